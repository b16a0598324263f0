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
    """Ends a text at the first stop string, wherever the deltas are cut.

    The first stop string is the one that is complete first, and the longest where several end at the same character.
    Text that could be the beginning of a stop string is held back until it is certain.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, delta: str, *, look: bool = True) -> str:
        """Add text, and return the text that may be shown; none once `matched` is set. Without `look`, a stop string
        that ends in this delta is ordinary text."""
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
        """Return the text that is held back, where the whole text ends without a stop string."""
        held, self._held = self._held, ""
        return held


def _partial(text: str, stop: str) -> int:
    """Measure the longest end of `text` that is a beginning of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
