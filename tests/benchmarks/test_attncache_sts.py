"""The AttnCache benchmark: the paper's own arithmetic, and a whole run on made-up pairs."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.papers import page_attncache, page_goals
from benchmarks.papers.attncache import baselines, carry_over, judging, sts
from benchmarks.papers.attncache.baselines import mean_maps
from benchmarks.papers.attncache.measures import gamma, read_pairs, spearman, split
from benchmarks.papers.attncache.passes import Passes
from benchmarks.papers.attncache.shapes import allowed
from benchmarks.papers.attncache.sts_report import goals_of

from afterglow.errors import ConfigError
from afterglow.memo import build, training
from afterglow.memo.maps import MapStore, token_key
from afterglow.memo.packing import unpack
from afterglow.memo.projector import Projector
from afterglow.model.encoder import BatchAttend
from afterglow.model.linear import int8_levels
from tests.memo.test_maps import IDENTITY, maps_of
from tests.memo.tiny import tiny_encoder

# AttnCache, table 1: STS12 to STS16, STS-B, SICK-R; average, speed-up, gamma.
TABLE_1 = {
    "Llama-2-7B": {
        "full": ((60.88, 73.93, 58.30, 70.27, 75.46, 73.89, 67.44), 68.60, 1.00, None),
        "SAN": ((5.02, 42.63, 19.84, 43.49, 44.70, 18.01, 38.71), 30.34, 1.45, 0.85),
        "LazyFormer": ((23.79, 34.88, 27.80, 35.93, 44.04, 32.50, 42.45), 34.48, 1.39, 0.87),
        "AttnCache-f": ((22.06, 67.75, 31.52, 61.15, 53.89, 53.97, 62.40), 50.39, 1.14, 1.30),
        "AttnCache": ((60.59, 73.46, 57.97, 69.01, 75.38, 72.02, 65.85), 67.75, 1.19, 0.04),
    },
    "Llama-3-8B": {
        "full": ((61.57, 76.41, 63.23, 75.27, 80.41, 75.84, 70.45), 71.88, 1.00, None),
        "SAN": ((27.61, 53.81, 37.18, 57.20, 57.43, 39.46, 54.98), 46.81, 1.49, 0.51),
        "LazyFormer": ((27.25, 60.37, 36.21, 53.85, 59.21, 40.30, 48.24), 46.49, 1.42, 0.60),
        "AttnCache-f": ((24.89, 51.15, 36.19, 67.81, 61.39, 48.05, 63.77), 50.46, 1.16, 1.34),
        "AttnCache": ((60.82, 72.49, 60.59, 74.67, 79.52, 72.61, 66.68), 69.63, 1.21, 0.11),
    },
    "Mistral-7B": {
        "full": ((63.28, 74.89, 61.57, 75.64, 81.89, 78.26, 69.39), 72.13, 1.00, None),
        "SAN": ((25.04, 54.66, 35.30, 53.11, 61.55, 39.59, 55.45), 46.39, 1.44, 0.58),
        "LazyFormer": ((38.90, 54.41, 38.71, 37.18, 57.61, 42.23, 50.66), 45.67, 1.38, 0.70),
        "AttnCache-f": ((35.03, 55.07, 40.28, 54.51, 50.22, 54.75, 64.52), 50.63, 1.15, 1.43),
        "AttnCache": ((62.66, 72.23, 61.85, 73.32, 81.59, 74.66, 65.89), 70.31, 1.20, 0.09),
    },
}
ROWS = [(model, method) for model, rows in TABLE_1.items() for method in rows]


@pytest.mark.parametrize(("model", "method"), ROWS)
def test_the_papers_averages_and_gammas_come_out(model: str, method: str) -> None:
    scores, average, speedup, printed = TABLE_1[model][method]
    assert sum(scores) / 7 == pytest.approx(average, abs=0.01)
    if printed is not None:
        found = gamma(TABLE_1[model]["full"][1] / 100, average / 100, speedup)
        assert found == pytest.approx(printed, abs=0.01)  # the printed ones are cut off or rounded


def test_rank_correlation() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 1000]) == pytest.approx(1)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    # Ties share a rank: 1, 2.5, 2.5, 4 against 1, 2, 3, 4.
    assert spearman([0, 5, 5, 9], [1, 2, 3, 4]) == pytest.approx(0.9486833)
    assert math.isnan(spearman([1, 1, 1], [1, 2, 3]))
    assert math.isnan(spearman([], []))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return made_up(tmp_path)


def made_up(place: Path) -> Path:
    """Write pairs of the tasks, and return their folder."""
    folder = place / "data" / "sts"
    folder.mkdir(parents=True)
    nouns, verbs = ("cat", "dog", "kite", "mill", "river", "mat"), ("sat", "ran", "is")
    pairs = [
        (float(a == c) * 3 + float(b == d) * 2, f"the {a} {b} near a red {c}", f"the {c} {d} near a red {a}")
        for a in nouns
        for b in verbs
        for c in nouns
        for d in verbs
    ]
    for name in ("sts12", "sts15", "stsb_train", "stsb_dev", "stsb_test"):
        (folder / f"{name}.tsv").write_text("".join(f"{gold}\t{x}\t{y}\tmade up\n" for gold, x, y in pairs))
    return place / "data"


@pytest.mark.parametrize("task", ["sts15", "stsb"])
def test_no_pair_is_in_two_parts(data: Path, task: str) -> None:
    """The made-up stsb has the same pairs in its three files: there it is the files that are kept apart."""
    parts = split(data, task, 100, 50, 0)
    assert (len(parts.known), len(parts.validation), len(parts.test)) == (100, 50, 50)
    again = split(data, task, 100, None, 0)
    assert again.known == parts.known
    assert again.test[: len(parts.test)] == parts.test
    if task == "sts15":
        assert len(again.validation) == len(again.test) == (324 - 50) / 2
        known = set(zip(again.known[::2], again.known[1::2], strict=True))
        validation, test = ({pair[1:] for pair in some} for some in (again.validation, again.test))
        assert not known & validation
        assert not known & test
        assert not validation & test
    with pytest.raises(ConfigError, match="324 pairs are too few for --build 648"):
        split(data, "sts15", 648, 50, 0)


def run(path: Path, folder: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return the rows of a small run without times."""
    sizes = ["--quick", "--build", "60", "--pairs", "16", "--steps", "5", "--no-times"]
    words = ["--data", str(data), "--tasks", "sts15", "stsb", "--model", str(folder), *sizes, "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["attncache_sts", *words])
    assert sts.main() == 0
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


def test_thresholds_do_not_know_the_test_part(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_encoder(tmp_path / "model")

    def chosen(rows: list[dict[str, Any]]) -> dict[tuple[str, str], float | None]:
        return {(row["task"], row["method"]): row["threshold"] for row in rows if row["chosen"]}

    first = run(tmp_path / "first.json", folder, data, monkeypatch)
    for task, name in (("sts15", "sts15"), ("stsb", "stsb_test")):
        path = data / "sts" / f"{name}.tsv"
        tested = {pair[1:] for pair in split(data, task, 60, 16, 0).test}
        lines = [line.split("\t") for line in path.read_text().splitlines()]
        changed = [
            [str((7 * number) % 5), *line[1:]] if tuple(line[1:3]) in tested else line
            for number, line in enumerate(lines)
        ]
        path.write_text("".join("\t".join(line) + "\n" for line in changed))
    second = run(tmp_path / "second.json", folder, data, monkeypatch)
    assert chosen(first) == pytest.approx(chosen(second), abs=1e-5)  # a second run may round otherwise
    for old, new in zip(first, second, strict=True):
        assert old["validation_loss"] == new["validation_loss"]
        assert (old["hit_rate"], old["error"]) == (new["hit_rate"], new["error"])
    assert [row["spearman"] for row in first] != [row["spearman"] for row in second]


def test_the_highest_rate_that_validation_allows_is_chosen() -> None:
    def found(method: str, setting: float, rate: float, validation: float, test: float) -> judging.Found:
        none = np.empty(0)
        judged = [judging.Judged(score, score, rate, 0.0, 0.0, rate, none, none) for score in (validation, test)]
        return judging.Found(method, setting, judged[0], judged[1], BatchAttend)

    settings = [
        found("full", 0, 0.0, 80.0, 70.0),
        found("maps", 1, 0.2, 79.0, 10.0),  # far off on the test part, which nothing may know
        found("maps", 2, 0.4, 78.0, 70.0),
        found("maps", 3, 0.6, 77.9, 70.0),
        found("all cost more", 4, 0.1, 70.0, 70.0),
        found("all cost more", 5, 0.9, 60.0, 80.0),
    ]
    chosen = judging.choose(settings)
    assert {name: one.setting for name, one in chosen.items()} == {"full": 0, "maps": 2, "all cost more": 4}
    assert judging.choose([*settings[:2], found("maps", 2, 0.4, 77.9, 80.0)])["maps"].setting == 1


def test_mean_maps_are_the_means_of_each_length(tmp_path: Path) -> None:
    store = MapStore.create(tmp_path, dataclasses.replace(IDENTITY, dtype="float16"))
    maps = [maps_of(5, seed) for seed in range(3)] + [maps_of(4)]
    for number, one in enumerate(maps):
        store.append(one, token_key([number]))
    means = mean_maps(store)
    assert sorted(means) == [4, 5]
    back = unpack(torch.from_numpy(means[5]), 5, causal=True).numpy()
    np.testing.assert_allclose(back, np.mean(maps[:3], 0), atol=1e-3)
    np.testing.assert_array_equal(means[4], store.read(3))


def test_the_command_writes(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "found.json"
    folder = tiny_encoder(tmp_path / "model")
    words = [
        "--data",
        str(data),
        "--tasks",
        "stsb",
        "--model",
        str(folder),
        "--quick",
        "--build",
        "80",
        "--pairs",
        "20",
    ]
    monkeypatch.setattr(sys, "argv", ["attncache_sts", *words, "--steps", "10", "--json", str(path)])
    assert sts.main() == 0
    rows = json.loads(path.read_text())["rows"]
    chosen = {row["method"]: row for row in rows if row["chosen"]}
    others = {"SAN", "LazyFormer", "AttnDrop", "BlockDrop", "AttnCache-f", "mean maps", "mean maps, by layers"}
    methods = {"full", *others, *sts.VARIANTS}
    assert set(chosen) == methods | ({"int8", "int4"} if int8_levels() else set())
    assert all(row["speedup_attention"] > 0 and row["timed"] for row in chosen.values())
    assert not any(row["timed"] for row in rows if not row["chosen"])
    assert json.loads(path.read_text())["clock"] is not None
    full = chosen["full"]
    assert full["hit_rate"] == full["error"] == full["loss"] == 0
    for row in rows:
        assert 0 <= row["hit_rate"] <= 1
        if row["hit_rate"] == 0 and row["method"] not in ("int8", "int4"):
            assert row["error"] < 1e-5  # without maps, the full model's vectors
    assert all(chosen[name]["error"] > 1e-5 for name in ("AttnDrop", "BlockDrop"))
    assert chosen["AttnCache"]["speedup_attention_hits"] > 0
    for row in rows:  # the made-up parts have the same pairs: some are in the database
        if row["method"] in sts.VARIANTS:
            share = row["known_sentences_asked"]
            assert 0 < share < 1
            apart = share * row["known_hit_rate"] + (1 - share) * row["unseen_hit_rate"]
            assert row["hit_rate"] == pytest.approx(apart, abs=3e-4)
    assert [row["known_hit_rate"] for row in rows if row["method"] == "AttnCache" and row["threshold"] == 0.995] == [1]

    written = path.read_bytes()
    again = [*words, "--steps", "10", "--json", str(path), "--resume"]
    monkeypatch.setattr(sys, "argv", ["attncache_sts", *again])
    monkeypatch.setattr(sts, "measure", None)  # nothing is left to measure
    assert sts.main() == 0
    assert json.loads(path.read_text())["rows"] == json.loads(written)["rows"]
    monkeypatch.setattr(sys, "argv", ["attncache_sts", *again, "--seed", "3"])
    with pytest.raises(ConfigError, match="other settings"):
        sts.main()
    monkeypatch.setattr(sys, "argv", ["attncache_sts", *again, "--no-times"])
    with pytest.raises(ConfigError, match="other settings"):  # a file has times of all its tasks, or of none
        sts.main()
    monkeypatch.setattr(sys, "argv", ["attncache_sts", *(word for word in again if word != "--quick")])
    with pytest.raises(ConfigError, match="other settings"):
        sts.main()
    whole = [row for row in rows if row["method"] == "AttnCache"]
    means = {row["threshold"]: row for row in rows if row["method"] == "mean maps"}
    assert all(means[row["threshold"]]["hit_rate"] == row["hit_rate"] for row in whole)
    assert any(means[row["threshold"]]["error"] != row["error"] for row in whole)
    ours, control = chosen["+ layers (ours)"], chosen["mean maps, by layers"]
    assert (control["threshold"], control["hit_rate"]) == (ours["threshold"], ours["hit_rate"])
    assert control["error"] != ours["error"]
    assert max(row["hit_rate"] for row in whole) == 1.0
    assert max(row["error"] for row in whole) > 1e-4


@dataclasses.dataclass
class Untimed:
    """A small run of two tasks without times: what it wrote, and how it trained."""

    found: dict[str, Any]
    trained: Counter[tuple[str, int]]  # kind of projector, steps


@pytest.fixture(scope="module")
def untimed(tmp_path_factory: pytest.TempPathFactory) -> Untimed:
    place, trained = tmp_path_factory.mktemp("untimed"), Counter[tuple[str, int]]()

    def train(spec: Any, *args: Any, steps: int, **more: Any) -> Projector:
        trained[spec.kind, steps] += 1
        return real(spec, *args, steps=steps, **more)

    real = training.train
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Passes, "times", None)
        patch.setattr(build, "train", train)
        patch.setattr(baselines, "train", train)
        run(place / "found.json", tiny_encoder(place / "model"), made_up(place), patch)
    return Untimed(json.loads((place / "found.json").read_text()), trained)


def test_without_times_nothing_is_timed_and_rows_say_so(untimed: Untimed) -> None:
    found, rows = untimed.found, untimed.found["rows"]
    assert (found["times"], found["clock"]) == (False, None)
    assert not any(row["timed"] for row in rows)
    assert not [key for row in rows for key in row if key.startswith(("speedup", "seconds"))]
    shown = page_attncache.attncache("tiny", found)
    assert "Times were not measured." in shown
    assert "attention, x" not in shown
    assert "±" in shown.split("| SAN |")[1].split("\n")[0]


def test_goals_have_errors_over_pairs(untimed: Untimed) -> None:
    """A loss's error is that of the difference to the full model; that of a mean is made of those of the tasks."""
    rows = untimed.found["rows"]
    assert all(row["loss_error"] == 0 for row in rows if row["method"] == "full")
    assert any(row["loss_error"] > 0 for row in rows if row["method"] == "SAN")
    goals = {goal["name"]: goal for goal in goals_of(rows)}
    errors = [row["loss_error"] for row in rows if row["chosen"] and row["method"] == "AttnCache"]
    assert goals["points lost at it, as published"]["error"] == pytest.approx(math.hypot(*errors) / 2)
    assert all("error" in goal for goal in goals.values())
    more = goals["hit rate, ours less that as published"]
    assert more["error"] > 0
    assert page_goals.error_of("attncache_sts", untimed.found, more) == f"± {1.96 * more['error']:.2g} (95 %)"


def test_attncache_f_is_trained_as_long_as_attncache(untimed: Untimed) -> None:
    """Two tasks; a projector for all layers of each database, and for each of two layers."""
    assert untimed.trained == {("binned", 5): 2 * (1 + 2), ("positions", 5): 2}


def test_layers_are_calibrated_on_sentences_that_are_neither_stored_nor_reported_on() -> None:
    """Stored ones of the validation part come last, so that there are always some."""
    validation, test = judging.Part([[1], [3], [3], [4]], [1.0, 2.0]), judging.Part([[5], [6]], [1.0])
    model: Any = None  # nothing is embedded
    task = judging.Task("a task", "a model", model, [[1], [2]], validation, test, {})
    assert sts.held_out(task) == [[3], [4], [1]]


def test_each_layer_of_attncache_f_has_its_own_threshold(untimed: Untimed) -> None:
    """Its setting is what all of them promise."""
    own = [row for row in untimed.found["rows"] if row["method"] == "AttnCache-f"]
    assert {row["threshold"] for row in own} <= set(sts.LAYERED_COSINES)
    assert all(len(row["layer_thresholds"]) == 2 for row in own)
    assert any(len(set(row["layer_thresholds"])) == 2 for row in own)


def test_any_scores_will_do(data: Path) -> None:
    (data / "mine.tsv").write_text("4.5\tone cat\ta cat\n1\ta dog\tsome rain\n")
    assert read_pairs(data, "mine") == [(4.5, "one cat", "a cat"), (1.0, "a dog", "some rain")]
    (data / "bad.tsv").write_text("4.5\tone cat\ta cat\nthe cat\ta dog\n")
    with pytest.raises(ConfigError, match=r"bad\.tsv, line 2"):
        read_pairs(data, "bad")
    with pytest.raises(ConfigError, match=r"--tasks none: there is neither .*sts.none\.tsv nor"):
        read_pairs(data, "none")


def test_what_operation_counts_allow() -> None:
    """A hit leaves half of attention, whatever the model: AttnCache's 1.19 at its hit rate of 30 %."""
    for name, length in (("Llama-2-7B", 32), ("Llama-3-8B and Mistral-7B", 128)):
        assert allowed(name, length, 0.0) == 1
        assert allowed(name, length, 1.0) == pytest.approx(2.0)
        assert allowed(name, length, 0.3) == pytest.approx(1 / 0.85)


def test_distances(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "found.json"
    folder = tiny_encoder(tmp_path / "model")
    words = ["--data", str(data), "--tasks", "stsb", "--model", str(folder), "--build", "40", "--figure", "distances"]
    monkeypatch.setattr(sys, "argv", ["attncache_sts", *words, "--json", str(path)])
    assert sts.main() == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["of"] for row in rows] == ["all layers", "nearest", "layer 0", "layer 1"]
    assert all(0 <= row["p5"] <= row["p50"] <= row["p95"] <= 1 for row in rows)
    assert rows[1]["p50"] < rows[0]["p50"]


def test_what_a_threshold_promises_is_measured_on_a_task_that_nothing_has_seen(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, folder = tmp_path / "found.json", tiny_encoder(tmp_path / "model")
    for name, place in (("sts12", "on the old"), ("stsb_train", "in a blue"), ("stsb_test", "in a blue")):
        file = data / "sts" / f"{name}.tsv"
        file.write_text(file.read_text().replace("near a red", place))
    words = ["--data", str(data), "--model", str(folder), "--build", "60", "--pairs", "10", "--steps", "5"]
    assert carry_over.main([*words, "--tasks", "sts12", "sts15", "stsb", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    ways = {(row["unseen"], row["stored"], row["calibrated_on"], row["way"]) for row in found["rows"]}
    assert ways == {
        (unseen, stored, third if way == "another" else stored, way)
        for unseen, stored, third in (
            ("sts12", "sts15", "stsb"),
            ("sts15", "stsb", "sts12"),
            ("stsb", "sts12", "sts15"),
        )
        for way in ("own", "another")
    }
    assert len(found["goals"]) == 3 * len(carry_over.THRESHOLDS) + 1
    assert {row["left_out"] for row in found["rows"]} == {0}
    with pytest.raises(SystemExit):
        carry_over.main([*words, "--tasks", "sts12", "sts15"])
    assert "three tasks" in capsys.readouterr().err
