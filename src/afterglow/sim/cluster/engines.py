"""Several engines behind a router, with or without a store that they share. One loop drives all engines: whatever comes
next, an arrival or an engine's next step, comes first.

An engine that does nothing but decode is left alone until something of its own happens, or a turn is sent to it; so a
thousand engines cost as much as their work, and not a thousand times as much.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from heapq import heappop, heappush
from math import ceil, inf
from typing import Any

from afterglow.plan.prefix.extent import Extent
from afterglow.plan.prefix.published import MIN_LOOKUP_ROWS
from afterglow.plan.prefix.salts import kind_of
from afterglow.plan.prefix.shared_way import forks
from afterglow.plan.prefix.truncation import Cut
from afterglow.plan.retention.shared_room import LastUses, SharedRoom, is_used_again
from afterglow.plan.stats import Counters
from afterglow.plan.step import Event, Step
from afterglow.sim.cluster.routers import router
from afterglow.sim.cluster.shared_tier import Listing, SharedTier, SharingExecutor
from afterglow.sim.engine_setup import Setup
from afterglow.sim.scenario_options import RouterName
from afterglow.sim.simulator import Outcome, Simulation
from afterglow.sim.workload.turns import Arrival, Workload, token_bytes

REMEMBERED = 100_000  # conversations whose last engine, and whose cuts, are known
FETCHED, WRITTEN = "network to engine", "engine to network"


@dataclass(frozen=True, slots=True)
class Network:
    """`bandwidth`: bytes/s of each engine's link, in each direction. `shared`: bytes of the store that all share."""

    bandwidth: float
    shared: int = 0


class SimulatedEngine(Simulation):
    """One of several: it takes what it is sent, and does not run ahead of what may still be sent to it."""

    def __init__(self, setup: Setup, workload: Workload, warm_up: int = 0, **more: Any) -> None:
        super().__init__(setup, workload, warm_up=warm_up, **more)
        self.due = inf  # when it goes on; infinity: when something is sent to it
        self._inbox: deque[Arrival] = deque()
        self._decoding: Step | None = None  # steps under way that may still be cut short, until when they go on
        self._until = inf

    @property
    def load(self) -> int:
        """Turns that it was sent and has not answered."""
        return len(self._jobs) + len(self._inbox)

    @property
    def next_arrival(self) -> float:
        return inf

    def receive(self, arrival: Arrival) -> None:
        """A turn is sent to it, now."""
        self._inbox.append(arrival)
        if self._decoding is not None and (heard := self.heard(self._decoding, arrival.time)) < self._until:
            self._until = heard
            self.due = self.executor.decodes_until(self._decoding, self.now, self._until)
        elif self.due == inf:
            self.due = max(self.now, arrival.time)

    def proceed(self) -> None:
        """Do what is due: end the decodes under way, or begin a step."""
        if self._decoding is not None:
            step, self._decoding = self._decoding, None
            self.compute(step, self._until)
            self.due = self.now
            return
        self.idle_until(self.due)
        step = self.begin()
        later = self.next_look(step)
        if not step.runs:
            self.due = max(later, self.now)
        elif step.repeat == 1:
            self.compute(step, later)
            self.due = self.now
        else:
            self._decoding, self._until = step, later
            self.due = self.executor.decodes_until(step, self.now, later)

    def _arrive(self) -> None:
        while self._inbox:
            self._submit(self._inbox.popleft())


