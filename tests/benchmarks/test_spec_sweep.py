"""SPEC's sweep: what is judged at a point, what a run that was stopped keeps, and which points share files."""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from benchmarks.papers import page_goals, page_rates, page_tables
from benchmarks.papers.spec import io, sweep
from benchmarks.papers.spec.io_variants import AGAIN, BASE, SPEC, WHOLE, Work
from benchmarks.papers.spec.sweep import AUTO, POINTS, QUICK, RECOMPUTE, Kept, Point, goals, summary

from afterglow.errors import ModelError

POINT = Point("heads64", 8192, 200)
TTFT = {WHOLE: 1000.0, BASE: 800.0, SPEC: 400.0, AGAIN.name: 420.0, AUTO: 500.0}


def arms(ttft: dict[str, float], read_mb: float = 60.0) -> list[dict[str, Any]]:
    """What `compare` returns."""
    return [
        {
            "variant": name,
            "ttft_ms": ms,
            "wait_ms": ms / 2,
            "read_mb": 200.0 if name == WHOLE else read_mb,
            "identifying": 0.05,
            "mapping": 0.0,
            "ways": {"select": 8},
        }
        for name, ms in ttft.items()
    ]


def row(point: Point = POINT, recompute: float | None = 9000.0) -> dict[str, Any]:
    return summary(point, arms(TTFT), recompute, 1_611_000_000)


def options(path: Path | None, *, quick: bool = False) -> argparse.Namespace:
    return argparse.Namespace(json=path, quick=quick, seed=0, threads=1, only="", data=None)


@pytest.fixture(autouse=True)
def at(monkeypatch: pytest.MonkeyPatch) -> None:
    set_commit(monkeypatch, "abc1234")


