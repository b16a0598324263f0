"""`afterglow chat`: a conversation in the terminal, or over pipes (one message per line). A reply that says the same again and
again, which small models do, is stopped.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, Protocol

from afterglow.cli.command_options import ChatOptions, SamplingOptions
from afterglow.cli.option_sources import Given
from afterglow.cli.terminal import not_utf8, progress, summary, utf8_stdin
from afterglow.config import CacheConfig, EngineConfig
from afterglow.errors import ConfigError, RequestError, UserError
from afterglow.library.language_model import LanguageModel, load_model
from afterglow.library.locate import ABOUT_BUNDLED, BUNDLED, find_model, model_name
from afterglow.library.sampling_defaults import SamplingDefaults
from afterglow.request import CachedTokens, Content, Reasoning, SamplingParams

LONGEST_PASSAGE = 300  # characters
TIMES = 4
LEAST = 200  # characters: a line of dashes, or a table's rule, is not that long


def repeated(text: str) -> int:
    """Count the characters at the end of a text that only repeat what is before them; 0 if the text goes on.

    The end must be one passage, at least `TIMES` times in a row.
    """
    for length in range(1, min(LONGEST_PASSAGE, len(text) // TIMES) + 1):
        if text[-1 - length] != text[-1]:
            continue
        end = max(LEAST, TIMES * length)
        if len(text) >= end and text[-end:-length] == text[-end + length :]:
            start = len(text) - end
            while start > 0 and text[start - 1] == text[start - 1 + length]:
                start -= 1
            return len(text) - length - start
    return 0


Messages = list[dict[str, str]]

LONGEST = 1024  # tokens of a reply, if nothing else was asked for
BUNDLED_LONGEST = 48  # of the bundled model, which says what it has to say in fewer, or never ends
TRY_BUNDLED = f"""\
{ABOUT_BUNDLED}. Try
  My favorite color is teal. I live in Lisbon.
  What is my favorite color?"""

HELP = """\
/reset          forget the conversation
/system TEXT    set the system message (and forget the conversation)
/help           show this
/quit           leave (so does Ctrl-D; Ctrl-C stops a reply)"""


class Speaker(Protocol):
    """A partner in a conversation. After a reply `note` says what it cost."""

    note: str

    def reply(self, messages: Messages) -> Iterator[str | Reasoning]:
        """Yield the pieces of the reply to the messages, reasoning first. Raises: RequestError."""
        ...


class LocalSpeaker:
    """A model in this process."""

    def __init__(self, model: LanguageModel, sampling: SamplingParams) -> None:
        self._model = model
        self._sampling = sampling
        self.note = ""

    def reply(self, messages: Messages) -> Iterator[str | Reasoning]:
        """Yield the pieces of the reply as they are generated. Raises: RequestError."""
        reply = self._model.stream_chat(messages, self._sampling)
        try:
            with contextlib.closing(reply.parts()) as parts:
                for part in parts:
                    if isinstance(part, Content | Reasoning):
                        yield part.text if isinstance(part, Content) else part
        finally:
            cut = reply.completion.finish_reason == "length"
            self.note = summary(reply.prompt_tokens, reply.cached, reply.ttft_s) + cut_off(cut, len(reply.tokens))


def cut_off(was: bool, tokens: int) -> str:
    """Write that a reply was cut off, if it was."""
    return f", cut off after {tokens} tokens (--max-tokens)" if was else ""


class RemoteSpeaker:
    """An OpenAI-compatible server. A server of Afterglow also says per tier how many tokens were cached."""

    def __init__(
        self,
        url: str,
        api_key: str | None,
        model: str | None,
        max_tokens: int | None,
        sampling: dict[str, Any],
    ) -> None:
        import httpx

        from afterglow.server.lifecycle.address import (
            asks_proxies,
            untrusted,
        )  # what it imports is not needed otherwise

        base = (url if "://" in url else f"http://{url}").rstrip("/")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            self._client = httpx.Client(
                base_url=base if base.endswith("/v1") else f"{base}/v1",
                headers=headers,
                timeout=httpx.Timeout(10, read=None),
                trust_env=asks_proxies(base),
            )
            self._model = model or self._first_model()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"no server answers at {url}: {untrusted(error) or error}") from None
        # Only options that were given: servers that do not know a field may refuse it.
        wanted = {**sampling, "max_tokens": max_tokens}
        self._longest = LONGEST if max_tokens is None else None  # not asked for: the server may not have so much room
        self._options = {k: v for k, v in wanted.items() if v is not None}
        self.note = ""

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _first_model(self) -> str:
        response = self._client.get("/models")
        if response.status_code != 200:
            raise ConfigError(f"{response.url} answers {response.status_code}: {_message_of(response.text)}")
        return str(response.json()["data"][0]["id"])

    def reply(self, messages: Messages) -> Iterator[str | Reasoning]:
        """Yield the pieces of the reply as they arrive. Raises: RequestError."""
        import httpx

        body = {
            "model": self._model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._options,
        }
        began = time.perf_counter()
        ttft = None
        usage: dict[str, Any] = {}
        pieces, cut = 0, False
        try:
            with self._client.stream("POST", "/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise RequestError(_message_of(response.read().decode("utf-8", "replace")))
                for line in response.iter_lines():
                    data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                    if data in ("", "[DONE]"):
                        continue
                    chunk = json.loads(data)
                    if chunk.get("error"):
                        raise RequestError(_message_of(data))
                    usage = chunk.get("usage") or usage
                    deltas = [c.get("delta") or {} for c in chunk["choices"]]
                    text = "".join(delta.get("content") or "" for delta in deltas)
                    thought = "".join(
                        delta.get("reasoning_content") or delta.get("reasoning") or "" for delta in deltas
                    )
                    if text or thought:
                        ttft = ttft or time.perf_counter() - began
                        yield from [Reasoning(thought)] if thought else []
                        yield from [text] if text else []
                        pieces += 1
                    cut = (
                        pieces == self._longest
                        or any(c.get("finish_reason") == "length" for c in chunk["choices"])
                        or cut
                    )
                    if pieces == self._longest:
                        break
        except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RequestError(f"the connection to the server broke: {error}") from None
        finally:
            self.note = _usage_note(usage, ttft) + cut_off(cut, usage.get("completion_tokens", pieces))


def _message_of(text: str) -> str:
    with contextlib.suppress(ValueError, LookupError, TypeError):
        return str(json.loads(text)["error"]["message"])
    return text.strip()[:200]


def _usage_note(usage: dict[str, Any], ttft: float | None) -> str:
    tiers = usage.get("cached_tokens_details")
    if isinstance(tiers, dict):
        return summary(usage["prompt_tokens"], CachedTokens(**{t: tiers.get(t, 0) for t in _TIERS}), ttft)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    note = f"{usage['prompt_tokens']} prompt tokens, {cached} cached" if "prompt_tokens" in usage else ""
    return note + (f", first token after {ttft * 1e3:.0f} ms" if ttft is not None else "")


_TIERS = ("device", "host", "disk", "shared")


def chat(model: str | None, config: EngineConfig, options: ChatOptions, sampling: SamplingOptions, given: Given) -> int:
    """Converse with a server, or with a model in this process, and return the exit code. Raises: UserError."""
    max_tokens, drawn = options.max_tokens, sampling.given()
    if options.url is not None:
        own = (each.name for kind in (EngineConfig, CacheConfig) for each in fields(kind))
        given.refuse(own, "beside --url: a server has options of its own")
        asked = model if "model" in given.typed else None  # a file or a variable names the model of servers here
        return converse(RemoteSpeaker(options.url, options.api_key, asked, max_tokens, drawn), options.system)
    given.refuse(("api_key",), "without --url: it is for a server")
    path = find_model(model)
    bundled = model_name(model, path) == BUNDLED
    if max_tokens is None:
        max_tokens = BUNDLED_LONGEST if bundled else LONGEST
    params = SamplingParams(max_tokens=max_tokens, **(SamplingDefaults.read(path).for_a_chat() | drawn))
    with progress() as report:
        local = load_model(model, config, progress=report)
    with local:
        return converse(LocalSpeaker(local, params), options.system, TRY_BUNDLED if bundled else "")


def converse(speaker: Speaker, system: str | None, about: str = "") -> int:
    """Read messages and print replies until the input ends. On a terminal `about` is printed first, and a failed turn
    is reported and forgotten; a pipe ends at a failed turn."""
    watched = utf8_stdin().isatty()
    if watched:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (gives input() history and editing)
        print("\n".join(filter(None, (about, "Type a message; /help shows the commands."))))
    opening: Messages = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    for line in _lines(watched):
        if line.startswith("/"):
            command, _, rest = line.partition(" ")
            if command in ("/quit", "/exit"):
                break
            if command == "/reset":
                messages = list(opening)
            elif command == "/system":
                opening = [{"role": "system", "content": rest.strip()}] if rest.strip() else []
                messages = list(opening)
            else:
                print(HELP if command == "/help" else f"there is no command {command}; /help lists them")
            continue
        messages.append({"role": "user", "content": line})
        try:
            text = _speak(speaker, messages)
        except UserError as error:
            if not watched:
                raise
            print(f"error: {error}", file=sys.stderr)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": text})
    return 0


def _speak(speaker: Speaker, messages: Sequence[dict[str, str]]) -> str:
    """Print a reply as it comes, and return it: without its end where that only repeats what was said, for the next reply
    would go on so. Reasoning is shown dimly on a terminal, and not at all over pipes."""
    text, again, thinking = "", 0, False
    pieces = speaker.reply(list(messages))
    try:
        for piece in pieces:
            if isinstance(piece, Reasoning):
                if sys.stdout.isatty():
                    thinking = True
                    print(f"\x1b[2m{piece.text}\x1b[0m", end="", flush=True)
                continue
            if thinking:
                thinking = False
                print("\n")
            text += piece
            print(piece, end="", flush=True)
            if again := repeated(text):
                print(" …", end="")
                break
    except KeyboardInterrupt:
        print(" …", end="")
    finally:
        pieces.close()  # type: ignore[attr-defined]
    print()
    stopped = ", stopped: it repeats itself" if again else ""
    print(_dim(f"[{speaker.note}{stopped}]"), file=sys.stderr, flush=True)
    return text[: len(text) - again]


def _lines(watched: bool) -> Iterator[str]:
    while True:
        try:
            line = input("> " if watched else "")
        except EOFError:
            if watched:
                print()
            return
        except KeyboardInterrupt:
            if not watched:
                raise
            print("\n(Ctrl-D leaves)")
            continue
        except UnicodeDecodeError as error:
            raise not_utf8(error) from None
        if line.strip():
            yield line.strip()


def _dim(text: str) -> str:
    return f"\x1b[2m{text}\x1b[0m" if sys.stderr.isatty() else text
