"""Token ids to text, a few at a time: nothing is emitted that a later token could change.

`IncrementalDecoder` turns ids into text deltas whose concatenation is the text of the whole sequence.
`StopStrings` watches those deltas and ends the text at the first stop string.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"  # what decoders put where bytes are not (yet) UTF-8
_MAX_HELD = 64  # tokens held back at most; no character needs so many, so by then it is garbage for good
_CONTEXT = 8  # prompt tokens that are looked at: enough for a leading space or a half-written character


class Decodes(Protocol):
    """What the decoder needs of a tokenizer."""

    byte_level: bool

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class IncrementalDecoder:
    """The text of a growing sequence of ids.

    `context` are the ids before it (the prompt): what a token looks like depends on its neighbour, for one
    the leading space that SentencePiece models drop only at the very start. Without context the deltas add up
    to `tokenizer.decode(ids)`, with it to what they add to the decoded context.

    Only a window of ids is decoded again for each token. It starts at a place where the text was complete and
    something visible follows, so its own first token loses no more than in the text before it.
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
        """Whether some of the text is held back, because a character is not complete."""
        return bool(self._held)

    def push(self, ids: Iterable[int]) -> str:
        """The text that has become certain with `ids`."""
        return "".join([self._push_one(token) for token in ids])

    def flush(self) -> str:
        """What is still held back: an unfinished character, as replacement characters."""
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
        """Of a window that only grows, keep the last tokens that show in a text at all: a lone space marker does where
        something follows."""
        seen = [token for token in self._window if self._decode((token, token))]
        self._window = seen if len(seen) <= _MAX_HELD // 2 else seen[-_CONTEXT:]
        self._text = self._decode(self._window)

    def _after(self, text: str) -> str:
        if text.startswith(self._text):
            return text[len(self._text) :]
        # A run of byte tokens that has become invalid as a whole: keep what is out, show the new ones alone.
        return self._decode(self._window[self._read :])

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip) if ids else ""


class StopStrings:
    """Ends a text at the first stop string, wherever the deltas are cut.

    The first is the one that is complete first; of those that end at the same character, the longest. Text
    that could be the beginning of a stop string is held back until it is certain.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, delta: str, *, look: bool = True) -> str:
        """The text that may be shown. Once `matched` is set, there is no more. Without `look`, stop strings that end in
        this delta are text like any other."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return delta
        text, old = self._held + delta, len(self._held)
        starts = ((stop, text.find(stop, max(0, old + 1 - len(stop)))) for stop in self._stops)
        found = [(at + len(stop), at, stop) for stop, at in starts if at >= 0]
        if found and look:
            end, start, self.matched = min(found)
            self._held = ""
            return text[: end if self._include else start]
        keep = max(_partial(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, when the text ends without a stop string."""
        held, self._held = self._held, ""
        return held


def _partial(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
