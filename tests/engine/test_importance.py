"""Policy `importance`: the tokens with the most attention survive, and scores are exact over any turns."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from afterglow.engine.runner import TorchRunner
from afterglow.engine.scores import STRIDE, Scores, ScoringAttend
from afterglow.errors import ConfigError
from afterglow.model.loader import load_model
from afterglow.plan.prefix.ranges import complement, count
from afterglow.plan.prefix.truncation import Cut, Origin
from afterglow.plan.step import Run
from tests import doors
from tests.engine.by_hand import ask_truncated, importance, logprobs, reference
from tests.engine.conftest import LLAMA, OTHER_SCORES, VOCAB, Handle, in_turn
from tests.engine.test_truncation import ROTARY

Start = Callable[..., Handle]
Models = Callable[[str], Path]

WINDOW, MOST, SYSTEM = 256, 128, 9
WEIGHTS = LLAMA["num_hidden_layers"] * LLAMA["num_attention_heads"]  # of a row, which add up to 1 each


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]


def pack(tokens: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def converse(handle: Handle, rng: random.Random, turns: int = 5) -> list[int]:
    text = words(rng, SYSTEM)
    for _ in range(turns):
        text += words(rng, 40)
        text += [token for out in ask_truncated(handle.engine, text, 5, turns=(SYSTEM,)) for token in out.tokens]
    return text


def scores_of(handle: Handle, salt: str, tokens: list[int]) -> torch.Tensor:
    assert handle.engine.parts.scores is not None
    return handle.engine.parts.scores.of(salt, pack(tokens))


@pytest.mark.parametrize("family", in_turn(name for name in ROTARY if name not in OTHER_SCORES))
def test_what_is_attended_to_most_survives(start: Start, model_of: Models, tmp_path: Path, family: str) -> None:
    rng = random.Random(family)
    model = model_of(family)
    handle = start(model, tmp_path, max_model_len=WINDOW, truncation_policy="importance")
    text = converse(handle, rng)
    decoder = load_model(model, dtype="float32", device="cpu", max_model_len=None)
    expected = importance(decoder, text[:-1])
    found = scores_of(handle, "", text)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert len(found) == len(text) - 1, "prompts and replies, but for the last token, which was never fed"
    handle.engine.settle()
    handle.engine.demote("disk")

    new = words(rng, 30)
    outputs = ask_truncated(handle.engine, text + new, turns=(SYSTEM,))
    told = outputs[0].truncation
    assert told is not None
    assert (told.kept, told.reused, told.policy) == (MOST, True, "importance")
    (epoch,) = doors.epochs_of(handle.engine.parts.scheduler).values()
    dropped = epoch.dropped
    rows = len(text) + len(new)
    kept = [row for a, b in complement(dropped, rows) for row in range(a, b)]
    assert kept[:SYSTEM] == list(range(SYSTEM))
    assert kept[-MOST // 2 :] == list(range(rows - MOST // 2, rows))
    middle = kept[SYSTEM : -MOST // 2]
    least = min(float(expected[row]) for row in middle)
    for a, b in dropped:
        assert float(expected[a:b].max()) <= least * (1 + 1e-4)
    if family != "cohere":  # which, with random weights, attends to each row a little less than to the one before
        assert len(dropped) > 1, "single tokens, not turns"
    assert outputs[0].cached.total == MOST - 30 - 1
    wanted = reference(decoder, text[:-1], dropped, [text[-1], *new])
    assert (logprobs(outputs) - wanted).abs().max() < 1e-4


def test_scores_go_on_in_what_survived(start: Start, model_of: Models) -> None:
    rng = random.Random(1)
    handle = start(model_of("llama"), max_model_len=WINDOW, truncation_policy="importance")
    text = converse(handle, rng)
    before = scores_of(handle, "", text)
    for _ in range(6):
        text += words(rng, 30)
        outputs = ask_truncated(handle.engine, text, turns=(SYSTEM,))
        assert outputs[0].truncation is not None
        assert outputs[0].truncation.policy == "importance"
        text += [token for output in outputs for token in output.tokens]
    first, *_, last = doors.epochs_of(handle.engine.parts.scheduler).values()
    assert count(last.dropped) > count(first.dropped), "the window has overflowed again"
    kept = complement(first.dropped, first.rows)
    survivors = torch.cat([before[a:b] for a, b in kept])
    after = scores_of(handle, first.salt, [text[row] for a, b in kept for row in range(a, b)])
    assert bool((after[: len(survivors)] >= survivors).all()), "what they had, and what they got since"
    assert handle.engine.stats().plan.counters.truncations_unscored == 0


def test_every_row_counts_once_however_it_comes(start: Start, model_of: Models, tmp_path: Path) -> None:
    rng = random.Random(2)
    handle = start(model_of("llama"), tmp_path, truncation_policy="importance")
    text: list[int] = []
    for tier in ("device", "host", "disk"):
        text += words(rng, 50)
        text += handle.ask(text, max_tokens=6).tokens
        handle.engine.settle()
        if tier != "device":
            handle.engine.demote("host" if tier == "host" else "disk")
    text += handle.ask(text, reuse=False).tokens  # all rows are computed anew
    found = scores_of(handle, "", text)
    assert len(found) == len(text) - 1
    assert float(found.sum()) == pytest.approx(len(found) * WEIGHTS, rel=1e-4)
    branch = [*text[:100], *words(rng, 40)]
    handle.ask(branch)
    assert len(scores_of(handle, "", branch)) > 100, "and what two conversations share counts for both"


def test_after_a_restart_nothing_is_known_and_that_is_said(start: Start, model_of: Models, tmp_path: Path) -> None:
    rng = random.Random(3)
    handle = start(model_of("llama"), tmp_path, max_model_len=WINDOW, truncation_policy="importance")
    text = converse(handle, rng)
    handle.engine.close()
    handle = start(model_of("llama"), tmp_path, max_model_len=WINDOW, truncation_policy="importance")
    outputs = ask_truncated(handle.engine, text + words(rng, 30), turns=(SYSTEM,))
    told = outputs[0].truncation
    assert told is not None
    assert (told.kept, told.reused, told.policy) == (MOST, True, "sinks_and_recent")
    plan = handle.engine.stats().plan
    assert plan is not None
    assert plan.counters.truncations_unscored == 1


def test_learned_positions_choose_by_importance_too(start: Start, model_of: Models) -> None:
    handle = start(model_of("opt"), max_model_len=WINDOW, truncation_policy="importance")
    text = converse(handle, random.Random(4))
    outputs = ask_truncated(handle.engine, text + [1] * 30, turns=(SYSTEM,))
    told = outputs[0].truncation
    assert told is not None
    assert (told.kept, told.reused, told.policy) == (MOST, False, "importance")


@pytest.mark.parametrize("policy", ["oldest", "sinks_and_recent"])
def test_other_policies_record_nothing(
    start: Start, model_of: Models, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[type] = []
    attend = TorchRunner._attend
    monkeypatch.setattr(TorchRunner, "_attend", lambda *args: (made.append(type(it := attend(*args))), it)[1])
    handle = start(model_of("llama"), max_model_len=WINDOW, truncation_policy=policy)
    handle.ask([1, 2, 3])
    assert made
    assert ScoringAttend not in made
    assert handle.engine.parts.scores is None


def test_resetting_a_tenants_cache_forgets_its_scores(start: Start, model_of: Models) -> None:
    handle = start(model_of("llama"), truncation_policy="importance")
    text = converse(handle, random.Random(5), turns=1)
    assert len(scores_of(handle, "", text))
    handle.engine.reset_cache("another")
    handle.engine.settle()
    assert len(scores_of(handle, "", text))
    handle.engine.reset_cache("")
    handle.engine.settle()
    assert not len(scores_of(handle, "", text))


# ------------------------------------------------------------------------------------------------ scores by themselves


def computed(scores: Scores, job: int, tokens: list[int], salt: str = "", value: float = 1.0) -> None:
    """Make a job that computes its whole prompt at once."""
    scores.begin(job, salt, pack(tokens), None)
    assert scores.counted(job) <= len(tokens)
    scores.add(Run(job, 0, tuple(tokens), True, len(tokens)), torch.full((len(tokens),), value))
    scores.end(job)


def test_memory_is_bounded_and_the_oldest_go_first() -> None:
    scores = Scores(torch.device("cpu"), max_rows=1000)
    texts = [[number] * 64 for number in range(40)]
    for job, text in enumerate(texts):
        computed(scores, job, text)
        scores.of("", pack(texts[0]))  # in use
    assert scores.rows <= 1000
    assert len(scores.of("", pack(texts[0]))) == 64
    assert len(scores.of("", pack(texts[1]))) == 0
    assert len(doors.score_places(scores)) == scores.rows // STRIDE
    scores.forget_all(None)
    assert (scores.rows, len(doors.score_places(scores)), len(doors.kept_scores(scores))) == (0, 0, 0)


def test_a_longer_context_takes_the_place_of_its_beginning() -> None:
    scores = Scores(torch.device("cpu"))
    text = list(range(100))
    computed(scores, 1, text[:70])
    computed(scores, 2, text)
    assert scores.rows == 100
    computed(scores, 3, [*text[:70], *range(200, 230)])
    assert scores.rows == 200, "a branch takes no scores of another"
    assert len(scores.of("", pack([*text[:70], 999]))) == 64, "as far as they agree, by strides"
    assert len(scores.of("other", pack(text))) == 0


def test_a_cut_context_begins_with_the_scores_of_what_it_kept() -> None:
    scores = Scores(torch.device("cpu"))
    text = list(range(100))
    computed(scores, 1, text, value=3.0)
    kept = ((0, 10), (60, 99))
    prompt = pack([text[row] for a, b in kept for row in range(a, b)])
    scores.begin(2, "", pack(text), Cut(prompt, "~e", 10, 51, Origin("", pack(text), kept), "importance"))
    assert scores.counted(2) == 49
    scores.add(Run(2, 49, (7,), True, 50), torch.ones(50))
    scores.end(2)
    found = scores.of("~e", prompt + pack([7]))
    assert found.tolist() == [4.0] * 49 + [1.0]


@pytest.mark.parametrize("options", [{"importance": 0.5}, {"truncation_policy": "importance"}])
def test_windows_and_capped_scores_are_refused_where_a_context_meets_them(
    start: Callable[..., Handle], model_of: Callable[[str], Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="gemma2, which has soft-capped scores; leave it out"):
        start(model_of("gemma2"), tmp_path, **options)
    with pytest.raises(ConfigError, match="cohere2, which has sliding windows"):
        start(model_of("cohere2"), tmp_path, **options)
    start(model_of("cohere2"), tmp_path, max_model_len=20, **options)
    with pytest.raises(ConfigError, match="gpt_oss, which has attention sinks"):
        start(model_of("gpt_oss"), tmp_path, max_model_len=20, **options)
