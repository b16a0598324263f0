"""Which tier holds which extent, and the moves that change it: what joins host, disk, loads and lifetimes.

It knows extents, the policy and the index's shape (who has children); not jobs, not queues, not what a move takes.
Each part does what concerns it alone: slots and evictions (`host`), bytes and files (`disk`), early writes
(`write_back`), loads (`loading`), lifetimes (`expiry`), tenants' quotas (`quota`), pins (`pins`), marks (`marks`), the warm
start (`warm_start`). This file joins them: extents that arrive, are used, are forgotten, and moves that end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from afterglow.plan.options import Capacity, SchedulerOptions
from afterglow.plan.prefix.extent import Extent, Key
from afterglow.plan.prefix.ghosts import Ghosts, Reason
from afterglow.plan.prefix.index import Index, Inserted
from afterglow.plan.prefix.salts import covers
from afterglow.plan.stats import Counters
from afterglow.plan.step import Copy, ExtentId, Load, Lost, MoveDone, Store
from afterglow.plan.tiers.cost import Cost
from afterglow.plan.tiers.device import Device
from afterglow.plan.tiers.disk import Disk
from afterglow.plan.tiers.expiry import Expiry
from afterglow.plan.tiers.host import Host
from afterglow.plan.tiers.loading import Loading, WarmStart
from afterglow.plan.tiers.marks import Marks
from afterglow.plan.tiers.moves import Moves
from afterglow.plan.tiers.policy import POLICIES, EvictionCandidates
from afterglow.plan.tiers.quota import Pins, Quota
from afterglow.plan.tiers.write_back import WriteBack


class Placement:
    """Host and disk. Each tier's part is public and is asked directly for what concerns that part alone."""

    def __init__(
        self, capacity: Capacity, options: SchedulerOptions, index: Index, device: Device, counters: Counters
    ) -> None:
        self.shares = options.shared
        self.deleted: list[ExtentId] = []  # since the list was last taken; kept where there is a shared tier
        self.replaced: list[
            tuple[ExtentId, ExtentId]
        ] = []  # with the merged ones that replace them, but for those that stay in memory
        self.lost: list[Extent] = []  # forgotten, although conversations with a name had used them
        self.ghosts = Ghosts()
        self.cost = Cost(capacity.layers, capacity.readers, options.probe_part)
        self.candidates = EvictionCandidates(POLICIES[options.policy])
        self.moves = Moves()
        self.disk = Disk(capacity, self.candidates, self.moves, counters, self.forget)
        self.write_back = WriteBack(capacity, index, self.candidates, self.disk, self.moves)
        self.host = Host(capacity, self.candidates, self.disk, self.write_back, counters, self.forget)
        self.loading = Loading(capacity, self.candidates, self.host, self.moves, counters, self.cost)
        self.loading.read_buffer = options.read_buffer
        self.expiry = Expiry(self.forget)
        self.quota = Quota(options.tenant_quota, self.forget)
        self.pins = Pins(capacity, options.tenant_pins)
        self.marks = Marks(capacity, self.pins, self.candidates.marked, counters, self.ranked, self.expire)
        self.warm_start = WarmStart(capacity, index.extents.values, self.host, self.loading, self.moves)
        self._index = index
        self._device = device
        self._counters = counters
        self._selective = options.write_policy == "write_through_selective" and capacity.disk_bytes > 0
        self._dead: dict[Extent, None] = {}

    # ---------------------------------------------------------------------------------------- how it stands

    @property
    def has_moves(self) -> bool:
        """Are there moves, or promotions of loads, to be handed out?"""
        return self.moves.planned or self.loading.has_promoted

    @property
    def relief(self) -> bool:
        """Are there moves under way that will free slots?"""
        return self.host.evicting > 0 or self.disk.dropping > 0

    @property
    def retry_at(self) -> float:
        """Return when to retry failed writes and removals on disk; infinity: none has failed."""
        return min(self.write_back.retry_at, self.disk.retry_at)

    # ---------------------------------------------------------------------------------- arrivals and use

    def add(self, extent: Extent, slots: tuple[int, ...], write_through: bool, now: float) -> None:
        """Add a new extent, which is in the index, and whose rows lie in `slots`."""
        extent.slots, extent.host = slots, "ready"
        self.candidates.place(extent)
        if extent.above is not None:
            self.candidates.place(extent.above)
        self.quota.add(extent)
        if write_through and not extent.volatile:
            self.write_back.write(extent, now, "write_through")

    def insert(self, extent: Extent, prefix_tokens: bytes) -> Inserted:
        """Put a new extent into the index, in place of one of its name in a tree where it is not looked for any more."""
        found = self._index.insert(extent, prefix_tokens)
        if found.outcome == "elsewhere":
            self.forget(self._index.extents[extent.id], "evicted")
            found = self._index.insert(extent, prefix_tokens)
        return found

    def restore(self, extents: Sequence[Extent], ends: Iterable[float]) -> None:
        """Take over extents found on disk at start, each with the time at which it expires."""
        self._expect_ends(extents, ends)
        self.disk.restore(extents)

    def adopt(self, extents: Sequence[Extent], ends: Iterable[float]) -> None:
        """Take over extents that are in the shared tier, each with the time at which it expires."""
        self.loading.adopted(extents)
        self._expect_ends(extents, ends)
        self.disk.adopt(extents)

    def _expect_ends(self, extents: Sequence[Extent], ends: Iterable[float]) -> None:
        for extent, end in zip(extents, ends, strict=True):
            self.quota.add(extent)
            self.expiry.expire(extent, end)

    def copy(self, pieces: list[tuple[tuple[int, ...], int, int]], slots: tuple[int, ...], rows: int) -> int:
        """Plan to copy rows within host. The caller keeps the slots, and the sources pinned, until the copy has ended."""
        move = Copy(self.moves.number(), tuple(pieces), slots, rows)
        self.moves.plan(move)
        return move.move

    def prepare(self, extent: Extent, slots: tuple[int, ...]) -> None:
        """Put an extent into `slots`, which its rows are about to fill. It cannot be matched until it replaces others, and it
        goes when it is unpinned before that."""
        extent.slots, extent.host, extent.dead, extent.pins = slots, "ready", True, 1
        self._dead[extent] = None

    def replace(self, parts: Sequence[Extent], whole: Extent) -> None:
        """Put a prepared extent in the place of others, which go when they are read and written no more."""
        self._index.replace(parts, whole)
        whole.dead, whole.pins = False, 0
        del self._dead[whole]
        for part in parts:
            if self.shares and whole.kind == "exact" and not part.volatile:
                self.replaced.append((part.id, whole.id))
            self._bury(part)
        self.quota.add(whole)
        self.candidates.place(whole)

    def pin(self, extent: Extent) -> None:
        """Keep an extent where it is: its bytes are about to be read."""
        extent.pins += 1
        if extent.evicting:  # its Store goes on, but the slots stay
            self.host.stay(extent)

    def unpin(self, extent: Extent) -> None:
        """Undo one `pin`."""
        extent.pins -= 1
        if extent.dead:
            self._reap(extent)

    def touch(self, extent: Extent, now: float, ttl: float | None = None, volatile: bool = False) -> None:
        """Count a use of an extent; `need` says how long it is kept now."""
        self.need(extent, now, ttl, volatile)
        extent.last_used = now
        extent.hits += 1
        self.ranked(extent)
        if self._selective and extent.host == "ready" and extent.disk == "absent" and not extent.volatile:
            self.write_back.write(extent, now, "second use")
        self.disk.touch(extent)

    def need(self, extent: Extent, now: float, ttl: float | None = None, volatile: bool = False) -> None:
        """Keep an extent for `ttl` seconds more (None: for ever); `volatile`: in memory only."""
        self.expire(extent, now + ttl if ttl is not None else inf)
        extent.volatile = extent.volatile and volatile

    def expire(self, extent: Extent, when: float) -> None:
        """Let an extent expire at `when`, unless a job has named, or names, a later time. The catalog is told."""
        if when > extent.expires:
            self.expiry.expire(extent, when)
            self.disk.touch(extent)

    def ranked(self, extent: Extent) -> None:
        """Look again at an extent's place in the order of eviction."""
        self.candidates.update(extent)
        self.quota.update(extent)

    def background(self, now: float, expected: int, waiter: Key | None = None) -> None:
        """Retry failed writes, and keep some slots free, `expected` ones as well."""
        self.write_back.write_again(now)
        self.host.refill(expected, now, waiter)

    # -------------------------------------------------------------------------------------------- the end

    def forget(self, extent: Extent, why: Reason) -> None:
        """Remove an extent from the index and all tiers, and what hangs below it."""
        above = extent.above
        for lost in self._index.remove(extent):
            self.ghosts.add(lost, why)
            if self.shares and why == "deleted":
                self.deleted.append(lost.id)
            if lost.sessions:
                self.lost.append(lost)
            self._counters.dropped += 1
            self._device.forget(lost)
            self._bury(lost)
        if above is not None:
            self.candidates.place(above)

    def _bury(self, extent: Extent) -> None:
        """Let go of an extent that is in the index no more; its bytes go when they are not in use."""
        extent.dead = True
        self.loading.forget(extent)
        self.write_back.forget(extent)
        self.host.not_prefetched(extent)
        self.quota.remove(extent)
        self.pins.lost(extent)
        self.marks.lost(extent)
        self._dead[extent] = None
        self.candidates.place(extent)
        self._reap(extent)

    def let_go(self, extent: Extent) -> bool:
        """Forget an extent whose rows are in the shared tier only, if nothing uses it or hangs below it. Returns whether it is gone."""
        used = extent.pins or extent.ref_count or extent.pin_count or extent.contexts
        if used or extent.has_children or extent.host != "absent" or not self.loading.is_far(extent):
            return False
        self.forget(extent, "evicted")
        return True

    def forget_all(self, whose: str | None = None) -> None:
        """Forget every extent that no job uses (see `covers`)."""
        while True:
            leaves = [
                e
                for e in self._index.extents.values()
                if not (e.is_read or e.ref_count or e.has_children) and covers(whose, e.salt)
            ]
            if not leaves:
                return
            for extent in leaves:
                self.forget(extent, "deleted")

    def give_up(self) -> Lost:
        """Forget extents that are in host only and should be on disk: the process ends, and there was no room for them."""
        live = self._index.extents.values()
        lost = [e for e in live if e.host == "ready" and e.disk == "absent" and not e.volatile]
        lost.sort(key=lambda extent: -extent.first_row)  # of a path the head last: a match ends before it
        found = Lost(len(lost), sum(e.rows for e in lost), sum(e.file_bytes for e in lost))
        self._counters.evicted_host += len(lost)
        for extent in lost:
            if not extent.dead:
                self.forget(extent, "evicted")
        return found

    def take_gone(self) -> tuple[list[ExtentId], list[tuple[ExtentId, ExtentId]]]:
        """Return the extents that were deleted, not evicted, and those that merged ones have replaced, with these, since the last call; none
        without a shared tier.
        """
        gone = self.deleted, self.replaced
        if self.deleted or self.replaced:
            self.deleted, self.replaced = [], []
        return gone

    def drop_clean(self) -> None:
        """Free the slots of every extent that is also on disk and not in use."""
        for extent in list(self._index.extents.values()):
            if extent.in_host and extent.disk == "ready" and not extent.pins and extent.store is None:
                self.host.not_prefetched(extent)
                self.host.free(extent)

    def shrink(self) -> None:
        """Bring tenants below their quota, and the disk tier below its budget (before a restart they may have been
        larger). Pins hold as long as they fit."""
        self.quota.shrink()
        self.disk.shrink()

    def _reap(self, extent: Extent) -> None:
        """Give back slots and file of a dead extent, unless they are being read or written."""
        if extent.pins or extent.load is not None or extent.store is not None:
            return
        if extent.in_host:
            self.host.free(extent)
        if extent.disk == "ready":
            self.disk.drop(extent, "forgotten")
        self._dead.pop(extent, None)

    # --------------------------------------------------------------------------------------- completions

    def complete(self, done: MoveDone, now: float) -> None:
        """Take note that a move has ended. Unknown moves are ignored."""
        flight = self.moves.end(done.move)
        if flight is None:
            if not done.slots_busy:
                self.host.end_quarantine(done.move)
                self.disk.returned(done.move)
        elif isinstance(flight.move, Load):
            self._loaded(flight.extent, done, now)
        elif isinstance(flight.move, Store):
            self._stored(flight.extent, flight.move, done, now)
        else:
            if done.ok:
                self.write_back.room_came(now)
            self.disk.dropped(flight.extent, done.ok, now)

    def unread(self, extent: Extent, now: float) -> None:
        """Take note that parts of an extent on disk could not be read."""
        if not self.loading.unread(extent, now) and not extent.dead:
            self._counters.damaged += 1
            self.forget(extent, "damaged")

    def _loaded(self, extent: Extent, done: MoveDone, now: float) -> None:
        if not self.loading.ended(extent, done, now) and not extent.dead:
            self._counters.damaged += 1  # the file does not hold the bytes that were written, or did not come
            self.forget(extent, "damaged")
        if extent.dead:
            self._reap(extent)

    def _stored(self, extent: Extent, move: Store, done: MoveDone, now: float) -> None:
        evicting = self.host.stay(extent)
        self.disk.stored(extent, done, now)
        self.write_back.stored(extent, done.ok, move.why, now)
        if done.ok and evicting and not extent.dead:
            self.host.leave(extent, now)
        self.candidates.place(extent)
        if extent.dead:
            self._reap(extent)

    def check(self, other_slots: list[int], restored: bool = False) -> None:
        """Every slot has one owner (`other_slots`: the drafts'), bytes add up, live extents are somewhere. `restored`:
        budgets may have been larger before a restart, and no step was planned since."""
        live = list(self._index.extents.values())
        extents = [*live, *self._dead]
        self.host.check(extents, other_slots)
        self.disk.check(extents, restored)
        self.loading.check(extents)
        self.quota.check(live, restored)
        self.marks.check()
        for extent in extents:
            assert extent.pins >= 0
            assert extent.ref_count >= 0
            assert extent.dead != (extent.id in self._index.extents and bool(extent.nodes))
            assert extent.host not in ("absent", "partial") or extent.disk == "ready" or extent.dead
            assert (extent.host == "partial") <= (extent.lacks > 0)
            assert extent.lacks == 0 or extent.host in ("loading", "partial")
            assert (extent in self.candidates.host) == (extent.in_host and extent.store is None and not extent.dead)
            assert extent.host == "loading" or (extent in self.candidates.cold) == (
                extent.disk == "ready" and extent.host != "ready" and not (extent.dead or extent.has_children)
            )
