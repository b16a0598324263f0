"""The papers' arithmetic to the digit, and small runs whose orders are those of the figures."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from afterglow.sim.catalogue import model, prices

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import papers_cachedattention
from cachedattention_parts import closed, serving
from cachedattention_parts.runs import GB, TB, Case, Runs, simulate
from cachedattention_parts.table import Paper, holds, row

SMALL = Case(conversations=50, rate=5.0, think=1.0, shrinks=False)  # most of them wait


def test_storage_and_savings_are_the_printed_ones() -> None:
    assert [round(closed.storage_share(devices), 1) for devices in (2, 4)] == [16.4, 9.0]
    for paper, exact in closed.EXACT_SAVINGS.items():
        speedups = zip(closed.COST_DEVICES, closed.SPEEDUPS[paper], strict=True)
        assert [round(closed.cost_saving(devices, gain), 1) for devices, gain in speedups] == list(exact)


def test_prices_are_those_of_the_catalogue() -> None:
    rates = prices("cachedattention")
    assert rates.device_hour("A100-80G") == closed.DEVICE_HOUR
    assert closed.storage_hour() == pytest.approx(rates.storage_hour(128 * 2**30, 10240 * 2**30))


def test_pre_loading_takes_what_figure_19_prints() -> None:
    found = closed.figure_19()
    whole = found[None]
    assert 1 - found[0] / whole == pytest.approx(0.38, abs=0.005)
    assert 1 - found[15] / whole == pytest.approx(0.61, abs=0.005)
    assert found[15] < found[10] < found[5] < found[0] < whole


@pytest.mark.parametrize("paper", ["ATC", "arXiv"])
def test_no_goal_without_a_run_is_missed(paper: Paper) -> None:
    found = closed.without_runs(paper, 4000, 0)
    assert len(found) == (9 if paper == "arXiv" else 7)
    wrong = [each["what"] for rows in found.values() for each in rows if each["met"] is False]
    assert wrong == []


def test_capacity_is_counted_in_whole_windows() -> None:
    case = Case(rate=1.0)
    assert serving.ccput(case) == 3600 * 4096 * model("LLaMA-2-13B").kv_bytes_per_token()
    assert case.setup().disk == int((10 * TB + 128 * GB) * 2284 / 4096 - 128 * GB)
    assert replace(case, conversations=900).setup().disk == int((TB + 12.8 * GB) * 2284 / 4096 - 128 * GB)
    assert replace(case, whole_windows=False).setup().disk == 10 * TB


def test_a_small_run_has_the_orders_of_the_figures() -> None:
    reuse = simulate(SMALL)
    again = simulate(replace(SMALL, mode="recompute"))
    overflow = simulate(replace(SMALL, mode="overflow"))
    assert reuse["turns"] == again["turns"] == overflow["turns"] > 150
    assert again["hit_rate"] == 0
    assert reuse["hit_rate"] > overflow["hit_rate"] > 0
    assert reuse["ttft"] < overflow["ttft"] < again["ttft"]
    assert reuse["device_seconds"] < overflow["device_seconds"] < again["device_seconds"]
    assert reuse["prefill_throughput"] > 2 * again["prefill_throughput"]


def test_looking_ahead_hits_more_where_room_is_short() -> None:
    short = replace(SMALL, conversations=80, rate=50.0, whole_windows=False, dram=30 * GB, disk=30 * GB)
    found = {policy: simulate(replace(short, policy=policy)) for policy in serving.POLICIES}
    assert found["lookahead"]["hit_rate"] > found["lru"]["hit_rate"]
    assert found["lookahead"]["hit_rate"] > found["fifo"]["hit_rate"]
    assert found["lookahead"]["host_share"] > found["lru"]["host_share"]
    roomier = simulate(replace(short, disk=TB))
    assert roomier["hit_rate"] > found["lookahead"]["hit_rate"]


def test_first_turns_count_as_misses() -> None:
    found = simulate(replace(SMALL, whole_windows=False))
    assert found["hit_rate_later"] > found["hit_rate"]
    assert found["hit_rate"] <= 1 - found["first_turns"]


def test_runs_are_made_once(capsys: pytest.CaptureFixture[str]) -> None:
    saved: list[int] = []
    runs: Runs = Runs(changed=lambda: saved.append(len(runs.kept)))
    tiny = Case(conversations=5)
    runs.all([tiny, tiny, replace(tiny, mode="recompute")])
    assert saved == [1, 2]
    assert runs[tiny]["turns"] > 0
    assert saved == [1, 2]
    assert replace(tiny, rate=2.0).key not in runs.kept
    assert capsys.readouterr().out.count("hits") == 2


def test_rows_say_what_is_missed() -> None:
    assert row("ATC", "13", "x, hits %", 86, 82, within=5)["met"]
    assert row("ATC", "13", "x, hits %", 86, 80.9, within=5)["met"] is False
    assert row("ATC", "16", "x, device time, x", 4.0, 2.0)["deviation"] == -50
    assert holds("ATC", "21", "order", [3, 2, 2])["met"] is False
    assert holds("ATC", "21", "order", [3, 2, 1])["met"]


def test_the_command_writes_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "found.json"
    asked = ["--conversations", "8", "--paper", "ATC", "--figure", "13", "--figure", "19", "--json", str(path)]
    assert papers_cachedattention.main(asked) == 0
    found = json.loads(path.read_text())
    assert {each["figure"] for each in found["rows"]} == {"13", "19"}
    assert len(found["runs"]) == 4
    assert capsys.readouterr().out.count(" later turns), queue") == 4
    assert papers_cachedattention.main([*asked, "--resume"]) == 0
    assert capsys.readouterr().out.count(" later turns), queue") == 0
    assert json.loads(path.read_text())["rows"] == found["rows"]
    assert papers_cachedattention.main([*asked, "--figure", "22", "--kept"]) == 0
    assert {each["figure"] for each in json.loads(path.read_text())["rows"]} == {"13", "19"}
