"""A store that several engines share, and what an engine does that has one beside its own tiers.

Engines write extents through to it, over their network links, as soon as they are sealed. An engine that is sent a
conversation whose rows another one has computed takes their records over, as after a restart; the first read of each
comes over the network, and leaves a file on the engine's own disk. So fetched extents count against that disk's
budget, and is read from there when it is wanted again. The store itself answers as fast as the links are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush
from math import inf

from afterglow.plan.prefix.extent import Extent
from afterglow.plan.prefix.index import Index
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


class SharedTier:
    """`budget` bytes of extents; the least recently used goes first, but none below which another hangs, and
    none that an engine has been promised and has not read. `ttl`: seconds after its last use at which it goes anyway."""

    def __init__(self, budget: int, ttl: float | None = None) -> None:
        self.budget = budget
        self.ttl = ttl if ttl is not None else inf
        self.used = 0
        self.evicted = 0  # extents
        self._index = Index()
        self._order: OrderedDict[ExtentId, Extent] = OrderedDict()  # parents after what hangs below them
        self._coming: list[tuple[float, int, ExtentRecord, bytes]] = []
        self._named: dict[ExtentId, None] = {}  # names of extents that are coming
        self._promised: dict[ExtentId, int] = {}
        self._numbers = 0

    def knows(self, name: ExtentId) -> bool:
        """Is it there, or on its way?"""
        return name in self._order or name in self._named

    def publish(self, record: ExtentRecord, prefix: bytes, at: float) -> None:
        """An extent, and the tokens before it, will be there at a time."""
        self._numbers += 1
        self._named[record.id] = None
        heappush(self._coming, (at, self._numbers, record, prefix))

    def match(self, salt: str, tokens: bytes, now: float) -> list[Extent]:
        """The extents that have the longest beginning of `tokens`, in order."""
        while self._coming and self._coming[0][0] <= now:
            at, number, record, prefix = heappop(self._coming)
            del self._named[record.id]
            self._add(record, prefix, at, number)
        while (oldest := next(iter(self._order.values()), None)) is not None and oldest.last_used + self.ttl < now:
            if oldest.id in self._promised:
                break
            self._remove(oldest)
        found = list(dict.fromkeys(view.extent for view in self._index.match(salt, tokens).views))
        if found:
            self._touch(found[-1], now)
        return found

    def promise(self, name: ExtentId) -> None:
        """Keep it until it has been read."""
        self._promised[name] = self._promised.get(name, 0) + 1

    def release(self, name: ExtentId) -> None:
        """The opposite of `promise`."""
        self._promised[name] -= 1
        if not self._promised[name]:
            del self._promised[name]

    def _add(self, record: ExtentRecord, prefix: bytes, now: float, number: int) -> None:
        made = Extent(
            record.id, record.salt, record.kind, record.tokens, len(prefix) // 4, record.file_bytes, now, number
        )
        if not self._make_room(made.file_bytes) or self._index.insert(made, prefix).outcome != "inserted":
            return
        self._order[made.id] = made
        self.used += made.file_bytes
        self._touch(made, now)

    def _touch(self, extent: Extent, now: float) -> None:
        above: Extent | None = extent
        while above is not None:
            above.last_used = max(above.last_used, now)
            self._order.move_to_end(above.id)
            above = self._order.get(above.parent) if above.parent is not None else None

    def _make_room(self, size: int) -> bool:
        while self.used + size > self.budget:
            victim = next((e for e in self._order.values() if e.id not in self._promised and not e.has_children), None)
            if victim is None:
                return False
            self._remove(victim)
            self.evicted += 1
        return True

    def _remove(self, extent: Extent) -> None:
        self._index.remove(extent)
        del self._order[extent.id]
        self.used -= extent.file_bytes


class SharingExecutor(Executor):
    """An engine's devices, links and disk, and its link to the shared store."""

    def __init__(self, machine: Machine, timing: Timing, shared: SharedTier, network: float) -> None:
        super().__init__(machine, timing)
        self.network_in = Link(network)
        self.network_out = Pipe(network)
        self._shared = shared
        self._far: dict[ExtentId, int] = {}  # promised, not read yet: bytes
        self._fetching: dict[int, ExtentId] = {}  # loads that go over the network
        self.stored: list[ExtentRecord] = []  # since the list was last read

    def adopted(self, extent: Extent) -> None:
        """The scheduler believes it on disk: it is read from the shared store, once."""
        self._sizes[extent.id] = self._far[extent.id] = extent.file_bytes
        self._shared.promise(extent.id)

    @property
    def next_event(self) -> float:
        return min(super().next_event, self.network_in.next_end)

    def take(self, now: float) -> list[TransferDone]:
        for ended in self.network_in.take(now):
            self._shared.release(self._fetching.pop(ended.key))
            self.disk_out.ask(-ended.key, ended.size, BACKGROUND, ended.at)  # the copy on the engine's own disk
            self._tell(ended.at, MoveDone(ended.key, True, ended.size, ended.seconds))
        return [done for done in super().take(now) if not (isinstance(done, MoveDone) and done.move < 0)]

    def start(self, step: Step, now: float) -> None:
        far: dict[int, Load] = {}
        for move in step.moves:
            if isinstance(move, Load) and move.extent in self._far:
                far[move.move] = move
            elif isinstance(move, Drop) and self._far.pop(move.extent, None) is not None:
                self._shared.release(move.extent)
            elif isinstance(move, Store):
                self.stored.append(move.record)
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
