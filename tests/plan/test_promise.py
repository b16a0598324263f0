"""The promise of load-or-recompute, on a simulated clock: once rates are learned, the chosen way takes at most a tenth
longer than the better of loading everything and recomputing everything.

The clock knows the truth: a disk that reads at some rate after some latency, layers that come one after the other,
passes that take so long a row and so long a product of row and context, and that wait for each layer in turn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afterglow.choices import KVSource
from afterglow.plan.scheduler import Scheduler
from afterglow.plan.step import Event, Load, MoveDone, Step, StepResult, TransferDone
from tests.plan.fake_executor import FakeExecutor
from tests.plan.lasting_kit import Lasting
from tests.plan.server_kit import Steady, words

BLOCK = 16  # rows; an extent has at most four blocks, and a file 100 bytes for each
ROW = 0.001  # seconds that computing a row takes, without its attention


@dataclass(frozen=True)
class World:
    """What takes how long. `ratio`: seconds of loading a row over seconds of computing it."""

    ratio: float
    latency: float = 0.0  # seconds before the first byte of a read
    product: float = 0.0  # seconds of a product of row and context
    step: float = 0.0005  # seconds that a pass takes whatever it does
    gather: float = 0.0  # seconds that a row takes from host to device
    layers: int = 8
    readers: int = 1  # that each read as fast as one alone

    def reading(self, rows: int) -> float:
        """Seconds from the first byte to the last; files are whole blocks."""
        return -(-rows // BLOCK) * BLOCK * self.ratio * ROW

    def computing(self, rows: int, start: int, gathered: int) -> float:
        return self.step + rows * ROW + rows * (start + rows / 2) * self.product + gathered * self.gather


class Disk(FakeExecutor):
    """Each reader reads one extent after the other."""

    def __init__(self, world: World, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.world = world
        self.now = 0.0
        self.free = [0.0] * world.readers
        self.reads: dict[int, tuple[float, float, float]] = {}  # asked for, first byte, last byte

    def execute(self, step: Step) -> StepResult:
        for move in step.moves:
            if isinstance(move, Load):
                reader = self.free.index(min(self.free))
                began = max(self.now, self.free[reader])
                first = began + self.world.latency
                self.free[reader] = first + self.world.reading(move.rows)
                self.reads[move.move] = (began, first, self.free[reader])
        return super().execute(step)

    def _end(self, number: int) -> None:
        super()._end(number)
        if number in self.reads:
            began, _, last = self.reads[number]
            done = self.done[-1]
            assert isinstance(done, MoveDone)
            self.done[-1] = done._replace(seconds=last - began)

    def tick(self) -> list[TransferDone]:
        for number, pending in self.pending.items():
            late = number in self.reads and self.reads[number][2] > self.now + 1e-12
            pending.ticks = 1 if late else 0
        return super().tick()

    def computing(self, step: Step) -> float:
        """Seconds that a step computes."""
        work = [(len(run.tokens), run.start, sum(g.stop - g.start for g in run.gathers)) for run in step.runs]
        return self.world.step + sum(self.world.computing(*item) - self.world.step for item in work)

    def wait(self, step: Step) -> float:
        """When the step that begins now ends."""
        layers = self.world.layers
        moves = [g.move for run in step.runs for g in run.gathers if g.move is not None]
        clock = self.now
        for layer in range(layers):
            for move in moves:
                _, first, last = self.reads[move]
                clock = max(clock, first + (last - first) * (layer + 1) / layers)
            clock += self.computing(step) / layers
        return clock


class Timed(Lasting):
    """A server in such a world."""

    def __init__(self, world: World) -> None:
        self.world = world
        super().__init__(device_rows=4096, host_slots=512, disk_bytes=10**6, block=BLOCK, source="load")
        self.executor = Disk(world, self.capacity, Steady(), self.faults)

    def make(self) -> Scheduler:
        self.capacity = replace(self.capacity, layers=self.world.layers, readers=self.world.readers)
        return super().make()

    def open(self) -> tuple[Step, StepResult]:
        assert isinstance(self.executor, Disk)
        self.executor.now = self.now
        step = self.scheduler.schedule(self.now)
        self.steps.append(step)
        return step, self.executor.execute(step)

    def close(self, step: Step, result: StepResult) -> list[Event]:
        assert isinstance(self.executor, Disk)
        if step.runs:
            self.now = self.executor.wait(step)
        else:  # until something ends
            ends = [self.executor.reads[n][2] for n in self.executor.pending if n in self.executor.reads]
            self.now = min(ends, default=self.now)
        self.executor.now = self.now
        events = self.scheduler.commit(step, result, self.executor.tick(), self.now)
        self.take(events)
        return events

    def finish(self) -> None:
        """Until nothing runs and nothing moves. (Other tests look at the answers.)"""
        while self.scheduler.unfinished or self.executor.busy or self.scheduler.stats().moves_in_flight:
            self.step()

    def learn(self) -> None:
        """Prefills of several lengths, with and without a history, in host and on disk."""
        number = 0
        for rows in (8, 40, 70, 130, 250, 400):
            number += 1
            self.ask(words(rows, 1000 * number), max_tokens=1)
            self.to_host()
            self.ask([*words(rows, 1000 * number), *words(rows // 2, 500)], max_tokens=1, write=False)
        for rows in (8, 40, 70, 130):
            self.to_disk()
            number += 1
            self.ask([*words(rows, 1000 * (number - 6)), 7], max_tokens=1, write=False)

    def first_token(self, history: int, new: int, source: KVSource) -> float:
        """Seconds to the first token of a turn whose history is on disk."""
        assert self.scheduler.cache.cost.known
        prompt = words(history, 10_000 * (len(self.specs) + 1))
        self.scheduler.baseline("layerwise", None, "load")
        self.ask(prompt, max_tokens=0)
        self.to_disk()
        self.scheduler.baseline("layerwise", None, source)
        began = self.now
        job = self.submit([*prompt, *words(new, 5000)])
        while job not in self.ends:
            self.step()
        took = self.now - began
        self.finish()
        self.scheduler.check()
        return took


def learned(world: World) -> Timed:
    server = Timed(world)
    server.learn()
    return server


def check(world: World, history: int, new: int) -> None:
    """First the chosen way, so that nothing was learned of this very turn."""
    server = learned(world)
    chosen, load, recompute = (server.first_token(history, new, source) for source in ("auto", "load", "recompute"))
    assert chosen <= 1.1 * min(load, recompute), (chosen / min(load, recompute), load, recompute)


def stalls(world: World, history: int, new: int) -> list[tuple[float, float]]:
    """Of each step beside a job that decodes: seconds that it waited for rows, and that it computed."""
    server = learned(world)
    prompt = words(history, 50_000)
    server.ask(prompt, max_tokens=0)
    server.to_disk()
    server.submit(words(5, 90_000), max_tokens=3000, write=False)
    server.step()
    job = server.submit([*prompt, *words(new, 5000)], write=False)
    found = []
    while job not in server.ends:
        began = server.now
        step = server.step()
        assert isinstance(server.executor, Disk)
        computing = server.executor.computing(step)
        found.append((server.now - began - computing, computing))
    assert sum(server.hits(job)) == history
    return found


@pytest.mark.parametrize("readers", [1, 2])
@pytest.mark.parametrize("latency", [0.0, 0.005])
@pytest.mark.parametrize("ratio", [0.05, 0.3, 2.0])
def test_who_decodes_hardly_waits_for_anothers_rows(ratio: float, latency: float, readers: int) -> None:
    for history, new in ((60, 200), (600, 200), (600, 1)):
        for waited, computing in stalls(World(ratio, latency, readers=readers), history, new):
            assert waited <= 1.01 * computing / World.layers + 1e-9, "a layer's computing time at most"


def test_a_job_joins_as_soon_as_its_rows_will_be_there_in_time() -> None:
    world = World(ratio=0.3, layers=40)
    server = learned(world)
    server.ask(words(64, 50_000), max_tokens=0)
    server.to_disk()
    server.submit(words(5, 90_000), max_tokens=3000, write=False)
    server.step()
    job = server.submit([*words(64, 50_000), *words(200, 5000)], write=False)
    while not server.runs(job):
        began = server.now
        server.step()
    assert isinstance(server.executor, Disk)
    _, first, last = server.executor.reads[server.loads()[-1].move]
    assert first < began + (last - first) / 40 < last, "after the first layer or so, and long before the last"


RATIOS = [10 ** (exponent / 4) for exponent in range(-6, 7)]  # three orders of magnitude


def test_the_clock_tells_the_truth() -> None:
    # Loading 64 rows at half a row's compute; then one pass that waits for the last layer.
    world = World(ratio=0.5, latency=0.01, layers=8)
    server = learned(world)
    assert server.first_token(64, 1, "load") == pytest.approx(0.01 + 0.032 + world.computing(1, 64, 64) / 8)
    assert server.first_token(64, 1, "recompute") == pytest.approx(world.computing(65, 0, 0))


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("history", [64, 300, 640])
def test_the_promise_over_three_orders_of_magnitude(ratio: float, history: int) -> None:
    check(World(ratio), history, new=16)


@pytest.mark.parametrize("ratio", [0.1, 1.0, 10.0])
def test_the_promise_where_attention_takes_longest(ratio: float) -> None:
    check(World(ratio, product=ROW / 200), 640, new=16)


@pytest.mark.parametrize("latency", [0.001, 0.01, 0.1])
@pytest.mark.parametrize("ratio", [0.03, 0.3, 3.0])
def test_the_promise_where_each_read_has_a_latency(ratio: float, latency: float) -> None:
    check(World(ratio, latency), 640, new=16)


@settings(max_examples=40, deadline=None)
@given(
    exponent=st.floats(-1.5, 1.5),
    latency=st.sampled_from([0.0, 0.5, 5.0, 50.0]),
    product=st.sampled_from([0.0, 0.001, 0.01]),
    step=st.sampled_from([0.1, 1.0, 10.0]),
    gather=st.sampled_from([0.0, 0.02]),
    layers=st.sampled_from([1, 4, 40]),
    readers=st.sampled_from([1, 2]),
    history=st.integers(1, 640),
    new=st.integers(1, 128),
)
def test_the_promise_whatever_takes_how_long(
    exponent: float,
    latency: float,
    product: float,
    step: float,
    gather: float,
    layers: int,
    readers: int,
    history: int,
    new: int,
) -> None:
    """Everything in rows' computing time."""
    world = World(10**exponent, latency * ROW, product * ROW, step * ROW, gather * ROW, layers, readers)
    check(world, history, new)
