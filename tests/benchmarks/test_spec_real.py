"""SPEC's quality on a real model: questions and examples are apart, choices are scored by tokens, chance is not judged."""

from __future__ import annotations

import itertools
import json
from importlib.resources import files
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from benchmarks.common.paired import Paired
from benchmarks.papers import page_goals, page_tables
from benchmarks.papers.spec import judged, prefixes, quality, real, runs
from benchmarks.papers.spec.prefixes import Query, Question, Shared
from benchmarks.papers.spec.runs import EXACT, Chosen, Variant
from torch import Tensor

from afterglow.kernels.attention import attend
from afterglow.model.decoder import Attention, Decoder
from afterglow.model.loader import load_model
from afterglow.text import Tokenizer

DIRECTORY = Path(str(files("afterglow") / "assets" / "model"))
TEXT = (
    "This function returns the number of items in the list. If the list is empty, it raises an error with a message that "
    "names the file in which the list was read. The caller may then try again with another file, or give up. "
)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return load_model(DIRECTORY)


@pytest.fixture(scope="module")
def encode() -> prefixes.Encode:
    tokenizer = Tokenizer(DIRECTORY)
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def plain_logits(decoder: Decoder, ids: list[int]) -> Tensor:
    """Compute all tokens in one causal pass, without any prefix."""
    positions = torch.arange(len(ids))
    rotation = decoder.rotation(positions)

    def causal(layer: int, attention: Attention, x: Tensor) -> Tensor:
        q, k, v = attention.project(x)
        q, k = attention.rotate(q, rotation), attention.rotate(k, rotation)
        return attend(q, k, v, scale=attention.scale, causal=True)[0].flatten(1)

    return decoder.logits(decoder.forward(torch.tensor(ids), positions, causal))


def piqa(folder: Path, count: int) -> Path:
    """Write `count` questions, each of them twice: the second time with other choices."""
    lines = [
        {"goal": f"How do I {number}?", "sol1": f"{way} so.", "sol2": f"{way} thus.", "label": number % 2}
        for number, way in itertools.product(range(count), ("Do it", "Make it"))
    ]
    path = folder / "lm_eval_tasks" / "piqa.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_no_example_is_asked_and_no_question_is_asked_twice(tmp_path: Path) -> None:
    piqa(tmp_path, 60)
    task = real.Task("piqa.jsonl", 40, prefixes=4, each=5)
    questions, examples = task.read(tmp_path, 0)
    assert len(questions) == 80
    assert not {one.text for one in questions} & {one.text for one in examples}
    assert 0 < len(examples) < 40, "those whose question comes again are dropped"
    assert task.read(tmp_path, 1)[0] != questions

    def characters(text: str) -> list[int]:
        return list(text.encode())

    shared = task.shared(tmp_path, characters, 0, quick=False)
    assert [len(asked) for _, asked in shared] == [5 + runs.EARLIER] * 4
    asked = [(bytes(one.prompt), bytes(one.choices[0])) for _, over in shared for one in over]
    assert len(asked) == len(set(asked))
    for ids, _ in shared:
        assert ids
        assert len(ids) <= real.PREFIX
        assert not any(prompt in bytes(ids) for prompt, _ in asked)
    few = list(prefixes.few_shot(questions, examples, characters, [1], most=200, prefixes=2, each=3, seed=0))
    assert all(100 < len(ids) <= 200 and ids[0] == 1 for ids, _ in few)
    assert few[0][0] != few[1][0], "examples are drawn anew"


def test_a_second_file_gives_the_examples(tmp_path: Path) -> None:
    path = piqa(tmp_path, 10)
    other = tmp_path / "lm_eval_tasks" / "train.jsonl"
    other.write_text(path.read_text().replace("How do", "When do") + path.read_text())
    questions, examples = real.Task("piqa.jsonl", "train.jsonl", 1, 1).read(tmp_path, 0)
    assert len(questions) == 20
    assert len(examples) == 20
    assert all(one.text.startswith("Question: When do I") for one in examples)


def test_stretches_lie_all_over_a_text() -> None:
    assert prefixes.stretches(range(100), 3, 20) == [range(20), range(33, 53), range(66, 86)]
    with pytest.raises(ValueError, match="3 stretches of 34 tokens are not in a text of 100"):
        prefixes.stretches(range(100), 3, 34)


