"""A store that several engines share, and what an engine does that has one beside its own tiers.

Engines write extents through to it, over their network links, when these are on their disks. An engine that is sent a
conversation whose rows another one has computed takes their records over, as after a restart; the first read of each
comes over the network, and leaves a file on the engine's own disk. So fetched extents count against that disk's
budget, and is read from there when it is wanted again. The store itself answers as fast as the links are.

What is found, counted, and removed is chosen by the code that real engines run: extents lie where these list them, each engine's own, so
that rows may be there twice; merged extents go in place of their parts; and when there is no room, a tenth of the budget goes at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from math import inf, nextafter

from afterglow.plan.prefix.extent import Extent
from afterglow.plan.prefix.published import Published, expiry, listed_under
from afterglow.plan.prefix.shared_way import Candidate, choices, follow, promising
from afterglow.plan.prefix.tree import common_rows
from afterglow.plan.retention.shared_room import Rank, SharedRoom
from afterglow.plan.step import (
    BACKGROUND,
    DEMAND,
    Drop,
    ExtentId,
    ExtentRecord,
    Load,
    MoveDone,
    Run,
    Step,
    Store,
    TransferDone,
)
from afterglow.sim.executor import Executor, Machine
from afterglow.sim.links import Link, Pipe
from afterglow.sim.machine.timing import Timing


@dataclass(eq=False, slots=True)
class Listing:
    """What lists an extent under a key. `modified`: when it was written, or last used."""

    published: Published
    key: str
    tokens: bytes
    modified: float


@dataclass(eq=False, slots=True)
class _Object:
    size: int
    listings: list[Listing]


class SharedTier:
    """`budget` bytes of extents. None goes that an engine has been promised and has not read."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.used = 0
        self.evicted = 0  # extents
        self._objects: dict[ExtentId, _Object] = {}
        self._listings: dict[str, dict[Published, Listing]] = {}  # by key
        self._coming: list[tuple[float, int, Callable[[float], None]]] = []  # a heap of changes
        self._promised: dict[ExtentId, int] = {}
        self._numbers = 0
        self._clock = 0.0  # when the store was last written

    def knows(self, name: ExtentId) -> bool:
        """Is it there?"""
        return name in self._objects

    def publish(
        self, extent: ExtentRecord, prefix: bytes, at: float, room: SharedRoom, fork: int | None = None
    ) -> Listing:
        """An extent, and the tokens before it, will be there at a time. `room`: what its engine knows of the store's; `fork`: the first row
        that it adds to that engine's tree.
        """
        first = len(prefix) // 4
        published = Published(extent.id, first, len(extent.tokens) // 4, expiry(extent.expires))
        tokens = prefix + extent.tokens
        key = listed_under(extent.salt, tokens[: 4 * ((first if fork is None else fork) + 1)])
        listing = Listing(published, key, extent.tokens, at)
        self._change(at, partial(self._publish, listing, extent.file_bytes, room))
        return listing

    def replace(self, name: ExtentId, at: float) -> None:
        """A merged extent takes the place of one at a time, after all that came before."""
        self._change(at, lambda _: self._remove(name))

    def use(self, listing: Listing, at: float) -> None:
        """An extent counts as used at a time."""
        self._change(at, partial(self._use, listing))

    def find(self, salt: str, tokens: bytes, known: int, forks: Sequence[int], now: float) -> list[Listing]:
        """Find the extents on the way of `tokens`, whose first `known` rows are cached; see `Finder.find`."""
        self._settle(now)
        rows = len(tokens) // 4

        def step(row: int) -> tuple[Listing, int] | None:
            there = self._listings.get(listed_under(salt, tokens[: 4 * (row + 1)]), {}).values()
            living = [Candidate(each.published, each.modified, each) for each in there if each.published.lives(now)]
            whole, parts = choices(living, row, rows)
            for each in (*whole, *promising(parts, row)):
                first, own = each.published.first_row, each.listed.tokens
                reached = first + common_rows(own, 0, tokens, first, min(len(own) // 4, rows - first))
                if reached > row:
                    return each.listed, reached
            return None

        return list(follow(rows, known, forks, step))

    def promise(self, name: ExtentId) -> None:
        """Keep it until it has been read."""
        self._promised[name] = self._promised.get(name, 0) + 1

    def release(self, name: ExtentId) -> None:
        """The opposite of `promise`."""
        self._promised[name] -= 1
        if not self._promised[name]:
            del self._promised[name]

    # ---------------------------------------------------------------------------------------------- changes

    def _change(self, at: float, change: Callable[[float], None]) -> None:
        self._numbers += 1
        heappush(self._coming, (at, self._numbers, change))

    def _settle(self, now: float) -> None:
        """Do what has come by now, in the order in which it came."""
        while self._coming and self._coming[0][0] <= now:
            at, _, change = heappop(self._coming)
            self._clock = max(at, nextafter(self._clock, inf))  # one after another, so that no two are as old
            change(self._clock)

    def _publish(self, listing: Listing, size: int, room: SharedRoom, now: float) -> None:
        name = listing.published.id
        if not self._make_room(size, room, now):
            return
        there = self._objects.get(name)
        if there is None:
            there = self._objects[name] = _Object(size, [])
            self.used += size
            room.wrote(size)
        if listing.published not in self._listings.setdefault(listing.key, {}):
            self._listings[listing.key][listing.published] = listing
            there.listings.append(listing)
        self._use(listing, now)

    def _use(self, listing: Listing, now: float) -> None:
        there = self._listings.get(listing.key, {}).get(listing.published)
        if there is not None:
            there.modified = now

    def _make_room(self, size: int, room: SharedRoom, now: float) -> bool:
        if size > self.budget:
            return False
        if room.counts(size):
            self._sweep(size, room, now)
        return room.fits(size)

    def _sweep(self, size: int, room: SharedRoom, now: float) -> None:
        """Count all; remove what has expired, and the least recently used."""
        room.counted(self.used)
        open_ones = [(name, each) for name, each in self._objects.items() if name not in self._promised]
        for name, each in open_ones:
            if not any(listing.published.lives(now) for listing in each.listings):
                room.removed(each.size)
                self._remove(name)
        ranks = [
            Rank(max(listing.modified for listing in each.listings), -each.listings[0].published.first_row, name)
            for name, each in open_ones
            if name in self._objects
        ]
        for name in room.leaving(ranks, size):
            room.removed(self._objects[name].size)
            self._remove(name)
            self.evicted += 1

    def _remove(self, name: ExtentId) -> None:
        there = self._objects.pop(name, None)
        if there is None:
            return
        self.used -= there.size
        for listing in there.listings:
            under = self._listings[listing.key]
            del under[listing.published]
            if not under:
                del self._listings[listing.key]


class SharingExecutor(Executor):
    """An engine's devices, links and disk, and its link to the shared store."""

    def __init__(self, machine: Machine, timing: Timing, shared: SharedTier, network: float) -> None:
        super().__init__(machine, timing)
        self.network_in = Link(network)
        self.network_out = Pipe(network)
        self._shared = shared
        self._far: dict[ExtentId, int] = {}  # promised, not read yet: bytes
        self._fetching: dict[int, ExtentId] = {}  # loads that go over the network
        self._storing: dict[int, ExtentRecord] = {}
        self._stored: list[ExtentRecord] = []

    def adopted(self, extent: Extent) -> None:
        """The scheduler believes it on disk: it is read from the shared store, once."""
        self._sizes[extent.id] = self._far[extent.id] = extent.file_bytes
        self._shared.promise(extent.id)

    def take_stored(self) -> list[ExtentRecord]:
        """The extents that were stored since the last call."""
        found, self._stored = self._stored, []
        return found

    @property
    def next_event(self) -> float:
        return min(super().next_event, self.network_in.next_end)

    def take(self, now: float) -> list[TransferDone]:
        for ended in self.network_in.take(now):
            self._shared.release(self._fetching.pop(ended.key))
            self.disk_out.ask(-ended.key, ended.size, BACKGROUND, ended.at)  # the copy on the engine's own disk
            self._tell(ended.at, MoveDone(ended.key, True, ended.size, ended.seconds))
        found = [done for done in super().take(now) if not (isinstance(done, MoveDone) and done.move < 0)]
        if self._storing:
            for done in found:
                stored = self._storing.pop(done.move, None) if isinstance(done, MoveDone) else None
                if stored is not None:
                    self._stored.append(stored)
        return found

    def start(self, step: Step, now: float) -> None:
        far: dict[int, Load] = {}
        for move in step.moves:
            if isinstance(move, Load) and move.extent in self._far:
                far[move.move] = move
            elif isinstance(move, Drop) and self._far.pop(move.extent, None) is not None:
                self._shared.release(move.extent)
            elif isinstance(move, Store):
                self._storing[move.move] = move.record
        super().start(replace(step, moves=tuple(m for m in step.moves if m.move not in far)) if far else step, now)
        for load in far.values():
            self._fetching[load.move] = load.extent
            self.network_in.ask(load.move, self._far.pop(load.extent), load.priority, now)
        for number in step.urged:
            self.network_in.urge(number, DEMAND)

    def _latest(self, runs: Sequence[Run]) -> float:  # type: ignore[override]
        late = super()._latest(runs)
        for run in runs:
            for gather in run.gathers:
                if gather.move is not None:
                    late = max(late, self.network_in.ends(gather.move) or 0.0)
        return late
