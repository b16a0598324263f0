"""What `simulate` shows and writes where something goes wrong, and how figures are written and drawn."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from afterglow.cli.plots import MOST_POINTS, distribution
from afterglow.cli.simulation_report import seconds
from afterglow.sim.workload.sharegpt import PRESETS
from tests.cli.test_simulate import SMALL, afterglow


def test_a_sweep_that_fails_keeps_the_points_before_and_names_its_own(tmp_path: Path) -> None:
    file = tmp_path / "part.json"
    swept = ("--sweep", "warm-up,disk=0:1G,1:2G,100000:3G,2:4G", "--json", str(file))
    ran = afterglow("simulate", *SMALL, *swept)
    assert ran.code == 2
    (line,) = ran.err.splitlines()
    assert line.startswith("afterglow: error: at --warm-up 100000, --disk 3G: nothing to count: the warm-up took")
    assert [line.split()[:2] for line in ran.out.splitlines()[1:]] == [["0", "1G"], ["1", "2G"]]
    points = json.loads(file.read_text())["points"]
    assert [point["options"]["disk"] for point in points] == ["1G", "2G"]


def test_a_sweep_whose_first_point_fails_writes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "none.json"
    ran = afterglow("simulate", *SMALL, "--sweep", "warm-up=100000,0", "--json", str(file))
    assert (ran.code, ran.out, file.exists()) == (2, "", False)
    assert "at --warm-up 100000: nothing to count" in ran.err


def test_turns_that_the_window_shortens_are_told(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    ran = afterglow("simulate", "sharegpt-arxiv", "--conversations", "20", "--json", str(file))
    (point,) = json.loads(file.read_text())["points"]
    count = point["figures"]["shortened_turns"]
    law = PRESETS["sharegpt-arxiv"]
    drawn = [turn for number in range(20) for turn in law.lengths(Random(f"0-{number} sharegpt-arxiv"))]
    assert 0 < count == sum(max(turn) > 1024 for turn in drawn) < len(drawn)
    (line,) = [line for line in ran.out.splitlines() if line.startswith("shortened ")]
    assert line.endswith(
        f"{count} turns: their questions or replies end at 1,024 tokens, half of the window (--window N changes it)"
    )
    whole = afterglow("simulate", "sharegpt-arxiv", "--conversations", "20", "--window", "8192")
    assert "shortened" not in whole.out


def test_a_window_without_room_for_a_question_and_a_reply_is_named() -> None:
    ran = afterglow("simulate", *SMALL, "--window", "1")
    assert (ran.code, ran.out) == (2, "")
    assert "--window must be 2 or more for a preset, got 1" in ran.err


@pytest.mark.parametrize("command", [("simulate", *SMALL), ("plan", *SMALL, "--hit-rate", "0.5")])
def test_a_folder_for_json_is_refused_before_anything_is_simulated(tmp_path: Path, command: tuple[str, ...]) -> None:
    ran = afterglow(*command, "--json", str(tmp_path))
    assert (ran.code, ran.out) == (2, "")
    assert f"--json {tmp_path} is a folder; give the name of a file in it" in ran.err


@pytest.mark.parametrize(
    ("value", "said"),
    [(0.0357, "35.7 ms"), (0.999, "999 ms"), (0.9996, "1 s"), (1.0, "1 s"), (119.96, "120 s"), (120.0, "2.0 min")],
)
def test_durations(value: float, said: str) -> None:
    assert seconds(value) == said


@pytest.mark.parametrize("count", [1, 2, 999, 1999, 2999, 12345])
def test_a_drawn_distribution_ends_with_the_largest_value(count: int) -> None:
    values, parts = distribution([float(value) for value in range(count, 0, -1)])
    assert (values[0], values[-1]) == (1.0, float(count))
    assert [round(part * count) for part in parts] == values
    assert parts[-1] == 1.0
    assert len(values) <= 2 * MOST_POINTS + 1
