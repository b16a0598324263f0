"""Load or recompute at many rates: what is judged, how, and that the command's engines load from the tier that is slow."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.papers.cachedattention import tier_rates
from benchmarks.papers.cachedattention.tier_rates import Shape, bench_of, break_even, goals, old_choices, summary

from afterglow.engine.engine import Engine
from afterglow.store.extents.throttle import ArtificiallySlowTier

SHAPE = Shape("tiny", turns=2, rows=64, new=4)
OPTIONS = argparse.Namespace(threads=1, seed=0)


def row(choice: float, loaded: list[int], **of: float) -> dict[str, Any]:
    found = {"load": [1.0], "recompute": [1.0], "choice": [choice], "choice again": [choice]}
    return summary("disk", 10, found | {arm: [seconds] for arm, seconds in of.items()}, loaded, 2_000_000, 100)


def test_the_choice_is_judged_by_the_better_way() -> None:
    found = row(0.9, [40, 60], load=2.0)
    assert (found["ratio"], found["split"], found["loaded"], found["a_a"]) == (0.9, True, 50, 0.0)
    assert not row(0.9, [0, 0])["split"]
    assert not row(0.9, [100, 100])["split"]
    assert row(1.0, [0], **{"choice again": 1.2})["a_a"] == 0.2
    assert break_even([found]) == 2.0  # MB in the second that computing takes


def test_a_split_has_to_gain() -> None:
    def best(rows: list[dict[str, Any]]) -> dict[str, Any]:
        return next(each for each in goals(rows, []) if each["name"] == "the best split / better way")

    assert best([row(0.5, [50]), row(0.4, [100])])["value"] == 0.5
    assert best([row(0.5, [50])])["met"]
    assert not best([row(0.95, [50])])["met"]
    assert not best([row(0.5, [100]), row(0.5, [0])])["met"], "nothing was split"
    assert [each["met"] for each in goals([row(1.1, [0]), row(1.11, [0])], [])][:2] == [True, False]


def test_turns_of_the_old_choice_are_counted_until_the_right_one_stays() -> None:
    assert old_choices([1.0, 0.0, 0.0], loads=False) == 1
    assert old_choices([0.0, 0.25, 0.0], loads=False) == 0
    assert old_choices([0.0, 1.0, 0.0, 1.0], loads=True) == 3
    assert old_choices([0.0, 0.0], loads=True) == 2


def test_phases_too_short_to_miss_a_goal_are_not_judged() -> None:
    def change(turns: int) -> dict[str, Any]:
        phases = [{"mb_per_s": 1, "loaded": [1.0] * turns, "old": turns}] * 3
        return {"tier": "disk", "phases": phases}

    met = {each["name"]: each["met"] for each in goals([], [change(10)])}
    assert not any(met.values())
    assert len(met) == 3
    assert len(goals([], [change(9)])) == 2
    assert len(goals([], [change(1)])) == 1


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_history_is_loaded_over_the_slow_line(tier: tier_rates.Slowed) -> None:
    with bench_of(SHAPE, tier, 1000, OPTIONS) as bench:
        size = row_bytes(bench.engine) * SHAPE.history
        bench.set_rate(size / 0.5 / 1e6)
        turn = bench.turn("load")
        assert getattr(turn.cached, tier) == SHAPE.history
        assert turn.ttft >= 0.5
        assert bench.turn("recompute").cached.total == 0
        assert isinstance(bench.engine.parts.store.on_disk.tier, ArtificiallySlowTier)


def row_bytes(engine: Engine) -> int:
    spec = engine.parts.decoder.spec
    return 2 * spec.layers * spec.kv_heads * spec.head_dim * engine.parts.store.arena.view.itemsize


@pytest.mark.timeout(900)
def test_the_command_writes(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    sizes = ["--turns", "1", "--rows", "64", "--new", "4", "--each", "2", "--repeats", "1"]
    args = ["--model", "tiny", "--tiers", "disk", "--rates", "400", *sizes, "--quick", "--json", str(path)]
    assert tier_rates.main(args) == 0
    found = json.loads(path.read_text())
    assert len(found["rows"]) == 2, "the rate at which both ways take as long is among them"
    assert 400 in {each["mb_per_s"] for each in found["rows"]}
    assert [(each["tier"], len(each["phases"])) for each in found["changes"]] == [("disk", 3)]
    assert all(set(each["ttft_ms"]) == set(tier_rates.ARMS) for each in found["rows"])
