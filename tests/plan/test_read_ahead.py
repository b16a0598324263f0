"""Which rows are named to be read ahead of a job's turn, and that their slots stay just as long."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from afterglow.plan.scheduler import Scheduler
from afterglow.plan.step import Gather, RowsAhead, Step
from afterglow.plan.tiers.cost import Cost
from tests.plan.lasting_kit import Lasting
from tests.plan.server_kit import jobs_of, words
from tests.plan.test_random import World


class Buffered(Lasting):
    """A server of four layers whose device has a read buffer, and one seat."""

    def __init__(self, *, buffer: int = 400, layers: int = 4, row_s: float = 0.0, **more: object) -> None:
        """`row_s`: seconds in which a row of a layer comes from host."""
        self.buffer, self.layers, self.row_s = buffer, layers, row_s
        super().__init__(**{"source": "load", "max_batch": 1, **more})
        self.executor.capacity = self.capacity

    def make(self) -> Scheduler:
        sizes = {"read_buffer_rows": self.buffer, "layers": self.layers, "read_row_seconds": self.row_s}
        self.capacity = replace(self.capacity, **sizes)  # type: ignore[arg-type]
        return super().make()

    @property
    def pinned(self) -> set[str]:
        return {extent.id for extent in self.scheduler.cache.index.extents.values() if extent.pins}


def in_host(conversations: int = 1, rows: int = 20, **settings: object) -> Buffered:
    """A server that has so many conversations in host alone."""
    server = Buffered(**settings)
    for i in range(conversations):
        server.ask(words(rows, 1000 * (i + 1)), max_tokens=0, session=f"s{i + 1}")
    server.scheduler.drop_contexts()
    server.step()
    server.steps = []
    return server


def running(server: Buffered, tokens: int = 30) -> int:
    """A job that decodes, and leaves nothing."""
    job = server.submit(words(5, 90_000), max_tokens=tokens, write=False)
    assert server.step().ahead is None
    return job


def turn(server: Buffered, number: int = 1, rows: int = 20, **more: object) -> int:
    return server.submit([*words(rows, 1000 * number), 7], **more)  # type: ignore[arg-type]


def named(step: Step) -> RowsAhead:
    assert step.ahead is not None
    return step.ahead


def test_the_job_that_waits_for_a_seat_gathers_what_was_named_before() -> None:
    server = in_host()
    first = running(server)
    job = turn(server)
    ahead = named(server.step())
    assert (ahead.job, ahead.first, ahead.rows, ahead.layers) == (job, 0, 20, 4)
    assert server.pinned == {gather.extent for gather in ahead.gathers}
    while first not in server.ends:
        assert named(server.steps[-1]) == ahead
        server.step()
    step = server.step()
    assert jobs_of(step) == [job]
    assert step.runs[0].gathers == ahead.gathers
    assert step.ahead is None
    server.finish()
    assert not server.pinned


def test_the_first_job_in_the_queue_is_read_ahead_and_then_the_second() -> None:
    server = in_host(2)
    running(server, 3)
    jobs = [turn(server, 1), turn(server, 2)]
    assert named(server.step()).job == jobs[0]
    while jobs[0] not in jobs_of(server.steps[-1]):
        server.step()
    assert named(server.steps[-1]).job == jobs[1], "in the step that admits the first"
    server.nothing_left_behind()


def test_a_job_of_higher_priority_takes_the_place_and_the_other_extents_are_let_go() -> None:
    server = in_host(2)
    running(server)
    turn(server, 1)
    before = named(server.step())
    urgent = turn(server, 2, priority=-1)
    after = named(server.step())
    assert after.job == urgent
    assert server.pinned == {gather.extent for gather in after.gathers}
    assert not server.pinned & {gather.extent for gather in before.gathers}
    server.nothing_left_behind()


def test_a_cancelled_jobs_extents_are_let_go() -> None:
    server = in_host()
    running(server)
    job = turn(server)
    named(server.step())
    server.cancel(job)
    assert server.step().ahead is None
    assert not server.pinned
    server.nothing_left_behind()


@pytest.mark.parametrize("how", ["reset", "deleted"])
def test_what_is_forgotten_goes_although_it_is_read_ahead(how: str) -> None:
    server = in_host()
    running(server)
    job = turn(server)
    ahead = named(server.step())
    slots = {slot for gather in ahead.gathers for slot in gather.slots}
    if how == "reset":
        server.scheduler.reset(server.now)
    else:
        assert server.scheduler.forget_session("", "s1")
    assert server.scheduler.stats().extents == 0
    assert server.executor.kept == slots, "copies may read them up to the next step"
    assert server.step().ahead is None
    assert server.scheduler.stats().host_slots == 0
    server.finish()
    assert server.hits(job) == (0, 0, 0)


def test_slots_that_are_read_ahead_are_no_victims() -> None:
    server = in_host(2, host_slots=24, disk_bytes=10_000, prefill_chunk=8)
    running(server, 60)
    turn(server, 1)
    ahead = named(server.step())
    server.scheduler.drop_clean_host()
    other = server.submit(words(60, 5000), priority=-1)  # its rows need the slots of both conversations
    while other not in server.ends:
        step = server.step()
        assert step.ahead in (None, ahead)
    server.finish()


def test_no_more_than_a_quarter_of_host_is_kept() -> None:
    for slots, kept in ((20, True), (19, False)):
        server = in_host(host_slots=slots)  # twenty rows have five slots
        running(server)
        turn(server)
        assert (server.step().ahead is not None) == kept
        server.finish()


@pytest.mark.parametrize(("buffer", "layers"), [(0, None), (19, None), (20, 1), (79, 3), (400, 4)])
def test_as_many_layers_as_the_buffer_holds(buffer: int, layers: int | None) -> None:
    server = in_host(buffer=buffer)
    running(server)
    turn(server)
    ahead = server.step().ahead
    assert (None if ahead is None else ahead.layers) == layers
    server.finish()


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ({"read_buffer": 0}, None),
        ({"read_buffer": 3}, 3),
        ({"read_buffer": 9}, 4),
        ({"read_buffer": "auto"}, 4),
        ({"preload": "whole"}, None),
        ({"source": "recompute"}, None),
        ({"sliding_window": 8}, None),
    ],
)
def test_options(settings: dict[str, object], layers: int | None) -> None:
    server = in_host(**settings)
    running(server)
    turn(server)
    ahead = server.step().ahead
    assert (None if ahead is None else ahead.layers) == layers
    server.finish()


LLAMA_13B = {
    "layers": 40,
    "buffer": 800,
    "row_s": 0.02 / 40 / 0.65 / 20,
}  # computing a layer takes 0.65 of what its 20 rows take


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ({"read_buffer": "auto"}, 15),  # Fig. 19: 40 - 39 x 0.65 = 14.65
        ({"read_buffer": "paper"}, 14),  # 40 - 40 x 0.65
        ({"read_buffer": "auto", "buffer": 219}, 10),  # as many as it holds
        ({"read_buffer": "auto", "row_s": 1e-9}, 1),  # the first cannot come while another one is computed
        ({"read_buffer": "auto", "row_s": 0.0}, 40),  # it was not measured
        ({"read_buffer": 7}, 7),
        ({}, 40),
    ],
)
def test_as_many_layers_as_the_formula_says(
    settings: dict[str, object], layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cost, "compute", lambda self, rows, start, gathered=0: 0.02 * rows)
    server = in_host(**{**LLAMA_13B, **settings})
    running(server)
    turn(server)
    assert named(server.step()).layers == layers
    server.finish()


def test_before_computing_is_measured_all_layers_come() -> None:
    server = in_host(**{**LLAMA_13B, "read_buffer": "auto"})
    running(server)
    turn(server)
    assert server.scheduler.cache.cost.compute(1, 20) == 0
    assert named(server.step()).layers == 40
    server.finish()


def test_rows_on_disk_are_not_read_ahead_before_they_have_come() -> None:
    server = in_host(disk_bytes=10_000, host_slots=400, policy="lookahead")
    server.flush()
    server.scheduler.drop_clean_host()
    server.faults.delay = 3
    server.step()
    running(server)
    job = turn(server)
    step = server.step()  # the policy looks ahead
    assert step.moves
    while step.ahead is None:
        assert job not in jobs_of(step)
        step = server.step()
    assert all(gather.move is None for gather in step.ahead.gathers)
    server.finish()


def test_nothing_is_named_for_a_prompt_that_another_job_computes_just_now() -> None:
    server = in_host(prefill_chunk=4, max_batch=2)
    running(server)
    first = server.submit([*words(20, 1000), *words(30, 7000)])
    server.step()
    second = server.submit([*words(20, 1000), *words(30, 7000), 8])
    while first not in server.ends:
        assert server.step().ahead is None
    while second not in server.ends:
        server.step()
    assert server.computed(second) < 20
    server.finish()


@pytest.mark.parametrize("more", [{"read": False}, {"selects": True}])
def test_jobs_that_gather_nothing_as_a_whole(more: dict[str, object]) -> None:
    server = in_host()
    running(server)
    job = turn(server, **more)
    assert server.step().ahead is None
    server.cancel(job)


def test_an_idle_plan_keeps_nothing() -> None:
    server = in_host(max_batch=2)
    job = turn(server)
    step = server.step()
    assert jobs_of(step) == [job]
    assert step.ahead is None


def test_without_a_buffer_no_step_differs() -> None:
    def digests(buffer: int) -> list[tuple[object, ...]]:
        server = in_host(2, buffer=buffer)
        running(server)
        turn(server, 1)
        turn(server, 2)
        server.finish()
        return [tuple(getattr(step, name) for name in ("runs", "moves", "releases", "frees")) for step in server.steps]

    assert digests(0) == digests(400)


def test_rows_that_came_to_the_device_meanwhile_are_left_out() -> None:
    gathers = (Gather("a", 4, 8, (1, 2), None), Gather("b", 0, 4, (3,), None))
    ahead = RowsAhead(1, 4, gathers, 2)
    assert ahead.ends_with(4, gathers)
    assert ahead.ends_with(6, (Gather("a", 6, 8, (1, 2), None), gathers[1]))
    assert ahead.ends_with(8, gathers[1:])
    assert not ahead.ends_with(4, gathers[1:])
    assert not ahead.ends_with(0, (Gather("a", 0, 8, (1, 2), None), gathers[1]))
    assert not ahead.ends_with(4, (gathers[0]._replace(slots=(2, 1)), gathers[1]))
    assert not ahead.ends_with(4, (gathers[0]._replace(move=7), gathers[1]))


class ManyWait(World):
    """Few seats, and a device that often forgets: what jobs need is in host."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        rng = random.Random(seed)
        slots, buffer = rng.choice([60, 400]), rng.choice([32, 400])
        policy = rng.choice(["lookahead", "lru"])
        self.settings |= {
            "policy": policy,
            "max_batch": rng.choice([1, 1, 2]),
            "preload": "layerwise",
            "read_buffer": rng.choice([None, "auto", "paper"]),
        }
        sizes = {"read_buffer_rows": buffer, "host_slots": slots, "device_rows": 320}
        self.capacity = replace(self.capacity, read_row_seconds=rng.choice([0.0, 1e-3, 1e-1]), **sizes)
        self.forgetting, self.arrivals = 0.3, 0.6
        self.executor, self.journals = self.machine(), []
        self.scheduler = self.start()


@pytest.mark.parametrize("seed", range(300, 312))
def test_what_is_read_ahead_stays_whatever_happens(seed: int) -> None:
    """The executor looks whose rows they are, and that nothing is written where they lie."""
    world = ManyWait(seed)
    world.run(120)
    world.restart()
    world.run(60)
    world.drain()
    world.check_journals()


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_most_of_what_is_read_ahead_is_used() -> None:
    found = {"foreseen": 0, "other": 0}
    for seed in range(3000, 3100):
        world = ManyWait(seed)
        world.run(200)
        world.drain()
        world.check_journals()
        found = {name: count + world.executor.ahead[name] for name, count in found.items()}
    assert found["foreseen"] > 4 * found["other"]


def test_a_step_that_is_repeated_names_the_same() -> None:
    server = in_host()
    running(server)
    turn(server)
    server.step()
    steps = [server.step() for _ in range(8)]
    assert all(a.ahead is b.ahead for a, b in pairwise(steps))
    server.finish()
