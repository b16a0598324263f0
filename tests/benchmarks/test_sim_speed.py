"""The speed benchmark counts what it ran."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.papers.cachedattention.runs import Case
from benchmarks.sim import speed


def test_turns_and_events_are_counted() -> None:
    small, large = (speed.measured(Case(conversations=n, rate=speed.STEADY, shrinks=False)) for n in (4, 12))
    assert large["turns"] > small["turns"] >= 4
    assert large["events"] > large["turns"]
    assert large["steps"] >= large["events"] / 10
    assert large["max_rss"] > 10**7


def test_goals_are_of_the_longest_run() -> None:
    shape = {
        "rate": speed.STEADY,
        "seconds": 1.0,
        "turns": 100,
        "ms_per_turn": 1.0,
        "max_rss": 10**8,
        "spread": 0.0,
    }
    shape["spread_rss"] = 0.0
    rows = [shape, shape | {"turns": 1000, "ms_per_turn": 2.0, "max_rss": 2 * 10**9}, shape | {"rate": 1.0}]
    assert [found["met"] for found in speed.goals(rows)] == [False, True, False]


def test_the_command_writes(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    assert speed.main(["--turns", "20,40", "--without-paper", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 2
    assert all(row["turns_per_s"] > 0 for row in rows)
