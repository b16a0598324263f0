"""Short turns grow together: an extent that nothing but the end of one conversation hangs below is merged with what hangs
below it, so that twenty short turns are a few extents and not forty, each with a half-empty block and a file.

    before   (A, 239 rows) -- (prompt, 41) -- (reply, 19)        when a turn has ended and all its rows are saved
    after    (A + prompt + reply, 299)                           an extent like any other, as if computed in one turn

The rows are copied in host. Until the copy has ended, and its file is written where one of the old ones has a file, the old
extents are matched; then the new one takes their place, and they go when they are read no more. So a crash
leaves either or both, never none. Whatever comes between is a reason not to merge: the end of the next turn is another
occasion.

A breakpoint stays the end of an extent while it lives, or until a later one of the conversation takes its place. So a turn
with breakpoints is merged up to its last one as soon as its prompt is stored, before its reply hangs below that.

Both halves have fewer than 256 rows, and the lower one at least a quarter of the upper one's unless that is of the same turn:
so a row is copied once with its turn, and once for every quarter by which its extent grows. That is at most 26 times, and 3
times where turns have 60 rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from afterglow.plan.batching.job import Job
from afterglow.plan.cache import Cache
from afterglow.plan.prefix.extent import Extent
from afterglow.plan.prefix.tree import subtree
from afterglow.plan.step import MoveDone

MIN_SHARE = 4  # the lower half has at least 1/4 of the upper half's rows, if another turn has used the upper half


@dataclass(eq=False, slots=True)
class _Merge:
    """`parts` become `whole`, which cannot be matched before it is complete. No parts: it is given up. `owner`: the
    conversation of the job that they were merged for."""

    parts: list[Extent]
    whole: Extent
    owner: tuple[str, str] | None


class Merging:
    """Merges under way. `small`: rows; 0: nothing is merged."""

    def __init__(self, cache: Cache, small: int) -> None:
        self._cache = cache
        self._small = small
        self._copies: dict[int, _Merge] = {}  # by move
        self._stores: dict[int, _Merge] = {}

    def __len__(self) -> int:
        return len(self._copies) + len(self._stores)

    # ---------------------------------------------------------------------------------------- to begin

    def ended(self, job: Job, now: float) -> None:
        """Merge the last extents of an ended job's conversation, if there is anything to be gained."""
        self._merge(job, job.length, now)

    def grown(self, job: Job, now: float) -> None:
        """Merge the last extents before a running job's last breakpoint: soon its reply hangs below them, and the breakpoint is
        where no others will be merged."""
        rows, job.grown = job.grown, 0
        self._merge(job, rows, now)

    def _merge(self, job: Job, stop: int, now: float) -> None:
        parts = self._parts(job, stop)
        rows = sum(part.rows for part in parts)
        need = self._cache.capacity.blocks(rows)
        if len(parts) < 2 or self._cache.host.pool.free - need < self._cache.host.low // 2:
            return
        slots = self._cache.host.pool.take(need)
        assert slots is not None
        first, last = parts[0], parts[-1]
        prefix = bytes(job.tokens[: 4 * first.first_row])
        own = b"".join(part.tokens for part in parts)
        whole = self._cache.new_extent(first.salt, prefix, own, last.volatile, now)
        whole.created_at, whole.last_used = first.created_at, last.last_used
        whole.hits = max(part.hits for part in parts)
        whole.expires = last.expires
        for part in parts:
            self._cache.pin(part)
        self._cache.placement.prepare(whole, slots)
        move = self._cache.placement.copy([(part.slots, 0, part.rows) for part in parts], slots, rows)
        self._copies[move] = _Merge(parts, whole, job.owner)

    def _parts(self, job: Job, stop: int) -> list[Extent]:
        """Choose the extents at the end of a job's first `stop` tokens that are to be one, in order."""
        views = self._cache.match(job.salt, bytes(job.tokens[: 4 * stop])).views
        if not views or views[-1].stop < views[-1].extent.rows:
            return []
        parts = [views[-1].extent]
        if not self._is_part(parts[0], parts[0], job.owner) or parts[0].has_children:
            return []
        rows = parts[0].rows
        while rows < self._small and (above := parts[0].above) is not None:
            if (
                not self._is_part(above, parts[-1], job.owner)
                or not _follows(above, parts[0])
                or _is_border(above)
                or above.rows >= self._small
                or (above.hits and above.rows > MIN_SHARE * rows)
                or above.rows + rows > self._cache.capacity.max_extent_rows
                or above.pins
            ):
                break
            parts.insert(0, above)
            rows += above.rows
        return parts

    def _is_part(self, extent: Extent, last: Extent, owner: tuple[str, str] | None) -> bool:
        """Is an extent whole, in host, and used by the same conversations as the last one (but for the owner, whose turn may
        not have ended), for no longer than that?"""
        return (
            not extent.dead
            and len(extent.nodes) == 1
            and extent.nodes[0].start == 0
            and extent.host == "ready"
            and extent.salt == last.salt
            and extent.expires <= last.expires
            and extent.pin_count == last.pin_count
            and extent.volatile == last.volatile
            and _others(extent, owner) == _others(last, owner)
            and _kept_until(extent) == _kept_until(last)
        )

    # ------------------------------------------------------------------------------------------ to end

    def copied(self, done: MoveDone, jobs: Iterable[Job], now: float) -> bool:
        """Take note that a move has ended. Was it a copy of a merge?"""
        merge = self._copies.pop(done.move, None)
        if merge is None:
            return False
        whole = merge.whole
        if done.slots_busy:
            self._cache.host.quarantine(done.move, whole.slots)
            whole.slots, whole.host = (), "absent"
        if not done.ok or not self._stands(merge):
            self._give_up(merge)
            return True
        # Meanwhile others may have used them, and another merge may have replaced what they hang below.
        whole.volatile, first = merge.parts[-1].volatile, merge.parts[0]
        whole.parent, whole.parent_rows = first.parent, first.parent_rows
        if (self._cache.write_through and not whole.volatile) or any(part.disk != "absent" for part in merge.parts):
            self._cache.placement.write_back.write(whole, now, "merge")
            if whole.store is None:
                self._give_up(merge)
            else:
                self._stores[whole.store] = merge
        else:
            self._replace(merge, jobs)
        return True

    def stored(self, done: MoveDone, jobs: Iterable[Job]) -> None:
        """Take note that a move has ended: perhaps the file of a merged extent is written."""
        merge = self._stores.pop(done.move, None)
        if merge is None:
            return
        if merge.whole.disk == "ready" and self._stands(merge) and merge.whole.parent == merge.parts[0].parent:
            self._replace(merge, jobs)
        else:
            self._give_up(merge)

    def _stands(self, merge: _Merge) -> bool:
        """Can the parts still be replaced? An extent that has come to hang below them must have no file, which would name them."""
        parts, last = merge.parts, merge.parts[-1] if merge.parts else None
        if last is None or merge.whole.id in self._cache.index.extents:
            return False
        if not all(self._is_part(part, last, merge.owner) for part in parts):
            return False
        if not all(_follows(above, below) for above, below in zip(parts, parts[1:], strict=False)):
            return False
        if any(_is_border(part) for part in parts[:-1]):
            return False
        names = {part.id for part in parts}
        below = [node.extent for node in subtree(last.nodes[0]) if node.extent is not None and node.extent is not last]
        return all(extent.disk == "absent" for extent in below if extent.parent in names)

    def _replace(self, merge: _Merge, jobs: Iterable[Job]) -> None:
        parts, whole = merge.parts, merge.whole
        for job in jobs:
            used = [part for part in parts if part in job.uses]
            for part in used:
                del job.uses[part]
                part.ref_count -= 1
            if used:
                job.uses[whole] = None
                whole.ref_count += 1
        self._cache.replace(parts, whole)
        for part in parts:
            self._cache.unpin(part)

    def _give_up(self, merge: _Merge) -> None:
        for part in merge.parts:
            self._cache.unpin(part)
        merge.parts = []
        self._cache.unpin(merge.whole)

    def cancel(self) -> None:
        """Give up all merges: rows are to be forgotten, and a merge must neither keep nor add any."""
        for merge in (*self._copies.values(), *self._stores.values()):
            for part in merge.parts:
                self._cache.unpin(part)
            merge.parts = []

    def pins(self) -> list[Extent]:
        """List the extents that are being copied from, once per pin."""
        return [part for merge in (*self._copies.values(), *self._stores.values()) for part in merge.parts]


def _others(extent: Extent, owner: tuple[str, str] | None) -> list[tuple[str, str]]:
    """List the conversations that have used an extent, without one."""
    names = [(session.tenant, session.name) for session in extent.sessions]
    return sorted(name for name in names if name != owner)


def _kept_until(extent: Extent) -> tuple[float, float] | None:
    return (extent.mark.used, extent.mark.ttl) if extent.mark is not None else None


def _is_border(extent: Extent) -> bool:
    """Is a breakpoint that lives at its end? Other prompts are going to go on from there."""
    return extent.mark is not None and extent.mark.border


def _follows(above: Extent, below: Extent) -> bool:
    """Is one extent all that hangs below another, and from its end on?"""
    children = above.nodes[-1].children()
    return (
        len(children) == 1
        and children[0].extent is below
        and below.parent == above.id
        and below.parent_rows == above.rows
    )