def test_a_choice_is_scored_by_the_mean_of_its_tokens(decoder: Decoder, encode: prefixes.Encode) -> None:
    """The longer choice begins with the shorter one, so it can only win where tokens are averaged."""
    ids = encode(4 * TEXT)
    prefix, prompt = ids[:100], encode(" The caller may then")
    short = encode(" give")
    long = short + encode(" up. This function returns the number of items in the list.")
    logits = plain_logits(decoder, prefix + prompt + long)[len(prefix + prompt) - 1 : -1]
    losses = F.cross_entropy(logits, torch.tensor(long), reduction="none")
    first = losses[: len(short)]
    assert losses.sum() > first.sum()
    assert losses.mean() < first.mean(), "so the mean prefers the other choice than the sum"
    question = Question(prompt, [short, long], 1)
    found = runs.choose(decoder, [(prefix, [question] * (runs.EARLIER + 1))], [EXACT, Variant("h2o", 0.9)], 0)
    assert found.right.accuracy(EXACT.name)["accuracy"]["exact"]["value"] == 100
    assert found.right.accuracy(EXACT.name)["questions"] == 1
    assert found.loaded["h2o 0.9 0.6"].requests == 2


def test_the_loss_over_all_rows_is_that_of_one_plain_pass(decoder: Decoder, encode: prefixes.Encode) -> None:
    ids = encode(6 * TEXT)
    prefix, prompt, reply = ids[:150], ids[150:170], ids[170:190]
    shared = Shared(prefix, [Query(ids[:20], ids[20:40]), Query(prompt, reply)], 1)
    ways = [EXACT, Variant("random", 0.1)]
    found, sessions = runs.run(decoder, [shared, shared], {"scored": ways, "published": ways}, 0)
    logits = plain_logits(decoder, prefix + prompt + reply)[len(prefix + prompt) - 1 : -1]
    loss = F.cross_entropy(logits, torch.tensor(reply))
    for protocol, values in found.items():
        exact, other = judged.quality(protocol, ways, values, sessions)
        assert exact["text_perplexity"] == pytest.approx(float(loss.exp()), rel=1e-3)
        assert exact["text_perplexity_ratio"] is None
        assert other["text_perplexity_ratio"]["value"] == pytest.approx(
            other["text_perplexity"] / exact["text_perplexity"], abs=1e-3
        )
        assert other["text_perplexity_ratio"]["value"] != 1


def chosen(right: list[list[int]], spec: list[list[int]]) -> Chosen:
    """Make up answers to questions of two choices: of the full cache and of SPEC over a quarter of the rows, by prefix."""
    found = Chosen(Paired(), Paired(), chances=[0.5] * sum(map(len, right)), rows=[1000] * len(right))
    for cluster, (exact, part) in enumerate(zip(right, spec, strict=True)):
        values = {"exact": torch.tensor(exact).float(), "spec 0.25 0.6": torch.tensor(part).float()}
        found.right.add(values, cluster)
        found.same.add({name: (value == values["exact"]).float() for name, value in values.items()}, cluster)
    return found


WAYS = [EXACT, Variant("spec", 0.25)]


def test_points_are_judged_where_the_full_cache_is_better_than_chance() -> None:
    good = chosen([[1, 1, 1, 0], [1, 1, 0, 1], [1, 1, 1, 1]], [[1, 1, 0, 0], [1, 0, 0, 1], [1, 1, 1, 1]])
    rows = judged.choices(WAYS, good)
    assert rows[0]["accuracy"]["value"] == pytest.approx(83.3333)
    assert rows[1]["points"]["value"] == pytest.approx(-16.6667)
    assert rows[1]["same_choice"]["value"] == pytest.approx(83.3333)
    assert rows[0]["above_chance"]
    (goal,) = judged.choice_goals("PIQA", rows)
    assert goal["name"] == "PIQA: points of accuracy lost at 25%"
    assert (goal["goal"], goal["met"], goal["within_noise"]) == ("<= 1", False, True)
    assert goal["error"] == rows[1]["points"]["error"] > 0


