"""Early writes of extents to disk: at once (write-through), at the second use, before an extent that hangs below, and when
the engine shuts down (`flush`); and again later, when a write could not be done.

It knows extents, how they hang together, and the disk tier; not host's budget.
"""

from __future__ import annotations

from math import inf

from afterglow.plan.options import Capacity
from afterglow.plan.prefix.extent import Extent
from afterglow.plan.prefix.index import Index
from afterglow.plan.tiers.disk import STORE_BACKOFF_S, Disk, Room
from afterglow.plan.tiers.moves import Moves
from afterglow.plan.tiers.policy import EvictionCandidates

MAX_WRITES = 3  # of an extent that could stay in host; after that it is written when it is evicted
WRITES_AT_ONCE = 4  # that are tried again in a step
EARLY_WRITES = ("write_through", "second use", "above")  # why extents are written that could stay in host

_Worth = tuple[bool, bool, float, int, int]  # needed, marked, last used, and what decides between equals


class WriteBack:
    """Extents in host that should be on disk."""

    def __init__(
        self, capacity: Capacity, index: Index, candidates: EvictionCandidates, disk: Disk, moves: Moves
    ) -> None:
        self._budget = capacity.disk_bytes
        self._index = index
        self._candidates = candidates
        self._disk = disk
        self._moves = moves
        self._unwritten: dict[Extent, int] = {}  # that should be on disk, and how often that has failed
        self._again_at = inf

    def write(self, extent: Extent, now: float, why: str) -> Room:
        """Write an extent that could stay in host, and before it what it hangs below: after a crash it is of no use
        without. What cannot be done now is done later.
        """
        path = [extent]
        while (above := self._parent(path[-1])) is not None and above.disk == "absent":
            path.append(above)
        for part in reversed(path):
            room = self._disk.store(part, now, why) if part.host == "ready" else "never"
            if room != "now":
                self._put_off(extent, room == "never" and now >= self._disk.rests_until, now)
                return room
        return "now"

    def write_above(self, extent: Extent, now: float) -> None:
        """Write the extents that one hangs below too, while they stay in host: after a crash it is of no use without.

        A prefix in constant use is never a victim itself.
        """
        above = self._parent(extent)
        while above is not None and above.disk == "absent" and above.host == "ready":
            if self._disk.store(above, now, "above") != "now":
                return
            above = self._parent(above)

    def stored(self, extent: Extent, ok: bool, why: str, now: float) -> None:
        """Take note that a Store has ended."""
        if ok:
            self._unwritten.pop(extent, None)
        elif why in EARLY_WRITES:
            self._put_off(extent, failed=True, now=now)

    def is_written(self, extent: Extent) -> bool:
        """Is it being written, or about to be, when there is room?"""
        return extent.disk == "writing" or (self._unwritten.get(extent) == 0 and not self._disk.failing)

    def forget(self, extent: Extent) -> None:
        """Stop trying to write an extent."""
        self._unwritten.pop(extent, None)

    def room_came(self, now: float) -> None:
        """Try again soon: a file has been removed."""
        self._again_at = min(self._again_at, now)

    def _put_off(self, extent: Extent, failed: bool, now: float) -> None:
        """Write an extent later that could not be written now, but do not try for ever."""
        failures = self._unwritten.pop(extent, 0) + failed
        if failures < MAX_WRITES and not extent.dead:
            self._unwritten[extent] = failures
            self._again_at = min(self._again_at, now + STORE_BACKOFF_S)

    def write_again(self, now: float) -> None:
        """Try failed writes again, now and then and when files have been removed."""
        if now < self.retry_at:
            return
        self._again_at = inf
        waiting = [extent for extent in self._unwritten if extent.disk == "absent"]
        for extent in waiting[:WRITES_AT_ONCE]:
            if extent.host == "ready" and self.write(extent, now, "write_through") == "soon":
                self._disk.claim(extent.file_bytes)
        self._disk.end_claims()
        if len(waiting) > WRITES_AT_ONCE:
            self._again_at = now

    @property
    def retry_at(self) -> float:
        """When to do so; infinity: there is nothing to be written."""
        return max(self._again_at, self._disk.rests_until) if self._unwritten else inf

    def flush(self, now: float) -> bool:
        """Write the extents that are only in host, the most valuable first. True: nothing is left to be done.

        Only the disk survives, so less valuable extents on it make room, whatever the policy; more valuable ones do not.
        """
        waiting = False
        dirty = [e for e in self._candidates.host.members() if e.disk == "absent" and not e.volatile]
        if not dirty:
            return not len(self._moves)
        worth = self._worths()
        dirty.sort(key=worth.__getitem__, reverse=True)
        stale = [extent for extent in self._index.extents.values() if extent.disk == "ready"]
        stale.sort(key=worth.__getitem__, reverse=True)
        for extent in dirty:
            if extent.dead or extent.file_bytes > self._budget or not self._has_parent_on_disk(extent):
                continue
            while self._disk.short(extent.file_bytes) > 0 and stale and worth[stale[-1]] < worth[extent]:
                victim = stale.pop()
                if not (victim.dead or worth[victim][0]):
                    self._disk.evict(victim)
            if self._disk.short(extent.file_bytes) > 0:
                continue
            if self._disk.store(extent, now, "flush") == "soon":
                waiting = True
                break  # those behind it are worth less: they must not take its room
        return not waiting and not len(self._moves)

    def _worths(self) -> dict[Extent, _Worth]:
        """Return the value of each extent, for when not all can be kept. Extents in use are worth most, then marked ones, then
        the last used.
        An extent is worth no less than those that hang below it and are lost with it. Of a conversation, which is used as
        a whole, the head is worth most.
        """
        best: dict[Extent, tuple[bool, bool, float]] = {}
        worths: dict[Extent, _Worth] = {}
        for extent in sorted(self._index.extents.values(), key=lambda e: -(e.first_row + e.nodes[0].start)):
            needed = extent.pin_count > 0 or extent.ref_count > 0 or extent.pins > 0
            own = (needed, extent.kept_on_disk, extent.last_used)
            own = max(own, best.pop(extent, own))
            worths[extent] = (*own, -extent.first_row, -extent.serial)
            if (above := extent.above) is not None:
                best[above] = max(own, best.get(above, own))
        return worths

    def _parent(self, extent: Extent) -> Extent | None:
        """Without whose file its own is of no use."""
        return self._index.extents.get(extent.parent) if extent.parent is not None else None

    def _has_parent_on_disk(self, extent: Extent) -> bool:
        parent = self._parent(extent)
        return parent is None or parent.disk != "absent"
