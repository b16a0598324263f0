"""What the jobs of a step have in common: rows whose keys and values need to be read once for all of them.

RelayAttention §3 knows one system prompt; here it is whatever tokens running jobs begin with alike, at several levels (a
system prompt, below it a document, below that a conversation), found from the tokens themselves. Tenants share nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from afterglow.plan.index import common_rows
from afterglow.plan.step import Share

LEAST_ROWS = 64  # fewer are not worth a read of their own (spec R8)


class Sharer(NamedTuple):
    """A job of the step: its tokens, and how many rows it has on the device."""

    job: int
    salt: str
    tokens: bytes | bytearray
    rows: int


def shares(jobs: Sequence[Sharer], least: int = LEAST_ROWS) -> tuple[Share, ...]:
    """The shares among jobs, each of at least `least` rows and two jobs."""
    by_salt: dict[str, list[tuple[bytes, int]]] = {}
    for each in jobs:
        if each.rows >= least:
            by_salt.setdefault(each.salt, []).append((bytes(each.tokens[: 4 * each.rows]), each.job))
    found: list[Share] = []
    for rows in by_salt.values():
        if len(rows) > 1:
            rows.sort()  # those with the most in common lie side by side
            alike = [_alike(a, b) for (a, _), (b, _) in zip(rows, rows[1:], strict=False)]
            _nest([job for _, job in rows], alike, 0, least, found)
    return tuple(found)


def _alike(a: bytes, b: bytes) -> int:
    return common_rows(a, 0, b, 0, min(len(a), len(b)) // 4)


def _nest(jobs: list[int], alike: list[int], start: int, least: int, found: list[Share]) -> None:
    """`alike[i]`: rows that jobs i and i + 1 have in common. All have the first `start` in common already."""
    rows = min(alike)
    if rows - start >= least:
        found.append(Share(tuple(sorted(jobs)), start, rows))
        start = rows
    first = 0
    for i in range(len(jobs)):
        if i == len(alike) or alike[i] - start < least:  # the next one is of another group
            if i > first:
                group = alike[first:i]
                if min(group) > rows or first > 0 or i < len(alike):
                    _nest(jobs[first : i + 1], group, start, least, found)
            first = i + 1
