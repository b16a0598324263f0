"""The command of tables 1 and 2 through the engine, on the bundled model and texts of a few lines: parts are kept, and taken up again."""

from __future__ import annotations

import json
import math
import random
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.common.paired import mean_and_error
from benchmarks.papers.cachedattention import tables
from benchmarks.papers.cachedattention.overflow import choices, streams, summary
from benchmarks.papers.cachedattention.overflow.arms import ARMS

MODEL = str(files("afterglow") / "assets" / "model")
WORDS = (
    "the",
    "river",
    "of",
    "stone",
    "was",
    "found",
    "by",
    "her",
    "sister",
    "near",
    "an",
    "old",
    "bridge",
    "in",
    "spring",
)


def prose(seed: int, words: int) -> str:
    rng = random.Random(seed)
    return "".join(rng.choice(WORDS) + ("\n" if rng.random() < 0.05 else " ") for _ in range(words))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    for name in ("wikitext2", "lm_eval_tasks", "longeval"):
        (folder / name).mkdir(parents=True)
    (folder / "wikitext2" / "wiki.test.raw").write_text(prose(1, 16_000))
    copa = {"premise": "It rained.", "choice1": "It was wet.", "choice2": "He sang.", "question": "effect", "label": 0}
    (folder / "lm_eval_tasks" / "copa.test500.jsonl").write_text((json.dumps(copa) + "\n") * 32)
    record = choices.OPENING.join(["A chat. ", *(f"{word}. {prose(4, 40)}" for word in ("rivers", "stones"))])
    topics = {"prompt": record, "topics": ["Rivers", "Stones"]}
    (folder / "longeval" / "5_topics.jsonl").write_text((json.dumps(topics) + "\n") * 2)
    return folder


def test_parts_are_kept_and_taken_up_again(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tables, "OVERFLOWS", 2)
    monkeypatch.setattr(tables, "QUESTIONS", 2)
    file = tmp_path / "found.json"
    args = ["--model", MODEL, "--window", "256", "--data", str(data), "--json", str(file), "--parts", "1"]

    def run(*only: str) -> dict[str, Any]:
        named = [each for name in only for each in ("--only", name)]
        assert tables.main([*args, *named]) == 0
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    one = run("WikiText-2")
    assert {part["arm"] for part in one["parts"]} == ARMS.keys()
    assert one["quick"], "it is no full run"
    capsys.readouterr()
    found = run("WikiText-2", "COPA", "LongEval topics", "PIQA")
    said = capsys.readouterr().out
    assert "WikiText-2, part 0" not in said, "it is done"
    assert f"PIQA: not in {data}" in said
    assert found["parts"][: len(ARMS)] == one["parts"]
    assert len(found["parts"]) == 3 * len(ARMS)
    by = {row["text"]: row for row in found["rows"]}
    text = by["WikiText-2"]
    assert text["ratio"]["OF"]["value"] == pytest.approx(1, abs=1e-4)
    assert text["prefilled"]["CA"] == text["prefilled"]["NKVT"] < text["prefilled"]["OF"] < text["prefilled"]["TT"]
    assert by["COPA"]["questions"] == 2
    assert by["LongEval topics"]["questions"] == 1
    assert by["COPA"]["chance"] == by["LongEval topics"]["chance"] == 50
    assert by["COPA"]["same_choice"]["OF"] == 100
    with pytest.raises(SystemExit, match="of other settings"):
        tables.main([*args, "--window", "128"])


def test_errors_are_those_of_all_values_by_cluster() -> None:
    """The sums and counts of clusters say what all their values say."""
    rng = torch.Generator().manual_seed(1)
    clusters = [torch.randn(count, generator=rng) + shift for count, shift in ((5, 0.0), (9, 1.0), (3, 3.0))]
    found = summary.clustered([float(each.sum()) for each in clusters], [len(each) for each in clusters])
    assert found == pytest.approx(mean_and_error(clusters))
    assert math.isnan(summary.clustered([1.0], [4])[1])


def part(arm: str, number: int, losses: list[float], **more: Any) -> dict[str, Any]:
    about = {"table": "perplexity", "text": "a", "arm": arm, "part": number, "tokens": [10, 10], "prefilled": 5}
    return about | {"losses": losses} | more


def test_only_parts_of_all_arms_count() -> None:
    losses = {"CA": [11.0, 12.0], "TT": [10.0, 10.0], "NKVT": [20.0, 30.0], "OF": [10.0, 10.0], "none": [15.0, 15.0]}
    parts = [part(arm, 0, each) for arm, each in losses.items()] + [part("CA", 1, [0.0, 0.0])]
    (row,) = summary.rows(parts, list(ARMS))
    assert (row["parts"], row["tokens"]) == (1, 20)
    assert row["ratio"]["CA"] == {"value": pytest.approx(math.exp(3 / 20), abs=1e-4), "error": None}
    assert [each["value"] for each in row["by_overflow"]["CA"]] == pytest.approx(
        [math.exp(0.1), math.exp(0.2)], abs=1e-4
    )
    met = {goal["name"]: goal["met"] for goal in summary.goals([row])}
    assert met == {
        "perplexity CA / TT: a": False,
        "perplexity CA / TT, overflow 2: a": False,
        "perplexity NKVT / TT: a": True,
        "perplexity OF apart from TT: a": True,
    }


def test_a_record_fills_the_window_to_the_last_token() -> None:
    """So that what comes next overflows it, and the record survives."""
    encode = lambda text: list(text.encode())  # noqa: E731
    question = choices.Question("?", (" a", " b"), 0, ("x" * 500, "y" * 500))
    before, (end,) = streams.before_a_record(list(range(9000)), question, encode, 1, 1024, 3)
    ids = [token for turn in before for token in turn]
    assert 1 + len(ids) == 1024 + 2 * 512
    record = ids.index(ord("x"), len(ids) - 512)
    assert ids[record:].count(ord("x")) == ids[record:].count(ord("y")) == (len(ids) - record) / 2
    assert len(ids) - record + len(end) <= 512


def test_dialogues_become_turns_of_as_many_tokens(tmp_path: Path) -> None:
    rows = [{"history": [{"user": f"u{n}", "bot": "b" * (n % 700)}] * 2} for n in range(16 * 20)]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = streams.of_dialogues(file, lambda text: list(text.encode()), 1024, 2)
    assert len(found) == streams.PARTS
    for part, turns in enumerate(found):
        assert sum(map(len, turns)) == 1024 + 2 * 512 + 64
        assert max(map(len, turns)) <= 256
        assert bytes(turns[0]).decode().startswith(f"<|im_start|>user\nu{part}<|im_end|>\n<|im_start|>assistant\n")
    first, rest = streams.begun(found[0], 10, 1024)
    assert 10 + len(first) + len(rest[0]) <= 1024 < 10 + len(first) + len(rest[0]) + len(rest[1])