def set_commit(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(sweep, "commit", lambda: name)
    monkeypatch.setattr(sweep, "about", lambda options: {"commit": name, "quick": options.quick, "seed": 0})


def test_the_choice_is_judged_by_the_fastest_way() -> None:
    found = row()
    assert (found["fastest"], found["auto_ratio"], found["spread"], found["recompute_ms"]) == (
        "select",
        1.25,
        0.05,
        9000.0,
    )
    assert row(recompute=250.0)["fastest"] == "recompute"
    assert summary(POINT, arms(TTFT | {WHOLE: 250.0}), None, 0)["auto_ratio"] == 2.0
    measured = summary(POINT, arms(TTFT | {RECOMPUTE: 100.0}), None, 0)
    assert (measured["fastest"], measured["recompute_ms"]) == ("recompute", 100.0)


def test_loading_everything_is_to_be_beaten_where_the_saved_bytes_take_longer_than_finding_out() -> None:
    found = row()
    assert found["predicted_saving_ms"] == 140 / 200 * 1e3 - 400 * 0.05
    names = [each["name"].removeprefix(f"{POINT.name}: ") for each in goals([found])]
    assert names == [
        "TTFT, loading everything over SPEC",
        "waiting for I/O, H2O with LFU over SPEC",
        "identification, share of TTFT",
        "TTFT, auto over the fastest way",
    ]
    assert [each["met"] for each in goals([found])] == [True, True, True, False]
    as_much = summary(POINT, arms(TTFT, read_mb=199.0), None, 0)
    assert as_much["predicted_saving_ms"] < 0
    assert len(goals([as_much])) == 3


@pytest.mark.parametrize(
    ("selected", "cached", "way"),
    [(True, 64, "select"), (False, 64, "load"), (False, 63, "split"), (False, 0, "recompute")],
)
def test_what_an_engine_did(selected: bool, cached: int, way: str) -> None:
    assert io.way_of(selected, cached, 64) == way


def test_points_with_the_same_files_follow_each_other() -> None:
    for points in (POINTS, QUICK):
        files = [key for key, _ in itertools.groupby(points, key=lambda point: point.files)]
        assert len(files) == len(set(files))
        kept = itertools.groupby(points, key=lambda point: (point.files, point.chunk, point.caches))
        engines = [key for key, _ in kept]
        assert len(engines) == len(set(engines))
        assert len(points) == len(set(points))
    assert Point("x", 1, chunk=256).files == Point("x", 1).files != Point("x", 1, chunk=32).files


def test_prefixes_are_as_many_as_can_be_computed_and_kept() -> None:
    row_bytes = sweep.MODELS["heads64"].row_bytes
    counts = [sweep.prefix_count(tokens, row_bytes, few=False) for tokens in (4096, 8192, 16384, 32768)]
    assert counts == [8, 6, 3, 3]
    assert sweep.prefix_count(6144, sweep.MODELS["wide"].row_bytes, few=False) == 5
    assert sweep.prefix_count(4096, row_bytes, few=True) == 3


def test_no_point_finds_rows_of_requests_of_another() -> None:
    work = Work([[1, 2]], [(0, 4, [7, 8])], [(0, 5, [9, 10]), (0, 6, [0, 1])])
    points = [sweep.unseen(work, point) for point in range(len(POINTS))]
    for at in range(2):
        firsts = {point.judged[at][2][0] for point in points}
        assert len(firsts) == len(POINTS)
    assert {point.judged[1][2][1] for point in points} == {1}
    assert points[0] == work


def test_points_of_this_commit_size_and_seed_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sweep.json"
    kept = Kept.of(options(path))
    assert kept.rows == []
    kept.add(row())
    found = json.loads(path.read_text())
    assert (found["commit"], found["quick"], len(found["rows"]), len(found["goals"])) == ("abc1234", True, 1, 4)
    again = Kept.of(options(path))
    assert again.row(POINT) == row()
    assert again.row(Point("heads64", 8192, 500)) is None
    assert again.recomputed(Point("heads64", 8192, 500, 16)) == 9000.0, "it reads nothing"
    assert again.recomputed(Point("heads64", 4096)) is None
    for point in POINTS[1:]:
        again.add(row(point))
    assert json.loads(path.read_text())["quick"] is False
    assert Kept.of(options(path, quick=True)).rows == []
    assert len(Kept.of(options(path)).rows) == len(POINTS)
    assert Kept.of(argparse.Namespace(**vars(options(path)) | {"seed": 1})).rows == []
    set_commit(monkeypatch, "def5678")
    assert Kept.of(options(path)).rows == []


def test_a_run_that_was_stopped_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Point] = []
    fails = {"heads64", sweep.REAL_NAME}

    def measure(points: list[Point], kept: Kept, options: argparse.Namespace) -> None:
        for point in points:
            if point.shape in fails and point.tokens != 2048:
                raise ModelError("not here")
            asked.append(point)
            kept.add(row(point))
            if point.mb_per_s == 200 and len(fails) == 2:
                raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "_measure", measure)
    path = tmp_path / "sweep.json"
    args = ["--quick", "--json", str(path)]
    with pytest.raises(KeyboardInterrupt):
        sweep.main(args)
    assert asked == QUICK[:1]
    fails.remove("heads64")
    assert sweep.main(args) == 0
    assert asked == QUICK[:3], "the first point was kept, the real model is not there"
    assert "skipped: smollm2-135m-instruct, 1024 tokens: not here" in capsys.readouterr().out
    assert len(json.loads(path.read_text())["rows"]) == 3
    fails.add("heads64")
    with pytest.raises(ModelError):
        sweep.main(["--only", "32768 tokens"])


def test_the_page_has_a_line_for_each_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_goals, "RESULTS", tmp_path)
    assert page_tables.table("spec sweep").startswith("Not measured yet: `importance_sweep.json`")
    rows = [row(), row(Point(sweep.REAL_NAME, 4096), None) | {"agreement": {"spec": 81.25, "h2o": 90.0}}]
    (tmp_path / "importance_sweep.json").write_text(json.dumps({"rows": rows}))
    lines = page_tables.table("spec sweep").splitlines()
    assert len(lines) == 4
    assert lines[2].startswith(
        "| heads64 | 8,192 | 200 | 64 | 15 | 9,000 | 1,000 | 800 | 400 | 500 | select 8 | 1.25 |"
    )
    assert "| 81.2 |" in lines[3]
    assert all(len(line) == len(page_rates.SWEEP) for line in page_rates.sweep_lines(rows))


def test_names_say_all_of_a_point() -> None:
    assert len({point.name for point in POINTS}) == len(POINTS)
    assert asdict(POINT) == {"shape": "heads64", "tokens": 8192, "mb_per_s": 200, "chunk": 64, "caches": 15}
