"""The files of benchmarks/results: what they say of themselves, their goals, and the command that makes them anew."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
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
        noise = spread * abs(wanted)
        near = value >= wanted - noise if sign == ">=" else value <= wanted + noise
        if spread == 0 or goal["met"]:  # spreads are written with fewer digits than they were judged with
            assert goal["within_noise"] is (near and not goal["met"]), goal


NAMES = rerun.RUNS.keys() | rerun.FULL.keys() | rerun.LEFT_OUT.keys()


def test_each_file_has_a_command_or_a_reason() -> None:
    assert not rerun.RUNS.keys() & rerun.LEFT_OUT.keys()
    assert rerun.FULL.keys() <= rerun.LEFT_OUT.keys()
    assert {path.stem for path in FILES} == NAMES
    assert {file for file, _ in readme_tables.TABLES.values()} <= {path.stem for path in FILES}


@pytest.mark.parametrize("name", [*rerun.RUNS, *rerun.FULL])
def test_commands_are_understood(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--help` behind all other options: they are parsed first."""
    for full in (True, False) if name in rerun.RUNS else (True,):
        for command in rerun.commands(name, full=full, data=Path("data"), into=Path("x.json")):
            _, _, module, *options = command
            assert ("--quick" in options) is not full
            monkeypatch.delitem(sys.modules, module, raising=False)  # runpy warns of a module that was imported before
            package, _, last = module.rpartition(".")
            if hasattr(sys.modules.get(package), last):  # a package that is imported anew would stay there
                monkeypatch.setattr(sys.modules[package], last, getattr(sys.modules[package], last))
            monkeypatch.setattr(sys, "argv", [module, *options, "--help"])
            with pytest.raises(SystemExit) as ended:
                runpy.run_module(module, run_name="__main__")
            assert ended.value.code == 0
            assert "--quick" in capsys.readouterr().out


WRITES = """
import json, pathlib, sys
path = pathlib.Path(sys.argv[-1])
kept = json.loads(path.read_text())["parts"] if path.is_file() else []
asked = pathlib.Path(sys.argv[1])
asked.write_text(asked.read_text() + "x" if asked.is_file() else "x")
found = {"commit": "abc1234", "quick": "--quick" in sys.argv, "parts": [*kept, len(kept)], "args": sys.argv[2:-1]}
path.write_text(json.dumps(found))
sys.exit(1 if pathlib.Path(sys.argv[1] + ".stop").is_file() else 0)
"""


class Bench:
    """Benchmarks of a moment, of a commit that the test decides on."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.at = folder, "abc1234"
        self.results = folder / "results"
        self.results.mkdir()
        monkeypatch.setattr(rerun, "RESULTS", self.results)
        monkeypatch.setattr(rerun, "RUNS", {name: self.way(name) for name in ("a", "b", "c")})
        monkeypatch.setattr(rerun, "FULL", {"d": ([*self.way("d"), rerun.DATA], self.way("d"))})
        monkeypatch.setattr(rerun, "LEFT_OUT", {"d": "long"})
        monkeypatch.setattr(rerun, "commit", lambda: self.at)
        monkeypatch.setattr(rerun, "changed", list)

    def way(self, name: str) -> list[str]:
        return ["-c", WRITES, str(self.folder / name)]

    def runs(self, name: str) -> int:
        """How often a benchmark has run."""
        path = self.folder / name
        return len(path.read_text()) if path.is_file() else 0

    def found(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.results / f"{name}.json").read_text())
        return found


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def test_quick_runs_write_their_files_each_time(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    (bench.folder / "a.stop").touch()
    assert rerun.main([]) == 1
    assert not (bench.results / "a.json").exists()
    assert bench.found("b")["args"] == ["--quick", "--json"]
    said = capfd.readouterr().out
    assert "failed, with the old files in place:\n  a failed" in said
    assert re.search(r"^ +\d+  b$", said, re.MULTILINE)
    assert "  d: long" in said
    assert rerun.main(["b"]) == 0
    assert (bench.runs("b"), bench.runs("c"), bench.runs("d")) == (2, 1, 0)
    assert bench.found("b")["parts"] == [0], "a quick run begins anew"
    assert rerun.main(["--list"]) == 0
    assert bench.runs("b") == 2
    for unknown in ("none", "d"):
        with pytest.raises(SystemExit):
            rerun.main([unknown])


def test_a_full_run_goes_on_where_it_was_stopped(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    args = ["--full", "--data", "folder"]
    (bench.folder / "b.stop").touch()
    assert rerun.main(args) == 1
    (bench.folder / "b.stop").unlink()
    found = bench.found("a")
    assert (found["commit"], found["quick"], found["parts"]) == ("abc1234", False, [0])
    assert len(found["load_average"]["before"]) == len(found["load_average"]["after"]) == 3
    assert found["seconds"] >= 0
    assert bench.found("d")["parts"] == [0, 1], "two commands write into one file"
    capfd.readouterr()
    assert rerun.main(args) == 0
    said = capfd.readouterr().out
    assert "== a: done at abc1234" in said
    assert "== b: 4 of 4, last time not known" in said
    assert [bench.runs(name) for name in "abcd"] == [1, 2, 1, 2]
    assert bench.found("b")["parts"] == [0, 1], "it goes on from what it had kept"
    assert rerun.main([*args, "--again", "a", "b"]) == 0
    assert f"last time {found['seconds']:.0f} s" in capfd.readouterr().out
    assert [bench.runs(name) for name in "abcd"] == [2, 3, 1, 2]
    assert bench.found("b")["parts"] == [0]
    bench.at = "def5678"
    assert rerun.main([*args, "c"]) == 1
    assert "c is of commit abc1234, not def5678" in capfd.readouterr().out
    assert bench.runs("c") == 2, "a file of another commit is not done"


def test_a_full_run_takes_no_quick_file_no_other_commit_and_no_changed_sources(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert rerun.main(["a"]) == 0
    monkeypatch.delenv("AFTERGLOW_DATA", raising=False)
    assert rerun.main(["--full", "a", "d"]) == 0
    assert bench.runs("a") == 2
    assert bench.runs("d") == 0
    said = capfd.readouterr().out
    assert "last time not known" in said, "a quick run says nothing of a full one"
    assert "  d: needs data" in said
    commits = iter(["abc1234", "def5678", "def5678"])
    monkeypatch.setattr(rerun, "commit", lambda: next(commits))
    assert rerun.main(["--full", "b"]) == 1
    assert "the commit has changed from abc1234 to def5678" in capfd.readouterr().out
    assert bench.runs("b") == 0
    monkeypatch.setattr(rerun, "changed", lambda: ["src/x.py"])
    with pytest.raises(SystemExit):
        rerun.main(["--full", "c"])
    assert "these differ from the commit, and results are to be of one: src/x.py" in capfd.readouterr().err


def test_only_sources_count_as_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ("src/x.py", "benchmarks/y.py", "benchmarks/results/z.json", "docs/papers.md", "README.md")
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("a")
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for args in (("init", "-q"), ("add", "."), (*who, "commit", "-q", "-m", "a")):
        subprocess.run(["git", *args], cwd=tmp_path, check=True)
    monkeypatch.setattr(rerun, "ROOT", tmp_path)
    assert rerun.changed() == []
    for name in files:
        (tmp_path / name).write_text("b")
    assert rerun.changed() == ["benchmarks/y.py", "src/x.py"]
