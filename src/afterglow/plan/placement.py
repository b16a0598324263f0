"""Which tier holds which extent, and the moves that change it: what joins host, disk, loads and lifetimes.

It knows extents, the policy and the index's shape (who has children); not jobs, not queues, not what a move takes.
What concerns one part only is that part's: host's slots and victims (`host`), disk's bytes and files (`disk`), what is
written before it has to be (`writing`), loads (`loading`), lifetimes (`expiry`), tenants' quotas (`quota`), the warm
start (`warm`). Here is what concerns several: extents that arrive, are used, are forgotten, and moves that end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from afterglow.plan.cost import Cost
from afterglow.plan.device import Device
from afterglow.plan.disk import Disk
from afterglow.plan.expiry import Expiry
from afterglow.plan.extent import Capacity, Extent, Key
from afterglow.plan.ghosts import Ghosts, Reason
from afterglow.plan.host import Host
from afterglow.plan.index import Index, Inserted
from afterglow.plan.loading import Loading
from afterglow.plan.moves import Moves
from afterglow.plan.pins import Pins
from afterglow.plan.policy import Policy
from afterglow.plan.quota import Quota
from afterglow.plan.salts import covers
from afterglow.plan.stats import Counters
from afterglow.plan.step import Copy, Load, Lost, MoveDone, Store
from afterglow.plan.victims import Victims
from afterglow.plan.warm import WarmStart
from afterglow.plan.writing import Writing


class Placement:
    """Host and disk. `quota`: bytes of extents that a tenant may have, in whatever tier (None: any). `pins`: part of the last
    tier that a tenant may pin (None: all)."""

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
        quota: int | None = None,
        pins: float | None = None,
    ) -> None:
        self.lost: list[Extent] = []  # forgotten, although conversations with a name had used them
        self._index = index
        self._device = device
        self._counters = counters
        self._ghosts = ghosts
        self._selective = selective
        self._dead: dict[Extent, None] = {}
        self._moves = moves = Moves()
        self._victims = victims = Victims(policy)
        self._disk = disk = Disk(capacity, victims, moves, counters, self.forget)
        self._writing = Writing(capacity, index, victims, disk, moves)
        self._host = host = Host(capacity, victims, disk, self._writing, counters, self.forget)
        self._loading = loading = Loading(capacity, victims, host, moves, counters, cost)
        self._expiry = expiry = Expiry(self.forget)
        self._quota = Quota(quota, self.forget)
        self.pins = Pins(capacity, pins)
        self._warm = WarmStart(capacity, index.extents.values, host, loading, moves)

        # What a part does alone, whoever asks gets from it at once: these are called for every extent of every job.
        self.pool = host.pool
        self.keep_free, self.evict, self.quarantine = host.keep_free, host.evict, host.quarantine
        self.take_slots, self.urge_slots, self.room_for_rows = host.take_slots, host.urge_slots, host.room_for_rows
        self.store, self.has_file, self.take_touched = disk.store, disk.has_file, disk.take_touched
        self.keep_budget = disk.keep_budget
        self.flush, self.write = self._writing.flush, self._writing.write
        self.is_written = self._writing.is_written
        self.load, self.prefetch, self.probe = loading.load, loading.prefetch, loading.probe
        self.avoid, self.avoids = loading.avoid, loading.avoids
        self.wanted, self.urge, self.take_urged = loading.wanted, loading.urge, loading.take_urged
        self.open_gates, self.open_gates_of = loading.open_gates, loading.open_gates_of
        self.sweep = expiry.sweep
        self.within_quota = self._quota.make_room
        self.warm_up, self.warm = self._warm.choose, self._warm.go_on
        self.take_moves, self.is_under_way = moves.take, moves.is_under_way

    # ---------------------------------------------------------------------------------------- how it stands

    @property
    def low(self) -> int:
        """Free slots below which victims go."""
        return self._host.low

    @property
    def high(self) -> int:
        """Free slots up to which they do."""
        return self._host.high

    @property
    def absences(self) -> int:
        """How often rows that queued jobs wait for have left host, or any have not come."""
        return self._host.absences

    @property
    def disk_used(self) -> int:
        """Bytes of files, also of those being written or removed."""
        return self._disk.used

    @property
    def disk_over(self) -> int:
        """Bytes of them above the budget."""
        return self._disk.over

    @property
    def in_flight(self) -> int:
        """Moves under way, copies apart."""
        return len(self._moves)

    @property
    def has_moves(self) -> bool:
        """Are there moves, or loads that somebody waits for now, to be handed out?"""
        return self._moves.planned or self._loading.urges

    @property
    def relief(self) -> bool:
        """Are there moves under way that will free slots?"""
        return self._host.evicting > 0 or self._disk.dropping > 0

    @property
    def next_expiry(self) -> float:
        """When to sweep next; infinity: never."""
        return self._expiry.next

    @property
    def chores_at(self) -> float:
        """When to try again what has failed on disk; infinity: nothing has."""
        return min(self._writing.chores_at, self._disk.chores_at)

    @property
    def read_buffer(self) -> int | None:
        """Layers to be loaded before the job joins (a baseline); None: all of them."""
        return self._loading.read_buffer

    @read_buffer.setter
    def read_buffer(self, layers: int | None) -> None:
        self._loading.read_buffer = layers

    @property
    def horizon(self) -> Key | None:
        """What jobs up to this one wait for does not leave the last tier."""
        return self._victims.horizon

    @horizon.setter
    def horizon(self, key: Key | None) -> None:
        self._victims.horizon = key

    # ---------------------------------------------------------------------------------- arrivals and use

    def add(self, extent: Extent, slots: tuple[int, ...], write_through: bool, now: float) -> None:
        """A new extent, in the index, whose rows lie in `slots`."""
        extent.slots, extent.host = slots, "ready"
        self._victims.place(extent)
        if extent.above is not None:
            self._victims.place(extent.above)
        self._quota.add(extent)
        if write_through and not extent.volatile:
            self._writing.write(extent, now, "write_through")

    def insert(self, extent: Extent, prefix_tokens: bytes) -> Inserted:
        """Hang a new extent into the index, in place of one of its name in a tree where it is not looked for any more."""
        found = self._index.insert(extent, prefix_tokens)
        if found.outcome == "elsewhere":
            self.forget(self._index.extents[extent.id], "evicted")
            found = self._index.insert(extent, prefix_tokens)
        return found

    def restore(self, extents: Sequence[Extent], ends: Iterable[float]) -> None:
        """Extents found on disk at start, and when nobody needs them any more."""
        for extent, end in zip(extents, ends, strict=True):
            self._quota.add(extent)
            self._expiry.expire(extent, end)
        self._disk.restore(extents)

    def copy(self, pieces: list[tuple[tuple[int, ...], int, int]], slots: tuple[int, ...], rows: int) -> int:
        """Plan to copy rows within host; whoever asks keeps the slots, and the sources pinned, until it has ended."""
        move = Copy(self._moves.number(), tuple(pieces), slots, rows)
        self._moves.plan(move)
        return move.move

    def prepare(self, extent: Extent, slots: tuple[int, ...]) -> None:
        """Rows are about to come into `slots`, of an extent that nobody finds until it replaces others; it goes as soon as
        it is unpinned, if it has not."""
        extent.slots, extent.host, extent.dead, extent.pins = slots, "ready", True, 1
        self._dead[extent] = None

    def replace(self, parts: Sequence[Extent], whole: Extent) -> None:
        """An extent that was prepared takes the place of others, which go when nobody reads or writes them any more."""
        self._index.replace(parts, whole)
        whole.dead, whole.pins = False, 0
        del self._dead[whole]
        for part in parts:
            self._bury(part)
        self._quota.add(whole)
        self._victims.place(whole)

    def pin(self, extent: Extent) -> None:
        """Keep an extent where it is: somebody is about to read it."""
        extent.pins += 1
        if extent.evicting:  # its Store goes on, but the slots stay
            self._host.stay(extent)

    def unpin(self, extent: Extent) -> None:
        """The opposite of `pin`."""
        extent.pins -= 1
        if extent.dead:
            self._reap(extent)

    def touch(self, extent: Extent, now: float, ttl: float | None = None, volatile: bool = False) -> None:
        """An extent was of use; see `need` for how long it is to be kept now."""
        self.need(extent, now, ttl, volatile)
        extent.last_used = now
        extent.hits += 1
        self.ranked(extent)
        if self._selective and extent.host == "ready" and extent.disk == "absent" and not extent.volatile:
            self._writing.write(extent, now, "second use")
        self._disk.touch(extent)

    def need(self, extent: Extent, now: float, ttl: float | None = None, volatile: bool = False) -> None:
        """A job needs an extent for `ttl` seconds more (None: for ever); `volatile`: as long as it is in memory."""
        self.expire(extent, now + ttl if ttl is not None else inf)
        extent.volatile = extent.volatile and volatile

    def expire(self, extent: Extent, when: float) -> None:
        """No job needs it after that, unless one has said, or says, a later time. The catalog is to know."""
        if when > extent.expires:
            self._expiry.expire(extent, when)
            self._disk.touch(extent)

    def ranked(self, extent: Extent) -> None:
        """Something has changed that a policy's order may depend on."""
        self._victims.update(extent)
        self._quota.update(extent)

    def background(self, now: float, expected: int, waiter: Key | None = None) -> None:
        """What is to be done now and then, and to keep some slots free, for `expected` rows' blocks as well."""
        self._writing.write_again(now)
        self._host.refill(expected, now, waiter)

    # -------------------------------------------------------------------------------------------- the end

    def forget(self, extent: Extent, why: Reason) -> None:
        """Remove an extent from the index and all tiers, and what hangs below it."""
        above = extent.above
        for lost in self._index.remove(extent):
            self._ghosts.add(lost, why)
            if lost.sessions:
                self.lost.append(lost)
            self._counters.dropped += 1
            self._device.forget(lost)
            self._bury(lost)
        if above is not None:
            self._victims.place(above)

    def _bury(self, extent: Extent) -> None:
        """It is in the index no more: nobody is to wait for it, and it goes when nobody uses its bytes."""
        extent.dead = True
        self._loading.forget(extent)
        self._writing.forget(extent)
        self._host.not_prefetched(extent)
        self._quota.remove(extent)
        self.pins.lost(extent)
        self._dead[extent] = None
        self._victims.place(extent)
        self._reap(extent)

    def forget_all(self, whose: str | None = None) -> None:
        """Forget every extent that nobody uses (see `covers`)."""
        while True:
            leaves = [
                e
                for e in self._index.extents.values()
                if not (e.pins or e.users or e.has_children) and covers(whose, e.salt)
            ]
            if not leaves:
                return
            for extent in leaves:
                self.forget(extent, "deleted")

    def give_up(self) -> Lost:
        """Forget what is in host only, although it was wanted on disk: the process ends, and there was no room for it."""
        live = self._index.extents.values()
        lost = [e for e in live if e.host == "ready" and e.disk == "absent" and not e.volatile]
        lost.sort(key=lambda extent: -extent.first_row)  # of a path the head last: a match ends before it
        found = Lost(len(lost), sum(e.rows for e in lost), sum(e.file_bytes for e in lost))
        self._counters.evicted_host += len(lost)
        for extent in lost:
            if not extent.dead:
                self.forget(extent, "evicted")
        return found

    def drop_clean(self) -> None:
        """Free the slots of every extent that is also on disk and not in use."""
        for extent in list(self._index.extents.values()):
            if extent.host == "ready" and extent.disk == "ready" and not extent.pins and extent.store is None:
                self._host.not_prefetched(extent)
                self._host.free(extent)

    def shrink(self) -> None:
        """Bring tenants below their quota, and the disk tier below its budget (before a restart they may have been
        larger). Pins hold as long as they fit."""
        self._quota.shrink()
        self._disk.shrink()

    def _reap(self, extent: Extent) -> None:
        """Give back what a dead extent holds, as far as nobody reads or writes it."""
        if extent.pins or extent.load is not None or extent.store is not None:
            return
        if extent.host == "ready":
            self._host.free(extent)
        if extent.disk == "ready":
            self._disk.drop(extent, "forgotten")
        self._dead.pop(extent, None)

    # --------------------------------------------------------------------------------------- completions

    def complete(self, done: MoveDone, now: float) -> None:
        """A move has ended. Unknown moves are ignored."""
        flight = self._moves.end(done.move)
        if flight is None:
            if not done.slots_busy:
                self._host.end_quarantine(done.move)
                self._disk.returned(done.move)
        elif isinstance(flight.move, Load):
            self._loaded(flight.extent, done, now)
        elif isinstance(flight.move, Store):
            self._stored(flight.extent, flight.move, done, now)
        else:
            if done.ok:
                self._writing.room_came(now)
            self._disk.dropped(flight.extent, done.ok, now)

    def unread(self, extent: Extent, now: float) -> None:
        """Parts of an extent that is on disk could not be read."""
        if not self._loading.unread(extent, now) and not extent.dead:
            self._counters.damaged += 1
            self.forget(extent, "damaged")

    def _loaded(self, extent: Extent, done: MoveDone, now: float) -> None:
        if not self._loading.ended(extent, done, now) and not extent.dead:
            self._counters.damaged += 1  # what the disk has of it is not what was written, or did not come
            self.forget(extent, "damaged")
        if extent.dead:
            self._reap(extent)

    def _stored(self, extent: Extent, move: Store, done: MoveDone, now: float) -> None:
        evicting = self._host.stay(extent)
        self._disk.stored(extent, done, now)
        self._writing.stored(extent, done.ok, move.why, now)
        if done.ok and evicting and not extent.dead:
            self._host.leave(extent, now)
        self._victims.place(extent)
        if extent.dead:
            self._reap(extent)

    def check(self, other_slots: list[int], restored: bool = False) -> None:
        """Every slot has one owner (`other_slots`: the drafts'), bytes add up, live extents are somewhere. `restored`:
        budgets may have been larger before a restart, and no step was planned since."""
        live = list(self._index.extents.values())
        extents = [*live, *self._dead]
        self._host.check(extents, other_slots)
        self._disk.check(extents, restored)
        self._loading.check(extents)
        self._quota.check(live, restored)
        for extent in extents:
            assert extent.pins >= 0
            assert extent.users >= 0
            assert extent.dead != (extent.id in self._index.extents and bool(extent.nodes))
            assert extent.host != "absent" or extent.disk == "ready" or extent.dead
            assert (extent in self._victims.host) == (extent.host == "ready" and not extent.dead)
            assert extent.host == "loading" or (extent in self._victims.cold) == (
                extent.disk == "ready" and extent.host == "absent" and not (extent.dead or extent.has_children)
            )
