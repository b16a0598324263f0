"""The command of tables 1 and 2 through the engine, on the bundled model and texts of a few lines: parts are kept, and taken up again."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.common.paired import mean_and_error
from benchmarks.papers.cachedattention import tables
from benchmarks.papers.cachedattention.overflow import choices, choices_table, streams, summary
from benchmarks.papers.cachedattention.overflow.arms import ARMS
from benchmarks.papers.cachedattention.overflow.choice_rows import COMPARED, OWN, VALIDATION

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
    (folder / "lm_eval_tasks" / "copa.test500.jsonl").write_text((json.dumps(copa) + "\n") * 128)
    topics = [
        {
            "prompt": choices.OPENING.join(
                ["A chat. ", *(f"{word} {n}. {prose(4, 40)}" for word in ("rivers", "stones"))]
            ),
            "topics": [f"Rivers {n}", f"Stones {n}"],
        }
        for n in range(24)
    ]
    (folder / "longeval" / "5_topics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in topics))
    return folder


@pytest.fixture
def run(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    monkeypatch.setattr(tables, "OVERFLOWS", 2)

    def run(table: int, *only: str) -> dict[str, Any]:
        file = tmp_path / f"{table}.json"
        named = [each for name in only for each in ("--only", name)]
        args = [
            "--model",
            MODEL,
            "--window",
            "256",
            "--data",
            str(data),
            "--json",
            str(file),
            "--parts",
            "1",
            "--quick",
        ]
        assert tables.main(["--table", str(table), *args, *named]) == 0
        found: dict[str, Any] = json.loads(file.read_text())
        assert found["quick"], "it is no full run"
        return found

    return run


def test_parts_are_kept_and_taken_up_again(
    run: Callable[..., dict[str, Any]], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = "WikiText-2, without a head"
    one = run(1, "WikiText-2")
    assert {part["arm"] for part in one["parts"]} == ARMS.keys()
    capsys.readouterr()
    found = run(1, "WikiText-2", bare, "Shakespeare")
    said = capsys.readouterr().out
    assert "WikiText-2, part 0" not in said, "it is done"
    assert f"{bare}, part 0, CA" in said
    assert f"Shakespeare: not in {data}" in said
    assert found["parts"][: len(ARMS)] == one["parts"]
    assert len(found["parts"]) == 2 * len(ARMS)
    text = next(row for row in found["rows"] if row["text"] == "WikiText-2")
    assert text["ratio"]["OF"]["value"] == pytest.approx(1, abs=1e-4)
    assert text["prefilled"]["CA"] == text["prefilled"]["NKVT"] < text["prefilled"]["OF"] < text["prefilled"]["TT"]
    with pytest.raises(SystemExit, match="of other settings"):
        tables.main(["--table", "1", "--data", str(data), "--json", str(tmp_path / "1.json"), "--window", "128"])
    with pytest.raises(SystemExit):
        tables.main(["--table", "2", "--only", "WikiText-2"])
    assert "table 2 has no 'WikiText-2'; it has PIQA" in capsys.readouterr().err


def test_questions_of_all_tasks_are_asked_in_all_arms(
    run: Callable[..., dict[str, Any]], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copa, topics, foreign = "COPA", choices_table.TOPICS, choices_table.FOREIGN
    one = run(2, copa)
    capsys.readouterr()
    found = run(2, copa, topics, foreign)
    assert found["parts"][: len(one["parts"])] == one["parts"]
    by = {row["text"]: row for row in found["rows"]}
    assert by.keys() == {copa, topics, foreign}
    assert {task: row["chance"] for task, row in by.items()} == {copa: 50, topics: 50, foreign: 20}
    assert by[copa]["questions"] == choices_table.QUICK_QUESTIONS
    assert by[copa]["validation"]["questions"] == choices_table.QUICK_VALIDATED
    assert by[topics]["questions"] == 2, "18 are reported, of which 0 and 16 are in the first part"
    for task, row in by.items():
        parts = [part for part in found["parts"] if part["text"] == task]
        own = {part["part"]: part for part in parts if part["arm"] == OWN}
        assert len(parts) == 2 + 1 + len(COMPARED)
        reported, validation = set(own[0]["numbers"]), set(own[VALIDATION]["numbers"])
        assert not reported & validation, "the rule is chosen on other questions"
        assert all(number % 4 == 3 for number in validation)
        assert [len(of) for of in own[0]["losses"]] == [len(of) for of in own[0]["tokens"]]
        assert row["accuracy"].keys() == row["above_chance"].keys() == set(COMPARED)
        assert row["validation"]["right"][row["rule"]] == max(row["validation"]["right"].values())
    kept = {
        (part["text"], part["arm"], part["part"]): [loss for of in part["losses"] for loss in of]
        for part in found["parts"]
    }

    def apart(arm: str) -> float:
        """What an arm's losses differ by from TT's, where the history matters."""
        pairs = zip(
            kept[topics, arm, 0] + kept[foreign, arm, 0], kept[topics, "TT", 0] + kept[foreign, "TT", 0], strict=True
        )
        return sum(abs(a - b) for a, b in pairs)

    assert 0 < apart("CA") < apart("NKVT")
    assert apart("CA") < apart("none")
    capsys.readouterr()
    again = run(2, copa, topics, foreign)
    assert again["rows"] == found["rows"]
    assert "part 0" not in capsys.readouterr().out, "all is done"
    args = ["--table", "2", "--model", MODEL, "--window", "256", "--data", str(data)]
    with pytest.raises(SystemExit, match="of other settings"):
        tables.main([*args, "--json", str(tmp_path / "2.json")])  # parts of a full run have more questions


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
    question = choices.Question("?", "?", (" a", " b"), 0, ("x" * 500, "y" * 500))
    (*before, end), alone = streams.before_a_record(list(range(9000)), question, encode, 1, 1024, 3)
    ids = [token for turn in before for token in turn]
    assert bytes(end).decode() == choices.RECORD_END
    assert alone == [*ids[ids.index(ord("x"), len(ids) - 512) :], *end]
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
