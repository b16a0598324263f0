"""The files of benchmarks/results: what they say of themselves, their goals, and the command that makes them anew."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.common.paths import RESULTS

from benchmarks import readme_tables, rerun

FILES = sorted(RESULTS.glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_goals_are_judged_as_they_are_written(path: Path) -> None:
    found: dict[str, Any] = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert re.fullmatch("[0-9a-f]{7,40}", found["commit"])
    assert isinstance(found["quick"], bool)
    assert found["rows"]
    for goal in found["goals"]:
        assert goal.keys() >= {"name", "value", "goal", "spread", "met", "within_noise"}, goal
        sign, number = goal["goal"].split()
        wanted, value, spread = float(number), goal["value"], goal["spread"]
        assert sign in (">=", "<=")
        assert goal["met"] is (value >= wanted if sign == ">=" else value <= wanted), goal
        near = value >= wanted * (1 - spread) if sign == ">=" else value <= wanted * (1 + spread)
        if spread == 0 or goal["met"]:  # spreads are written with fewer digits than they were judged with
            assert goal["within_noise"] is (near and not goal["met"]), goal


def test_each_file_has_a_command_or_a_reason() -> None:
    assert not rerun.RUNS.keys() & rerun.LEFT_OUT.keys()
    assert {path.stem for path in FILES} <= rerun.RUNS.keys() | rerun.LEFT_OUT.keys()
    assert {path.stem for path in FILES} >= (rerun.RUNS.keys() | rerun.LEFT_OUT.keys()) - rerun.NOT_YET
    assert {file for file, _ in readme_tables.TABLES.values()} <= {path.stem for path in FILES}


@pytest.mark.parametrize("name", rerun.RUNS)
def test_commands_are_understood(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--help` behind all other options: they are parsed first."""
    _, _, module, *options = rerun.command(name)
    monkeypatch.delitem(sys.modules, module, raising=False)  # runpy warns of a module that was imported before
    package, _, last = module.rpartition(".")
    if hasattr(sys.modules.get(package), last):  # a package that is imported anew would stay there
        monkeypatch.setattr(sys.modules[package], last, getattr(sys.modules[package], last))
    monkeypatch.setattr(sys, "argv", [module, *options, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__")
    assert ended.value.code == 0
    assert "--quick" in capsys.readouterr().out


def test_files_are_written_and_failures_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    good = "import sys; open(sys.argv[-1], 'w').write(' '.join(sys.argv[1:-1]))"
    monkeypatch.setattr(rerun, "RESULTS", tmp_path)
    monkeypatch.setattr(rerun, "RUNS", {"bad": ["-c", "raise SystemExit(2)"], "good": ["-c", good]})
    assert rerun.main([]) == 1
    assert (tmp_path / "good.json").read_text() == "--quick --json"
    said = capfd.readouterr().out
    assert "failed, with the old files in place: bad" in said
    assert re.search(r"^ +\d+  good$", said, re.MULTILINE)
    assert rerun.main(["good"]) == 0
    assert rerun.main(["--list"]) == 0
    said = capfd.readouterr().out
    assert all(f"  {name}: {why}" in said for name, why in rerun.LEFT_OUT.items())
    with pytest.raises(SystemExit):
        rerun.main(["none"])
