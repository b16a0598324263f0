"""Find what followed where a text's last tokens stood before."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

SHORTEST = 2  # tokens of a match
LONGEST = 32  # tokens that two places are compared by; a match that goes on may become longer
CANDIDATES = 16  # most recent places that are compared


class Lookup:
    """Follow a growing text, and the place before its end that ends with the most tokens that the text ends with: of equal
    ones the most recent.

    Each pair of tokens is in a table of its last place, from which places with the same pair are linked, as compressors of the
    LZ77 family do. A place that a match was found at is followed as long as the text goes on as it did there; then no other
    place has a longer match, and nothing is looked for. So a token takes a few microseconds, however long the text is.
    """

    __slots__ = ("_before", "_last", "at", "length", "tokens")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens = list(tokens)
        self.at = 0  # the place that is expected to go on as the text does; 0: there is none
        self.length = 0  # tokens before it that are the text's last ones
        self._last: dict[int, int] = {}  # by pair: the place behind it
        self._before = [0, 0][: len(self.tokens) + 1]  # by place: the place before it behind the same pair
        last, before = self._last, self._before
        for place, (token, following) in enumerate(pairwise(self.tokens), 2):
            pair = token << 32 | following
            before.append(last.get(pair, 0))
            last[pair] = place
        if len(self.tokens) > 1:
            self._search()

    def add(self, token: int) -> None:
        """Let the text grow by a token."""
        tokens = self.tokens
        follows = self.at and tokens[self.at] == token
        pair = tokens[-1] << 32 | token if tokens else None
        tokens.append(token)
        self._before.append(0 if pair is None else self._last.get(pair, 0))
        if pair is not None:
            self._last[pair] = len(tokens)
        if follows:
            self.at += 1
            self.length += 1
        else:
            self._search()

    def guess(self, most: int) -> list[int]:
        """Guess up to `most` tokens that come next: none where the text's end is new. Behind the end of the text, its guessed part
        goes on."""
        if not self.at:
            return []
        found = self.tokens[self.at : self.at + most]
        period = len(self.tokens) - self.at
        while len(found) < most:
            found.append(found[-period])
        return found

    def _search(self) -> None:
        tokens = self.tokens
        end = len(tokens)
        self.at = self.length = 0
        place = self._before[end]
        for _ in range(CANDIDATES):
            if not place:
                break
            length = SHORTEST
            most = min(place, LONGEST)
            while length < most and tokens[place - length - 1] == tokens[end - length - 1]:
                length += 1
            if length > self.length:
                self.at, self.length = place, length
            place = self._before[place]
