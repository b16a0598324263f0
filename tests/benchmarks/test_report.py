"""Goals are judged without tolerance, and a miss within the run's own noise is counted apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from afterglow.bench.report import COUNTED, arguments, finish, goal, verdict


@pytest.mark.parametrize(
    ("value", "least", "spread", "said"),
    [
        (1.03, False, COUNTED, "met"),
        (1.0301, False, COUNTED, "MISSED"),
        (1.04, False, 0.02, "within noise"),
        (1.06, False, 0.02, "MISSED"),
        (1.03, True, 0.5, "met"),
        (1.0, True, 0.02, "MISSED"),
        (1.01, True, 0.02, "within noise"),
    ],
)
def test_a_goal_is_met_or_not_whatever_the_noise(value: float, least: bool, spread: float, said: str) -> None:
    found = goal("decode: on / off", value, 1.03, least=least, spread=spread)
    assert verdict(found) == said
    assert found["met"] == (said == "met")
    assert found["within_noise"] == (said == "within noise")
    assert (found["value"], found["spread"]) == (value, spread)
    assert found["goal"].endswith("1.03")


def test_the_three_kinds_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    goals = [goal("x", value, 1.0, least=True, spread=0.1) for value in (1.2, 0.95, 0.5, 1.0)]
    path = tmp_path / "found.json"
    finish(arguments("x", "").parse_args(["--quick", "--seed", "3", "--json", str(path)]), [], goals)
    assert "2 met, 1 within noise, 1 MISSED" in capsys.readouterr().out
    found = json.loads(path.read_text())
    assert found["goals"] == goals
    assert (found["quick"], found["seed"], found["rows"]) == (True, 3, [])


@pytest.mark.parametrize("value", [0.1000001, 1e-9 + 0.1, 0.1, 0.0999999])
def test_what_is_written_says_whether_it_is_met(value: float) -> None:
    found = goal("x", value, 0.1, least=False, spread=COUNTED)
    assert found["met"] == (found["value"] <= float(found["goal"].split()[1])) == (value <= 0.1)
