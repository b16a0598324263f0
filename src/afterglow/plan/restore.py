"""After a restart: from catalog records to extents. It believes the catalog; whether bytes are right the reads say."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count

from afterglow.plan.drafts import Drafts
from afterglow.plan.extent import Extent
from afterglow.plan.index import Index
from afterglow.plan.placement import Placement
from afterglow.plan.step import ExtentRecord
from afterglow.plan.truncation import is_private


def restore(
    records: Sequence[ExtentRecord],
    index: Index,
    placement: Placement,
    drafts: Drafts,
    now: float,
    ttl: float | None = None,
) -> list[ExtentRecord]:
    """Put records, given in any order, below their parents; they are kept `ttl` seconds from their last use on, or
    longer if somebody says so. Returns those that have no parent, or add nothing.

    Those that end first go first, as they once came: were the longer of two there before, the shorter would add
    nothing, and all that hangs below it would have no parent.
    """
    children: dict[str | None, list[ExtentRecord]] = {}
    for record in sorted(records, key=lambda item: item.id):
        children.setdefault(record.parent, []).append(record)
    useless: list[ExtentRecord] = []
    heap: list[tuple[int, int, ExtentRecord, Extent | None]] = []
    order = count()

    def offer(offered: list[ExtentRecord], parent: Extent | None) -> None:
        for record in offered:
            end = _first_row(record, parent) + record.rows
            heappush(heap, (end, next(order), record, parent))

    offer(children.pop(None, []), None)
    while heap:
        _, _, record, parent = heappop(heap)
        extent = _extent(record, parent, drafts.next_serial(), now)
        if not _insert(extent, parent, index):
            useless.append(record)
            continue
        placement.restore(extent)
        if ttl is not None:
            placement.expire(extent, extent.last_used + ttl)
        offer(children.pop(record.id, []), extent)
    for orphans in children.values():
        useless += orphans
    return useless


def _first_row(record: ExtentRecord, parent: Extent | None) -> int:
    return parent.first_row + record.parent_rows if parent else 0


def _extent(record: ExtentRecord, parent: Extent | None, serial: int, now: float) -> Extent:
    # A clock that was set back must not make an extent the most recently used for ever.
    used = min(record.last_used, now)
    return Extent(
        id=record.id,
        salt=record.salt,
        kind=record.kind,
        tokens=record.tokens,
        first_row=_first_row(record, parent),
        file_bytes=record.file_bytes,
        born=used,
        serial=serial,
        parent=record.parent,
        parent_rows=record.parent_rows,
        last_used=used,
        hits=record.hits,
    )


def _insert(extent: Extent, parent: Extent | None, index: Index) -> bool:
    if (
        extent.kind != ("session" if is_private(extent.salt) else "exact")
        or not extent.rows
        or extent.id in index.extents
    ):
        return False
    if parent is None:
        return index.insert(extent, b"").outcome == "inserted"
    if not 0 < extent.parent_rows <= parent.rows or extent.salt != parent.salt:
        return False
    return index.insert_below(extent, parent, extent.parent_rows).outcome == "inserted"
