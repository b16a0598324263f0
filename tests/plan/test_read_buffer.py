"""The papers' baselines: all rows before a job joins, or so many layers before its turn; no job waits for ever.

The executor here is strict: of a load that stops at the read buffer nothing more comes before the plan has urged it.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from afterglow.plan.scheduler import Scheduler
from afterglow.plan.step import Copy, Load, Step, StepResult, TransferDone
from tests import doors
from tests.plan.fake_executor import FakeExecutor
from tests.plan.lasting_kit import Lasting
from tests.plan.server_kit import FOREVER, Steady, jobs_of, words

TURNS = tuple(range(8, 61, 12))


class Gated(FakeExecutor):
    """Loads end only when their gates are open."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.open: set[int] = set()
        self.came = 0  # completions of the last tick

    def execute(self, step: Step) -> StepResult:
        starting = {move.move for move in step.moves}
        assert all(move in self.pending or move in starting for move in step.urged), "it is not under way"
        assert len(set(step.urged)) == len(step.urged)
        self.open |= set(step.urged)
        return super().execute(step)

    def is_open(self, number: int) -> bool:
        move = self.pending[number].move
        return not isinstance(move, Load) or move.ahead is None or number in self.open

    def _end(self, number: int) -> None:
        assert self.is_open(number), "a job waits for what will never come"
        super()._end(number)

    def tick(self) -> list[TransferDone]:
        for number, pending in self.pending.items():
            if not self.is_open(number):
                pending.ticks = max(pending.ticks, 1)
        done = super().tick()
        self.came = len(done)
        return done


class Strict(Lasting):
    """A server with that executor. `layers`: of the model."""

    def __init__(self, *, layers: int = 4, **more: object) -> None:
        self.layers = layers
        super().__init__(**{"disk_bytes": 100_000, "source": "load", **more})
        self.executor = Gated(self.capacity, Steady(), self.faults)

    def make(self) -> Scheduler:
        self.capacity = replace(self.capacity, layers=self.layers)
        return super().make()

    def restart(self, **more: object) -> None:
        super().restart(**more)  # type: ignore[arg-type]
        old = self.executor
        self.executor = Gated(self.capacity, Steady(), self.faults)
        self.executor.files, self.executor.catalog, self.executor.texts = old.files, old.catalog, old.texts

    def step(self) -> Step:
        """An engine sleeps when there is nothing to do, until something comes or it is told to look again."""
        step = super().step()
        assert isinstance(self.executor, Gated)
        coming = self.executor.came or self.executor.busy or self.withheld
        if step.idle and not coming and self.scheduler.unfinished:
            assert step.wake_at is not None, "it sleeps for ever, and a job waits"
        return step

    def finish(self) -> None:
        """The same, but it does not wait for ever for what never ends."""
        for _ in range(1000):
            if not self.scheduler.unfinished:
                break
            self.step()
        self.faults.delay = 0
        for pending in self.executor.pending.values():
            pending.ticks = 0
        for _ in range(100):
            if not self.scheduler.stats().moves_in_flight and not self.executor.busy:
                break
            self.step()
        assert not self.scheduler.stats().moves_in_flight, "a load that is never let go on"
        super().finish()

    def gates(self) -> list[int]:
        """Loads that stand before a closed gate."""
        assert isinstance(self.executor, Gated)
        return [number for number in self.executor.pending if not self.executor.is_open(number)]


def on_disk(conversations: int = 1, rows: int = 30, row_seconds: float | None = None, **settings: object) -> Strict:
    """A server that has so many conversations on disk."""
    server = Strict(**settings)
    server.row_seconds = row_seconds
    for i in range(conversations):
        server.ask(words(rows, 1000 * (i + 1)), max_tokens=0, session=f"s{i + 1}")
    server.to_disk()
    server.steps = []
    return server


def turn(server: Strict, number: int = 1, rows: int = 30, **more: object) -> int:
    return server.submit([*words(rows, 1000 * number), 7], **more)  # type: ignore[arg-type]


def running(server: Strict, tokens: int = 40) -> int:
    job = server.submit(words(5, 90_000), max_tokens=tokens, write=False)
    server.step()
    return job


# ------------------------------------------------------------------------------------------------- all at first


