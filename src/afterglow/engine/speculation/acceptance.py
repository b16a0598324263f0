"""How likely guesses are right, and how many pay."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
