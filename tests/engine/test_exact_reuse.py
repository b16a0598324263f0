"""Reuse is exact: for every family and tier, logits after reuse equal those of full prefill."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from afterglow.engine.engine import Completion
from tests.engine.conftest import FAMILIES, REPEATED, VOCAB, Handle, in_turn

Start = Callable[..., Handle]
Models = Callable[[str], Path]

HISTORY = 150
# rows shared with the cached history: nothing, one token, a chunk boundary and its neighbours, the middle of
# an extent, all but the last token
SHARED = (0, 1, 63, 64, 65, 100, HISTORY - 1)
FEWER = (1, 65, HISTORY - 1)  # for all families but one: what is found does not depend on them
TIERS = ("device", "host", "disk", "restart")


def same(a: Completion, b: Completion) -> None:
    """Token-equal, and every log-probability of every step within 1e-4."""
    assert a.tokens == b.tokens
    for x, y in zip(a.logprobs, b.logprobs, strict=True):
        left, right = dict(x.top), dict(y.top)
        assert left.keys() == right.keys()
        assert max(abs(left[t] - right[t]) for t in left) < 1e-4


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("family", in_turn(FAMILIES, FAMILIES.keys() - REPEATED))
def test_reuse_equals_full_prefill(start: Start, model_of: Models, tmp_path: Path, family: str, tier: str) -> None:
    rng = random.Random(family + tier)
    model = model_of(family)
    handle = start(model, tmp_path)
    for shared in SHARED if family == "llama" else FEWER:
        history = [rng.randrange(VOCAB) for _ in range(HISTORY)]
        first = handle.ask(history, max_tokens=30)
        handle.engine.settle()
        if tier == "restart":
            handle.engine.close()
            handle = start(model, tmp_path)
        elif tier != "device":
            handle.engine.demote(tier)
        prompt = [*history[:shared], (history[shared] + 1) % VOCAB]
        prompt += [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 90))]
        reused = handle.ask(prompt, max_tokens=6)
        assert reused.cached.total >= shared
        if shared >= 64:  # a shorter run can also be found under an older history, wherever that is
            assert getattr(reused.cached, "disk" if tier == "restart" else tier) >= shared
        same(reused, handle.ask(prompt, reuse=False, max_tokens=6))
        assert len(first.tokens) == 30


@pytest.mark.parametrize("tier", TIERS)
def test_next_turn_prefills_only_its_new_tokens(start: Start, model_of: Models, tmp_path: Path, tier: str) -> None:
    """The last token of a reply has no KV until it is fed: exactly that one and the new ones are prefilled."""
    rng = random.Random(tier)
    model = model_of("llama")
    handle = start(model, tmp_path)
    context: list[int] = []
    rows = 0  # of the context that have KV
    for _ in range(5):
        context += [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 80))]
        answer = handle.ask(context, max_tokens=rng.randrange(1, 40))
        assert answer.cached.total == rows
        same(answer, handle.ask(context, reuse=False, max_tokens=len(answer.tokens)))
        context += answer.tokens
        rows = len(context) - 1
        handle.engine.settle()
        if tier == "restart":
            handle.engine.close()
            handle = start(model, tmp_path)
        elif tier != "device":
            handle.engine.demote(tier)


def test_same_prompt_twice_computes_one_token(start: Start, model_of: Models) -> None:
    handle = start(model_of("llama"))
    prompt = [i % VOCAB for i in range(130)]
    first = handle.ask(prompt)
    again = handle.ask(prompt)
    assert again.cached.total == len(prompt) - 1
    same(again, first)


def test_long_turns_become_chains_of_extents(start: Start, model_of: Models, tmp_path: Path) -> None:
    """More rows than one extent holds, prefilled in chunks, reused from disk after a split in the middle."""
    rng = random.Random(3)
    handle = start(model_of("llama"), tmp_path, prefill_chunk=100, max_model_len=512, device_cache=8 << 20)
    prompt = [rng.randrange(VOCAB) for _ in range(480)]
    handle.ask(prompt)
    handle.engine.demote("disk")
    other = prompt[:333] + [rng.randrange(VOCAB) for _ in range(50)]
    reused = handle.ask(other)
    assert reused.cached.disk >= 333
    same(reused, handle.ask(other, reuse=False))


def test_write_through_survives_without_a_flush(start: Start, model_of: Models, tmp_path: Path) -> None:
    handle = start(model_of("llama"), tmp_path, write_policy="write_through")
    prompt = [i * 7 % VOCAB for i in range(200)]
    handle.ask(prompt)
    handle.engine.settle()
    handle.engine.close(flush=False)
    handle = start(model_of("llama"), tmp_path)
    reused = handle.ask(prompt)
    assert reused.cached.disk == len(prompt) - 1
    same(reused, handle.ask(prompt, reuse=False))


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
def test_narrow_storage_is_close(start: Start, model_of: Models, tmp_path: Path, kv_dtype: str) -> None:
    handle = start(model_of("llama"), tmp_path, kv_dtype=kv_dtype)
    prompt = [i * 7 % VOCAB for i in range(200)]
    handle.ask(prompt)
    handle.engine.demote("disk")
    reused = handle.ask(prompt, max_tokens=1)
    plain = handle.ask(prompt, reuse=False, max_tokens=1)
    assert reused.cached.disk == len(prompt) - 1
    left, right = dict(reused.logprobs[0].top), dict(plain.logprobs[0].top)
    worst = max(abs(left[t] - right[t]) for t in left)
    assert 0 < worst < 0.1  # rounded on the way, and only that