def test_layer_by_layer_an_idle_engine_begins_before_the_rows_are_there() -> None:
    server = on_disk()
    server.faults.delay = 5
    job = turn(server)
    assert jobs_of(server.step()) == [job]
    server.finish()


def test_whole_it_waits_until_all_rows_are_there() -> None:
    server = on_disk(preload="whole")
    server.faults.delay = 5
    job = turn(server)
    for _ in range(6):
        assert jobs_of(server.step()) == []
    step = server.step()
    assert jobs_of(step) == [job]
    assert len(step.runs[0].gathers) == 2
    server.finish()
    assert server.hits(job) == (0, 0, 30)


def taught(preload: str, seconds: float) -> Strict:
    """It is known that a load takes a moment and computing takes long."""
    server = on_disk(6, row_seconds=1.0, preload=preload, layers=100)
    server.faults.seconds = seconds
    for i in range(2, 7):
        turn(server, i)
        server.finish()
    for rows in range(4, 24):
        server.ask(words(rows, 20_000 + 100 * rows), write=False)
    server.steps = []
    return server


def test_layer_by_layer_a_load_that_fits_behind_computing_is_not_waited_for() -> None:
    server = taught("layerwise", seconds=0.01)
    running(server)
    server.faults.delay = 2
    job = server.submit([*words(30, 1000), *words(40, 500)], write=False)
    assert job in jobs_of(server.step())
    server.finish()


def test_whole_a_load_that_would_fit_behind_computing_is_waited_for_all_the_same() -> None:
    server = taught("whole", seconds=0.01)
    decoding = running(server)
    server.faults.delay = 2
    job = server.submit([*words(30, 1000), *words(40, 500)], write=False)
    while job not in jobs_of(server.steps[-1]):
        step = server.step()
        assert decoding in jobs_of(step), "the others do not wait"
        if job in jobs_of(step):
            assert not any(isinstance(pending.move, Load) for pending in server.executor.pending.values())
    server.finish()
    assert server.hits(job) == (0, 0, 30)


def test_whole_a_job_that_needs_no_load_passes() -> None:
    server = on_disk(preload="whole")
    server.faults.delay = 9
    slow = turn(server)
    other = server.submit(words(5, 5000), max_tokens=2)
    assert jobs_of(server.step()) == [other]
    server.finish()
    assert server.ends[slow] == "length"


def test_whole_the_tail_of_a_split_prefill_is_waited_for_too() -> None:
    server = taught("whole", seconds=4.0)
    server.scheduler.baseline("whole", None, "auto")
    server.faults.delay = 3
    job = turn(server)
    seen = []
    while job not in server.ends:
        step = server.step()
        loading = [pending.move.move for pending in server.executor.pending.values()]
        for run in step.runs:
            seen.append(run.start)
            assert not any(gather.move in loading for gather in run.gathers), "not one layer may be missing"
    assert seen == [0, 30], "the head was computed while the tail was loaded"
    server.finish()


def test_whole_a_load_that_fails_costs_a_second_try() -> None:
    server = on_disk(preload="whole")
    server.executor.damaged = set(server.executor.files)
    job = turn(server)
    server.finish()
    assert server.hits(job) == (0, 0, 0)
    assert server.computed(job) == 31


# -------------------------------------------------------------------------------------------- a buffer of so many


@pytest.mark.parametrize("layers", [None, 0, 3])
def test_loads_say_how_many_layers_may_come_before_the_jobs_turn(layers: int | None) -> None:
    server = on_disk(read_buffer=layers)
    job = turn(server)
    server.finish()
    assert [load.ahead for load in server.loads()] == [layers, layers]
    assert server.hits(job) == (0, 0, 30)


@pytest.mark.parametrize("beside", [False, True])
def test_when_a_job_joins_all_its_loads_go_on(beside: bool) -> None:
    server = on_disk(read_buffer=2)
    if beside:
        running(server)
    server.faults.delay = FOREVER
    job = turn(server)
    step = server.step()
    assert job in jobs_of(step), "it joins at once, and computes while its layers come"
    assert sorted(step.urged) == sorted(move.move for move in step.moves)
    server.finish()
    assert server.hits(job) == (0, 0, 30)