def test_points_are_not_judged_at_chance() -> None:
    """Two thirds of twelve answers are right, and half are chance: the interval holds both."""
    poor = chosen([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 1, 0]], [[0, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0]])
    rows = judged.choices(WAYS, poor)
    assert rows[0]["accuracy"]["value"] > rows[0]["chance"] == 50
    assert not rows[0]["above_chance"]
    assert judged.choice_goals("PIQA", rows) == []
    alone = judged.choices(WAYS, chosen([[1, 1, 1, 1]], [[1, 1, 1, 1]]))
    assert not alone[0]["above_chance"], "one prefix has no interval"


def test_the_page_shows_what_is_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_goals, "RESULTS", tmp_path)
    assert page_tables.table("spec real").startswith("Not measured yet: `importance_real.json`")
    found = chosen([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 1, 0]], [[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 1, 0]])
    report = quality.Report()
    report.add("choices", "PIQA", judged.choices(WAYS, found))
    for alpha in (2.0, 0.6, 0.2):
        for protocol in ("scored", "published") if alpha == 0.6 else ("scored",):
            for mode, retention in (("exact", 1.0), ("spec", 0.25)) if alpha == 0.6 else (("spec", 0.25),):
                values = {"value": 90 + alpha, "error": 0.5}
                row = {"protocol": protocol, "mode": mode, "retention": retention, "alpha": alpha, "sessions": 3}
                row |= {"prefix_rows": 1500, "text_agreement": values, "text_agreement_samples": 96}
                row |= {"text_perplexity": 20 + alpha, "fallback": 0.25, "vectors_loaded": 0.625}
                row |= {"text_perplexity_ratio": None if mode == "exact" else {"value": 1 + alpha, "error": 0.01}}
                report.add("quality", "WikiText-2", [row])
    about = {"rows": report.rows, "not_judged": ["PIQA: exact is at chance: not judged"], "goals": []}
    (tmp_path / "importance_real.json").write_text(json.dumps(about))
    text = page_tables.table("spec real")
    assert "Prefixes: PIQA 3 of 1,000 tokens." in text
    assert "| right answers, % ± 95 % | PIQA (12 questions, chance 50) | points to all rows |" in text
    assert "| SPEC, 25 % | 58.3 ± " in text
    assert "\nPIQA: exact is at chance: not judged.\n" in text
    assert "| WikiText-2 (96 tokens, 3 prefixes of 1,500) |" in text
    assert "| all rows |  | 20.60 |  |  | 20.60 |  |" in text
    assert "| SPEC, 25 % | 90.6 ± 1.0 | 20.60 | 1.600 ± 0.020 | 90.6 ± 1.0 | 20.60 | 1.600 ± 0.020 |" in text
    alphas = [line.split(" | ")[0] for line in text.split("\n") if line.endswith("| 25 % | 62.5 % |")]
    assert alphas == ["| 0.2", "| 0.6", "| 2"]


def test_all_arms_are_asked(decoder: Decoder) -> None:
    ids = list(range(300, 700))
    over = [Question(ids[at : at + 8], [ids[at + 8 : at + 12], ids[50:53]], 0) for at in range(0, 200, 25)]
    rows = judged.choices(real.WAYS, runs.choose(decoder, [(ids, over), (ids[100:], over)], real.WAYS, 0))
    names = [(row["mode"], row["retention"]) for row in rows]
    assert names[:4] == [("exact", 1.0), ("spec", 0.5), ("spec", 0.25), ("spec", 0.1)]
    assert names[4:] == [(mode, 0.25) for mode in ("h2o", "spi", "random")]
    assert rows[0]["questions"] == 2 * (len(over) - runs.EARLIER)
    assert rows[0]["same_choice"] == {"value": 100.0, "error": 0.0}
    assert {row["mode"] for row in rows if "vectors_loaded" in row} == {"spec", "h2o"}
    assert {way.alpha for way in real.TEXT_WAYS["scored"]} == {0.2, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0}


def test_no_real_model_or_text_is_said(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    assert quality.main(["--tasks", "real", "--data", str(tmp_path), "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    (line,) = found["skipped"]
    assert line.startswith("real: ")
    assert found["quick"] is True, "it is no full run"
    assert found["goals"] == []
