"""The planner of several engines: the cheapest that meets the goal, with a shared store or without one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from afterglow.errors import ConfigError
from afterglow.sim.capacity.fleet import FleetSearch
from afterglow.sim.capacity.search import hit_rate
from afterglow.sim.scenario import Running
from afterglow.sim.scenario_options import ClusterConfig, EngineModel, GoalConfig, Scenario, TierConfig, WorkloadConfig

TIB = 2**40


def scenario(**values: Any) -> Scenario:
    made = Scenario(
        workload="sharegpt-atc",
        source=WorkloadConfig(conversations=8, think=10.0),
        engine=EngineModel(retain=False),
        tiers=TierConfig(),
        cluster=ClusterConfig(engines=2, router="random", shared_tier=TIB),
    )
    return made.with_values(**values)


def test_one_engine_is_cheapest_where_it_meets_the_goal() -> None:
    search = FleetSearch(scenario(), GoalConfig(hit_rate=0.7))
    best = search.run()
    assert (best.engines, best.shared_tier) == (1, 0)
    assert [(trial.engines, trial.shared_tier) for trial in search.trials] == [(1, 0), (2, 0), (2, TIB)]
    assert search.made == sum(trial.simulated for trial in search.trials)
    assert best.hourly == min(trial.hourly for trial in search.trials)


def test_what_is_found_meets_the_goal_when_it_is_simulated() -> None:
    """Turns go to any engine: without a store the history is elsewhere."""
    search = FleetSearch(scenario(), GoalConfig(hit_rate=0.8))
    search.run()
    _, alone, shared = search.trials
    assert alone.best is None
    assert "cannot be met" in alone.why
    found = shared.best
    assert found is not None
    assert found.disk > 0, "the store is read through it"
    again = Running(scenario(devices=found.devices, dram=found.dram, disk=found.disk))
    assert hit_rate(again.run()) == found.hit_rate >= 0.8
    assert shared.hourly == 2 * found.hourly.total


def test_a_goal_that_none_meets_is_told_for_each_number() -> None:
    search = FleetSearch(scenario(shared_tier=0), GoalConfig(hit_rate=0.9, ttft=0.0001, max_devices=1))
    with pytest.raises(ConfigError, match=r"1 engine: .* cannot be met: .*; 2 engines: .* cannot be met"):
        search.run()
    assert search.best is None


def test_a_workload_that_is_not_there_is_told_once() -> None:
    search = FleetSearch(replace(scenario(), workload="nothing.jsonl"), GoalConfig(hit_rate=0.8))
    with pytest.raises(ConfigError, match=r"^unknown workload 'nothing.jsonl'"):
        search.run()
    assert search.trials == []
