"""The papers' arithmetic to the digit, and small runs whose orders are those of the figures."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from benchmarks.papers.cachedattention import closed, figures, serving, varied
from benchmarks.papers.cachedattention.runs import GB, TB, Case, Runs, simulate
from benchmarks.papers.cachedattention.table import Paper, holds, row

from afterglow.sim.machine.catalogue import model, prices

SMALL = Case(conversations=50, rate=5.0, think=1.0, shrinks=False)  # most conversations wait


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


@pytest.mark.parametrize(
    ("name", "window_gib"),
    [("LLaMA-2-13B", 3.125), ("LLaMA-65B", 5.0), ("LLaMA-2-70B", 1.25), ("Falcon-40B", 0.234375)],
)
def test_a_conversation_takes_a_whole_windows_rows_at_most(name: str, window_gib: float) -> None:
    """CCpS, and CCpUT as so many times that (ATC 4.3.6; the printed 2.5, 0.78, 0.31, 0.12 MB a token, in powers of two)."""
    case = Case(model=name, rate=0.5)
    assert serving.ccput(case) == 0.5 * 3600 * window_gib * GB
    assert serving.ccput(replace(case, rate=1.0)) == 2 * serving.ccput(case)


def test_with_room_for_all_of_a_unit_time_every_later_turn_hits() -> None:
    """Room of CCpUT is enough for all, whose TTL is the unit time; with less room, fewer hit (ATC 4.3.6)."""
    light = Case(conversations=80, rate=0.25, think=20.0, ttl=300.0, shrinks=False)
    full = light.rate * 300.0 * serving.ccput(light) / (light.rate * serving.TTL_S)
    found = []
    for ratio in (1.0, 0.25, 0.05):
        dram = min(light.dram, ratio * full / 2)
        found.append(simulate(replace(light, dram=dram, disk=ratio * full - dram))["hit_rate_later"])
    assert found[0] == 1
    assert found[0] > found[1] > found[2]


def test_capacity_cases_have_the_room_that_they_say() -> None:
    for (_, ratio), case in serving.capacity_cases(Case(conversations=1500)).items():
        assert case.dram + case.disk == pytest.approx(ratio * serving.ccput(case))
        assert case.ttl == serving.TTL_S


def test_the_printed_times_leave_no_room_for_figure_16() -> None:
    """From 0.92 to 0.138 s for each of 42,000 turns are 9.1 h, of 6.63 that are left: 2.4 times less, not 4."""
    assert serving.gain_of_printed_ttft() == pytest.approx(1 + 42_000 * (0.138 / 0.15 - 0.138) / 3600 / 6.63)
    assert serving.gain_of_printed_ttft() < 2.5 < serving.SPEEDUPS["ATC"][0]


def test_sizes_are_powers_of_two_and_swept() -> None:
    read = varied.units(Case())
    assert [(case.dram, case.disk) for case in read.values()] == [
        (128 * 2**30, 10 * 2**40),
        (128 * 10**9, 10**13),
        (128 * 10**9, 10_240 * 10**9),
    ]
    assert set(varied.sensitivity_cases(Case())) >= {
        case for each in read.values() for _, _, case in varied.unit_cases(each)
    }


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


def test_runs_of_all_conversations_are_set_beside_shorter_ones() -> None:
    def ran(case: Case, hits: float) -> dict[str, dict[str, object]]:
        return {case.key: {"case": asdict(case), "hit_rate": hits, "mean_queue": 1.0}}

    whole = Case(model="LLaMA-65B", policy="lru", disk=2 * TB)
    kept = ran(whole, 0.5) | ran(replace(whole, conversations=1500), 0.48) | ran(Case(), 0.9)
    (found,) = varied.scale_rows("ATC", kept, 1500)
    assert found["what"] == f"LLaMA-65B lru disk={2 * TB}, hits %"
    assert (found["simulated"], found["shorter"], found["conversations"]) == (50, 48, 9000)
    assert list(varied.scale_rows("arXiv", kept, 1500)) == []


def test_tiers_without_disk_are_taken_from_all_conversations_where_those_have_been_run() -> None:
    short = Case(conversations=6)
    runs = Runs()
    for model_case in serving.model_cases(short):
        for each in serving.medium_cases(model_case):
            runs.kept[each.key] = {"case": asdict(each), "hit_rate": 0.1, "device_seconds": 1.0, "turns": 6}
    whole = replace(serving.medium_cases(replace(short, model="Falcon-40B"))[0], conversations=9000)
    runs.kept[whole.key] = {"case": asdict(whole), "hit_rate": 0.0, "device_seconds": 12_000.0, "turns": 9000}
    found = {each["what"]: each for each in serving.figure_mediums("ATC", "24", short, runs)}
    taken = found["Falcon-40B, HBM, hits %"]
    assert (taken["simulated"], taken["conversations"], taken["met"]) == (0, 9000, True)
    other = found["LLaMA-65B, HBM, hits %"]
    assert (other["simulated"], other["conversations"], other["met"]) == (10, 6, False)
    assert found["Falcon-40B, device time of a turn: HBM, SSD"]["met"]


def test_rows_say_what_is_missed() -> None:
    assert row("ATC", "13", "x, hits %", 86, 82, within=5)["met"]
    assert row("ATC", "13", "x, hits %", 86, 80.9, within=5)["met"] is False
    assert row("ATC", "16", "x, device time, x", 4.0, 2.0)["deviation"] == -50
    assert holds("ATC", "21", "order", [3, 2, 2])["met"] is False
    assert holds("ATC", "21", "order", [3, 2, 1])["met"]


def test_the_command_writes_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "found.json"
    asked = ["--conversations", "8", "--paper", "ATC", "--figure", "13", "--figure", "19", "--json", str(path)]
    assert figures.main(asked) == 0
    found = json.loads(path.read_text())
    assert {each["figure"] for each in found["rows"]} == {"13", "19"}
    assert len(found["runs"]) == 4
    assert capsys.readouterr().out.count(" later turns), queue") == 4
    assert figures.main([*asked, "--resume"]) == 0
    assert capsys.readouterr().out.count(" later turns), queue") == 0
    assert json.loads(path.read_text())["rows"] == found["rows"]
    assert figures.main([*asked, "--figure", "22", "--kept"]) == 0
    kept = json.loads(path.read_text())["rows"]
    assert {each["figure"] for each in kept} == {"13", "19"}
    assert {each.get("conversations") for each in kept if each["figure"] == "13"} == {8}
    assert {each.get("conversations") for each in kept if each["figure"] == "19"} == {None}


def test_figures_that_lack_a_run_are_made_of_shorter_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "QUICK", 6)
    path = tmp_path / "found.json"
    asked = ["--paper", "ATC", "--figure", "13", "--json", str(path)]
    assert figures.main([*asked, "--quick"]) == 0
    longer = [*asked, "--conversations", "8", "--figure", "14", "--kept"]
    assert figures.main(longer) == 0
    assert {each["conversations"] for each in json.loads(path.read_text())["rows"]} == {6}
    assert figures.main([*asked, "--conversations", "8", "--resume"]) == 0
    assert figures.main(longer) == 0
    found = json.loads(path.read_text())
    assert {each["conversations"] for each in found["rows"]} == {8}
    assert len(found["runs"]) == 8  # the shorter ones are kept
