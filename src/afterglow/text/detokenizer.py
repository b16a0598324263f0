"""Token ids to text, a few at a time: nothing is emitted that a later token could change.

`IncrementalDecoder` turns ids into text deltas whose concatenation is the text of the whole sequence.
`StopStrings` watches those deltas and ends the text at the first stop string.
`Assembler` adds the text to a request's outputs, and counts. One object for each choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal, Protocol

from afterglow.errors import shutting_down
from afterglow.request import (
    CachedTokens,
    Content,
    Missed,
    Output,
    Part,
    Reasoning,
    Selected,
    TokenLogprob,
    ToolCall,
    Truncation,
)
from afterglow.text.reasoning import Span, Splitter
from afterglow.text.tool_calls.parts import ReplyParser

REPLACEMENT = "\ufffd"  # what decoders put where bytes are not (yet) UTF-8
_MAX_HELD = 64  # tokens held back at most; no character needs so many, so by then it is garbage for good
_CONTEXT = 8  # prompt tokens that are looked at: enough for a leading space or a half-written character


class Decodes(Protocol):
    """The part of a tokenizer that the decoder uses."""

    byte_level: bool

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids."""
        ...


class IncrementalDecoder:
    """Decodes a growing sequence of ids.

    `context` are the ids before the sequence (the prompt): the text of a token depends on its neighbour. SentencePiece
    models, for one, drop a leading space at the very start only. Without a context the deltas add up to
    `tokenizer.decode(ids)`; with a context they add up to what `ids` add to the decoded context.

    Each push decodes a window of the last ids again. The window starts at a place where the text was complete and
    something visible follows, so the window's first token loses no more than the same token did in the text before.
    """

    def __init__(self, tokenizer: Decodes, context: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window = list(context[-_CONTEXT:])
        self._read = len(self._window)  # ids of the window whose text is out
        self._text = self._decode(self._window)  # their text
        self._held = ""

    @property
    def holding(self) -> bool:
        """Tell whether some text is held back because a character is not complete."""
        return bool(self._held)

    def push(self, ids: Iterable[int]) -> str:
        """Add ids, and return the text that has become certain."""
        return "".join([self._push_one(token) for token in ids])

    def flush(self) -> str:
        """Return the text that is still held back: an unfinished character, as replacement characters."""
        held, self._held = self._held, ""
        self._read = len(self._window)
        self._text = self._decode(self._window)
        return held

    def _push_one(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        delta = self._after(text)
        if delta.endswith(REPLACEMENT) and len(self._window) - self._read <= _MAX_HELD:
            # Byte-level decoding is settled but for its last character. Byte fallback judges a whole run of
            # byte tokens at once, so all of the run has to wait.
            certain = delta[:-1] if self._tokenizer.byte_level else delta.rstrip(REPLACEMENT)
            if not self._tokenizer.byte_level or not certain:
                self._held = delta
                return ""
            # The window must keep the bytes of the unfinished character: only the text moves on.
            self._text += certain
            self._held = delta[len(certain) :]
            return certain
        self._held = ""
        fresh = self._decode(self._window[self._read :])
        if fresh:  # invisible tokens alone (special ones, a lone space marker) make no window: see the class
            self._window = self._window[self._read :]
            self._text = fresh
        else:
            self._text = text
            if len(self._window) > _MAX_HELD:
                self._shorten()
        self._read = len(self._window)
        return delta

    def _shorten(self) -> None:
        """Shorten a window that only grows to the last tokens that are visible in some text: a lone space marker is,
        where something follows it."""
        seen = [token for token in self._window if self._decode((token, token))]
        self._window = seen if len(seen) <= _MAX_HELD // 2 else seen[-_CONTEXT:]
        self._text = self._decode(self._window)

    def _after(self, text: str) -> str:
        if text.startswith(self._text):
            return text[len(self._text) :]
        # A run of byte tokens has become invalid as a whole: the text that is out stays, and the new tokens are shown alone.
        return self._decode(self._window[self._read :])

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip) if ids else ""


class StopStrings:
    """Ends a text at the first stop string, wherever the deltas are cut. Takes time in proportion to the text, for each stop string.

    The first stop string is the one that is complete first, and the longest where several end at the same character.
    Text that could be the beginning of a stop string is held back until it is certain.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._begun = [_Begun(stop) for stop in stops if stop]
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, delta: str, *, look: bool = True) -> str:
        """Add text, and return the text that may be shown; none once `matched` is set. Without `look`, a stop string
        that ends in this delta is ordinary text."""
        if self.matched is not None:
            return ""
        if not self._begun:
            return delta
        text, old = self._held + delta, len(self._held)
        for end, character in enumerate(delta, old + 1):
            complete = [begun.stop for begun in self._begun if begun.add(character)]
            if complete and look:
                self.matched = max(complete, key=len)
                self._held = ""
                return text[: end if self._include else end - len(self.matched)]
        keep = max(begun.size for begun in self._begun)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return the text that is held back, where the whole text ends without a stop string. What comes then begins anew."""
        held, self._held = self._held, ""
        for begun in self._begun:
            begun.size = 0
        return held


class _Begun:
    """Follows how much of one stop string the end of a text is: `size` characters, never the whole (Knuth, Morris and Pratt)."""

    __slots__ = ("_shorter", "size", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.size = 0
        self._shorter: list[
            int
        ] = []  # for each beginning, as far as one was met: the longest shorter one that it ends with

    def add(self, character: str) -> bool:
        """Add a character, and tell whether the stop string ends with it."""
        stop, shorter = self.stop, self._shorter
        size = self._longer(self.size, character)
        if size > len(shorter):
            shorter.append(self._longer(shorter[-1], character) if shorter else 0)
        whole = size == len(stop)
        self.size = shorter[-1] if whole else size
        return whole

    def _longer(self, size: int, character: str) -> int:
        """Find the longest beginning that the text ends with, given that it ended with one of `size` characters before."""
        while size and self.stop[size] != character:
            size = self._shorter[size - 1]
        return size + (self.stop[size] == character)


Finish = Literal["stop", "length"]
Reason = Literal["stop", "length", "tool_calls"]


class Assembler:
    """Collect the text and the facts of one reply, output by output."""

    def __init__(
        self,
        tokenizer: Decodes,
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

    def feed(self, output: Output) -> Output:
        """Add one output of the engine; returns it with its text, and without tokens that come after the end.

        When a stop string completes, `finish_reason` is set although the engine goes on: the caller cancels the request.
        Raises: RequestError, if the engine gave the request up.
        """
        if output.finish_reason == "error":
            raise output.failure()
        if output.finish_reason == "cancelled":  # not by the caller: the engine is closing
            raise shutting_down()
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
        logprobs = output.logprobs[:count]
        return replace(
            output, tokens=tokens, finish_reason=self.finish, logprobs=logprobs, text=text, parts=tuple(parts)
        )

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
