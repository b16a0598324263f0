"""Guess the next tokens of the replies of a batch: find what followed where a text's last tokens stood before, learn from what is
drawn how likely guesses are right, and choose how many pay.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

# Classes of matches by their length in tokens, each with the share of guesses that is right at first, before a request has
# shown its own: between what was counted in prose and in edits of programs.
CLASSES = ((2, 0.25), (3, 0.35), (4, 0.5), (5, 0.6), (7, 0.7), (10, 0.8), (16, 0.9))
BELIEF = 4.0  # guesses that the first shares count as much as
MEMORY = 0.96  # what a guess counts after the next one of its class
LEAST = 0.05  # chances below are not worth a look
MARGIN = 1.03  # a step with guesses must be predicted to be better by so much than one without

_CLASS_OF = [0] * (CLASSES[-1][0] + 1)
for _number, (_first, _) in enumerate(CLASSES):
    _CLASS_OF[_first:] = [_number] * (len(_CLASS_OF) - _first)


class Acceptance:
    """Count how often the lookup is right in one reply, by the length of the match. Every token of the reply is compared with its
    guess, whether that was verified or not: so nothing has to be tried to learn whether it pays."""

    __slots__ = ("_right", "_total")

    def __init__(self) -> None:
        self._right = [BELIEF * share for _, share in CLASSES]
        self._total = [BELIEF] * len(CLASSES)

    def note(self, length: int, right: bool) -> None:
        """Note whether the guess behind a match of `length` tokens was right."""
        number = _CLASS_OF[min(length, len(_CLASS_OF) - 1)]
        self._right[number] = self._right[number] * MEMORY + right
        self._total[number] = self._total[number] * MEMORY + 1

    def chances(self, length: int, most: int) -> list[float]:
        """Predict how likely the first guess behind a match is right, the first two both, and so on: up to `most`."""
        found: list[float] = []
        chance = 1.0
        while len(found) < most:
            number = _CLASS_OF[min(length, len(_CLASS_OF) - 1)]
            chance *= self._right[number] / self._total[number]
            if chance < LEAST:
                break
            found.append(chance)
            length += 1
        return found


def allot(chances: Sequence[Sequence[float]], seconds: Callable[[int], float], reading: Sequence[float]) -> list[int]:
    """Choose how many guesses of each reply to verify in a step, so that most tokens are drawn in a second.

    `chances[i][n]`: that the first n + 1 guesses of reply i are right. `seconds(rows)`: of a step with so many rows in all.
    `reading[i]`: seconds that attention takes for each further row of reply i.
    """
    offers = sorted(
        ((-chance, n, i) for i, falling in enumerate(chances) for n, chance in enumerate(falling)),
    )
    rows, tokens, attention = len(chances), float(len(chances)), 0.0
    best, taken = MARGIN * tokens / seconds(rows), 0
    for count, (chance, _, i) in enumerate(offers, 1):
        tokens -= chance
        attention += reading[i]
        rate = tokens / (seconds(rows + count) + attention)
        if rate > best:
            best, taken = rate, count
    found = [0] * len(chances)
    for _, _, i in offers[:taken]:
        found[i] += 1
    return found


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


MAX_GUESSES = 15  # of a reply in a step: with its row these fit into what gathers new rows (`engine.tee`)

Guesses = dict[int, tuple[int, ...]]  # by job


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Predict the seconds of a decode step. `rows(n)`: of its n rows, without attention. `reads`: of attention to one row of
    context, in all layers; `again`: for each further row of the same reply."""

    rows: Callable[[int], float]
    reads: float
    again: float


@dataclass(slots=True)
class _Reply:
    """Follow one reply. Its text is entered when its first token is drawn: a request that waits needs no tables."""

    prompt: Sequence[int]
    stops: Collection[int]
    lookup: Lookup | None = None
    acceptance: Acceptance = field(default_factory=Acceptance)


class Guesser:
    """Guess tokens by looking up where a reply's last tokens stood before, in its prompt or in itself."""

    def __init__(self, costs: StepCosts | None) -> None:
        """`costs`: of steps on this machine, for guesses only where they pay; None: wherever there are any."""
        self._costs = costs
        self._replies: dict[int, _Reply] = {}

    def begin(self, job: int, prompt: Sequence[int], stops: Collection[int]) -> None:
        """Begin a reply, which ends with one of `stops`."""
        self._replies[job] = _Reply(prompt, stops)

    def forget(self, job: int) -> None:
        """Forget a reply."""
        self._replies.pop(job, None)

    def drew(self, job: int, tokens: Sequence[int]) -> None:
        """Take in tokens that were drawn for a reply."""
        reply = self._replies.get(job)
        if reply is None:
            return
        lookup = reply.lookup
        if lookup is None:
            lookup = reply.lookup = Lookup(reply.prompt)
        for token in tokens:
            if lookup.at:
                reply.acceptance.note(lookup.length, lookup.tokens[lookup.at] == token)
            lookup.add(token)

    def guesses(self, jobs: Sequence[tuple[int, int]]) -> Guesses:
        """Guess what comes next in replies that are decoded together. `jobs`: with the rows of their contexts."""
        offers: list[tuple[int, list[int]]] = []
        chances: list[list[float]] = []
        for job, _ in jobs:
            reply = self._replies.get(job)
            tokens: list[int] = []
            falling: list[float] = []
            if reply is not None and reply.lookup is not None and reply.lookup.at:
                most = MAX_GUESSES
                if self._costs is not None:
                    falling = reply.acceptance.chances(reply.lookup.length, most)
                    most = len(falling)
                tokens = _until(reply.lookup.guess(most), reply.stops)
            offers.append((job, tokens))
            chances.append(falling[: len(tokens)])
        if self._costs is None:
            return {job: tuple(tokens) for job, tokens in offers if tokens}
        if not any(chances):
            return {}
        costs = self._costs
        attention = costs.reads * sum(rows for _, rows in jobs)
        counts = allot(chances, lambda rows: costs.rows(rows) + attention, [costs.again * rows for _, rows in jobs])
        return {job: tuple(tokens[:count]) for (job, tokens), count in zip(offers, counts, strict=True) if count}


def _until(tokens: list[int], stops: Collection[int]) -> list[int]:
    """Cut tokens at the first one that would end the reply: nothing comes after it."""
    for at, token in enumerate(tokens):
        if token in stops:
            return tokens[:at]
    return tokens
