"""Shares: rows that several jobs of a step have in common, whose keys and values need to be read once for all.

RelayAttention §3 knows one system prompt; here it is whatever tokens running jobs begin with alike, at several levels (a
system prompt, below it a document, below that a conversation), found from the tokens themselves. Tenants share nothing
but the operator's registered prefixes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from afterglow.plan.prefix.index import common_rows
from afterglow.plan.step import Share

MIN_SHARED_ROWS = 64  # fewer are not worth a read of their own (spec R8)


class Sharer(NamedTuple):
    """A job of the step: its tokens, and how many rows it has on the device. `common`: its first tokens that are a prefix
    registered for others as well."""

    job: int
    salt: str
    tokens: bytes | bytearray
    rows: int
    common: int = 0


def shares(jobs: Sequence[Sharer], least: int = MIN_SHARED_ROWS) -> tuple[Share, ...]:
    """Find the shares among jobs, each of at least `least` rows and two jobs."""
    groups: dict[str | bytes, list[_Member]] = {}
    for each in jobs:
        if each.rows >= least:
            group = bytes(each.tokens[: 4 * each.common]) if each.common else each.salt
            member = _Member(each.salt, bytes(each.tokens[: 4 * each.rows]), each.job, each.common)
            groups.setdefault(group, []).append(member)
    found: list[Share] = []
    for members in groups.values():
        if len(members) > 1:
            members.sort()  # those with the most in common lie side by side
            alike = [_alike(a, b) for a, b in zip(members, members[1:], strict=False)]
            _nest([member.job for member in members], alike, 0, least, found)
    return tuple(found)


class _Member(NamedTuple):
    salt: str
    tokens: bytes
    job: int
    common: int


def _alike(a: _Member, b: _Member) -> int:
    rows = min(len(a.tokens), len(b.tokens)) // 4
    return common_rows(a.tokens, 0, b.tokens, 0, rows if a.salt == b.salt else min(rows, a.common))


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
