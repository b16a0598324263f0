"""The host tier: slots that are handed out, and the extents that leave when there are too few.

It knows extents, their order of eviction, and the disk tier, where victims go; not jobs, nor how extents come back. Slots count
as used from the moment they are planned for until the completion that says they are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from afterglow.plan.options import Capacity
from afterglow.plan.prefix.extent import Extent, Key
from afterglow.plan.stats import Counters
from afterglow.plan.tiers.disk import Disk
from afterglow.plan.tiers.moves import SlotPool, watermarks
from afterglow.plan.tiers.policy import EvictionCandidates, Forget
from afterglow.plan.tiers.write_back import WriteBack


class Host:
    """The host tier."""

    def __init__(
        self,
        capacity: Capacity,
        candidates: EvictionCandidates,
        disk: Disk,
        write_back: WriteBack,
        counters: Counters,
        forget: Forget,
    ) -> None:
        self.pool = SlotPool(capacity.host_slots)
        self.low, self.high = watermarks(capacity.host_slots)
        self.absences = 0  # how often rows that queued jobs wait for have left host, or any have not come
        self.evicting = 0  # slots that are free when Stores under way have ended
        self._candidates = candidates
        self._disk = disk
        self._write_back = write_back
        self._counters = counters
        self._forget = forget
        self._quarantine: dict[int, tuple[int, ...]] = {}

    # ----------------------------------------------------------------------------------------- slots

    def keep_free(self, low: int, high: int) -> None:
        """Set how many slots to keep free, as far as the tier's size allows."""
        self.low, self.high = watermarks(self.pool.total, low, high)

    def take_slots(
        self, count: int, now: float, after: int | None = None, waiter: Key | None = None
    ) -> tuple[int, ...] | None:
        """Take slots at once, evicting extents that can go at once. None: there are too few; evictions are on their way if any
        are possible.

        For a job in the queue (`waiter`) nothing goes that this job or one before it waits for.
        """
        if self.pool.free < count:
            self.evict(count, now, waiter)
        return self.pool.take(count, after)

    def make_room(self, count: int, now: float, waiter: Key | None = None) -> bool:
        """Evict extents until so many slots are free. False: they are not, at once."""
        if self.pool.free < count:
            self.evict(count, now, waiter)
        return self.pool.free >= count

    def urge_slots(self, count: int, now: float, after: int | None = None) -> tuple[int, ...] | None:
        """Take slots for rows that would be lost otherwise: clean copies go before their turn, if no victim goes in time."""
        slots = self.take_slots(count, now, after)
        if slots is None:
            self._candidates.clean.visit(lambda extent: self._free_clean(extent, count, now))
            slots = self.pool.take(count, after)
        return slots

    def room_for_rows(self, count: int, now: float) -> bool:
        """Are there slots for rows that are about to be computed? If not, some may be on their way (`relief`)."""
        slots = self.urge_slots(count, now)
        if slots is None:
            return False
        self.pool.give(slots)
        return True

    def _free_clean(self, extent: Extent, count: int, now: float) -> bool:
        if self.pool.free < count and extent.pins == 0:
            self.leave(extent, now)
        return self.pool.free < count

    def quarantine(self, move: int, slots: tuple[int, ...]) -> None:
        """Keep slots aside: their move was given up, but may still write into them until it says that it has ended."""
        self._quarantine[move] = slots

    def end_quarantine(self, move: int) -> None:
        """Free the slots of a move that was given up and has now ended (no effect for other moves)."""
        slots = self._quarantine.pop(move, None)
        if slots is not None:
            self.pool.give(slots)

    # ------------------------------------------------------------------------------------- evictions

    def refill(self, expected: int, now: float, waiter: Key | None = None) -> None:
        """Keep some slots free, and as many as running prefills are going to need (at most half of all)."""
        expected = min(expected, self.pool.total // 2)
        if self.pool.free + self.evicting < max(self.low, expected):
            self.evict(max(self.high, expected), now, waiter)

    def evict(self, target: int, now: float, waiter: Key | None = None) -> None:
        """Let go of victims until `target` slots are free, or are going to be; of none that `waiter` or a job before it
        waits for."""
        short, in_order = target - self.pool.free - self.evicting, self._candidates.in_order

        def more(extent: Extent) -> bool:
            nonlocal short
            if waiter is not None and extent.rank is not None and extent.rank <= waiter:
                return short > 0 and not in_order  # the last in the queue came first: all others are nearer
            if short > 0 and extent.pins == 0:
                short -= self._evict_one(extent, now)
            return short > 0

        if short > 0:
            before = inf
            while self._candidates.marked and 0 < short < before and not self._disk.claimed:
                before = short  # what hangs below nothing any more goes, too, before what is marked
                self._candidates.host.visit(lambda extent: not extent.kept_in_host and more(extent))
            if short > 0:
                self._candidates.host.visit(more)
            self._disk.end_claims()

    def _evict_one(self, extent: Extent, now: float) -> int:
        """Evict an extent; returns the slots that this frees now or soon."""
        slots = len(extent.slots)
        if extent.disk == "ready":
            self.leave(extent, now)
            return slots
        room = self._disk.store(extent, now, "evict")
        if room == "now":
            extent.evicting = True
            self.evicting += slots
            self._write_back.write_above(extent, now)
        elif room == "soon":
            self._disk.claim(extent.file_bytes)  # the next victim needs room of its own
        else:
            if self._candidates.must_stay(extent):
                return 0
            self._counters.evicted_host += 1
            self._forget(extent, "evicted")
        return slots

    def stay(self, extent: Extent) -> bool:
        """Keep an extent in host when its Store has ended. Was it about to leave?"""
        evicting, extent.evicting = extent.evicting, False
        if evicting:
            self.evicting -= len(extent.slots)
        return evicting

    def leave(self, extent: Extent, now: float) -> None:
        """Free the slots of an extent whose rows are on disk too."""
        self._counters.evicted_host += 1
        self.not_prefetched(extent)
        extent.left_host = now
        self.free(extent)

    def not_prefetched(self, extent: Extent) -> None:
        """Count a prefetch that was of no use, if the extent that leaves host was prefetched."""
        self._counters.prefetches_wasted += extent.prefetched
        extent.prefetched = False

    def free(self, extent: Extent) -> None:
        """Give an extent's slots back."""
        self.pool.give(extent.slots)
        extent.slots, extent.host, extent.lacks = (), "absent", 0
        self.absences += bool(extent.waiting)
        self._candidates.place(extent)

    def not_loaded(self, extent: Extent, move: int, busy: bool) -> None:
        """Give up an extent's slots: the Load into them has failed. `busy`: it may still write there."""
        if busy:
            self.quarantine(move, extent.slots)
        else:
            self.pool.give(extent.slots)
        extent.slots, extent.host, extent.lacks = (), "absent", 0
        self.absences += 1

    def check(self, extents: Sequence[Extent], other_slots: list[int]) -> None:
        """Every slot has one owner (`other_slots`: the drafts')."""
        self.pool.check()
        owned = [slot for extent in extents for slot in extent.slots]
        owned += [slot for slots in self._quarantine.values() for slot in slots]
        assert sorted(owned + other_slots + self.pool.listing()) == list(range(self.pool.total))
        assert self.evicting == sum(len(e.slots) for e in extents if e.evicting)
        for extent in extents:
            assert (extent.host == "absent") == (not extent.slots)
