"""Short turns grow together: an extent that nothing but the end of one conversation hangs below is merged with what hangs
below it, so that twenty short turns are a few extents and not forty, each with a half-empty block and a file.

    before   (A, 239 rows) -- (prompt, 41) -- (reply, 19)        when a turn has ended and all its rows are saved
    after    (A + prompt + reply, 299)                           an extent like any other, as if computed in one turn

The rows are copied in host. Until the copy has ended, and its file is written where one of the old ones has a file, the old
extents are what everybody finds; then the new one takes their place, and they go when nobody reads them any more. So a crash
leaves either or both, never none. Whatever comes between is a reason not to merge: the end of the next turn is another
occasion.

Both halves have fewer than 256 rows, and the lower one at least a quarter of the upper one's unless that is of the same turn:
so a row is copied once with its turn, and once for every quarter by which its extent grows. That is at most 26 times, and 3
times where turns have 60 rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from afterglow.plan.device import Device
from afterglow.plan.extent import Capacity, Extent
from afterglow.plan.index import Index, extent_id
from afterglow.plan.jobs import Job
from afterglow.plan.placement import Placement
from afterglow.plan.sessions import Sessions
from afterglow.plan.stats import Counters
from afterglow.plan.step import MoveDone
from afterglow.plan.tree import subtree

SMALL = 256  # rows of an extent that is merged
SHARE = 4  # the lower half has at least this part of the upper half's rows, if others have used that


@dataclass(eq=False, slots=True)
class _Merge:
    """`parts` become `whole`, which nobody finds before it is complete. No parts: it is given up."""

    parts: list[Extent]
    whole: Extent


class Merging:
    """Merges under way. `small`: rows; 0: nothing is merged."""

    def __init__(
        self,
        capacity: Capacity,
        index: Index,
        placement: Placement,
        device: Device,
        sessions: Sessions,
        counters: Counters,
        digest: str,
        write_through: bool,
        small: int = SMALL,
    ) -> None:
        self._capacity = capacity
        self._index = index
        self._placement = placement
        self._device = device
        self._sessions = sessions
        self._counters = counters
        self._digest = digest
        self._write_through = write_through
        self._small = small
        self._copies: dict[int, _Merge] = {}  # by move
        self._stores: dict[int, _Merge] = {}

    def __len__(self) -> int:
        return len(self._copies) + len(self._stores)

    # ---------------------------------------------------------------------------------------- to begin

    def ended(self, job: Job, serial: int, now: float) -> None:
        """A job has ended, and its rows are extents: merge the last ones of its conversation, if there is anything to be
        gained. `serial` is the number of the extent that they become."""
        parts = self._parts(job)
        rows = sum(part.rows for part in parts)
        need = self._capacity.blocks(rows)
        if len(parts) < 2 or self._placement.pool.free - need < self._placement.low // 2:
            return
        slots = self._placement.pool.take(need)
        assert slots is not None
        first, last = parts[0], parts[-1]
        prefix = bytes(job.tokens[: 4 * first.first_row])
        own = b"".join(part.tokens for part in parts)
        whole = Extent(
            extent_id(self._digest, first.salt, prefix, own),
            first.salt,
            first.kind,
            own,
            first.first_row,
            self._capacity.file_size(rows),
            born=first.born,
            serial=serial,
            parent=first.parent,
            parent_rows=first.parent_rows,
            last_used=last.last_used,
            hits=max(part.hits for part in parts),
            volatile=last.volatile,
        )
        whole.expires = last.expires
        for part in parts:
            self._placement.pin(part)
        self._placement.prepare(whole, slots)
        move = self._placement.copy([(part.slots, 0, part.rows) for part in parts], slots, rows)
        self._copies[move] = _Merge(parts, whole)

    def _parts(self, job: Job) -> list[Extent]:
        """The extents at the end of a job's tokens that are to be one, in order."""
        views = self._index.match(job.spec.salt, bytes(job.tokens)).views
        if not views or views[-1].stop < views[-1].extent.rows:
            return []
        parts = [views[-1].extent]
        if not self._is_part(parts[0], parts[0]) or parts[0].has_children:
            return []
        rows = parts[0].rows
        while rows < self._small and (above := parts[0].above) is not None:
            if (
                not self._is_part(above, parts[-1])
                or not _follows(above, parts[0])
                or above.rows >= self._small
                or (above.hits and above.rows > SHARE * rows)
                or above.rows + rows > self._capacity.max_extent_rows
                or above.pins
            ):
                break
            parts.insert(0, above)
            rows += above.rows
        return parts

    def _is_part(self, extent: Extent, last: Extent) -> bool:
        """Is it whole, in host, and nobody's but those whose the last one is, for no longer than that?"""
        return (
            not extent.dead
            and len(extent.nodes) == 1
            and extent.nodes[0].start == 0
            and extent.host == "ready"
            and extent.salt == last.salt
            and extent.expires <= last.expires
            and extent.kept == last.kept
            and extent.volatile == last.volatile
            and extent.sessions.keys() == last.sessions.keys()
        )

    # ------------------------------------------------------------------------------------------ to end

    def copied(self, done: MoveDone, jobs: Iterable[Job], now: float) -> bool:
        """A copy has ended, if it was one of these."""
        merge = self._copies.pop(done.move, None)
        if merge is None:
            return False
        whole = merge.whole
        if done.slots_busy:
            self._placement.quarantine(done.move, whole.slots)
            whole.slots, whole.host = (), "absent"
        if not done.ok or not self._stands(merge):
            self._give_up(merge)
            return True
        whole.volatile = merge.parts[-1].volatile  # others may have used them since
        if (self._write_through and not whole.volatile) or any(part.disk != "absent" for part in merge.parts):
            self._placement.write(whole, now, "merge")
            if whole.store is None:
                self._give_up(merge)
            else:
                self._stores[whole.store] = merge
        else:
            self._replace(merge, jobs)
        return True

    def stored(self, done: MoveDone, jobs: Iterable[Job]) -> None:
        """A move has ended: perhaps the file of a merged extent is written."""
        merge = self._stores.pop(done.move, None)
        if merge is None:
            return
        if merge.whole.disk == "ready" and self._stands(merge):
            self._replace(merge, jobs)
        else:
            self._give_up(merge)

    def _stands(self, merge: _Merge) -> bool:
        """Can the parts still be replaced? What has come to hang below them may have no file, which would name them."""
        parts, last = merge.parts, merge.parts[-1] if merge.parts else None
        if last is None or merge.whole.id in self._index.extents:
            return False
        if not all(self._is_part(part, last) for part in parts):
            return False
        if not all(_follows(above, below) for above, below in zip(parts, parts[1:], strict=False)):
            return False
        names = {part.id for part in parts}
        below = [node.extent for node in subtree(last.nodes[0]) if node.extent is not None and node.extent is not last]
        return all(extent.disk == "absent" for extent in below if extent.parent in names)

    def _replace(self, merge: _Merge, jobs: Iterable[Job]) -> None:
        parts, whole, when = merge.parts, merge.whole, merge.parts[-1].expires
        for job in jobs:
            used = [part for part in parts if part in job.held]
            for part in used:
                del job.held[part]
                part.users -= 1
            if used:
                job.held[whole] = None
                whole.users += 1
        whole.hits = max(part.hits for part in parts)
        whole.last_used = max(part.last_used for part in parts)
        self._device.replace(parts, whole)
        self._placement.replace(parts, whole)
        self._sessions.replace(parts, whole)
        whole.expires = -inf  # it was noted for the file only
        self._placement.expire(whole, when)
        self._counters.merges += 1
        self._counters.merged_rows += whole.rows
        for part in parts:
            self._placement.unpin(part)

    def _give_up(self, merge: _Merge) -> None:
        for part in merge.parts:
            self._placement.unpin(part)
        merge.parts = []
        self._placement.unpin(merge.whole)

    def cancel(self) -> None:
        """Rows are to be forgotten: what is being merged must neither keep them nor become more."""
        for merge in (*self._copies.values(), *self._stores.values()):
            for part in merge.parts:
                self._placement.unpin(part)
            merge.parts = []

    def pins(self) -> list[Extent]:
        """What is being copied from, once per pin."""
        return [part for merge in (*self._copies.values(), *self._stores.values()) for part in merge.parts]


def _follows(above: Extent, below: Extent) -> bool:
    """Is one extent all that hangs below another, and from its end on?"""
    children = above.nodes[-1].children()
    return (
        len(children) == 1
        and children[0].extent is below
        and below.parent == above.id
        and below.parent_rows == above.rows
    )
