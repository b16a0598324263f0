"""Turn a request's token outputs into pieces of text: decode, find stop strings, count. One object for each choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from afterglow.errors import RequestError
from afterglow.request import CachedTokens, Missed, Output, Selected, TokenLogprob, Truncation
from afterglow.text import IncrementalDecoder, StopStrings, Tokenizer
from afterglow.text.reasoning.splitters import Span, Splitter
from afterglow.text.tool_calls.parts import Content, Part, Reasoning, ReplyParser, ToolCall

Finish = Literal["stop", "length"]
Reason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Piece:
    """The text and tokens that one output adds to a reply.

    `text` may be empty: the end may be an unfinished character, or the beginning of a stop string. `parts`: the text as
    content and calls, and the reasoning before it.
    """

    text: str
    parts: tuple[Part, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish: Finish | None


class Assembler:
    """Collect the text and the facts of one reply, output by output."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        parser: ReplyParser | None = None,
        splitter: Splitter | None = None,
    ) -> None:
        """`min_tokens`: the first tokens of the reply, in which no stop string ends the reply. `parser`: finds calls in the
        text; without one all text is content. `splitter`: finds reasoning, in which no stop string and no call is looked for."""
        self._decoder = IncrementalDecoder(tokenizer, prompt, skip_special_tokens=skip_special_tokens)
        self._stops = StopStrings(stops, include=include_stop)
        self._min_tokens = min_tokens
        self._parser = parser
        self._splitter = splitter
        self._unshown = 0  # characters at the end of what was generated that a stop string has cut off, or may
        self._raw = ""
        self.text = ""  # all that was generated, without a stop string,
        self.content = ""  # the part that is for the user
        self.reasoning = ""
        self.reasoning_tokens = 0  # with the marks around it
        self.tokens: list[int] = []
        self.cached = CachedTokens()
        self.missed = Missed()
        self.waited = 0.0
        self.truncation: Truncation | None = None
        self.selected: Selected | None = None
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
        self.finish: Finish | None = None

    @property
    def calls(self) -> list[ToolCall]:
        """The calls that the reply has begun."""
        return self._parser.calls if self._parser is not None else []

    @property
    def reasoned(self) -> bool:
        """Check whether the reply has had reasoning, be it empty."""
        return self.reasoning != "" or (self._splitter is not None and self._splitter.reasoned)

    @property
    def stop(self) -> str | None:
        """The stop string that ended the reply."""
        return self._stops.matched

    @property
    def reason(self) -> Reason | None:
        """Why the reply ended, as OpenAI names it."""
        whole = bool(self.calls) and all(call.ended for call in self.calls)
        return "tool_calls" if self.finish == "stop" and whole else self.finish

    def feed(self, output: Output) -> Piece:
        """Add one output of the engine.

        When a stop string completes, `finish` is set although the engine goes on: the caller cancels the request.
        Raises: RequestError, if the engine gave the request up.
        """
        if output.finish_reason == "error":
            raise RequestError(output.error or "the request failed", status=500)
        if output.finish_reason == "cancelled":  # not by the caller: the engine is closing
            raise RequestError("the server is shutting down", status=503, code="unavailable")
        if not self.tokens:
            self.cached, self.missed, self.waited = output.cached, output.missed, output.waited
            self.truncation = output.truncation
        if output.selected is not None:
            self.selected = output.selected
        if output.prompt_logprobs:
            self.prompt_logprobs = output.prompt_logprobs
        text = ""
        parts: list[Part] = []
        count = 0
        for token in output.tokens:
            count += 1
            # The token that ends a reply is generated and counted, but left out of the text.
            if output.finish_reason == "stop" and count == len(output.tokens):
                continue
            look = len(self.tokens) + count > self._min_tokens
            fresh, found = self._read(self._decoder.push((token,)), look)
            text += fresh
            parts += found
            if self._stops.matched is not None or (self._parser is not None and self._parser.complete):
                self.finish = "stop"
                break
        if output.finish_reason is not None and self.finish is None:
            fresh, found = self._read(self._decoder.flush(), len(self.tokens) + count > self._min_tokens, last=True)
            text += fresh
            parts += found
            self.finish = "stop" if self._stops.matched is not None else output.finish_reason
        if self.finish is not None and self._parser is not None:
            parts += self._shown(self._parser.flush())
        tokens = output.tokens[:count]
        self.text = self._raw[: len(self._raw) - self._unshown]
        self.tokens.extend(tokens)
        return Piece(text, tuple(parts), tokens, output.logprobs[:count], self.finish)

    def _read(self, text: str, look: bool, last: bool = False) -> tuple[str, list[Part]]:
        """Read text that was generated. Returns what is no reasoning of it, and all its parts. `look`: for stop strings."""
        self._raw += text
        spans: list[Span] = [Content(text)] if text else []
        splitter = self._splitter
        if splitter is not None:
            thinking = splitter.thinking
            spans = splitter.push(text)
            self.reasoning_tokens += not last and (thinking or splitter.thinking)
            if last:
                spans += splitter.flush()
        shown = ""
        parts: list[Part] = []
        for span in spans:
            if isinstance(span, Reasoning):
                parts += self._shown([span])
                continue
            stopped = self._stops.matched is not None
            if isinstance(span, Content):
                fresh = self._stops.push(span.text, look=look)
            else:
                fresh = self._stops.flush() + ("" if stopped else span.text)
            self._unshown += len(span.text) - len(fresh)
            shown += fresh
            parts += self._parse(fresh)
        if last:
            fresh = self._stops.flush()
            self._unshown -= len(fresh)
            shown += fresh
            parts += self._parse(fresh)
        return shown, parts

    def _parse(self, text: str) -> list[Part]:
        if self._parser is not None:
            return self._shown(self._parser.push(text))
        return self._shown([Content(text)] if text else [])

    def _shown(self, parts: list[Part]) -> list[Part]:
        for part in parts:
            if isinstance(part, Content):
                self.content += part.text
            elif isinstance(part, Reasoning):
                self.reasoning += part.text
        return parts
