"""The planner: what it finds meets the goal and nothing a step smaller does; it says how far an unmet goal gets."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from afterglow.errors import ConfigError
from afterglow.sim.capacity.bill import charged, hourly, price_list
from afterglow.sim.capacity.census import Census, WorkingSet
from afterglow.sim.capacity.search import GIB, Search, _first, device_counts, hit_rate, sizes
from afterglow.sim.machine.catalogue import prices
from afterglow.sim.scenario import Running
from afterglow.sim.scenario_options import (
    ClusterConfig,
    EngineModel,
    GoalConfig,
    Scenario,
    TierConfig,
    WorkloadConfig,
    parse_option,
)
from afterglow.sim.sweep import checked, points
from afterglow.sim.workload.traces import TraceSource
from afterglow.sim.workload.turns import Arrival, StreamSegment, TraceTurn


def scenario(**values: Any) -> Scenario:
    made = Scenario(
        workload="sharegpt-atc",
        source=WorkloadConfig(conversations=30, think=10.0),
        engine=EngineModel(retain=False),
        tiers=TierConfig(),
        cluster=ClusterConfig(),
    )
    return made.with_values(**values)


def test_the_cheapest_meets_the_goal_and_a_step_less_does_not() -> None:
    search = Search(scenario(), GoalConfig(hit_rate=0.8))
    best = search.run()
    assert best.met
    assert best.hit_rate >= 0.8
    assert best.devices == 1
    assert len(search.trials) <= 20
    assert best.hourly.total == min(trial.hourly.total for trial in search.trials if trial.met)
    grid = [0, *sizes(GIB, best.disk, best.disk)]
    less = scenario(devices=best.devices, dram=best.dram, disk=grid[grid.index(best.disk) - 1])
    assert best.disk > 0
    assert hit_rate(Running(less).run()) < 0.8


def test_the_working_set_is_the_workloads() -> None:
    search = Search(scenario(), GoalConfig(hit_rate=0.5))
    best = search.run()
    found = search.working_set
    assert found is not None
    assert found.sessions == 30
    assert found.session_bytes == 2048 * 2 * 40 * 5120 * 2
    assert found.most_bytes == 30 * found.session_bytes
    assert 0 < found.bytes < found.most_bytes
    assert best.dram + best.disk < 4 * found.most_bytes


def test_more_devices_where_one_is_too_slow() -> None:
    slow = Search(scenario(), GoalConfig(ttft=10.0)).run()
    quick = Search(scenario(), GoalConfig(ttft=0.06, ttft_of="mean")).run()
    assert slow.devices == 1
    assert quick.devices == 2
    assert quick.figures["ttft_mean"] <= 0.06


def test_a_goal_that_cannot_be_met_says_how_far_it_gets() -> None:
    search = Search(scenario(), GoalConfig(hit_rate=0.9, ttft=0.0001, max_devices=2))
    with pytest.raises(
        ConfigError, match=r"cannot be met: the hit rate gets up to .* %.*, the TTFT \(p99\) down to .* s \(2 dev"
    ):
        search.run()
    assert search.best is None
    assert [trial.devices for trial in search.trials] == [1, 2]


def mooncake(path: Path, requests: Iterable[int], blocks: int, output: int) -> Path:
    """Write requests as a trace, one per second: those of one number ask the same `blocks` blocks."""
    rows = [
        {
            "timestamp": 1000 * at,
            "input_length": 512 * blocks,
            "output_length": output,
            "hash_ids": list(range(blocks * number, blocks * (number + 1))),
        }
        for at, number in enumerate(requests)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_trace_of_single_requests_is_planned(tmp_path: Path) -> None:
    trace = mooncake(tmp_path / "trace.jsonl", [i % 20 for i in range(120)], blocks=3, output=8)
    search = Search(
        replace(scenario(conversations=None), workload=str(trace)), GoalConfig(hit_rate=0.7, max_devices=1, max_disk=0)
    )
    best = search.run()
    assert best.hit_rate >= 0.7
    assert search.working_set is not None
    assert search.working_set.all_rows == 20 * 1536 + 120 * 8


def test_a_goal_that_a_trial_met_is_planned_however_small_the_working_set_looks(tmp_path: Path) -> None:
    trace = mooncake(tmp_path / "trace.jsonl", [i % 8 for i in range(32)], blocks=3, output=1)
    search = Search(replace(scenario(conversations=None), workload=str(trace)), GoalConfig(hit_rate=0.7, max_devices=1))
    search.working_set = WorkingSet(unit=3600.0, sessions=1, rows=1, all_rows=1, window=2048, row_bytes=1)
    best = search.run()
    assert best.met
    assert best.dram + best.disk < 64 * GIB, "sizes between those tried at first and the largest are tried too"


def test_what_cannot_be_planned_is_said_before_anything_is_simulated() -> None:
    goal = GoalConfig(hit_rate=0.9)
    with pytest.raises(ConfigError, match="takes 2 A100-80G, and --max-devices is 1"):
        Search(scenario(model="LLaMA-65B"), GoalConfig(hit_rate=0.9, max_devices=1))
    with pytest.raises(
        ConfigError, match=r"what an hour of CPU-2 costs is not known; give --prices .* \[devices\] CPU-2 ="
    ):
        Search(scenario(hardware="CPU-2", model="Llama-3.2-3B"), goal)
    with pytest.raises(ConfigError, match="--max-dram must be"):
        Search(scenario(), GoalConfig(hit_rate=0.9, max_dram=GIB))
    with pytest.raises(ConfigError, match="a plan needs a goal"):
        GoalConfig()


def test_sizes_are_round_and_end_where_they_are_enough() -> None:
    assert sizes(GIB, 10 * GIB, 64 * GIB) == [n * GIB for n in (1, 1.5, 2, 3, 4, 6, 8, 12)]
    assert sizes(5 * GIB, 10**15, 10 * GIB) == [6 * GIB, 8 * GIB, 10 * GIB]
    assert sizes(GIB, GIB, GIB) == [GIB]


def test_devices_are_powers_of_two_between_the_fewest_and_the_most() -> None:
    assert device_counts(1, 8) == [1, 2, 4, 8]
    assert device_counts(3, 12) == [3, 4, 8, 12]
    assert device_counts(2, 2) == [2]


@pytest.mark.parametrize("answer", [0, 1, 7, 15])
def test_bisection(answer: int) -> None:
    asked: list[int] = []

    def met(i: int) -> bool:
        asked.append(i)
        return i >= answer

    assert _first(0, 15, met) == answer
    assert len(asked) <= 6
    assert _first(0, 15, lambda i: False) is None


def arrival(time: float, session: str, start: int, length: int, stream: str = "") -> Arrival:
    return Arrival(time, TraceTurn(session, 0, (StreamSegment(stream or session, start, length),), (), length))


def test_census_counts_the_busiest_unit() -> None:
    census = Census(3600.0, 1000, 10)
    for each in (
        arrival(0, "a", 0, 100),
        arrival(10, "b", 0, 200),
        arrival(20, "a", 0, 300),  # the next turn of a: 200 new tokens
        arrival(30, "c", 0, 150, "b"),  # the same tokens as b's
        arrival(3700, "d", 0, 5000),  # no more than a context holds
    ):
        census.add(each)
    found = census.result()
    assert (found.sessions, found.rows, found.all_rows) == (3, 1000, 1500)
    assert (found.session_bytes, found.most_bytes, found.bytes) == (10_000, 30_000, 10_000)


def test_census_counts_all_blocks_of_single_requests(tmp_path: Path) -> None:
    census = Census(3600.0, 4096, 10)
    for conversation in TraceSource(mooncake(tmp_path / "trace.jsonl", range(200), blocks=4, output=16)):
        for turn in conversation.turns:
            census.add(Arrival(conversation.start, turn))
    assert census.result().all_rows == 200 * (2048 + 16)


def test_census_counts_rows_that_several_parts_of_a_stream_have_once() -> None:
    census = Census(3600.0, 1000, 10)
    for session, start, length in (("a", 0, 100), ("b", 300, 100), ("c", 600, 100), ("d", 50, 300), ("e", 400, 50)):
        census.add(arrival(0, session, start, length, "blocks"))
    assert census.result().all_rows == 450 + 100
    census.add(arrival(0, "f", 0, 4000, "blocks"))
    assert census.result().all_rows == 4000
    census.add(arrival(0, "f", 4000, 4000, "blocks"))
    assert census.result().all_rows == 6000, "no more than all contexts hold"


@pytest.mark.parametrize(("devices", "share"), [(2, 0.164), (4, 0.090)])
def test_storages_share_of_the_papers_bill(devices: int, share: float) -> None:
    wanted = scenario(devices=devices, dram=128 * GIB, disk=10 * 2**40)
    bill = charged(wanted, prices("cachedattention"), 7 * 3600.0)
    assert bill.storage / bill.total == pytest.approx(share, abs=0.0005)
    assert bill.total == pytest.approx(7 * hourly(wanted, prices("cachedattention")).total)
    assert charged(wanted.with_values(mode="recompute"), prices("cachedattention"), 3600.0).total == 5 * devices


def test_a_sweep_of_devices_has_costs_of_one_list() -> None:
    def lists(*sweeps: str) -> list[str | None]:
        found = [price_list(each) for each in checked(scenario(), points(list(sweeps)))]
        return [each.name if each is not None else None for each in found]

    assert lists("hardware=A100-80G,H100,L40S") == ["aws"] * 3
    assert lists("hardware=H100,H200") == ["aws"] * 2
    assert lists("hardware=A100-80G,A40") == ["relayattention"] * 2
    assert lists("disk=0,1T") == ["cachedattention"] * 2  # the papers', as for one simulation
    assert lists("hardware=A40,H100") == ["relayattention", "aws"]  # none has both
    assert lists("hardware=A100-80G,CPU-2") == ["cachedattention", None]
    assert lists("prices=aws,cachedattention") == ["aws", "cachedattention"]


def test_sweeps_make_grids_and_pairs() -> None:
    grid = points(["disk=1T,0", "policy=lru,fifo"])
    assert [(p.values["disk"], p.values["policy"]) for p in grid] == [
        (2**40, "lru"), (2**40, "fifo"), (0, "lru"), (0, "fifo"),
    ]  # fmt: skip
    pairs = points(["engines,rate=1:0.5,10:5"])
    assert [point.values for point in pairs] == [{"engines": 1, "rate": 0.5}, {"engines": 10, "rate": 5.0}]
    both = points(["engines,rate=1:0.5,10:5", "policy=lru,fifo"])
    assert {(*point.first, len(point.values)) for point in both} == {("engines", "rate", 3)}
    assert points(["retain=yes,no", "window=none,512"])[1].values == {"retain": True, "window": 512}
    assert [point.values for point in points([])] == [{}]


@pytest.mark.parametrize(
    ("sweep", "said"),
    [
        ("dsk=1", "unknown option to sweep 'dsk': did you mean disk"),
        ("disk", "write an option and its values"),
        ("disk=x", "'x' is not a size"),
        ("max-batch=1.5", "--max-batch: '1.5' is not a whole number"),
        ("engines,rate=1", "should be 2 values"),
        ("retain=maybe", "yes or no"),
    ],
)
def test_a_sweep_that_cannot_be(sweep: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        points([sweep])


@pytest.mark.parametrize("name", ["kv_dtype", "format", "window", "ttl", "calibration"])
def test_an_option_that_may_be_none_is_swept_without_it(name: str) -> None:
    assert parse_option(name, "none") is None


def test_a_sweep_of_dtypes_has_none_among_them() -> None:
    swept = checked(scenario(), points(["kv-dtype=none,int8"]))
    assert [each.engine.kv_dtype for each in swept] == [None, "int8"]


def test_a_sweep_names_an_option_once() -> None:
    with pytest.raises(ConfigError, match="given twice"):
        points(["disk=1", "disk=2"])