class SharingEngine(SimulatedEngine):
    """One that has a shared store beside its own tiers."""

    executor: SharingExecutor
    late = 0.0  # others may wait for what it stores

    def __init__(
        self, setup: Setup, workload: Workload, warm_up: int, shared: SharedTier, cuts: _Cuts, network: float
    ) -> None:
        super().__init__(setup, workload, warm_up)
        self.executor = SharingExecutor(setup.machine(), setup.passes(), shared, network)
        self._shared = shared
        self._room = SharedRoom(shared.budget)
        self._uses = LastUses[Listing]()
        self._cuts = cuts

    def _carried(self) -> dict[str, int]:
        executor = self.executor
        network = {FETCHED: executor.network_in.bytes, WRITTEN: executor.network_out.bytes}
        return super()._carried() | network

    def _tell(self, events: list[Event]) -> None:
        self._share()
        super()._tell(events)

    def _share(self) -> None:
        """Publish what has been stored, and take away what merged extents have replaced, once the plan knows of it."""
        cache, carry = self.scheduler.cache, self.executor.network_out.carry
        for record in self.executor.take_stored():
            extent = cache.index.extents.get(record.id)
            prefix = cache.prefix_of(record) if extent is not None and extent.nodes else None
            if extent is not None and prefix is not None:
                fork = extent.first_row + extent.nodes[0].start
                there = carry(record.file_bytes, self.now)
                listing = self._shared.publish(extent.record(), prefix, there, self._room, fork)
                self._uses.note(extent.id, listing, self.now)
                for each in self._uses.again(cache.index.above(extent), self.now):
                    self._shared.use(each, there)
        deleted, replaced = cache.placement.take_gone()
        for name in (*deleted, *(part for part, _ in replaced)):
            self._uses.forget(name)
            self._shared.replace(name, carry(0, self.now))

    def _submit(self, arrival: Arrival) -> Cut | None:
        session = arrival.turn.session
        self.scheduler.recall({"epoch": self._cuts.of(session)})
        cut = super()._submit(arrival)
        for kind, key, value in self.scheduler.cache.take_notes():
            if kind == "epoch" and value is not None:
                self._cuts.note(session, key, value)
        if cut is None:
            self._adopt("", token_bytes(arrival.turn.prompt))
            return None
        if cut.origin is not None:
            self._adopt(cut.origin.salt, cut.origin.tokens)
        self._adopt(cut.salt, cut.prompt)
        return cut

    def _adopt(self, salt: str, tokens: bytes) -> None:
        match, now = self.scheduler.cache.match(salt, tokens), self.now
        if len(tokens) // 4 - match.rows < MIN_LOOKUP_ROWS:
            return
        found = self._shared.find(salt, tokens, match.rows, forks(match), now)
        ends = [each.published.expires for each in found if each.published.expires]
        extents = [
            Extent(
                each.published.id, salt, kind_of(salt), each.tokens, each.published.first_row,
                self.scheduler.cache.capacity.file_size(each.published.rows), now, 0,
            )
            for each in found
        ]  # fmt: skip
        adopted = self.scheduler.adopt(salt, tokens, extents, min(ends) - now if ends else None, now) if found else []
        taken = {extent.id for extent in adopted}
        for extent in adopted:
            self.executor.adopted(extent)
        for each in reversed(found):
            if each.published.id in taken:
                again = is_used_again(each.modified, now)
                self._uses.note(each.published.id, each, now if again else each.modified)
                if again:
                    self._shared.use(each, now)


class _Cuts:
    """Where conversations were cut: engines tell each other, as they tell themselves over a restart."""

    def __init__(self) -> None:
        self._notes: OrderedDict[str, dict[str, str]] = OrderedDict()

    def of(self, session: str) -> dict[str, str]:
        return self._notes.get(session, {})

    def note(self, session: str, key: str, value: str) -> None:
        self._notes.setdefault(session, {})[key] = value
        self._notes.move_to_end(session)
        if len(self._notes) > REMEMBERED:
            self._notes.popitem(last=False)


