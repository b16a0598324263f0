"""Loads from disk to host: their urgency, where they stop and wait, and what follows when they fail.

It knows extents and host's slots; not how long loads take, nor why a job would rather recompute. States of an extent in host:
absent -> loading -> ready, or partial where the load left out rows that no query was to see.

Warm start: after a restart, the most used extents are brought back to host before a job asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from afterglow.choices import ReadBuffer
from afterglow.plan.options import Capacity
from afterglow.plan.prefix.extent import Extent, Key
from afterglow.plan.stats import Counters
from afterglow.plan.step import BACKGROUND, DEMAND, PREFETCH, Load, MoveDone
from afterglow.plan.tiers.buffers import read_buffer_layers
from afterglow.plan.tiers.cost import Cost
from afterglow.plan.tiers.host import Host
from afterglow.plan.tiers.moves import Moves
from afterglow.plan.tiers.policy import EvictionCandidates

MAX_LOAD_FAILURES = 3  # in a row, before an extent counts as lost
LOAD_RETRY_S = 5.0  # when a load that failed in a way that may pass is tried again
LOAD_RETRY_LATE_S = 60.0  # and when a load that timed out, which no job should wait for again in vain
PASSING_FAILURES = ("io", "timeout", "refused")  # reasons of failures that may pass
THRASH_S = 60.0  # an extent wanted again so soon after it was evicted should have stayed


class Loading:
    """Extents that come to host, and those whose loads have failed."""

    def __init__(
        self,
        capacity: Capacity,
        candidates: EvictionCandidates,
        host: Host,
        moves: Moves,
        counters: Counters,
        cost: Cost,
    ) -> None:
        self.read_buffer: ReadBuffer = None  # layers to be loaded before the job joins, or their formula; None: all
        self.buffer_layers = self.buffer_bytes = 0  # what the formula said last
        self._capacity = capacity
        self._candidates = candidates
        self._host = host
        self._moves = moves
        self._counters = counters
        self._cost = cost
        self._far: dict[Extent, None] = {}  # whose rows are in the shared tier, and not on this disk yet
        self._promoted: list[int] = []  # loads that a job waits for now; not yet handed out
        self._gated: dict[int, Extent] = {}  # loads that stop at the read buffer until they are promoted
        self._deferred: dict[int, None] = {}  # loads that let others go first until they are promoted
        self._probes: dict[int, float] = {}  # loads that no job has asked for, and since when
        self._failing: dict[
            Extent, tuple[int, float]
        ] = {}  # extents whose loads failed: how often, and until when not to try again

    # ------------------------------------------------------------------------------------- the shared tier

    def adopted(self, extents: Sequence[Extent]) -> None:
        """Note that the rows of these extents are in the shared tier; the first load of each comes from there."""
        self._far.update(dict.fromkeys(extents))

    def is_far(self, extent: Extent) -> bool:
        """Are the rows of an extent in the shared tier, and not on this disk yet?"""
        return extent in self._far

    # --------------------------------------------------------------------------------------- to begin

    def buffered(self, extents: Iterable[Extent], rows: int, start: int) -> int | None:
        """Compute how many layers of these extents, which a job that computes `rows` rows from row `start` on needs, are to be
        there before its turn, from measured rates. None: all, or as many as an operator has said.
        """
        if not isinstance(self.read_buffer, str):
            return None
        absent = [extent for extent in extents if extent.host != "ready"]
        near = [extent.file_bytes for extent in absent if extent not in self._far]
        far = [extent.file_bytes for extent in absent if extent in self._far]
        if not absent or (near and not self._cost.known) or (far and not self._cost.far_known):
            return None
        layers = self._cost.layers
        load, compute = self._cost.alone(near, far) / layers, self._cost.compute(rows, start) / layers
        self.buffer_layers = read_buffer_layers(layers, load, compute, exact=self.read_buffer == "auto")
        self.buffer_bytes = (sum(near) + sum(far)) * self.buffer_layers // layers
        return self.buffer_layers if self.buffer_layers < layers else None

    def load(
        self, extent: Extent, now: float, waiter: Key | None = None, skip: int = 0, ahead: int | None = None
    ) -> bool:
        """Start to bring an extent from disk to host; layers with a window leave out its first `skip` blocks. `ahead`: layers
        that may come before its job joins, where the buffer's size is a formula's. False: no slots now (see `relief`)."""
        return self._load(extent, now, waiter, DEMAND, "demand", skip=skip, ahead=ahead)

    def prefetch(self, extent: Extent, now: float, waiter: Key, reserve: int = 0, ahead: int | None = None) -> bool:
        """Load an extent before its job's turn has come. `reserve` slots are to stay free."""
        if self.avoids(extent, now):
            return True
        need = self._capacity.blocks(extent.rows) + reserve
        pool = self._host.pool
        if reserve and pool.free < need:
            self._host.evict(need, now, waiter)
            if pool.free < need:
                return False
        if not self._load(extent, now, waiter, PREFETCH, "prefetch", ahead=ahead):
            return False
        extent.prefetched = True
        self._counters.prefetches += 1
        return True

    def bring_back(self, extent: Extent, now: float) -> bool:
        """Load an extent although no job waits for it."""
        return self._load(extent, now, None, BACKGROUND, "warm start")

    def probe(self, extent: Extent, most: float, now: float) -> None:
        """Load an extent to see how fast the tier is, for at most so many seconds; nothing is evicted for it."""
        if self._host.pool.free >= self._capacity.blocks(extent.rows) and not self.avoids(extent, now):
            self._load(extent, now, None, BACKGROUND, "probe", most)
            self._probes[extent.load or 0] = now
            self._counters.probes += 1

    def _load(
        self,
        extent: Extent,
        now: float,
        waiter: Key | None,
        priority: int,
        why: str,
        most: float | None = None,
        skip: int = 0,
        ahead: int | None = None,
    ) -> bool:
        slots = self._host.take_slots(self._capacity.blocks(extent.rows), now, waiter=waiter)
        if slots is None:
            return False
        far = extent in self._far
        skip = 0 if far else skip  # the whole file comes, and is verified before it is the disk's
        if isinstance(self.read_buffer, int) and priority != BACKGROUND:
            ahead = self.read_buffer
        move = Load(self._moves.number(), extent.id, extent.rows, slots, priority, why, ahead, most, skip)
        if ahead is not None:
            self._gated[move.move] = extent
        if priority != DEMAND:
            self._deferred[move.move] = None
        extent.host, extent.load, extent.slots = "loading", move.move, slots
        extent.lacks = skip * self._capacity.block_rows
        self._moves.start(move, extent)
        size = extent.file_bytes - skip * self._capacity.window_block_bytes
        self._cost.started(move.move, size, now, far, ahead)
        self._counters.loads += 1
        self._counters.thrashed += extent.left_host is not None and now - extent.left_host < THRASH_S
        return True

    # ---------------------------------------------------------------------------------------- to urge

    def used(self, extent: Extent) -> None:
        """Note that a job that is about to run needs an extent: its prefetch was useful, or comes late."""
        if extent.load in self._deferred and extent.load not in self._gated:
            self.promote([extent])
        if extent.prefetched:
            extent.prefetched = False
            self._counters.prefetches_late += extent.load is not None
            self._counters.prefetches_useful += extent.load is None

    def promote(self, extents: Sequence[Extent]) -> None:
        """Let the loads of these extents go before other moves: a job has joined that needs their rows."""
        for extent in extents:
            if extent.load is not None and extent.load not in self._promoted:
                self._gated.pop(extent.load, None)
                self._deferred.pop(extent.load, None)
                self._promoted.append(extent.load)

    def open_gates_of(self, extents: Sequence[Extent]) -> None:
        """Let loads that stop at the read buffer go on, although no job has joined."""
        self.promote([extent for extent in extents if extent.load in self._gated])

    def open_gates(self, all_of_them: bool) -> None:
        """Let loads go on that stop at the read buffer and that no job waits for: they would keep their slots for ever."""
        abandoned = [
            extent
            for extent in self._gated.values()
            if all_of_them or self.read_buffer is None or extent.dead or not (extent.pins or extent.rank is not None)
        ]
        self.open_gates_of(abandoned)

    @property
    def has_promoted(self) -> bool:
        """Were loads promoted since `take_promoted`?"""
        return bool(self._promoted)

    def take_promoted(self, now: float) -> list[int]:
        """Return the loads promoted since the last call, to be handed out with the moves."""
        urged, self._promoted = self._promoted, []
        for move in urged:
            self._cost.resumed(move, now)
        return urged

    # ------------------------------------------------------------------------------------ how they end

    def ended(self, extent: Extent, done: MoveDone, now: float) -> bool:
        """Take note that a Load has ended. False: its extent counts as lost."""
        self._gated.pop(done.move, None)
        self._deferred.pop(done.move, None)
        slow = done.why == "slow"
        self._cost.ended(done.move, done.bytes if done.ok or slow else 0, done.seconds, now)
        if (began := self._probes.pop(done.move, None)) is not None:
            self._cost.probed(done.seconds or now - began, now)
        extent.load = None
        if done.ok:
            extent.host = "partial" if extent.lacks else "ready"
            blocks = extent.lacks // self._capacity.block_rows
            self._counters.load_bytes_left += blocks * self._capacity.window_block_bytes
            self._far.pop(extent, None)
            self._failing.pop(extent, None)
            self._candidates.place(extent)
            return True
        self._host.not_loaded(extent, done.move, done.slots_busy)
        if slow:
            self._candidates.place(extent)
            return True
        return self._may_come_later(extent, done.why, now)

    def _may_come_later(self, extent: Extent, why: str | None, now: float) -> bool:
        """Decide whether a failed load is tried again."""
        failures = self._failing.get(extent, (0, 0.0))[0] + (why != "refused")  # nothing was tried then
        if why not in PASSING_FAILURES or failures >= MAX_LOAD_FAILURES or extent.dead:
            return False
        self._failing[extent] = (failures, now + (LOAD_RETRY_LATE_S if why == "timeout" else LOAD_RETRY_S))
        self._candidates.place(extent)
        return True

    def avoid(self, extent: Extent, now: float) -> None:
        """Avoid an extent for a while: its rows did not come in time. The end of the load says whether they are lost."""
        if extent.load is not None:
            failures, _ = self._failing.get(extent, (0, 0.0))
            self._failing[extent] = (failures, now + LOAD_RETRY_S)

    def unread(self, extent: Extent, now: float) -> bool:
        """Take note that chunks of an extent could not be read. False: the extent counts as lost."""
        return self._may_come_later(extent, "io", now)

    def avoids(self, extent: Extent, now: float) -> bool:
        """Are the rows of an extent to be recomputed, because its load has just failed? Rows in host never are."""
        return extent in self._failing and not extent.in_host and now < self._failing[extent][1]

    def forget(self, extent: Extent) -> None:
        """Forget the failures of an extent that is not loaded any more, and where its rows were."""
        self._failing.pop(extent, None)
        self._far.pop(extent, None)

    def check(self, extents: Sequence[Extent]) -> None:
        """What waits at a gate is under way, and extents know their loads."""
        assert all(self._moves.is_under_way(move) for move in self._gated)
        for extent in extents:
            assert (extent.host == "loading") == (extent.load is not None)


