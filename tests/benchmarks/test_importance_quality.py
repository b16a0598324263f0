"""The benchmark of selections measures what it says: prefixes with their facts, protocols, chunks, priors."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest
import tokenizers
import torch
from benchmarks.papers.spec import cost, judged, observations, prefixes, quality, runs
from benchmarks.papers.spec.attend import prefill
from benchmarks.papers.spec.baselines import attend_as
from benchmarks.papers.spec.runs import EXACT, Protocol, Session, Variant
from scripts.small_model.tokenizer import ASSISTANT, BOS

from afterglow.importance.row_layout import RowImportance
from afterglow.model.decoder import Decoder
from afterglow.model.loader import load_model

DIRECTORY = Path(str(files("afterglow") / "assets" / "model"))
SENTENCES = ["Return the value of the object.", "This is a list of names.", "Raise an error if the file is missing."]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return load_model(DIRECTORY)


def shared(tokens: int = 500, count: int = 1) -> list[prefixes.Shared]:
    return list(prefixes.dialogues(DIRECTORY, SENTENCES, count=count, tokens=tokens, facts=8, seed=1))


def test_facts_are_in_the_prefix_and_questions_end_before_the_reply() -> None:
    fast = tokenizers.Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))
    for each in shared(count=3):
        assert 500 <= len(each.prefix) < 900
        assert each.prefix[0] == BOS
        facts = [query for query in each.queries if query.value is not None]
        assert 6 <= len(facts) <= 8
        assert sum(query.value is None for query in each.queries[each.earlier :]) == 2
        text = fast.decode(each.prefix)
        for query in facts:
            assert query.prompt[-1] == ASSISTANT
            assert query.value is not None
            assert query.reply[query.value] in each.prefix
            assert fast.decode([query.reply[query.value]]).strip() in text


def test_protocols_on_the_bundled_model(decoder: Decoder) -> None:
    wanted: dict[Protocol, list[Variant]] = {
        "scored": runs.variants((0.5, 0.1), (0.0, 0.6)),
        "generated": runs.variants((0.5,), (), ("spec",)),
        "published": runs.variants((0.5,), (), ("spec",)),
    }
    found, sessions = runs.run(decoder, shared(), wanted, seed=0)
    for protocol, values in found.items():
        agree = values.agree.accuracy(EXACT.name)["accuracy"]
        assert agree["exact"]["value"] == 100
        rows = judged.quality(protocol, wanted[protocol], values, sessions)
        assert [row["mode"] for row in rows] == [variant.mode for variant in wanted[protocol]]
    right = found["scored"].right.accuracy(EXACT.name)["accuracy"]
    agree = found["scored"].agree.accuracy(EXACT.name)["accuracy"]
    assert agree["spec 0.5 0.6"]["value"] > agree["random 0.1 0.6"]["value"]
    # The same request scored and generated is the same with the full cache.
    assert found["generated"].right.accuracy(EXACT.name)["accuracy"]["exact"] == right["exact"]
    replies = {name: found[name].agree.accuracy(EXACT.name)["accuracy"] for name in ("generated", "published")}
    assert replies["generated"]["spec 0.5 0.6"]["value"] == 100
    assert replies["published"]["spec 0.5 0.6"]["value"] < 95  # the reply's own attention did not select
    recalled = {name: found[name].right.accuracy(EXACT.name)["accuracy"] for name in ("generated", "published")}
    assert recalled["generated"]["exact"] == recalled["published"]["exact"] == recalled["generated"]["spec 0.5 0.6"]
    never = found["scored"].loaded["spec 0.25 0"]
    assert never.mean(never.fallbacks) == 1  # alpha 0
    assert never.mean(never.vectors) == pytest.approx((8 + 8 * 0.25) / 16, abs=1e-3)
    goals = judged.goals("here", wanted["scored"], found["scored"])
    assert {goal["name"] for goal in goals} >= {"here: points of recall lost at 50%"}
    (session,) = sessions
    judged_requests = len(shared()[0].queries) - 5
    assert len(session.sums) == judged_requests
    assert session.sums[0].shape == (6, 8, session.rows)
    assert (session.before.count == 5).all()


def test_a_renewed_reply_is_decoded_token_by_token(decoder: Decoder) -> None:
    each = shared()[0]
    query = next(query for query in each.queries if query.value is not None)
    assert runs.first_part(query, "scored") == query.prompt + query.reply[:-1]
    assert runs.first_part(query, "published") == query.prompt
    prefix = prefill(decoder, each.prefix)
    whole = attend_as("exact", decoder, prefix, 1.0)
    at_once = torch.cat((whole.extend(query.prompt)[-1:], whole.extend(query.reply[:-1])))
    step = attend_as("exact", decoder, prefix, 1.0, renew=True)
    tokens = [step.extend(query.prompt)[-1:], *(step.extend([token]) for token in query.reply[:-1])]
    torch.testing.assert_close(torch.cat(tokens), at_once, atol=1e-4, rtol=1e-4)


def session(requests: list[torch.Tensor], before: torch.Tensor) -> Session:
    importance = RowImportance(len(before), before.shape[1])
    importance.mean = before
    return Session(before.shape[1], importance, requests)


def test_observations_of_attention_that_is_known() -> None:
    """One layer after the other wants the same half of the rows, every second one, which was important before too."""
    alternating = torch.zeros(3, 4, 256)
    alternating[..., ::2] = 1 + torch.arange(128.0).flip(0) / 1000
    one = session([alternating, alternating], alternating.mean(1))
    half = observations.chunks([one], (16,))[0]
    assert half["read"] == {"text": 1.0, "reordered": 0.5}
    assert half["important_in_read"] == {"text": 0.5, "reordered": 1.0}
    assert half["amplification"] == {"text": 2.0, "reordered": 1.0}
    assert half["fewer_by_reordering"] == 2
    assert half["frequency_to_share"] is None  # all chunks are read alike
    assert [row["recall"] for row in observations.static([one])] == [1.0] * 5
    assert all(row["heads"] == [1.0] * 3 and row["adjacent_layers"] == [1.0] * 2 for row in observations.heads([one]))
    found = {(row["order"], row["prior"], row["budget"]): row for row in observations.priors([one], retention=0.5)}
    assert found["reordered", "prior", 0.5]["recall"] == found["reordered", "prior", 0.5]["precision"] == 1
    assert found["text", "prior", 0.5]["recall"] == 0.5  # all chunks are wanted
    assert found["reordered", "prior", 0.25]["recall"] == 0.5
    assert found["reordered", "random", 0.5]["recall"] < 0.8
    assert found["reordered", "prior", 0.5]["rows_recall"] == 1
    assert found["text", "cut", 0.5]["rows_recall"] == 0.5


def test_caching_by_policy() -> None:
    """Every prefix's first rows are wanted by all requests, others by one each: densely wanted rows are worth more."""
    generator = torch.Generator().manual_seed(0)
    sessions = []
    for _ in range(6):
        requests = []
        for _ in range(4):
            sums = torch.zeros(2, 4, 256)
            sums[..., :32] = 2
            sums[..., 32 + torch.randperm(224, generator=generator)[:32]] = 1
            requests.append(sums)
        sessions.append(session(requests, torch.stack(requests).mean(0).mean(1)))
    found = {(row["order"], row["policy"]): row["rows_on"] for row in observations.caching(sessions)}
    for shares in found.values():
        assert sum(shares.values()) == pytest.approx(1, abs=1e-3)
    assert found["text", "score"]["device"] > found["text", "lru"]["device"]
    assert found["text", "score"]["device"] >= found["text", "lfu"]["device"]
    assert found["reordered", "score"]["device"] >= found["text", "score"]["device"]


