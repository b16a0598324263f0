"""From records to extents: after a restart the catalog's, at any time another engine's. It believes them; whether bytes
are right the reads say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import chain, repeat
from math import inf
from operator import attrgetter
from typing import TypeAlias

from afterglow.plan.prefix.extent import Extent
from afterglow.plan.prefix.index import Index
from afterglow.plan.prefix.salts import kind_of
from afterglow.plan.step import ExtentId, ExtentRecord
from afterglow.plan.tiers.placement import Placement


def restore(
    records: Sequence[ExtentRecord],
    index: Index,
    placement: Placement,
    now: float,
    ttl: float | None = None,
) -> list[ExtentRecord]:
    """Put records, given in any order, below their parents; they are kept until they expire, or where no job has named
    an end, for `ttl` seconds from their last use on (None: for ever). Returns those that have no parent, or add nothing.

    Those that end first go first, as they once came: were the longer of two there before, the shorter would add
    nothing, and all that hangs below it would have no parent. What a branch hangs below goes with the branch, which may
    end before it.
    """
    taken, useless = _taken(records, index, now)
    ends = {record.id: record.expires for record in records if record.expires < inf}
    more = ttl if ttl is not None else inf
    placement.restore(taken, (ends.get(extent.id, extent.last_used + more) for extent in taken))
    return useless


def adopt(
    salt: str,
    tokens: bytes,
    path: Sequence[Extent],
    index: Index,
    placement: Placement,
    now: float,
    ttl: float | None,
) -> list[Extent]:
    """Copy the extents of `path`, another index's way along `tokens`, whose rows are missing here, for `ttl` seconds
    (None: for ever). Returns the copies, as if they were on disk; the first load of each comes from the shared tier.

    The two indexes may have cut the tokens into extents at different places: parents are found by the tokens.
    """
    known = index.match(salt, tokens).rows
    taken: list[Extent] = []
    for other in path:
        if other.first_row + other.rows <= known or placement.disk.has_file(other.id):
            continue
        own = Extent(
            other.id,
            salt,
            other.kind,
            other.tokens,
            other.first_row,
            other.file_bytes,
            now,
            index.next_serial(),
            last_used=now,
        )
        if own.id in index.extents or index.insert(own, tokens[: 4 * own.first_row]).outcome == "orphan":
            break
        if own.nodes:
            taken.append(own)
    if taken:
        placement.adopt(taken, repeat(now + ttl if ttl is not None else inf, len(taken)))
    return taken


def prefix_of(record: ExtentRecord, index: Index) -> bytes | None:
    """Return the tokens before an extent; None, if its parent is gone."""
    parts: list[bytes] = []
    parent, rows = record.parent, record.parent_rows
    while parent is not None:
        above = index.extents.get(parent)
        if above is None:
            return None
        parts.append(above.tokens[: 4 * rows])
        parent, rows = above.parent, above.parent_rows
    return b"".join(reversed(parts))


def _taken(records: Sequence[ExtentRecord], index: Index, now: float) -> tuple[list[Extent], list[ExtentRecord]]:
    """Insert records; returns the extents that are in the index now, and the records of no use."""
    below, queue = _Below(records), _Queue()
    taken: list[Extent] = []
    useless: list[ExtentRecord] = []
    early = below.early(records)
    numbers: dict[int, int] = {}  # first rows come up again and again; one object of each is enough

    def offer(offered: Sequence[ExtentRecord], parent: Extent | None) -> None:
        for record in offered:
            row = parent.first_row + record.parent_rows if parent is not None else 0
            end = row + record.rows - early.get(record.id, 0)
            queue.add(end, (numbers.setdefault(row, row), record, parent))

    offer(below.take(None), None)
    while queue:
        first_row, record, parent = queue.pop()
        extent = _extent(record, parent, first_row, index.next_serial(), now)
        if not _insert(extent, parent, index):
            useless.append(record)
            continue
        taken.append(extent)
        offer(below.take(record.id), extent)
    return taken, useless + below.left()


_Offer: TypeAlias = tuple[int, ExtentRecord, Extent | None]  # first row, what, below whom


class _Below:
    """Records by parent. Most are the only one of theirs, and get no list."""

    def __init__(self, records: Sequence[ExtentRecord]) -> None:
        self._first: dict[ExtentId | None, ExtentRecord] = {}
        self._more: dict[ExtentId | None, list[ExtentRecord]] = {}
        for record in records:
            if record.parent in self._first:
                self._more.setdefault(record.parent, []).append(record)
            else:
                self._first[record.parent] = record

    def take(self, parent: ExtentId | None) -> Sequence[ExtentRecord]:
        """Return the records below one parent, by id; each is given out once."""
        first = self._first.pop(parent, None)
        if first is None:
            return ()
        more = self._more.pop(parent, None)
        return (first,) if more is None else sorted([first, *more], key=attrgetter("id"))

    def early(self, records: Sequence[ExtentRecord]) -> dict[ExtentId, int]:
        """Find the extents with a branch that ends before they do, and by how many rows; they are rare."""
        parents: dict[ExtentId, ExtentRecord] = {}
        found: dict[ExtentId, int] = {}
        for child in self._off_the_middle(records):
            parents = parents or {record.id: record for record in records}
            at, ends = child, child.rows  # after so many rows of `at` something ends
            while at.parent is not None and at.parent_rows > 0 and at.parent in parents:
                ends += at.parent_rows
                at = parents[at.parent]
                if at.rows - ends <= found.get(at.id, 0):
                    break
                found[at.id] = at.rows - ends
        return found

    def _off_the_middle(self, records: Sequence[ExtentRecord]) -> Iterator[ExtentRecord]:
        """Yield the records that end before their parent does."""
        for record in records:
            first = self._first.get(record.id)
            if first is not None:
                for child in (first, *self._more.get(record.id, ())):
                    if child.parent_rows + child.rows < record.rows:
                        yield child

    def left(self) -> list[ExtentRecord]:
        """Return the records that were not taken."""
        return [*self._first.values(), *chain.from_iterable(self._more.values())]


class _Queue:
    """Records to be inserted, in the order of their ends, then of their arrival. A heap of the ends alone: a
    million records end at few different rows.
    """

    def __init__(self) -> None:
        self._ends: list[int] = []
        self._waiting: dict[int, deque[_Offer]] = {}

    def __bool__(self) -> bool:
        return bool(self._ends)

    def add(self, end: int, offer: _Offer) -> None:
        waiting = self._waiting.get(end)
        if waiting is None:
            waiting = self._waiting[end] = deque()
            heappush(self._ends, end)
        waiting.append(offer)

    def pop(self) -> _Offer:
        end = self._ends[0]
        waiting = self._waiting[end]
        offer = waiting.popleft()
        if not waiting:
            heappop(self._ends)
            del self._waiting[end]
        return offer


def _extent(record: ExtentRecord, parent: Extent | None, first_row: int, serial: int, now: float) -> Extent:
    # A clock that was set back must not make an extent the most recently used for ever.
    used = record.last_used if record.last_used <= now else now
    return Extent(
        record.id,
        record.salt,
        record.kind,
        record.tokens,
        first_row,
        record.file_bytes,
        used,
        serial,
        parent.id if parent is not None else None,
        record.parent_rows,
        used,
        record.hits,
    )


def _insert(extent: Extent, parent: Extent | None, index: Index) -> bool:
    if extent.kind != kind_of(extent.salt) or not extent.rows or extent.id in index.extents:
        return False
    if parent is None:
        return index.insert(extent, b"").outcome == "inserted"
    if not 0 < extent.parent_rows <= parent.rows:
        return False
    return index.insert_below(extent, parent, extent.parent_rows).outcome == "inserted"