class WarmStart:
    """At most half of host is filled."""

    def __init__(
        self,
        capacity: Capacity,
        known: Callable[[], Iterable[Extent]],
        host: Host,
        loading: Loading,
        moves: Moves,
    ) -> None:
        """`known`: all extents that there are."""
        self._capacity = capacity
        self._known = known
        self._pool = host.pool
        self._loading = loading
        self._moves = moves
        self._chosen: list[Extent] = []  # to be brought back, the first one last

    def choose(self) -> None:
        """Choose the most used extents after a restart, to bring them back to host when there is nothing else to do."""
        cold = [extent for extent in self._known() if extent.disk == "ready" and extent.host == "absent"]
        cold.sort(key=lambda e: (-e.hits, -e.last_used, e.first_row, e.serial))
        room = self._pool.total // 2
        chosen: dict[Extent, None] = {}
        for extent in cold:
            for part in _unchosen(extent, chosen):
                room -= self._capacity.blocks(part.rows)
                if room >= 0:
                    chosen[part] = None
            if room < 0:
                break
        self._chosen = list(reversed(chosen))

    def go_on(self, now: float) -> None:
        """Bring a chosen extent back, if nothing moves and at most half of host is full then."""
        while self._chosen and not len(self._moves):
            extent = self._chosen.pop()
            full = self._pool.total - self._pool.free + self._capacity.blocks(extent.rows)
            if not extent.dead and extent.host == "absent" and full <= self._pool.total // 2:
                self._loading.bring_back(extent, now)


def _unchosen(extent: Extent, chosen: dict[Extent, None]) -> list[Extent]:
    """List an extent and the extents that it is reached through, from the top: a parent was perhaps used less lately."""
    path: list[Extent] = []
    above: Extent | None = extent
    while above is not None and above not in chosen:
        path.append(above)
        above = above.above
    return path[::-1]
