"""Architectures that run through transformers: token-equal to it, and reuse as exact as that of other models."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from afterglow.model.loader import load_model
from tests.engine.by_hand import ask_truncated, logprobs, reference
from tests.engine.conftest import VOCAB, Handle
from tests.engine.fallback_kit import MODELS
from tests.engine.test_exact_reuse import HISTORY, TIERS, same
from tests.engine.test_relay import prompts, together
from tests.engine.test_relay import same as same_replies
from tests.engine.test_truncation import SYSTEM, TURN, WINDOW, turns_of

Start = Callable[..., Handle]
Models = Callable[[str], Path]

# One whose keys are turned back, neighbours in pairs, and one whose keys are kept as they are.
QUICK = ("ernie4_5", "gpt_bigcode")
AS_THEY_ARE = ("biogpt", "gpt_bigcode", "hunyuan_v1_dense", "hunyuan_v1_moe")
KINDS = [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.long) for kind in MODELS]


@torch.inference_mode()
def by_transformers(folder: Path, asked: list[list[int]], tokens: int) -> list[tuple[list[int], torch.Tensor]]:
    """Replies of `generate`, one prompt at a time, and the log-probabilities of each of their tokens, [tokens, VOCAB]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for prompt in asked:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),  # else padding tokens in the prompt would be left out
            max_new_tokens=tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        found.append((out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits).log_softmax(-1)))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_replies_are_those_of_transformers(start: Start, model_of: Models, kind: str) -> None:
    """A batch of prompts of 30 to 250 tokens, whose beginnings are read together; then each again, with its history."""
    asked = prompts(random.Random(kind))
    handle = start(model_of(kind), relay="on", max_batch=8)
    for _ in range(2):
        replies = together(handle, asked)
        for (tokens, given), (their_tokens, theirs) in zip(
            replies, by_transformers(model_of(kind), asked, 12), strict=True
        ):
            assert tokens == their_tokens
            for ours, row in zip(given, theirs, strict=True):
                assert max(abs(value - float(row[token])) for token, value in ours.top) < 1e-4
        asked = [[*prompt, *tokens, 7] for prompt, (tokens, _) in zip(asked, replies, strict=True)]
    stats = handle.engine.stats().engine
    assert stats.relay.rows_saved > stats.relay.rows_read > 0
    assert stats.cached_tokens["device"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_reuse_from_every_tier_equals_full_prefill(start: Start, model_of: Models, tmp_path: Path, kind: str) -> None:
    rng = random.Random(kind)
    handle = start(model_of(kind), tmp_path)
    for tier in TIERS:
        for shared in (64, 100, HISTORY - 1):
            history = [rng.randrange(VOCAB) for _ in range(HISTORY)]
            handle.ask(history, max_tokens=10)
            handle.engine.settle()
            if tier == "restart":
                handle.engine.close()
                handle = start(model_of(kind), tmp_path)
            elif tier != "device":
                handle.engine.demote(tier)
            prompt = [*history[:shared], (history[shared] + 1) % VOCAB, *(rng.randrange(VOCAB) for _ in range(40))]
            reused = handle.ask(prompt, max_tokens=6)
            assert getattr(reused.cached, "disk" if tier == "restart" else tier) >= shared
            same(reused, handle.ask(prompt, reuse=False, max_tokens=6))


@pytest.mark.long
@pytest.mark.parametrize("kind", QUICK)
@pytest.mark.parametrize("options", [{"speculate": "on"}, {"truncation_policy": "importance"}])
def test_guesses_and_recorded_attention_change_nothing(
    start: Start, model_of: Models, kind: str, options: dict[str, str]
) -> None:
    asked = [[1, 2, 3, 4, 5, 6, 7] * 6 + [1, 2, 3], *prompts(random.Random(kind))[:3]]
    plain = together(start(model_of(kind), speculate="off"), asked)
    same_replies(together(start(model_of(kind), **options), asked), plain)


@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_conversation(start: Start, model_of: Models, tmp_path: Path, kind: str) -> None:
    """Keys without positions move; keys that are kept as they are, are computed again."""
    rng = random.Random(kind)
    handle = start(model_of(kind), tmp_path, max_model_len=WINDOW)
    text = [rng.randrange(VOCAB) for _ in range(SYSTEM)]
    for _ in range(5):
        text += [rng.randrange(VOCAB) for _ in range(TURN)]
        (reply, *_) = ask_truncated(handle.engine, text, turns=turns_of(len(text)))
    handle.engine.settle()
    handle.engine.demote("disk")
    new = [(reply.tokens[0] + 1) % VOCAB, *(rng.randrange(VOCAB) for _ in range(TURN - 1))]  # not the reply
    outputs = ask_truncated(handle.engine, text + new, turns=turns_of(len(text) + TURN))
    told = outputs[0].truncation
    assert told is not None
    assert told.reused == (kind not in AS_THEY_ARE)
    dropped = (SYSTEM, SYSTEM + told.dropped)
    compact = text[:SYSTEM] + text[dropped[1] :] + new
    if not told.reused:
        fresh = handle.ask(compact, reuse=False, max_tokens=2)
        assert fresh.tokens == tuple(token for output in outputs for token in output.tokens)
        return
    decoder = load_model(model_of(kind))
    assert (logprobs(outputs) - reference(decoder, text, [dropped], new)).abs().max() < 1e-4
    ((_, theirs),) = by_transformers(model_of(kind), [compact], 1)
    assert (logprobs(outputs) - theirs[0]).abs().max() > 1e-4, "surviving rows have seen the dropped ones"
