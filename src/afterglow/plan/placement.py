"""Which tier holds which extent, and the moves that change it. Host slots and disk bytes against their budgets.

It knows extents, the policy and the index's shape (who has children); not jobs, not queues, not what a move takes.
States of an extent per tier: host absent -> loading -> ready, disk absent -> writing -> ready. Slots and disk bytes
count as used from the moment a move is planned until the completion that says they are not.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import Literal

from afterglow.plan.cost import Cost
from afterglow.plan.device import Device
from afterglow.plan.extent import Capacity, Extent, Key
from afterglow.plan.ghosts import Ghosts, Reason
from afterglow.plan.index import Index
from afterglow.plan.policy import POLICIES, Policy, Ranking
from afterglow.plan.slots import SlotPool, watermarks
from afterglow.plan.stats import Counters
from afterglow.plan.step import BACKGROUND, DEMAND, PREFETCH, SAVE, Copy, Drop, ExtentId, Load, Move, MoveDone, Store
from afterglow.plan.truncation import tenant_of

MAX_STORE_FAILURES = 3  # in a row, before the disk is left alone for a while
STORE_BACKOFF_S = 30.0
MAX_WRITES = 3  # of an extent that could stay in host; after that it is written when it is evicted
WRITES_AT_ONCE = 4  # that are tried again in a step
EARLY = ("write_through", "second use", "above")  # why extents are written that could stay in host
EXPIRY_RETRY_S = 60.0  # when what has expired but is still needed is looked at again
MAX_LOAD_FAILURES = 3  # in a row, before an extent counts as lost
LOAD_RETRY_S = 5.0  # when a load that failed in a way that may pass is tried again
LOAD_RETRY_LATE_S = 60.0  # and when one that nobody should wait for once more in vain: it timed out
PASSING = ("io", "timeout", "refused")  # why loads fail of which that may be so
THRASH_S = 60.0  # an extent wanted again so soon after it was evicted should have stayed

Room = Literal["now", "soon", "never"]
_Worth = tuple[bool, float, int, int]  # needed, last used, and what decides between equals


@dataclass(slots=True)
class _Flight:
    """A move under way. A Load owns its slots: the extent may be given up meanwhile."""

    move: Move
    extent: Extent


class Placement:
    """Host and disk."""

    def __init__(
        self,
        capacity: Capacity,
        policy: Policy,
        index: Index,
        device: Device,
        counters: Counters,
        cost: Cost,
        ghosts: Ghosts,
        selective: bool = False,
    ) -> None:
        self.capacity = capacity
        self.pool = SlotPool(capacity.host_slots)
        self.disk_used = 0
        self.moves: list[Move] = []  # planned, not yet handed out
        self.absences = 0  # how often rows have left host, or have not come
        self.flights: dict[int, _Flight] = {}
        self.low, self.high = watermarks(capacity.host_slots)
        self.horizon: Key | None = None  # what jobs up to this one wait for does not leave the last tier
        self.read_buffer: int | None = None  # layers to be loaded before the job joins (a baseline); None: all of them
        self.urged: list[int] = []  # loads that somebody waits for now, to be handed out with the moves
        self._gated: dict[int, Extent] = {}  # loads that stop at the read buffer until they are urged
        self._lazy: dict[int, None] = {}  # loads that let others go before them until they are urged
        self.lost: list[Extent] = []  # forgotten, although conversations with a name had used them
        self._index = index
        self._device = device
        self._in_order = policy.looks_ahead
        self._counters = counters
        self._cost = cost
        self._host = Ranking(policy)  # ready in host
        self._clean = Ranking(policy)  # ready in both
        self._cold = Ranking(policy)  # ready on disk only
        self._files: dict[ExtentId, Extent] = {}  # who owns the file of that name; also one being dropped
        self._evicting_slots = 0
        self._dropping_bytes = 0
        self._claimed = 0  # bytes of those for victims that wait to be written, while victims are looked for
        self._undropped: list[Extent] = []  # whose files could not be removed
        self._drop_again_at = 0.0
        self._unwritten: dict[Extent, int] = {}  # that should be on disk, and how often that has failed
        self._write_again_at = inf
        self._quarantine: dict[int, tuple[int, ...]] = {}
        self._dead: dict[Extent, None] = {}
        self._unsure: dict[Extent, tuple[int, float]] = {}  # whose loads failed: how often, and until when not again
        self._last_move = 0
        self._failures = 0
        self._no_disk_until = 0.0
        self._touched: dict[Extent, None] = {}
        self._expiring: list[tuple[float, int, Extent]] = []  # a heap; entries may be out of date
        self._ghosts = ghosts
        self._selective = selective
        self._warming: list[Extent] = []  # to be brought back after a restart, the first one last
        self.quota: int | None = None  # bytes of extents that a tenant may have, in whatever tier
        self._tenants: dict[str, Ranking] = {}  # with a quota: whose extents are whose
        self._tenant_bytes: dict[str, int] = {}

    # ------------------------------------------------------------------------------------- asked by jobs

    def pin(self, extent: Extent) -> None:
        """Keep an extent where it is: somebody is about to read it."""
        extent.pins += 1
        if extent.evicting:  # its Store goes on, but the slots stay
            extent.evicting = False
            self._evicting_slots -= len(extent.slots)

    def unpin(self, extent: Extent) -> None:
        """The opposite of `pin`."""
        extent.pins -= 1
        if extent.dead:
            self._reap(extent)

    def touch(self, extent: Extent, now: float, ttl: float | None = None) -> None:
        """An extent was of use, and is to be kept for `ttl` seconds more (None: for ever)."""
        self.expire(extent, now + ttl if ttl is not None else inf)
        extent.last_used = now
        extent.hits += 1
        self.ranked(extent)
        if self._selective and extent.host == "ready" and extent.disk == "absent":
            self._write(extent, now, "second use")
        if extent.disk == "ready":
            self._touched[extent] = None

    def keep(self, extent: Extent) -> None:
        """It must not leave the last tier until it is released as often."""
        extent.kept += 1

    def release(self, extent: Extent) -> None:
        """The opposite of `keep`."""
        extent.kept -= 1

    def expire(self, extent: Extent, when: float) -> None:
        """Nobody needs it after that, unless somebody has said, or says, later."""
        if when > extent.expires:
            extent.expires = when
            if when < inf and not extent.timed:  # who is looked at before its time is looked at again
                self._look_at(extent, when)

    def _look_at(self, extent: Extent, when: float) -> None:
        extent.timed = True
        heappush(self._expiring, (when, extent.serial, extent))

    def sweep(self, now: float, awaited: Callable[[], Container[Extent]]) -> None:
        """Forget what has expired (A15), unless it is queued for (`awaited`), in use, or something hangs below it."""
        due: list[Extent] = []
        while self._expiring and self._expiring[0][0] <= now:
            _, _, extent = heappop(self._expiring)
            extent.timed = False
            if extent.dead or extent.expires == inf:
                continue
            if extent.expires > now:
                self._look_at(extent, extent.expires)
            else:
                due.append(extent)
        queued: Container[Extent] | None = None

        def needed(extent: Extent) -> bool:
            nonlocal queued
            if extent.users or extent.pins or extent.rank is not None or extent.kept or extent.has_children:
                return True
            queued = queued if queued is not None else awaited()
            return extent in queued

        for extent in sorted(due, key=lambda e: -e.first_row):  # children go before their parents
            if extent.dead:
                continue
            if needed(extent):
                self._look_at(extent, now + EXPIRY_RETRY_S)
                continue
            above: Extent | None = extent
            while above is not None and -inf < above.expires <= now and not needed(above):
                last, above = above, self._above(above)  # which may have waited for its last child only
                self.forget(last, "expired")

    @property
    def next_expiry(self) -> float:
        """When to sweep next; infinity: never."""
        return self._expiring[0][0] if self._expiring else inf

    def take_touched(self) -> list[tuple[ExtentId, float, int]]:
        """(id, last used, hits) of the extents on disk that were touched since the last call, for the catalog."""
        touched, self._touched = self._touched, {}
        return [(e.id, e.last_used, e.hits) for e in touched if e.disk == "ready" and not e.dead]

    def ranked(self, extent: Extent) -> None:
        """Something has changed that a policy's order may depend on."""
        for ranking in (self._host, self._clean, self._cold):
            ranking.update(extent)
        if (own := self._tenants.get(tenant_of(extent.salt))) is not None:
            own.update(extent)

    def keep_free(self, low: int, high: int) -> None:
        """The least free slots to keep (A9), as far as the tier's size allows."""
        self.low, self.high = watermarks(self.pool.total, low, high)

    def take_slots(
        self, count: int, now: float, after: int | None = None, waiter: Key | None = None
    ) -> tuple[int, ...] | None:
        """Slots at once, evicting what can go at once; or None, and evictions are on their way if there can be any.

        For a job in the queue (`waiter`) nothing goes that this job or one before it waits for (A10).
        """
        if self.pool.free < count:
            self.evict(count, now, waiter)
        return self.pool.take(count, after)

    def urge_slots(self, count: int, now: float, after: int | None = None) -> tuple[int, ...] | None:
        """The same for rows that would be lost: clean copies go before their turn, rather than none go in time."""
        slots = self.take_slots(count, now, after)
        if slots is None:
            self._clean.visit(lambda extent: self._free_clean(extent, count, now))
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
            self._evicted(extent, now)
        return self.pool.free < count

    def load(self, extent: Extent, now: float, waiter: Key | None = None) -> bool:
        """Start to bring an extent from disk to host. False: no slots now (see `relief`)."""
        return self._load(extent, now, waiter, DEMAND, "demand")

    def avoid(self, extent: Extent, now: float) -> None:
        """Its rows did not come in time. Whether they are lost is said when the load has ended."""
        if extent.load is not None:
            failures, _ = self._unsure.get(extent, (0, 0.0))
            self._unsure[extent] = (failures, now + LOAD_RETRY_S)

    def avoids(self, extent: Extent, now: float) -> bool:
        """Is it to be recomputed, because a load of it has just failed? What is in host is not."""
        return extent in self._unsure and extent.host != "ready" and now < self._unsure[extent][1]

    def prefetch(self, extent: Extent, now: float, waiter: Key, reserve: int = 0) -> bool:
        """The same before its job's turn has come. `reserve` slots are to stay free."""
        if self.avoids(extent, now):
            return True
        need = self.capacity.blocks(extent.rows) + reserve
        if reserve and self.pool.free < need:
            self.evict(need, now, waiter)
            if self.pool.free < need:
                return False
        if not self._load(extent, now, waiter, PREFETCH, "prefetch"):
            return False
        extent.prefetched = True
        self._counters.prefetches += 1
        return True

    def _load(self, extent: Extent, now: float, waiter: Key | None, priority: int, why: str) -> bool:
        slots = self.take_slots(self.capacity.blocks(extent.rows), now, waiter=waiter)
        if slots is None:
            return False
        ahead = self.read_buffer if priority != BACKGROUND else None
        move = Load(self._next_move(), extent.id, extent.rows, slots, priority, why, ahead)
        if ahead is not None:
            self._gated[move.move] = extent
        if priority != DEMAND:
            self._lazy[move.move] = None
        extent.host, extent.load, extent.slots = "loading", move.move, slots
        self._start(move, extent)
        self._cost.started(move.move, extent.file_bytes, now)
        self._counters.loads += 1
        self._counters.thrashed += extent.left_host is not None and now - extent.left_host < THRASH_S
        return True

    def wanted(self, extent: Extent) -> None:
        """A job that is about to run needs an extent: a prefetch of it was of use, or comes late."""
        if extent.load in self._lazy and extent.load not in self._gated:
            self.urge([extent])
        if extent.prefetched:
            extent.prefetched = False
            self._counters.prefetches_late += extent.load is not None
            self._counters.prefetches_useful += extent.load is None

    def urge(self, extents: Sequence[Extent]) -> None:
        """A job has joined whose rows these loads bring."""
        for extent in extents:
            if extent.load is not None and extent.load not in self.urged:
                self._gated.pop(extent.load, None)
                self._lazy.pop(extent.load, None)
                self.urged.append(extent.load)

    def open_gates_of(self, extents: Sequence[Extent]) -> None:
        """Loads that stop at the read buffer are to go on, although no job has joined."""
        self.urge([extent for extent in extents if extent.load in self._gated])

    def open_gates(self, all_of_them: bool) -> None:
        """Those of which nobody waits for the rest would stop for ever, and keep their slots."""
        abandoned = [
            extent
            for extent in self._gated.values()
            if all_of_them or self.read_buffer is None or extent.dead or not (extent.pins or extent.rank is not None)
        ]
        self.open_gates_of(abandoned)

    def is_under_way(self, move: int) -> bool:
        """Has a move not ended yet?"""
        return move in self.flights

    @property
    def relief(self) -> bool:
        """Are there moves under way that will free slots?"""
        return self._evicting_slots > 0 or self._dropping_bytes > 0

    def copy(self, pieces: list[tuple[tuple[int, ...], int, int]], slots: tuple[int, ...], rows: int) -> int:
        """Plan to copy rows within host; whoever asks keeps the slots, and the sources pinned, until it has ended."""
        move = Copy(self._next_move(), tuple(pieces), slots, rows)
        self.moves.append(move)
        return move.move

    def quarantine(self, move: int, slots: tuple[int, ...]) -> None:
        """A move was given up, but may still write into these slots until it says that it has ended."""
        self._quarantine[move] = slots

    # ------------------------------------------------------------------------------------------ arrivals

    def add(self, extent: Extent, slots: tuple[int, ...], write_through: bool, now: float) -> None:
        """A new extent, in the index, whose rows lie in `slots`."""
        extent.slots, extent.host = slots, "ready"
        self._rank(extent)
        self._belongs(extent)
        if write_through:
            self._write(extent, now, "write_through")

    def restore(self, extents: Sequence[Extent]) -> None:
        """Extents found on disk at start."""
        for extent in extents:
            extent.disk = "ready"
            self._files[extent.id] = extent
            self.disk_used += extent.file_bytes
            self._belongs(extent)
        self._cold.fill(extents)

    def within_quota(self, salt: str, size: int) -> bool:
        """Make room for `size` more bytes of a tenant, at the cost of its own least recently used. False: there is none."""
        tenant = tenant_of(salt)
        if self.quota is None or self._tenant_bytes.get(tenant, 0) + size <= self.quota:
            return True

        quota, gone = self.quota, True

        def more(extent: Extent) -> bool:
            nonlocal gone
            if not (extent.users or extent.pins or extent.kept or extent.has_children):
                self.forget(extent, "evicted")
                gone = True
            return self._tenant_bytes.get(tenant, 0) + size > quota

        while gone and size <= quota < self._tenant_bytes.get(tenant, 0) + size:
            gone = False  # parents are looked at again, now without children
            self._tenants[tenant].visit(more)
        return self._tenant_bytes.get(tenant, 0) + size <= quota

    def _belongs(self, extent: Extent) -> None:
        if self.quota is not None:
            tenant = tenant_of(extent.salt)
            self._tenants.setdefault(tenant, Ranking(POLICIES["lru"])).set(extent, member=True)
            self._tenant_bytes[tenant] = self._tenant_bytes.get(tenant, 0) + extent.file_bytes

    def _belongs_no_more(self, extent: Extent) -> None:
        if self.quota is not None:
            tenant = tenant_of(extent.salt)
            self._tenants[tenant].set(extent, member=False)
            self._tenant_bytes[tenant] -= extent.file_bytes
            if not self._tenants[tenant]:
                del self._tenants[tenant], self._tenant_bytes[tenant]

    # ----------------------------------------------------------------------------------------- evictions

    def _drop_again(self, now: float) -> None:
        """Now and then try again to remove files that could not be removed."""
        if self._undropped and now >= self._drop_again_at:
            undropped, self._undropped = self._undropped, []
            for extent in undropped:
                self._drop_file(extent, "again")

    def background(self, now: float, expected: int, waiter: Key | None = None) -> None:
        """Keep some slots free, and as many as running prefills are going to need (at most half of all)."""
        self._drop_again(now)
        self._write_again(now)
        expected = min(expected, self.pool.total // 2)
        if self.pool.free + self._evicting_slots < max(self.low, expected):
            self.evict(max(self.high, expected), now, waiter)

    def evict(self, target: int, now: float, waiter: Key | None = None) -> None:
        """Let go of victims until `target` slots are free, or are going to be; of none that `waiter` or a job before it
        waits for."""
        short = target - self.pool.free - self._evicting_slots

        def more(extent: Extent) -> bool:
            nonlocal short
            if waiter is not None and extent.rank is not None and extent.rank <= waiter:
                return short > 0 and not self._in_order  # the last in the queue came first: all others are nearer
            if short > 0 and extent.pins == 0 and extent.store is None:
                short -= self._evict_one(extent, now)
            return short > 0

        self._claimed = 0
        if short > 0:
            self._host.visit(more)
        self._claimed = 0

    def _evict_one(self, extent: Extent, now: float) -> int:
        """Slots that this frees now or soon."""
        slots = len(extent.slots)
        if extent.disk == "ready":
            self._evicted(extent, now)
            return slots
        room = self.store(extent, now, "evict")
        if room == "now":
            extent.evicting = True
            self._evicting_slots += slots
            self._store_above(extent, now)
        elif room == "soon":
            self._claimed += extent.file_bytes  # the next victim needs room of its own
        else:
            if extent.users or extent.kept or extent.has_children or self._exempt(extent):
                return 0
            self._counters.evicted_host += 1
            self.forget(extent, "evicted")
        return slots

    def _evicted(self, extent: Extent, now: float) -> None:
        """Its rows are on disk, and leave host."""
        self._counters.evicted_host += 1
        self._not_prefetched(extent)
        extent.left_host = now
        self._free_host(extent)

    def _not_prefetched(self, extent: Extent) -> None:
        """It leaves host, or is forgotten: if it was prefetched, that was of no use."""
        self._counters.prefetches_wasted += extent.prefetched
        extent.prefetched = False

    def _exempt(self, extent: Extent) -> bool:
        """Does a job within the eviction window wait for it (A11)?"""
        return extent.rank is not None and self.horizon is not None and extent.rank <= self.horizon

    def _store_above(self, extent: Extent, now: float) -> None:
        """Write the extents that one hangs below too, while they stay in host: after a crash it is of no use without.

        A prefix in constant use is never a victim itself.
        """
        above = self._index.extents.get(extent.parent) if extent.parent is not None else None
        while above is not None and above.disk == "absent" and above.host == "ready":
            if self.store(above, now, "above") != "now":
                return
            above = self._index.extents.get(above.parent) if above.parent is not None else None

    def _write(self, extent: Extent, now: float, why: str) -> Room:
        """Write an extent that could stay in host, and before it what it hangs below: after a crash it is of no use
        without. What cannot be done now is done later.
        """
        path = [extent]
        while (above := self._parent(path[-1])) is not None and above.disk == "absent":
            path.append(above)
        for part in reversed(path):
            room = self.store(part, now, why) if part.host == "ready" else "never"
            if room != "now":
                self._put_off(extent, room == "never" and now >= self._no_disk_until, now)
                return room
        return "now"

    def _put_off(self, extent: Extent, failed: bool, now: float) -> None:
        """An extent that should be on disk is not: see to it later, but not for ever."""
        failures = self._unwritten.pop(extent, 0) + failed
        if failures < MAX_WRITES and not extent.dead:
            self._unwritten[extent] = failures
            self._write_again_at = min(self._write_again_at, now + STORE_BACKOFF_S)

    def _write_again(self, now: float) -> None:
        """Now and then, and when files have been removed, try again to write what could not be written."""
        if not self._unwritten or now < max(self._write_again_at, self._no_disk_until):
            return
        self._write_again_at, self._claimed = inf, 0
        waiting = [extent for extent in self._unwritten if extent.disk == "absent"]
        for extent in waiting[:WRITES_AT_ONCE]:
            if extent.host == "ready" and self._write(extent, now, "write_through") == "soon":
                self._claimed += extent.file_bytes  # the next one needs room of its own
        self._claimed = 0
        if len(waiting) > WRITES_AT_ONCE:
            self._write_again_at = now

    @property
    def chores_at(self) -> float:
        """When to try again what has failed on disk; infinity: nothing has."""
        again = max(self._write_again_at, self._no_disk_until) if self._unwritten else inf
        return min(again, self._drop_again_at if self._undropped else inf)

    def store(self, extent: Extent, now: float, why: str) -> Room:
        """Plan to write an extent to disk, if there is room now."""
        if now < self._no_disk_until:
            return "never"
        if extent.id in self._files:  # the file of an older extent of the same name is still being removed
            return "soon"
        room = self._make_room(extent.file_bytes)
        if room == "now":
            move = Store(self._next_move(), extent.record(), extent.slots, SAVE, why)
            extent.disk, extent.store = "writing", move.move
            self._files[extent.id] = extent
            self.disk_used += extent.file_bytes
            self._start(move, extent)
            self._counters.stores += 1
        return room

    def _make_room(self, incoming: int) -> Room:
        """Room for `incoming` bytes on disk. Clean copies go first, then what nothing depends on."""
        if incoming > self.capacity.disk_bytes or self.capacity.disk_bytes == 0:
            return "never"
        short = self.disk_used + self._claimed + incoming - self.capacity.disk_bytes
        if short <= 0:
            return "now"
        short -= self._dropping_bytes

        def more(extent: Extent) -> bool:
            nonlocal short
            if extent.pins == 0:
                if extent.host == "ready" and short > 0 and not extent.kept:
                    short -= self._drop_file(extent, "evict")
                    self._rank(extent)
                    self._counters.evicted_disk += 1
                elif short > 0 and not (extent.users or extent.kept or extent.has_children or self._exempt(extent)):
                    short -= extent.file_bytes
                    self._counters.evicted_disk += 1
                    self.forget(extent, "evicted")
            return short > 0

        if short > 0:
            self._clean.visit(more)
        if short > 0:
            self._cold.visit(more)
        return "soon" if short <= 0 else "never"

    def flush(self, now: float) -> bool:
        """Write what is only in host, what is worth most first. True: nothing is left to be done.

        Only the disk survives, so what is on it and worth less makes room, whatever the policy; not what is worth more.
        """
        waiting = False
        dirty = [extent for extent in self._host.members() if extent.disk == "absent"]
        if not dirty:
            return not self.flights
        worth = self._worths()
        dirty.sort(key=worth.__getitem__, reverse=True)
        stale = [extent for extent in self._index.extents.values() if extent.disk == "ready"]
        stale.sort(key=worth.__getitem__, reverse=True)
        for extent in dirty:
            if extent.dead or extent.file_bytes > self.capacity.disk_bytes or not self._has_parent_on_disk(extent):
                continue
            while self._disk_short(extent.file_bytes) > 0 and stale and worth[stale[-1]] < worth[extent]:
                victim = stale.pop()
                if not (victim.dead or worth[victim][0]):
                    self._counters.evicted_disk += 1
                    self.forget(victim, "evicted")
            if self._disk_short(extent.file_bytes) > 0:
                continue
            if self.store(extent, now, "flush") == "soon":
                waiting = True
                break  # those behind it are worth less: they must not take its room
        return not waiting and not self.flights

    def _worths(self) -> dict[Extent, _Worth]:
        """What extents are worth when not all can be kept. What is needed now is worth most, then what was used last;
        nothing less than what hangs below it, and is lost with it; of a conversation, which is used as a whole, the head.
        """
        best: dict[Extent, tuple[bool, float]] = {}
        worths: dict[Extent, _Worth] = {}
        for extent in sorted(self._index.extents.values(), key=lambda e: -(e.first_row + e.nodes[0].start)):
            own = (extent.kept > 0 or extent.users > 0 or extent.pins > 0, extent.last_used)
            own = max(own, best.pop(extent, own))
            worths[extent] = (*own, -extent.first_row, -extent.serial)
            if (above := self._above(extent)) is not None:
                best[above] = max(own, best.get(above, own))
        return worths

    def _parent(self, extent: Extent) -> Extent | None:
        """Without whose file its own is of no use."""
        return self._index.extents.get(extent.parent) if extent.parent is not None else None

    def _has_parent_on_disk(self, extent: Extent) -> bool:
        parent = self._parent(extent)
        return parent is None or parent.disk != "absent"

    def _disk_short(self, incoming: int) -> int:
        """Bytes that `incoming` bytes lack once the removals under way are done."""
        return self.disk_used - self._dropping_bytes + incoming - self.capacity.disk_bytes

    def warm_up(self) -> None:
        """After a restart: remember what was used most, to bring it back to host when there is nothing else to do."""
        cold = sorted(self._cold.members(), key=lambda e: (-e.hits, -e.last_used, e.first_row, e.serial))
        room = self.pool.total // 2
        chosen: dict[Extent, None] = {}
        for extent in cold:
            for part in self._unchosen(extent, chosen):
                room -= self.capacity.blocks(part.rows)
                if room >= 0:
                    chosen[part] = None
            if room < 0:
                break
        self._warming = list(reversed(chosen))

    def _unchosen(self, extent: Extent, chosen: dict[Extent, None]) -> list[Extent]:
        """An extent and what it can be reached through only, from the top: a parent was perhaps used less lately."""
        path: list[Extent] = []
        above: Extent | None = extent
        while above is not None and above not in chosen:
            path.append(above)
            above = self._above(above)
        return path[::-1]

    def _above(self, extent: Extent) -> Extent | None:
        """What an extent is matched through."""
        node = extent.nodes[0].parent
        return node.extent if node is not None else None

    def warm(self, now: float) -> None:
        """Bring one of them back, if nothing moves and at most half of host is full then."""
        while self._warming and not self.flights:
            extent = self._warming.pop()
            full = self.pool.total - self.pool.free + self.capacity.blocks(extent.rows)
            if not extent.dead and extent.host == "absent" and full <= self.pool.total // 2:
                self._load(extent, now, None, BACKGROUND, "warm start")

    def shrink(self) -> None:
        """Bring the disk tier below its budget, and tenants below their quota (before a restart they may have been
        larger). Pins hold as long as they fit."""
        for tenant in list(self._tenants):
            self.within_quota(tenant, 0)
        self._shrink_disk(pinned_too=False)
        self._shrink_disk(pinned_too=True)

    def _shrink_disk(self, pinned_too: bool) -> None:
        def more(extent: Extent) -> bool:
            if not (extent.users or extent.pins or extent.has_children or (extent.kept and not pinned_too)):
                self._counters.evicted_disk += 1
                self.forget(extent, "evicted")
            return self._disk_short(0) > 0

        before = -1
        while self._disk_short(0) > 0 and len(self._cold) != before:
            before = len(self._cold)  # a second look at parents, now without children
            self._cold.visit(more)

    def drop_clean(self) -> None:
        """Free the slots of every extent that is also on disk and not in use."""
        for extent in list(self._index.extents.values()):
            if extent.host == "ready" and extent.disk == "ready" and not extent.pins and extent.store is None:
                self._not_prefetched(extent)
                self._free_host(extent)

    def forget_all(self, tenant: str | None = None) -> None:
        """Forget every extent that nobody uses; of one tenant, or of all."""
        while True:
            leaves = [
                e
                for e in self._index.extents.values()
                if not (e.pins or e.users or e.has_children) and tenant in (None, tenant_of(e.salt))
            ]
            if not leaves:
                return
            for extent in leaves:
                self.forget(extent, "deleted")

    # -------------------------------------------------------------------------------------------- the end

    def forget(self, extent: Extent, why: Reason) -> None:
        """Remove an extent from the index and all tiers, and what hangs below it."""
        for lost in self._index.remove(extent):
            lost.dead = True
            self._unsure.pop(lost, None)
            self._unwritten.pop(lost, None)
            self._not_prefetched(lost)
            self._belongs_no_more(lost)
            self._ghosts.add(lost, why)
            if lost.sessions:
                self.lost.append(lost)
            self._dead[lost] = None
            self._counters.dropped += 1
            self._rank(lost)
            self._device.forget(lost)
            self._reap(lost)

    def damaged(self, extent: Extent) -> None:
        """What the disk has of an extent is not what was written, or did not come."""
        if not extent.dead:
            self._counters.damaged += 1
            self.forget(extent, "damaged")

    def _reap(self, extent: Extent) -> None:
        """Give back what a dead extent holds, as far as nobody reads or writes it."""
        if extent.pins or extent.load is not None or extent.store is not None:
            return
        if extent.host == "ready":
            self._free_host(extent)
        if extent.disk == "ready":
            self._drop_file(extent, "forgotten")
        self._dead.pop(extent, None)

    def _free_host(self, extent: Extent) -> None:
        self.pool.give(extent.slots)
        extent.slots, extent.host = (), "absent"
        self.absences += 1
        self._rank(extent)

    def _drop_file(self, extent: Extent, why: str) -> int:
        """Plan the removal of the file; its bytes count, and its name is taken, until that is done."""
        move = Drop(self._next_move(), extent.id, why, BACKGROUND)
        extent.disk = "absent"
        self._dropping_bytes += extent.file_bytes
        self._start(move, extent)
        return extent.file_bytes

    # --------------------------------------------------------------------------------------- completions

    def complete(self, done: MoveDone, now: float) -> None:
        """A move has ended. Unknown moves are ignored."""
        flight = self.flights.pop(done.move, None)
        if flight is None:
            slots = self._quarantine.pop(done.move, None) if not done.slots_busy else None
            if slots is not None:
                self.pool.give(slots)
        elif isinstance(flight.move, Load):
            self._gated.pop(done.move, None)
            self._lazy.pop(done.move, None)
            self._cost.ended(done.move, done.bytes if done.ok else 0, done.seconds, now)
            self._loaded(flight.extent, done, now)
        elif isinstance(flight.move, Store):
            self._stored(flight.extent, flight.move, done, now)
        elif done.ok:
            self._write_again_at = min(self._write_again_at, now)  # there is room
            self._dropping_bytes -= flight.extent.file_bytes
            self.disk_used -= flight.extent.file_bytes
            del self._files[flight.extent.id]
        else:  # the file is still there: its bytes count, and its name is taken, until it can be removed
            self._dropping_bytes -= flight.extent.file_bytes
            self._undropped.append(flight.extent)
            self._drop_again_at = now + STORE_BACKOFF_S

    def _loaded(self, extent: Extent, done: MoveDone, now: float) -> None:
        extent.load = None
        if done.ok:
            extent.host = "ready"
            self._unsure.pop(extent, None)
            self._rank(extent)
        else:
            if done.slots_busy:
                self.quarantine(done.move, extent.slots)
            else:
                self.pool.give(extent.slots)
            extent.slots, extent.host = (), "absent"
            self.absences += 1
            self._not_loaded(extent, done.why, now)
        if extent.dead:
            self._reap(extent)

    def _not_loaded(self, extent: Extent, why: str | None, now: float) -> None:
        """A load has failed: the extent is lost, or is tried again later."""
        failures = self._unsure.get(extent, (0, 0.0))[0] + (why != "refused")  # nothing was tried then
        if why in PASSING and failures < MAX_LOAD_FAILURES and not extent.dead:
            self._unsure[extent] = (failures, now + (LOAD_RETRY_LATE_S if why == "timeout" else LOAD_RETRY_S))
            self._rank(extent)
        else:
            self.damaged(extent)

    def _stored(self, extent: Extent, move: Store, done: MoveDone, now: float) -> None:
        extent.store = None
        evicting, extent.evicting = extent.evicting, False
        if evicting:
            self._evicting_slots -= len(extent.slots)
        if done.ok:
            self._failures = 0
            self._unwritten.pop(extent, None)
            extent.disk = "ready"
            if evicting and not extent.dead:
                self._evicted(extent, now)
        else:
            extent.disk = "absent"
            del self._files[extent.id]
            self.disk_used -= extent.file_bytes
            self._counters.store_failures += 1
            self._failures += 1
            if self._failures >= MAX_STORE_FAILURES:
                self._no_disk_until = now + STORE_BACKOFF_S
            if move.why in EARLY:
                self._put_off(extent, failed=True, now=now)
        self._rank(extent)
        if extent.dead:
            self._reap(extent)

    # ------------------------------------------------------------------------------------------- helpers

    def _next_move(self) -> int:
        self._last_move += 1
        return self._last_move

    def _start(self, move: Move, extent: Extent) -> None:
        self.moves.append(move)
        self.flights[move.move] = _Flight(move, extent)

    def _rank(self, extent: Extent) -> None:
        live = not extent.dead
        host, disk = extent.host == "ready", extent.disk == "ready"
        self._host.set(extent, live and host)
        self._clean.set(extent, live and host and disk)
        self._cold.set(extent, live and disk and extent.host == "absent")

    def check(self, other_slots: list[int], restored: bool = False) -> None:
        """Every slot has one owner (`other_slots`: the drafts'), bytes add up, live extents are somewhere. `restored`:
        budgets may have been larger before a restart, and no step was planned since."""
        self.pool.check()
        extents = [*self._index.extents.values(), *self._dead]
        owned = [slot for extent in extents for slot in extent.slots]
        owned += [slot for slots in self._quarantine.values() for slot in slots]
        assert sorted(owned + other_slots + self.pool.listing()) == list(range(self.pool.total))
        assert self.disk_used == sum(extent.file_bytes for extent in self._files.values())
        assert restored or self._disk_short(0) <= 0
        assert self._evicting_slots == sum(len(e.slots) for e in extents if e.evicting)
        dropping = [f.extent for f in self.flights.values() if isinstance(f.move, Drop)]
        assert self._dropping_bytes == sum(extent.file_bytes for extent in dropping)
        for tenant, used in self._tenant_bytes.items():
            own = [e for e in self._index.extents.values() if tenant_of(e.salt) == tenant]
            assert used == sum(e.file_bytes for e in own)
            assert restored or self.quota is None or used <= self.quota or any(e.kept for e in own)
        assert all(flight in self.flights for flight in self._gated)
        for extent in extents:
            assert extent.pins >= 0
            assert extent.users >= 0
            assert extent.dead != (extent.id in self._index.extents and bool(extent.nodes))
            assert extent.host != "absent" or extent.disk == "ready" or extent.dead
            assert (extent.host == "absent") == (not extent.slots)
            assert (extent.host == "loading") == (extent.load is not None)
            assert (extent.disk == "writing") == (extent.store is not None)
            assert (extent in self._host) == (extent.host == "ready" and not extent.dead)
            assert extent.disk == "absent" or self._files[extent.id] is extent
