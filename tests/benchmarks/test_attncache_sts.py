"""The AttnCache benchmark: the paper's own arithmetic, and a whole run on made-up pairs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from afterglow.errors import ConfigError
from afterglow.model.linear import int8_levels
from tests.memo.tiny import tiny_encoder

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import attncache_sts
from attncache_parts.measures import gamma, read_pairs, spearman, split
from attncache_parts.shapes import allowed

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


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data" / "sts"
    folder.mkdir(parents=True)
    nouns, verbs = ("cat", "dog", "kite", "mill", "river", "mat"), ("sat", "ran", "is")
    pairs = [
        (float(a == c) * 3 + float(b == d) * 2, f"the {a} {b} near a red {c}", f"the {c} {d} near a red {a}")
        for a in nouns
        for b in verbs
        for c in nouns
        for d in verbs
    ]
    for name in ("sts15", "stsb_train", "stsb_test"):
        (folder / f"{name}.tsv").write_text("".join(f"{gold}\t{x}\t{y}\tmade up\n" for gold, x, y in pairs))
    return tmp_path / "data"


def test_what_is_known_is_not_asked(data: Path) -> None:
    known, asked = split(data, "sts15", 100, 50, 0)
    assert len(known) == 100
    assert len(asked) == 50
    everything = (data / "sts" / "sts15.tsv").read_text()
    assert all(f"\t{text}\t" in everything for text in known)
    again = split(data, "sts15", 100, None, 0)
    assert again[0] == known
    assert len(again[1]) == 324 - 50
    assert not {pair[1:] for pair in again[1]} & set(zip(known[::2], known[1::2], strict=True))


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
    assert attncache_sts.main() == 0
    rows = json.loads(path.read_text())["rows"]
    chosen = {row["method"]: row for row in rows if row["chosen"]}
    methods = {"full", "SAN", "LazyFormer", "AttnDrop", "BlockDrop", "AttnCache-f", *attncache_sts.VARIANTS}
    assert set(chosen) == methods | ({"int8"} if int8_levels() else set())
    assert all(row["speedup_attention"] > 0 for row in chosen.values())
    full = chosen["full"]
    assert full["hit_rate"] == full["error"] == full["loss"] == 0
    for row in rows:
        assert 0 <= row["hit_rate"] <= 1
        if row["hit_rate"] == 0 and row["method"] != "int8":
            assert row["error"] < 1e-5  # without maps, the full model's vectors
    assert all(chosen[name]["error"] > 1e-5 for name in ("AttnDrop", "BlockDrop"))
    assert chosen["AttnCache"]["speedup_attention_hits"] > 0

    written = path.read_bytes()
    again = [*words, "--steps", "10", "--json", str(path), "--resume"]
    monkeypatch.setattr(sys, "argv", ["attncache_sts", *again])
    monkeypatch.setattr(attncache_sts, "measure", None)  # nothing is left to measure
    assert attncache_sts.main() == 0
    assert json.loads(path.read_text())["rows"] == json.loads(written)["rows"]
    monkeypatch.setattr(sys, "argv", ["attncache_sts", *again, "--seed", "3"])
    with pytest.raises(ConfigError, match="other settings"):
        attncache_sts.main()
    whole = [row for row in rows if row["method"] == "AttnCache"]
    assert max(row["hit_rate"] for row in whole) == 1.0
    assert max(row["error"] for row in whole) > 1e-4


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
    assert attncache_sts.main() == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["of"] for row in rows] == ["all layers", "nearest", "layer 0", "layer 1"]
    assert all(0 <= row["p5"] <= row["p50"] <= row["p95"] <= 1 for row in rows)
    assert rows[1]["p50"] < rows[0]["p50"]