@pytest.mark.parametrize("policy", ["lru", "lookahead"])
def test_what_is_read_for_the_next_job_stops_at_the_buffer_until_its_turn(policy: str) -> None:
    server = on_disk(read_buffer=2, max_batch=1, policy=policy)
    first = running(server, tokens=8)
    job = turn(server)
    while first not in server.ends:
        step = server.step()
        assert step.urged == ()
    assert len(server.gates()) == 2
    step = server.step()
    assert (jobs_of(step), len(step.urged)) == ([job], 2)
    assert server.gates() == []
    server.finish()
    assert server.hits(job) == (0, 0, 30)


def test_a_job_whose_turn_is_put_off_does_not_fill_more_than_the_buffer() -> None:
    # There is a seat, but no room on the device.
    server = on_disk(read_buffer=2, device_rows=64)
    first = server.submit(words(40, 5000), max_tokens=10, write=False)
    server.step()
    job = turn(server, max_tokens=2)
    while first not in server.ends:
        step = server.step()
        assert step.urged == ()
    server.finish()
    assert server.hits(job) == (0, 0, 30)


def test_the_buffer_is_filled_for_the_next_job_only() -> None:
    server = on_disk(3, read_buffer=2, max_batch=1, policy="lru")
    running(server)
    for i in (1, 2, 3):
        turn(server, i)
    server.step()
    server.step()
    names = {load.extent for load in server.loads()}
    (first,) = (s for s in doors.sessions_of(server.scheduler).values() if s.name == "s1")
    assert names == {extent.id for extent in first.extents}
    server.finish()


def test_without_a_buffer_nothing_is_read_before_the_jobs_turn() -> None:
    server = on_disk(read_buffer=0, max_batch=1, policy="lru")
    first = running(server, tokens=6)
    job = turn(server)
    while first not in server.ends:
        server.step()
    assert server.loads() == []
    server.finish()
    assert server.hits(job) == (0, 0, 30)


def test_what_two_jobs_need_goes_on_with_the_first_that_joins() -> None:
    server = on_disk(read_buffer=2, max_batch=2)
    running(server)
    jobs = [turn(server, max_tokens=2, priority=-i) for i in range(2)]
    step = server.step()
    assert jobs[1] in jobs_of(step)
    assert len(step.urged) == 2
    server.finish()
    assert [sum(server.hits(job)) for job in jobs] == [30, 30]


def test_a_warm_start_knows_no_buffer() -> None:
    server = on_disk(read_buffer=2, warm_start=True)
    server.restart()
    server.finish()
    assert [load.ahead for load in server.loads()] == [None, None]
    assert server.scheduler.stats().host_slots == 8


# ------------------------------------------------------------------------------------------------ no wait for ever


def waiting(policy: str = "lru", layers: int = 2, **settings: object) -> tuple[Strict, int, int]:
    """What a job needs that waits for its turn stands before closed gates."""
    server = on_disk(read_buffer=layers, max_batch=1, policy=policy, **settings)
    first = running(server)
    job = turn(server)
    server.step()
    assert len(server.gates()) == 2
    return server, first, job


@pytest.mark.parametrize(("policy", "layers"), [("lru", 2), ("lookahead", 2), ("lookahead", 0)])
def test_when_the_job_is_cancelled_its_loads_go_on(policy: str, layers: int) -> None:
    server, _, job = waiting(policy, layers)
    server.cancel(job)
    assert len(server.step().urged) == 2
    assert server.step().urged == ()
    server.finish()
    assert server.known(words(30, 1000)) == 30
    assert server.scheduler.stats().host_slots == 8, "the rows read may stay"


@pytest.mark.parametrize("which", ["its own", "another"])
def test_what_is_deleted_while_it_is_read_gives_its_slots_back(which: str) -> None:
    server, first, job = waiting()
    server.scheduler.drop_contexts()
    if which == "its own":
        server.scheduler.forget_session("", "s1")
    else:
        server.scheduler.reset(server.now)
    server.cancel(first)
    server.finish()
    assert server.ends[job] == "length"
    assert sum(server.hits(job)) == 0
    server.nothing_left_behind()