def test_hot_chunks() -> None:
    assert observations._hotness(torch.tensor([[2, 4, 8], [0, 4, 8], [0, 0, 8]]), 8)[0] > 0.95
    assert observations._hotness(torch.tensor([[8, 2, 1], [0, 2, 1], [0, 0, 1]]), 8)[0] < -0.9
    assert observations._hotness(torch.tensor([[1, 2, 1]]), 8) == []


def test_questions_are_read(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = []
    for number in range(6):
        rows += [
            {"goal": f"How {number}?", "sol1": "So.", "sol2": "Not so.", "label": 1},
            {"question_stem": f"What {number}?", "choices": ["a", "b", "c"], "label": 2},
            {
                "premise": f"It broke {number}.",
                "choice1": "It fell.",
                "choice2": "It rose.",
                "question": "cause",
                "label": 0,
            },
        ]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = prefixes.read_questions(path)
    assert read[0] == ("Question: How 0?\nAnswer:", [" So.", " Not so."], 1)
    assert read[1] == ("What 0?", [" a", " b", " c"], 2)
    assert read[2] == ("It broke 0 because", [" it fell.", " it rose."], 0)


def test_stories_are_gone_on_with() -> None:
    ids = list(range(1000))
    (one,) = prefixes.stories([ids], (0,), 300, 4)
    assert one.prefix == [0, *range(299)]
    assert one.earlier == 3
    assert one.queries[3].prompt[0] == 299  # the first that is judged goes on where the prefix ends
    assert len(one.queries) == 7


def test_the_cost_of_identification(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("HEADS", 4), ("HEAD_DIM", 8), ("HIDDEN", 32), ("FFN", 64)):
        monkeypatch.setattr(cost, name, value)
    row = cost.measure(500, 2)
    assert row["rows"] == 500
    assert set(row["milliseconds"]) == {"identify", "all_heads", "gather_keys", "rest"}


def test_without_data_it_says_what_it_skips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AFTERGLOW_DATA", raising=False)
    path = tmp_path / "found.json"
    assert quality.main(["--quick", "--tasks", "stories,real", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["rows"] == found["goals"] == []
    assert len(found["skipped"]) == 2
    assert "AFTERGLOW_DATA" in found["skipped"][0]
    arguments = ["--tasks", "stories", "--data", str(tmp_path), "--json", str(path)]
    assert quality.main(arguments) == 0
    found = json.loads(path.read_text())
    assert len(found["skipped"]) == 1
    assert found["quick"] is True, "it is no full run"