class Cluster:
    """`engines` engines of one kind serving one workload."""

    def __init__(
        self,
        setup: Setup,
        workload: Workload,
        engines: int,
        routing: RouterName,
        network: Network,
        seed: int = 0,
        warm_up: int = 0,
    ) -> None:
        """`warm_up`: turns that are not counted; each engine leaves out its share."""
        self.workload = workload
        self.shared = SharedTier(network.shared) if network.shared else None
        self.moved = 0  # turns that another engine got than the turn before
        self._routing: RouterName = routing
        self._router = router(routing, seed)
        share = ceil(warm_up / engines)
        cuts = _Cuts()
        self.engines: list[SimulatedEngine] = [
            SimulatedEngine(setup, workload, share)
            if self.shared is None
            else SharingEngine(setup, workload, share, self.shared, cuts, network.bandwidth)
            for _ in range(engines)
        ]
        self._loads = [0] * engines
        self._due: list[tuple[float, int]] = []  # a heap; entries may be out of date
        self._left: list[tuple[float, int, int]] = []  # a heap: when, engine, how many turns it has answered
        self._last: OrderedDict[str, int] = OrderedDict()  # conversation -> its last engine

    def run(self, progress: Callable[[Cluster], object] | None = None, every: int = 500) -> Outcome:
        """To the end of the workload. `progress` is called now and then."""
        rounds = 0
        while not self.workload.exhausted:
            self._next()
            rounds += 1
            if progress is not None and rounds % every == 0:
                progress(self)
        return self.finish()

    def _next(self) -> None:
        while self._due and self.engines[self._due[0][1]].due != self._due[0][0]:
            heappop(self._due)
        soonest = self._due[0][0] if self._due else inf
        arrival = self.workload.peek()
        if arrival is not None and arrival <= soonest:
            for each in self.workload.take(arrival):
                self._route(each)
        elif self._due:
            self._proceed(heappop(self._due)[1])
        else:
            raise RuntimeError("the simulation stands still: turns wait, and nothing is going to happen")

    def _route(self, arrival: Arrival) -> None:
        while self._left and self._left[0][0] <= arrival.time:
            _, number, turns = heappop(self._left)
            self._loads[number] -= turns
        chosen = self._router.choose(arrival.turn, self._loads)
        self._loads[chosen] += 1
        session = arrival.turn.session
        self.moved += self._last.get(session, chosen) != chosen
        self._last[session] = chosen
        self._last.move_to_end(session)
        if len(self._last) > REMEMBERED:
            self._last.popitem(last=False)
        engine = self.engines[chosen]
        before = engine.due
        engine.receive(arrival)
        if engine.due != before:
            heappush(self._due, (engine.due, chosen))

    def _proceed(self, number: int) -> None:
        engine = self.engines[number]
        before = engine.load
        engine.proceed()
        if engine.load != before:
            heappush(self._left, (engine.now, number, before - engine.load))
        if engine.due < inf:
            heappush(self._due, (engine.due, number))

    def finish(self) -> Outcome:
        """The outcome so far, of all engines together."""
        return merged([engine.finish() for engine in self.engines])

    def figures(self) -> dict[str, Any]:
        """What there is to say of several engines besides."""
        busy = [engine.executor.prefilling + engine.executor.decoding for engine in self.engines]
        mean = sum(busy) / len(busy)
        moved = [engine.bytes_moved() for engine in self.engines]
        return {
            "engines": len(self.engines),
            "router": self._routing,
            "moved_turns": self.moved,
            "busiest_over_mean": max(busy) / mean if mean else 0.0,
            "network_in_bytes": sum(each.get(FETCHED, 0) for each in moved),
            "network_out_bytes": sum(each.get(WRITTEN, 0) for each in moved),
            "shared_bytes": self.shared.used if self.shared is not None else 0,
        }


def merged(outcomes: list[Outcome]) -> Outcome:
    """One outcome of several engines': columns joined, counts added up; it ended when the last one did."""
    found = Outcome()
    for f in fields(Outcome):
        values = [getattr(outcome, f.name) for outcome in outcomes]
        if f.name in ("ended", "prefetch_window", "eviction_window"):
            setattr(found, f.name, max(values))
        elif f.name == "counters":
            found.counters = _added([value for value in values if value is not None])
        elif f.name == "bytes_moved":
            found.bytes_moved = {name: sum(value.get(name, 0) for value in values) for name in values[0]}
        elif isinstance(values[0], array):
            for value in values:
                getattr(found, f.name).extend(value)
        else:
            setattr(found, f.name, sum(values))
    return found


def _added(counters: list[Counters]) -> Counters:
    return Counters(**{f.name: sum(getattr(c, f.name) for c in counters) for f in fields(Counters)})