def test_a_flush_does_not_wait_for_what_nobody_lets_go_on() -> None:
    server, first, job = waiting()
    server.cancel(first)
    server.cancel(job)
    server.flush()
    assert server.scheduler.flushed


def test_a_flush_beside_a_waiting_job_ends() -> None:
    server, _, _ = waiting()
    server.scheduler.flush(server.now)
    for _ in range(10):
        server.step()
        if server.scheduler.flushed:
            break
    assert server.scheduler.flushed
    server.finish()


def test_when_the_buffer_is_taken_away_what_stands_before_it_goes_on() -> None:
    server, _, job = waiting()
    server.scheduler.baseline("whole", None, "load")
    assert len(server.step().urged) == 2
    server.finish()
    assert server.hits(job) == (0, 30, 0)


@pytest.mark.parametrize("layers", [0, 2])
def test_what_survives_a_truncation_is_read_whole(layers: int) -> None:
    server = Strict(max_model_len=64, read_buffer=layers)
    server.ask(words(56), truncation=True, turns=TURNS[:4])
    server.to_disk()
    job = server.ask(words(68), truncation=True, turns=TURNS)
    assert server.hits(job) == (0, 0, 20)
    assert any(isinstance(move, Copy) for step in server.steps for move in step.moves)


@pytest.mark.parametrize("preload", ["layerwise", "whole"])
@pytest.mark.parametrize("busy", [0.0, 1.0])
def test_loads_that_fail_at_the_buffer_cost_no_answer(preload: str, busy: float) -> None:
    server = on_disk(read_buffer=2, preload=preload)
    server.faults.load, server.faults.busy = 1.0, busy
    jobs = [turn(server, max_tokens=3) for _ in range(3)]
    server.finish()
    assert {server.ends[job] for job in jobs} == {"length"}


def test_whole_and_a_buffer_together_do_not_wait_for_each_other() -> None:
    server = on_disk(2, read_buffer=0, preload="whole", max_batch=1)
    jobs = [turn(server, i, max_tokens=3) for i in (1, 2)]
    server.finish()
    assert [server.hits(job) for job in jobs] == [(0, 0, 30)] * 2


@pytest.mark.parametrize("seed", range(40))
def test_nothing_ever_waits_for_ever(seed: int) -> None:
    """Jobs, cancellations, deletions and changes of baseline, on a disk that keeps to the gates."""
    rng = random.Random(seed)
    buffer = rng.choice([0, 1, 3, "auto", "paper"])
    server = on_disk(
        4, rows=20, policy=rng.choice(["lru", "lookahead"]), read_buffer=buffer,
        host_slots=rng.choice([12, 60]), preload=rng.choice(["layerwise", "whole"]) if buffer in (0, 1, 3) else "layerwise",
        source=rng.choice(["auto", "load"]), max_batch=rng.choice([1, 2, 5]),
        device_rows=rng.choice([64, 400]), prefill_chunk=rng.choice([0, 8, 64]), warm_start=True,
    )  # fmt: skip
    server.row_seconds = rng.choice([None, 0.01, 1.0])
    server.faults.seconds = rng.choice([0.01, 1.0])
    for _ in range(3):
        jobs: list[int] = []
        for _ in range(12):
            server.faults.delay = rng.choice([0, 2, 6])
            if rng.random() < 0.6:
                jobs.append(turn(server, rng.randint(1, 4), rng.randint(1, 20), max_tokens=rng.randint(0, 5)))
            for _ in range(rng.randint(0, 3)):
                server.step()
            if jobs and rng.random() < 0.3:
                server.cancel(rng.choice(jobs))
            if rng.random() < 0.1:
                server.scheduler.forget_session("", f"s{rng.randint(1, 4)}")
            if rng.random() < 0.05:
                server.scheduler.reset(server.now)
            if rng.random() < 0.1:
                preload = rng.choice(["layerwise", "whole"])
                sizes = [None, 0, 2] if preload == "whole" else [None, 0, 2, "auto"]
                server.scheduler.baseline(preload, rng.choice(sizes), rng.choice(["auto", "load"]))
        server.finish()
        assert all(job in server.ends for job in jobs)
        if rng.random() < 0.3:
            server.restart()
        else:
            server.to_disk()
