"""Goals are judged without tolerance, and a miss within the run's own noise is counted apart."""

from __future__ import annotations

import json
import random
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from afterglow.bench import calibrate, disk, multiturn, report
from afterglow.bench.report import COUNTED, arguments, finish, goal, interleaved, spread, verdict
from afterglow.errors import ConfigError


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


@pytest.mark.parametrize(
    ("value", "least", "said"),
    [
        (-1.0, True, "met"),
        (-1.3, True, "within noise"),
        (-1.6, True, "MISSED"),
        (-1.0, False, "met"),
        (-0.7, False, "within noise"),
        (-0.4, False, "MISSED"),
    ],
)
def test_noise_is_on_the_side_of_the_miss_where_a_goal_is_negative(value: float, least: bool, said: str) -> None:
    assert verdict(goal("points, int8 less float32", value, -1.0, least=least, spread=0.5)) == said


def test_what_repeats_differ_by_is_positive() -> None:
    assert spread([-2.0, -1.0, -3.0]) == spread([2.0, 1.0, 3.0]) == 0.5


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


def test_variants_take_turns_in_the_order_that_is_drawn() -> None:
    called: list[str] = []

    def run(name: str) -> float:
        called.append(name)
        return len(called)

    variants = {name: partial(run, name) for name in "abc"}
    assert interleaved(variants, 2) == {"a": [1, 4], "b": [2, 5], "c": [3, 6]}
    called.clear()
    found = interleaved(variants, 20, random.Random(1))
    rounds = ["".join(called[at : at + 3]) for at in range(0, 60, 3)]
    assert {"".join(sorted(each)) for each in rounds} == {"abc"}
    assert len(set(rounds)) > 3
    assert all(called[int(at) - 1] == name for name, each in found.items() for at in each)


def test_a_commit_is_that_of_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*args: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        return subprocess.run(["git", *who, *args], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    module = tmp_path / "src" / "afterglow" / "bench" / "report.py"
    module.parent.mkdir(parents=True)
    monkeypatch.setattr(report, "__file__", str(module))
    assert report.commit() is None, "no checkout"
    git("init", "-q")
    shown = (
        "benchmarks/results/a.json",
        "benchmarks/papers/missed.py",
        "benchmarks/papers/page_a.py",
        "docs/papers.md",
    )
    for name in ("src/x.py", *shown, "tests/test_x.py", "benchmarks/papers/y.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("a")
        git("add", ".")
        git("commit", "-q", "-m", name)
        if name == "src/x.py":
            first = git("rev-parse", "--short", "HEAD").strip()
            assert report.commit() == first
        if name == "tests/test_x.py":
            assert report.commit() == first, "results, their explanations, documents and tests change no figure"
    assert report.commit() == git("rev-parse", "--short", "HEAD").strip() != first


def test_results_say_which_instructions_the_processor_has() -> None:
    """Processors of one name differ in them, and the compiled kernels differ by factors."""
    assert report.hardware()["instructions"] == torch.backends.cpu.get_cpu_capability()


@pytest.mark.parametrize("path", ["{folder}", "{folder}/file/x.json", "{folder}/" + "x" * 300])
def test_a_file_that_cannot_be_written_is_refused_at_once(
    tmp_path: Path, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    path = path.format(folder=tmp_path)
    with pytest.raises(SystemExit):
        arguments("x", "").parse_args(["--json", path])
    assert f"argument --json: {path} " in capsys.readouterr().err


def test_a_file_may_be_new_and_its_folder_too(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.json"
    options = arguments("x", "").parse_args(["--json", str(path)])
    assert list(tmp_path.iterdir()) == []
    finish(options, [], [])
    assert json.loads(path.read_text())["rows"] == []
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match=f"--json {path} cannot be written: Is a directory"):
        finish(options, [], [])


def test_a_file_in_a_folder_of_others_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    for read in (arguments("x", "").parse_args, disk.main):
        with pytest.raises(SystemExit):
            read(["--json", str(tmp_path / "x.json")])
        assert f"you have no right to write {tmp_path}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        disk.main(["--cache-dir", str(tmp_path)])
    assert f"no right to write into the folder {tmp_path}" in capsys.readouterr().err


@pytest.mark.parametrize("module", [disk, multiturn, calibrate])
@pytest.mark.parametrize(("name", "says"), [("missing", "there is no folder"), ("x" * 300, "x")])
def test_a_cache_directory_that_is_not_there(
    tmp_path: Path, module: Any, name: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        module.main(["--cache-dir", str(tmp_path / name)])
    assert end.value.code == 2
    assert f"argument --cache-dir: {says}" in capsys.readouterr().err.replace(str(tmp_path / name), name)


def test_threads_that_would_change_nothing_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        disk.main(["--threads", "4"])
    assert "unrecognized arguments: --threads 4" in capsys.readouterr().err


@pytest.mark.parametrize("text", [b"# A readme\n", b"\xff\xfe", b'{"op": "plan"}\n', b'{"op": "schedule"}\n', b"[]\n"])
def test_a_file_that_is_no_journal_is_named(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "README.md"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=f"--journal {path} is no whole journal"):
        calibrate.main(["--journal", str(path)])
