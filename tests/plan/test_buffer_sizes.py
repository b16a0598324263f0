"""Buffers of the size that the papers' formulas say, from rates that were measured while running."""

from __future__ import annotations

import math

import pytest

from afterglow.plan.options import Capacity
from afterglow.plan.tiers.buffers import read_buffer_layers, write_buffer_bytes
from afterglow.plan.tiers.cost import Cost, Work
from tests.plan.server_kit import jobs_of, words
from tests.plan.test_read_buffer import TURNS, Strict, on_disk, running, turn

LAYERS = 4


@pytest.mark.parametrize(
    ("layers", "load", "compute", "paper", "exact"),
    [
        (40, 1.0, 0.65, 14, 15),  # LLaMA-13B, as in Fig. 19: 40 - 26 = 14 layers, and 40 - 39 x 0.65 = 14.65
        (32, 2.0, 0.5, 24, 25),  # 32 - 32/4 = 24, 32 - 31/4 = 24.25
        (4, 1.0, 0.5, 2, 3),  # 4 - 2, and 4 - 1.5
        (4, 1.0, 2.0, 1, 1),  # computing takes longer: only the first layer is waited for
        (4, 1.0, 0.0, 4, 4),  # nothing to hide behind
    ],
)
def test_read_buffers_by_hand(layers: int, load: float, compute: float, paper: int, exact: int) -> None:
    assert read_buffer_layers(layers, load, compute, exact=False) == paper
    assert read_buffer_layers(layers, load, compute) == exact


def test_write_buffers_by_hand() -> None:
    # 12 GB at 24 GB/s take 0.5 s to save; a job that computes for 0.2 s behind its first layer leaves 7.2 GB.
    assert write_buffer_bytes(12_000, 24_000.0, 0.2) == 7_200
    assert write_buffer_bytes(12_000, 24_000.0, 0.5) == 0
    assert write_buffer_bytes(12_000, 24_000.0, 3.0) == 0, "saved long before"


# ------------------------------------------------------------------------------------------- loads that stop


def measured(layers: int = LAYERS) -> Cost:
    """A cost model that knows: a byte takes 1 ms, a row 20 ms."""
    cost = Cost(layers)
    teach(cost)
    return cost


def teach(cost: Cost, byte_s: float = 0.001, row_s: float = 0.02) -> None:
    for i in range(1, 13):
        cost.started(-i, 100 * i, now=0.0)
        cost.ended(-i, 100 * i, 100 * i * byte_s, now=0.0)
        work = Work()
        work.add(i, 0)
        cost.passed(work, i * row_s)


def test_a_load_that_stops_is_there_as_far_as_it_goes() -> None:
    cost = measured()
    cost.started(1, 1000, now=10.0, ahead=3)
    assert cost.is_held(1)
    assert cost.held_at([1]) == pytest.approx(10.75, rel=0.01)
    assert cost.coming([1], (), now=20.0)[1] == pytest.approx(0.25, abs=0.01), "if it went on now, and it is not late"
    cost.resumed(1, now=20.0)
    assert not cost.is_held(1)
    assert cost.coming([1], (), now=20.1)[1] == pytest.approx(0.15, abs=0.01)


def test_others_are_read_while_a_load_stops() -> None:
    cost = measured()
    cost.started(1, 1000, now=0.0, ahead=1)
    assert cost.loads([1000], now=0.0) == pytest.approx(1.25, rel=0.01)
    cost.ended(1, 0, 0.0, now=0.5)
    assert not cost.is_held(1)


def test_loads_alone_take_turns_on_the_readers() -> None:
    cost = Cost(LAYERS, readers=2)
    teach(cost)
    cost.started(1, 9000, now=0.0)
    assert cost.alone([1000, 1000, 500]) == pytest.approx(1.5, rel=0.01)


# ---------------------------------------------------------------------------------------------- in the plan


@pytest.mark.parametrize(("form", "new"), [("auto", 2), ("auto", 8), ("auto", 14), ("paper", 14), ("auto", 30)])
@pytest.mark.parametrize("policy", ["lru", "lookahead"])
def test_loads_for_the_next_job_stop_at_the_formulas_size(form: str, new: int, policy: str) -> None:
    server = on_disk(read_buffer=form, max_batch=1, policy=policy, source="load", layers=LAYERS)
    first = running(server, tokens=8)
    cost = server.scheduler.cache.cost
    teach(cost)
    job = server.submit([*words(30, 1000), *range(new)], max_tokens=2)
    while first not in server.ends:
        assert server.step().urged == ()
    loads = server.loads()
    load = cost.alone([extent_bytes(server.scheduler.capacity, each.rows) for each in loads]) / LAYERS
    compute = cost.compute(new, 30) / LAYERS
    lead = LAYERS - (LAYERS - (form == "auto")) * compute / load
    wanted = min(LAYERS, max(1, math.ceil(lead - 1e-9)))
    assert {each.ahead for each in loads} == {wanted if wanted < LAYERS else None}
    assert server.scheduler.stats().read_buffer_layers == wanted
    step = server.step()
    assert jobs_of(step) == [job]
    server.finish()
    assert sum(server.hits(job)) == 30


@pytest.mark.parametrize("form", ["auto", "paper"])
def test_beside_others_a_job_joins_when_its_buffer_is_full(form: str) -> None:
    server = on_disk(read_buffer=form, max_batch=2, source="load", layers=LAYERS, row_seconds=0.02)
    running(server, tokens=40)
    teach(server.scheduler.cache.cost)
    server.submit([*words(30, 1000), *range(18)], max_tokens=2)
    server.step()
    cost, moves = server.scheduler.cache.cost, [load.move for load in server.loads()]
    assert all(cost.is_held(move) for move in moves)
    full = cost.held_at(moves)
    assert full > server.now
    server.now = full - 1e-3
    assert len(jobs_of(server.step())) == 1
    server.now = max(server.now, full)
    step = server.step()
    assert len(jobs_of(step)) == 2
    assert sorted(step.urged) == sorted(moves)
    server.finish()


def extent_bytes(capacity: Capacity, rows: int) -> int:
    return capacity.file_size(rows)


def test_before_anything_is_measured_all_layers_come() -> None:
    server = on_disk(read_buffer="auto", max_batch=1, policy="lru")
    running(server, tokens=4)
    turn(server)
    server.step()
    assert [load.ahead for load in server.loads()] == [None, None]
    assert server.scheduler.stats().read_buffer_layers == 0


def test_what_survives_a_truncation_is_read_whole() -> None:
    server = Strict(max_model_len=64, read_buffer="auto")
    teach(server.scheduler.cache.cost)
    server.ask(words(56), truncation=True, turns=TURNS[:4])
    server.to_disk()
    job = server.ask(words(68), truncation=True, turns=TURNS)
    assert server.hits(job) == (0, 0, 20)
