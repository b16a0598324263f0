"""The disk tier: files that are written and removed within a budget, evictions that make room, and a disk that fails.

It knows extents and their order of eviction; not which others are to be written, nor host. States of an extent: absent -> writing ->
ready. Bytes count as used from the moment a Store is planned until the completion of the Drop.

No Store takes the files over the budget. They are over it only where a restart finds more than a smaller budget allows:
until the removals that the first step plans have ended. A file that cannot be removed still counts, and is tried again
every 30 s; other files go in its place. While they are over, nothing is written; `over` says by how much.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf
from typing import Literal

from afterglow.plan.options import Capacity
from afterglow.plan.prefix.extent import Extent
from afterglow.plan.stats import Counters
from afterglow.plan.step import BACKGROUND, SAVE, Drop, ExtentId, MoveDone, Store, Use
from afterglow.plan.tiers.moves import Moves
from afterglow.plan.tiers.policy import EvictionCandidates, Forget

MAX_STORE_FAILURES = 3  # in a row, before the disk is left alone for a while
MAX_DROP_FAILURES = 3  # in a row, before no more files go in place of files that cannot be removed
STORE_BACKOFF_S = 30.0

Room = Literal["now", "soon", "never"]


class Disk:
    """The disk tier."""

    def __init__(
        self, capacity: Capacity, candidates: EvictionCandidates, moves: Moves, counters: Counters, forget: Forget
    ) -> None:
        self.used = 0  # bytes
        self.dropping = 0  # bytes that are being removed, a part of `used`
        self.rests_until = 0.0  # nothing is written before, because stores have failed
        self._budget = capacity.disk_bytes
        self._candidates = candidates
        self._moves = moves
        self._counters = counters
        self._forget = forget
        self._owners: dict[ExtentId, Extent] = {}  # of the files, by name; also of one being removed
        self.claimed = 0  # bytes for those that wait to be written
        self._failures = 0  # of stores, in a row
        self._late: dict[int, Extent] = {}  # by Store: given up, but its call may still write
        self._undropped: dict[ExtentId, Extent] = {}  # whose files could not be removed
        self._drop_again_at = 0.0
        self._drop_failures = 0  # in a row
        self._touched: dict[Extent, None] = {}

    def restore(self, extents: Sequence[Extent]) -> None:
        """Take over extents found on disk at start."""
        for extent in extents:
            extent.disk = "ready"
            self._owners[extent.id] = extent
            self.used += extent.file_bytes
        self._candidates.cold.fill(extent for extent in extents if not extent.has_children)
        for extent in extents:
            if (above := extent.above) is not None and above in self._candidates.cold:
                self._candidates.place(above)  # it was there before them
            if self._candidates.watch is not None:
                self._candidates.watch(extent)

    def adopt(self, extents: Sequence[Extent]) -> None:
        """Take over a few extents while many may be there: they are put in their places one by one."""
        for extent in extents:
            extent.disk = "ready"
            self._owners[extent.id] = extent
            self.used += extent.file_bytes
        for extent in extents:
            self._candidates.place(extent)
            if extent.above is not None:
                self._candidates.place(extent.above)

    def has_file(self, name: ExtentId) -> bool:
        """Is there a file of that name, or one being written or removed?"""
        return name in self._owners

    def touch(self, extent: Extent) -> None:
        """Note that an extent was used, for the catalog."""
        if extent.disk != "absent":
            self._touched[extent] = None

    def take_touched(self) -> list[Use]:
        """Return the uses of extents on disk since the last call. An extent that is being written is told of later."""
        touched = [e for e in self._touched if e.disk != "absent" and not e.dead]
        self._touched = {e: None for e in touched if e.disk == "writing"}
        return [Use(e.id, e.last_used, e.hits, e.expires) for e in touched if e.disk == "ready"]

    # ------------------------------------------------------------------------------------------ writing

    def store(self, extent: Extent, now: float, why: str) -> Room:
        """Plan to write an extent to disk, if there is room now."""
        if now < self.rests_until or extent.volatile:
            return "never"
        if extent.id in self._owners:  # there still is the file of an older extent of the same name
            return "soon" if self._is_going(extent.id) else "never"
        room = self._make_room(extent.file_bytes, extent.kept_on_disk)
        if room == "now":
            move = Store(self._moves.number(), extent.record(), extent.slots, SAVE, why)
            extent.disk, extent.store = "writing", move.move
            self._candidates.written(extent)
            self._owners[extent.id] = extent
            self.used += extent.file_bytes
            self._moves.start(move, extent)
            self._counters.stores += 1
        return room

    def _is_going(self, name: ExtentId) -> bool:
        """Is the file of that name being removed?"""
        return name not in self._undropped and self._owners[name] not in self._late.values()

    def stored(self, extent: Extent, done: MoveDone, now: float) -> None:
        """Take note that a Store has ended. One that was given up keeps its bytes and its name until its call returns."""
        extent.store = None
        if done.ok:
            self._failures = 0
            extent.disk = "ready"
            return
        extent.disk = "absent"
        if done.slots_busy:
            self._late[done.move] = extent
        else:
            self._release(extent)
        self._counters.store_failures += 1
        self._failures += 1
        if self._failures >= MAX_STORE_FAILURES:
            self.rests_until = now + STORE_BACKOFF_S

    def returned(self, move: int) -> None:
        """Release the file of a Store that was given up and whose call has now returned (no effect for other moves)."""
        extent = self._late.pop(move, None)
        if extent is not None:
            self._release(extent)

    def _release(self, extent: Extent) -> None:
        """Count the file of an extent no more."""
        self.used -= extent.file_bytes
        del self._owners[extent.id]

    @property
    def failing(self) -> bool:
        """Is it left alone, because stores have failed and none has succeeded since?"""
        return self._failures >= MAX_STORE_FAILURES

    # ----------------------------------------------------------------------------------------- removing

    def drop(self, extent: Extent, why: str) -> int:
        """Plan the removal of the file; its bytes count, and its name is taken, until that is done. Returns them."""
        move = Drop(self._moves.number(), extent.id, why, BACKGROUND)
        extent.disk = "absent"
        self.dropping += extent.file_bytes
        self._moves.start(move, extent)
        return extent.file_bytes

    def dropped(self, extent: Extent, ok: bool, now: float) -> None:
        """Take note that a Drop has ended."""
        self.dropping -= extent.file_bytes
        if ok:
            self._drop_failures = 0
            self._release(extent)
        else:  # the file is still there: its bytes count, and its name is taken, until it can be removed
            self._counters.drop_failures += 1
            self._drop_failures += 1
            self._undropped[extent.id] = extent
            self._drop_again_at = now + STORE_BACKOFF_S

    def keep_budget(self, now: float) -> None:
        """Try again, now and then, to remove files that could not be removed. Others that no job needs go in their place
        meanwhile; unless nothing can be removed: then the whole cache would be forgotten for nothing."""
        if self._undropped and now >= self._drop_again_at:
            undropped, self._undropped, self._drop_failures = self._undropped, {}, 0
            for extent in undropped.values():
                self.drop(extent, "again")
        if self.short(0) > 0 and self._drop_failures < MAX_DROP_FAILURES:
            self._make_room(0, marked_too=True)

    @property
    def retry_at(self) -> float:
        """When to try so again; infinity: there is nothing to be tried."""
        return self._drop_again_at if self._undropped else inf

    # --------------------------------------------------------------------------------------------- room

    def claim(self, size: int) -> None:
        """Claim bytes of the room that is coming for one extent: the next extent needs room of its own."""
        self.claimed += size

    def end_claims(self) -> None:
        """Forget all claims: extents that waited for room are going to ask again."""
        self.claimed = 0

    @property
    def over(self) -> int:
        """Bytes of files above the budget."""
        return max(0, self.used - self._budget)

    def short(self, incoming: int) -> int:
        """Return the bytes that `incoming` bytes lack once the removals under way are done."""
        return self.used - self.dropping + incoming - self._budget

    def _make_room(self, incoming: int, marked_too: bool) -> Room:
        """Room for `incoming` bytes on disk. Clean copies go first, then what nothing depends on; after all of them, if at
        all, those that a mark keeps, and then those that a job waits for."""
        if incoming > self._budget or self._budget == 0:
            return "never"
        short = self.used + self.claimed + incoming - self._budget
        if short <= 0:
            return "now"
        short -= self.dropping
        in_order = marked_too and self._candidates.in_order

        def more(spare: bool | None, clean: bool, extent: Extent) -> bool:
            nonlocal short
            late = extent.kept_on_disk or (in_order and bool(extent.waiting))
            if extent.pins == 0 and (spare is None or late != spare):
                if clean and extent.host == "ready" and short > 0 and not extent.pin_count:
                    short -= self.drop(extent, "evict")
                    self._candidates.place(extent)
                    self._counters.evicted_disk += 1
                elif not clean and short > 0 and not self._candidates.must_stay(extent):
                    short -= extent.file_bytes
                    self.evict(extent)
            return short > 0

        for spare in (True, False)[: 1 + marked_too] if self._candidates.marked else (None,):
            if short > 0:
                self._candidates.clean.visit(partial(more, spare, True))
            if short > 0:
                self._candidates.cold.visit(partial(more, spare, False))
        return "soon" if short <= 0 else "never"

    def evict(self, extent: Extent) -> None:
        """Let go of a victim, wherever else it is."""
        self._counters.evicted_disk += 1
        self._forget(extent, "evicted")

    def shrink(self) -> None:
        """Come below the budget: before a restart it may have been larger. Pins hold as long as they fit."""
        self._shrink(pinned_too=False)
        self._shrink(pinned_too=True)

    def _shrink(self, pinned_too: bool) -> None:
        def more(extent: Extent) -> bool:
            if not (extent.ref_count or extent.pins or extent.has_children or (extent.pin_count and not pinned_too)):
                self.evict(extent)
            return self.short(0) > 0

        before = -1
        cold = self._candidates.cold
        while self.short(0) > 0 and len(cold) != before:
            before = len(cold)  # a second look: parents have come, now without children
            cold.visit(more)

    def check(self, extents: Sequence[Extent], restored: bool) -> None:
        """Assert that bytes add up, and that files have the right owners; `restored`: the budget may have been larger."""
        assert self.used == sum(extent.file_bytes for extent in self._owners.values())
        assert restored or self._undropped or self.short(0) <= 0
        assert self.dropping == sum(extent.file_bytes for extent in self._moves.dropping())
        for extent in extents:
            assert (extent.disk == "writing") == (extent.store is not None)
            assert extent.disk == "absent" or not extent.volatile
            assert extent.disk == "absent" or self._owners[extent.id] is extent
