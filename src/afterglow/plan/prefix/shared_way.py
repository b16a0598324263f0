"""Which published extents lie on a prompt's way: the choices of a lookup, for whatever lists and reads them.

Servers cut and merge conversations each for itself. So a store has rows in several extents, and a lookup chooses between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

from afterglow.plan.options import MERGED_ROWS
from afterglow.plan.prefix.index import Match
from afterglow.plan.prefix.published import Published

MAX_FORKS: Final = 8  # of small extents that are looked at for a merged one

T = TypeVar("T")


class Candidate(NamedTuple, Generic[T]):
    """An extent that may be on a prompt's way, listed by `listed`, which was last written at `modified`. `agrees`: the prompt's rows up to
    which a directory says so; None: a listing says it.
    """

    published: Published
    modified: float
    listed: T
    agrees: int | None = None


def forks(match: Match) -> list[int]:
    """Return the rows at which the last extents of a match begin, the last one first: those that may be merged with what follows."""
    found, row = [], match.rows
    for view in reversed(match.views[-MAX_FORKS:]):
        if view.extent.rows >= MERGED_ROWS:
            break
        row -= view.stop - view.start
        found.append(row)
    return found


def starts(rows: int, known: int, forks: Sequence[int]) -> list[int]:
    """Return the rows from which the way of a prompt of `rows` rows is followed, if its first `known` rows are cached."""
    return list(dict.fromkeys([known, *forks, *([0] if rows > 2 * known else [])]))


def follow(rows: int, known: int, forks: Sequence[int], step: Callable[[int], tuple[T, int] | None]) -> Iterator[T]:
    """Yield what lies on a prompt's way, from the first start on that brings more than the cached rows. `step`: what goes on the farthest
    from a row, and the row that it reaches; None: nothing does.
    """
    for start in starts(rows, known, forks):
        row = start
        while row < rows and (found := step(row)) is not None:
            each, row = found
            yield each
        if row > known:
            return


def choices(candidates: Iterable[Candidate[T]], row: int, rows: int) -> tuple[list[Candidate[T]], list[Candidate[T]]]:
    """Choose the candidates that bring a prompt of `rows` rows on from a row: those that end within it, the longest first, and others."""
    whole: list[Candidate[T]] = []
    parts: list[Candidate[T]] = []
    for each in candidates:
        if each.published.first_row <= row < each.published.end:
            (whole if each.published.end <= rows else parts).append(each)
    whole.sort(key=lambda each: (-each.published.end, each.published.id))
    return whole, parts


def promising(parts: Iterable[Candidate[T]], row: int) -> list[Candidate[T]]:
    """Order the candidates of which a prompt may follow a part: those that agree the farthest first, then the last written."""
    # where a directory says how far, another brings less than a block
    found = [each for each in parts if each.agrees is None or each.agrees > row]
    return sorted(found, key=lambda each: (-(each.agrees or 0), -each.modified, each.published.id))
