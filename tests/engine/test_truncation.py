"""A conversation that outgrows its window: the KV of what survives is kept, at new positions, and nothing else is.

The reference recomputes it by hand (`by_hand.py`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from afterglow.errors import RequestError
from afterglow.model.loader import load_model
from afterglow.request import Output
from tests import doors
from tests.engine.by_hand import Cut, ask_truncated, behind, logprobs, reference
from tests.engine.conftest import FAMILIES, VOCAB, Handle, in_turn

Start = Callable[..., Handle]
Models = Callable[[str], Path]

WINDOW = 256
SYSTEM = 24
TURN = 40
ROTARY = sorted(set(FAMILIES) - {"opt", "gpt2"})


def ask(handle: Handle, tokens: list[int], turns: tuple[int, ...]) -> list[Output]:
    """All outputs of a turn."""
    return ask_truncated(handle.engine, tokens, turns=turns)


def turns_of(rows: int) -> tuple[int, ...]:
    return tuple(range(SYSTEM, rows - 1, TURN))


@pytest.mark.parametrize("tier", ["device", "host", "disk", "restart"])
@pytest.mark.parametrize("family", in_turn(ROTARY))
def test_what_survives_is_embedded_at_new_positions(
    start: Start, model_of: Models, tmp_path: Path, family: str, tier: str
) -> None:
    rng = random.Random(family + tier)
    model = model_of(family)
    handle = start(model, tmp_path, max_model_len=WINDOW)
    text = [rng.randrange(VOCAB) for _ in range(SYSTEM)]
    for _ in range(5):
        text += [rng.randrange(VOCAB) for _ in range(TURN)]
        (reply, *_) = ask(handle, text, turns_of(len(text)))
    handle.engine.settle()
    if tier == "restart":
        handle.engine.close()
        handle = start(model, tmp_path, max_model_len=WINDOW)
    elif tier != "device":
        handle.engine.demote(tier)
    new = [(reply.tokens[0] + 1) % VOCAB, *(rng.randrange(VOCAB) for _ in range(TURN - 1))]  # not the reply
    outputs = ask(handle, text + new, turns_of(len(text) + TURN))
    told = outputs[0].truncation
    assert told is not None
    assert told.reused
    assert told.dropped == 4 * TURN
    dropped = (SYSTEM, SYSTEM + 4 * TURN)
    survived = len(text) - told.dropped
    assert outputs[0].cached.total == survived
    decoder = load_model(model, dtype="float32", device="cpu", max_model_len=None)
    expected = reference(decoder, text, [dropped], new)
    assert (logprobs(outputs) - expected).abs().max() < 1e-4
    plain = reference(decoder, text[:SYSTEM] + text[dropped[1] :], [], new)
    assert (logprobs(outputs) - plain).abs().max() > 1e-4, "surviving rows have seen the dropped ones"
    again = ask(handle, text + new + [1] * TURN, turns_of(len(text) + 2 * TURN))
    assert again[0].cached.total >= survived + TURN, "the next turn goes on from there"


@pytest.mark.parametrize("tier", ["device", "disk"])
def test_the_oldest_half_goes_wherever_turns_end(start: Start, model_of: Models, tmp_path: Path, tier: str) -> None:
    """The papers' truncation, twice: half of the window, through the middle of turns."""
    rng = random.Random(tier)
    model = model_of("llama")
    handle = start(model, tmp_path, max_model_len=WINDOW, truncation_policy="oldest_tokens")
    decoder = load_model(model, dtype="float32", device="cpu", max_model_len=None)
    text = [rng.randrange(VOCAB) for _ in range(SYSTEM)]
    before: Cut | None = None
    for _ in range(9):
        if tier == "disk":
            handle.engine.settle()
            handle.engine.demote("disk")
        seen = len(text)
        text += [rng.randrange(VOCAB) for _ in range(TURN)]
        outputs = ask(handle, text, turns_of(len(text)))
        told = outputs[0].truncation
        dropped = before.dropped if before is not None else 0
        if told is None:
            continue
        assert told.policy == "oldest_tokens"
        if told.dropped > dropped:
            assert (told.dropped, outputs[0].cached.total) == (dropped + WINDOW // 2, seen - told.dropped)
            before = Cut(text[:seen], SYSTEM, told.dropped, seen - told.dropped, before)
        assert before is not None
        (expected,) = behind(decoder, before, text, [outputs[0].tokens[0]])
        assert (logprobs(outputs) - expected).abs().max() < 1e-4
    assert before is not None
    assert before.before is not None, "it was cut twice"


def test_learned_positions_are_recomputed_and_say_so(start: Start, model_of: Models, tmp_path: Path) -> None:
    rng = random.Random(3)
    handle = start(model_of("opt"), tmp_path, max_model_len=WINDOW)
    text = [rng.randrange(VOCAB) for _ in range(SYSTEM + 6 * TURN)]
    for rows in range(SYSTEM + TURN, len(text) + 1, TURN):
        outputs = ask(handle, text[:rows], turns_of(rows))
    assert outputs[0].truncation is not None
    assert not outputs[0].truncation.reused
    compact = text[:SYSTEM] + text[SYSTEM + outputs[0].truncation.dropped :]
    fresh = handle.ask(compact, reuse=False, max_tokens=2)
    assert fresh.tokens == tuple(t for output in outputs for t in output.tokens)


def test_a_prompt_that_cannot_be_cut_is_refused_at_once(start: Start, model_of: Models) -> None:
    handle = start(model_of("llama"), max_model_len=WINDOW)
    with pytest.raises(RequestError, match="shorten the system prompt or the last message"):
        ask(handle, [1] * 600, (SYSTEM, SYSTEM + 10))


@pytest.mark.parametrize("family", in_turn(sorted(FAMILIES)))
def test_a_recomputed_head_and_a_loaded_tail_give_the_same_logits(
    start: Start, model_of: Models, tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(family)
    handle = start(model_of(family), tmp_path)
    text: list[int] = []
    for _ in range(5):  # extents of several sizes
        text += [rng.randrange(VOCAB) for _ in range(rng.randrange(20, 70))]
        handle.ask(text, max_tokens=3)
    text += [rng.randrange(VOCAB) for _ in range(30)]
    expected = handle.ask(text, reuse=False, max_tokens=3)
    for kept in (slice(1, None, 2), slice(0, None, 2), slice(3, None), slice(0, 0)):
        handle.engine.settle()
        handle.engine.demote("disk")
        decision = doors.admission_of(handle.engine.parts.scheduler).decision
        monkeypatch.setattr(decision, "choose", lambda job, views, row, now, kept=kept: views[kept])
        found = handle.ask([*text[:-1], text[-1]], max_tokens=3)
        assert found.tokens == expected.tokens
        for a, b in zip(found.logprobs, expected.logprobs, strict=True):
            assert dict(a.top) == pytest.approx(dict(b.top), abs=1e-4)
        text = [*text, 0]
        expected = handle.ask(text, reuse=False, max_tokens=3)
