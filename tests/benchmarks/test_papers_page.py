"""docs/papers.md is made of the files of results: `test_readme.py` compares each table with its file; here, how a table is made."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from benchmarks.papers import (
    missed,
    page,
    page_goals,
    page_measured,
    page_printed,
    page_prose,
    page_rates,
    page_simulated,
    page_summary,
    page_tables,
)
from scripts import readme

from afterglow.bench import report
from benchmarks import readme_tables

ROOT = Path(__file__).parents[2]
BY_HAND = {"name", "paper", "together", "open", "word"}  # by first column: tables without figures


def test_every_table_with_figures_is_generated() -> None:
    text = (ROOT / page.PAGE).read_text("utf-8")
    by_hand = readme.REGION.sub("", text).split("\n")
    heads = [line for line, under in zip(by_hand, by_hand[1:], strict=False) if under.startswith("|---")]
    assert {head.split("|")[1].strip() for head in heads} == BY_HAND
    shown = {region["source"] for region in readme.REGION.finditer(text) if region["kind"] == "papers"}
    assert shown == page_tables.TABLES.keys()


def test_the_page_is_as_its_files_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert page.main(["--check"]) == 0, capsys.readouterr().out


def test_a_table_follows_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = page_goals.read("saving")
    found["goals"] = [found["goals"][0] | {"value": 123.25, "met": False, "within_noise": False, "spread": 0.0}]
    (tmp_path / "saving.json").write_text(json.dumps(found))
    monkeypatch.setattr(page_goals, "RESULTS", tmp_path)
    source = page_goals.Source("saving", "Fig. 20", "a model", "a validation part")
    monkeypatch.setitem(page_goals.MEASURED, "CachedAttention", (source,))
    (line,) = page_tables.goal_lines(source, page_goals.read("saving"))
    assert line[1:] == ("", "123.2", "<= 1.03", "**missed**", "one run")
    text = page_tables.table("measured: CachedAttention")
    assert "<summary>Fig. 20 (a model), 1 goal: 1 missed</summary>" in text
    assert "Thresholds: a validation part." in text
    with pytest.raises(ValueError, match="no table 'none'; there are summary"):
        page_tables.table("none")


def test_a_file_that_is_not_there_yet_is_said_and_then_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "load or recompute: rates"
    monkeypatch.setattr(page_goals, "RESULTS", tmp_path)
    assert page_tables.table(name).startswith("Not measured yet: `tier_rates.json`")
    assert page_goals.sources("CachedAttention") == []
    ms = {"load": 1000.0, "recompute": 400.0, "choice": 300.0, "choice again": 306.0}
    point = {"tier": "disk", "mb_per_s": 64, "ttft_ms": ms, "ratio": 0.7575, "a_a": 0.02, "loaded": 1024, "split": True}
    phases = [{"mb_per_s": 8192, "loaded": [0.0, 0.0, 1.0, 1.0], "old": 2}]
    found = {
        "model": "m",
        "history": 2048,
        "rows": [point],
        "changes": [{"tier": "disk", "phases": phases}],
        "goals": [],
    }
    (tmp_path / "tier_rates.json").write_text(json.dumps(found))
    assert "| disk | 64 | 1,000 | 400 | 300 | 0.76 | 1,024 (a split) | 2.0% |" in page_tables.table(name)
    assert "| disk | 8,192 | 4 | 2 | 50% |" in page_tables.table("load or recompute: changes")
    assert [source.file for source in page_goals.sources("CachedAttention")] == ["tier_rates"]


def goal(value: float, wanted: str, spread: float = 0.0, **more: Any) -> dict[str, Any]:
    least, limit = wanted.split()
    return report.goal("a goal", value, float(limit), least=least == ">=", spread=spread) | more


@pytest.mark.parametrize(
    ("found", "came_out"),
    [
        (goal(0.93, "<= 1", 0.43), page_goals.JUST_MET),
        (goal(0.93, "<= 1", 0.06), page_goals.MET),
        (goal(1.05, "<= 1", 0.06), page_goals.JUST_MISSED),
        (goal(1.07, "<= 1", 0.06), page_goals.MISSED),
        (goal(0.99, ">= 0.98", 0.02), page_goals.JUST_MET),
        (goal(-1.0, "<= -0.98", 0.03), page_goals.JUST_MET),
        (goal(0.0, "<= 0", 0.0), page_goals.MET),
        (goal(1.5, "<= 2", error=0.3), page_goals.JUST_MET),
        (goal(1.3, "<= 2", error=0.3), page_goals.MET),
        (goal(2.1, "<= 2", error=0.3), page_goals.MISSED),  # no error excuses a miss
    ],
)
def test_noise_is_judged_on_both_sides(found: dict[str, Any], came_out: str) -> None:
    assert page_goals.judged(found) == came_out


def test_goals_met_within_noise_are_counted_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = page_goals.read("saving")
    values = {"well met": (0.9, 0.01), "just met": (1.02, 0.02), "just missed": (1.04, 0.02), "missed": (1.5, 0.02)}
    found["goals"] = [goal(value, "<= 1.03", spread) | {"name": name} for name, (value, spread) in values.items()]
    (tmp_path / "saving.json").write_text(json.dumps(found))
    monkeypatch.setattr(page_goals, "RESULTS", tmp_path)
    source = page_goals.Source("saving", "Fig. 20", "a model")
    monkeypatch.setattr(page_goals, "MEASURED", {"CachedAttention": (source,)})
    assert [line[4] for line in page_tables.goal_lines(source, page_goals.read("saving"))] == [
        *("met", "met, within noise", "missed, within noise", "**missed**"),
    ]
    assert "4 goals: 1 met; 1 met, within noise; 1 missed, within noise; 1 missed" in page_tables.measured(
        "CachedAttention"
    )
    shown = page_summary.line(
        "CachedAttention", "measured", page_summary.measured("CachedAttention"), "CachedAttention"
    )
    assert shown[2:] == ("1", "1", "1", "[1](#cachedattention-goals-that-are-not-met)", "")
    assert [one["name"] for _, one in page_goals.just_met("CachedAttention")] == ["just met"]


def test_goals_met_within_noise_are_listed_with_their_noise() -> None:
    text = page_tables.table("not met: RelayAttention")
    listed = text[text.index("**Met, within noise**") :]
    assert len(page_goals.just_met("RelayAttention")) == listed.count("(wanted")
    for file, one in page_goals.just_met("RelayAttention"):
        assert f"{one['name']} {page_simulated.number(one['value'])} (wanted {one['goal']}; " in listed
        assert page_goals.link(file) in listed


def git(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True, check=False)


def test_figures_older_than_chunks_by_one_call_are_said_to_be() -> None:
    files = ("importance_io", "importance_wide", "importance_sweep")
    commits = {file: page_goals.read(file)["commit"] for file in files}
    if any(git("cat-file", "-e", f"{one}^{{commit}}").returncode for one in (page_goals.ONE_CALL, *commits.values())):
        pytest.skip("needs the history of the repository")
    text = page_tables.table("spec io: older")
    for file, commit in commits.items():
        older = git("merge-base", "--is-ancestor", page_goals.ONE_CALL, commit).returncode == 1
        assert older == (commit in page_goals.BEFORE_ONE_CALL), file
        assert older == (f"{page_goals.link(file)} (commit {commit})" in text), file


def test_files_that_are_measured_again_are_no_longer_said_to_be_older(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in ("importance_io", "importance_wide", "importance_sweep"):
        (tmp_path / f"{file}.json").write_text(
            json.dumps({"commit": "1234567" if file != "importance_io" else "d7d1d04"})
        )
    monkeypatch.setattr(page_goals, "RESULTS", tmp_path)
    assert "importance_io.json" in page_prose.before_one_call()
    assert "importance_wide" not in page_prose.before_one_call()
    (tmp_path / "importance_io.json").write_text(json.dumps({"commit": "1234567"}))
    assert "older" not in page_prose.before_one_call()


def test_what_renewal_costs_is_said_with_its_run_and_its_noise() -> None:
    def of(way: str, ms: float) -> dict[str, Any]:
        row = {"ttft_ms": 1.0, "token_ms": ms, "token_ratio": 1.0, "token_mb": 0.0, "requests": 2}
        return row | {"model": "m", "variant": way}

    rows = [of("anew after 1", 50.0), of("anew after 1, again", 100.0), of("anew after 4", 20.0)]
    found = {"tokens": 8, "retention": 0.25, "mb_per_s": 500, "quick": True, "commit": "1234567", "rows": rows}
    text = page_rates.renewal(found)
    assert "A quick run of commit 1234567: 2 requests for each way." in text
    assert "differs by 2.00 times with m (50.0 and 100.0 ms), so" in text


def test_every_file_of_results_is_named_in_a_document() -> None:
    """What no document shows cannot be seen to be missed."""
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "".join(document.read_text("utf-8") for document in documents)
    tables = {f"<!-- generated: table: {name} -->": file for name, (file, _) in readme_tables.TABLES.items()}
    shown = {file for region, file in tables.items() if region in text}
    files = {path.stem for path in page_goals.RESULTS.glob("*.json")}
    named = {file for file in files if f"{file}.json" in text or f"results/{file}`" in text}
    assert files - shown - named == set()
    assert {"soak", "importance_renew", "attncache_distances", "saving", "preload", "disk"} <= shown | named


def test_no_goal_that_is_not_met_is_left_out() -> None:
    """Every goal of the files that the page is about is in it, or does not count."""
    listed = {(file, goal["name"]) for goals in page_goals.unmet().values() for file, goal in goals}
    files = [source.file for paper in page_goals.MEASURED for source in page_goals.sources(paper)]
    assert {"disk", "scale", "sim_speed"} < set(files)
    for file in files:
        wrong = {goal["name"] for goal in page_goals.read(file)["goals"] if not goal["met"]}
        assert {name for name in wrong if (file, name) not in listed} <= {
            name for name in wrong if page_goals.counts(name) != page_simulated.COUNTS
        }
    fitted = {g["name"] for g in page_goals.read(page_goals.OPERATORS)["goals"] if "fitted" in g["name"]}
    wrong = {g["name"] for g in page_goals.read(page_goals.OPERATORS)["goals"] if not g["met"]}
    assert wrong - fitted == {name for file, name in listed if file == page_goals.OPERATORS}
    counted = [(goal, use) for paper in ("ATC", "arXiv") for goal, use in page_goals.simulated_goals(paper)]
    assert len(counted) == len(page_goals.read(page_goals.SIMULATED)["goals"])
    assert {goal["name"] for goal, use in counted if use and not goal["met"]} == {
        name for file, name in listed if file == page_goals.SIMULATED
    }


def test_each_goal_that_is_not_met_has_its_cause_and_two_ways_that_were_tried() -> None:
    goals = [(file, goal["name"]) for goals in page_goals.unmet().values() for file, goal in goals]
    found = {goal: missed.explanation(*goal) for goal in goals}
    assert [goal for goal, entry in found.items() if entry is None] == []
    assert [entry.what for entry in missed.EXPLAINED if entry not in found.values()] == []
    for entry in missed.EXPLAINED:
        assert len(entry.tried) >= 2 or entry.fewer, f"{entry.what}: less than two ways, and no word about it"
        assert all((entry.cause, entry.changes, *entry.tried)), entry.what
        shown = "".join(entry.lines(page_goals.read(entry.files[0])))
        assert "{" not in shown, entry.what


def test_goals_are_made_of_rows_that_no_benchmark_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"bytes_per_extent": 900.0, "token_bytes_per_extent": 200.0}]
    goal = page_goals.goals_of("scale", {"rows": rows, "goals": []})[0]
    assert (goal["value"], goal["met"], goal["made"]) == (1100.0, False, True)
    relay = {"workload": "ShareGPT", "batch": 32, "prefix": 2048, "gain": 1.5, "spread": 0.01}
    alone = relay | {"batch": 1}
    (goal,) = page_goals.goals_of("relay_engine", {"rows": [relay, alone], "goals": []})
    assert (goal["goal"], goal["met"], goal["within_noise"]) == (">= 2.09", False, False)
    assert page_printed.printed("relay_engine", goal["name"]) == "2.09"
    (goal,) = page_goals.goals_of("relay_engine", {"rows": [relay | {"gain_spread": 0.3}], "goals": []})
    assert (goal["spread"], goal["within_noise"]) == (0.3, True), "the gain's own noise, not that of auto"
    unseen = [{"way": "another", "threshold": 0.9, "loss": loss, "promised": 0.5} for loss in (0.25, 1.5)]
    (goal,) = page_goals.goals_of("attncache_carry_over", {"rows": unseen, "goals": []})
    assert (goal["value"], goal["met"]) == (1.0, False)


def test_relays_gain_is_shown_with_its_own_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = page_goals.read("relay_engine")
    found["rows"] = [found["rows"][0] | {"spread": 0.01, "gain_spread": 0.25}]
    (tmp_path / "relay_engine.json").write_text(json.dumps(found))
    monkeypatch.setattr(page_goals, "RESULTS", tmp_path)
    assert "| 25.0% |" in page_measured.relay_gains()
    assert "fewer than 32 decode together" in page_prose.together()
    del found["rows"][0]["gain_spread"]
    (tmp_path / "relay_engine.json").write_text(json.dumps(found))
    assert "| 1.0% |" in page_measured.relay_gains()
    assert "about 9 decoded together" in page_prose.together()


def test_errors_are_95_percent_intervals_or_what_repeats_differ_by() -> None:
    def error(file: str, **goal: Any) -> str:
        return page_goals.error_of(file, {"rows": []}, {"name": "a goal", "goal": "<= 2", "spread": 0.0} | goal)

    assert error("overflow", error=0.5) == "± 0.98 (95 %)"
    assert error("importance_means", spread=0.5) == "± 2 (95 %)"  # a spread of half the goal is an error of 1
    assert error("saving", spread=0.0123) == "1.2 %"
    assert error("saving") == "one run"
    assert error("relay_engine", name="bytes held") == "counted"


def row(what: str, printed: float | str, simulated: float, **more: Any) -> dict[str, Any]:
    about = {"paper": "ATC", "figure": "9", "what": what, "printed": printed, "simulated": simulated, "met": True}
    return about | {"note": ""} | more


def test_what_is_arithmetic_or_fitted_does_not_count() -> None:
    rows = [
        row("LLaMA-2-13B, hits %", 80, 81.0, conversations=1500),
        row("LLaMA-65B, hits %", 70, 60.0, conversations=1500, met=False),
        row("cost, less %", 70, 70.1, note="from the printed x4.0"),
        row("share %", 50, 50.0, note="fitted"),
        row("turns", 5, 5.1, figure="2"),
        row("hits: a, b", "falls", 1.0, conversations=1500),
    ]
    table = page_simulated.evaluation({"rows": rows}, "ATC").split("\n")
    assert "| 9 | hits % | 80 / 70 | 81 / 60 | **missed** by 1 of 2 | 1,500 | yes |" in table
    assert "| 9 | cost, less % | 70 | 70.1 | met |  | no: arithmetic |" in table
    assert "| 9 | share % | 50 | 50 | met |  | no: fitted |" in table
    assert "| 2 | turns | 5 | 5.1 | met |  | no: fitted |" in table
    assert "| 9 | orders as printed | 1 | 1 | met |  | yes |" in table
    assert [page_simulated.operator_counts("Fig. 1", note) for note in ("fitted", "exact", "")] == [
        "no: fitted",
        "no: arithmetic",
        "yes",
    ]
    assert page_simulated.operator_counts("Fig. 17", "") == "no: fitted"


def test_rows_that_differ_in_numbers_are_joined() -> None:
    rows = [
        {
            "figure": "X Fig. 1",
            "what": f"30B relay us, s={s}",
            "paper": 10.0,
            "simulated": v,
            "deviation": d,
            "note": "",
        }
        for s, v, d in (("64", 9.0, -0.1), ("2K", 12.0, 0.2))
    ]
    table = page_simulated.operators({"rows": rows}, "X")
    assert "| Fig. 1 | 30B relay us, s=64 / 2K | 10 / 10 | 9 / 12 | +20 % | yes |  |" in table
