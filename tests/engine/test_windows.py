"""Layers with a sliding window: rows before it are not brought to the device, and no answer depends on them.

Every row of a context that has not been written is NaN here, so that a read of one shows in all that follows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from afterglow.engine.stats import GatherCounters
from tests import doors
from tests.engine.conftest import FAMILIES, LLAMA, VOCAB, Handle, write_model
from tests.engine.test_exact_reuse import same

Start = Callable[..., Handle]
Models = Callable[[str], Path]

LONG = {
    **LLAMA,
    "model_type": "gemma3_text",
    "head_dim": 16,
    "max_position_embeddings": 8400,
    "sliding_window": 1024,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "num_hidden_layers": 3,
}
ROW = 2 * 2 * 16 * 4  # bytes in one layer: keys and values of two heads


@pytest.fixture(autouse=True)
def nothing_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    doors.fill_new_contexts(monkeypatch, torch.nan)


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]


def gathered(handle: Handle) -> GatherCounters:
    handle.engine.settle()
    return handle.engine.stats().engine.gather


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_bytes_of_a_long_context_follow_the_windows(start: Start, tmp_path: Path, tier: str) -> None:
    """8,000 tokens, and a window of 1,024 in two of three layers."""
    model = write_model(LONG, tmp_path / "model")
    handle = start(model, tmp_path, host_cache=1024**2 * 16, device_cache=1024**2 * 32)
    history = words(random.Random(tier), 8000)
    handle.ask(history, max_tokens=1)
    handle.engine.settle()
    handle.engine.demote(tier)
    before = gathered(handle)
    prompt = [*history, 1, 2, 3]
    reused = handle.ask(prompt, max_tokens=2)
    rows = reused.cached.total
    assert rows >= 7999
    assert getattr(reused.cached, tier) == rows
    after = gathered(handle)
    assert after.bytes_read - before.bytes_read == ROW * (rows + 2 * 1023)
    assert after.bytes_left - before.bytes_left == ROW * 2 * (rows - 1023)
    same(reused, handle.ask(prompt, reuse=False, max_tokens=2))


@pytest.mark.parametrize("family", ["gemma3_text", "mistral-window", "gemma2"])
def test_a_context_that_lacks_rows_is_used_as_far_as_it_goes(
    start: Start, model_of: Models, tmp_path: Path, family: str
) -> None:
    """A turn goes on from it; another that leaves it where rows are missing does not, and neither does its own next turn."""
    window = FAMILIES[family]["sliding_window"]
    rng = random.Random(family)
    handle = start(model_of(family), tmp_path, prefill_chunk=32)
    text = words(rng, 300)
    handle.ask(text, max_tokens=1)
    for _ in range(2):
        handle.engine.settle()
        handle.engine.demote("host")
        text = [*text, *words(rng, 20)]
        first = handle.ask(text, max_tokens=4)
        same(first, handle.ask(text, reuse=False, max_tokens=4))
        assert first.cached.host >= 299
        handle.engine.settle()
        going_on = [*text, 1]
        second = handle.ask(going_on, max_tokens=4)
        assert second.cached.device == len(text), "all that a window shows is there"
        same(second, handle.ask(going_on, reuse=False, max_tokens=4))
        for rows in (window // 2, window + 30, 200, 299 - window, len(text) - 5):
            handle.engine.settle()
            handle.engine.demote("host")
            same(handle.ask(text, max_tokens=1), handle.ask(text, reuse=False, max_tokens=1))  # a context with holes
            handle.engine.settle()
            other = [*text[:rows], (text[rows] + 1) % VOCAB, *words(rng, 10)]
            found = handle.ask(other, max_tokens=4)
            assert found.cached.total >= rows
            assert found.cached.device == 0, "what its windows show is not there"
            same(found, handle.ask(other, reuse=False, max_tokens=4))


def test_requests_that_share_a_prefix_go_on_from_contexts_with_holes(
    start: Start, model_of: Models, tmp_path: Path
) -> None:
    handle = start(model_of("gemma3_text"), tmp_path, relay="on", max_batch=8)
    rng = random.Random(5)
    head = words(rng, 150)
    prompts = [[*head, *words(rng, 5 + 30 * i)] for i in range(4)]
    expected = [handle.ask(prompt, reuse=False) for prompt in prompts]
    for prompt in prompts:
        handle.ask(prompt)
    handle.engine.settle()
    for tier in ("host", "disk"):
        handle.engine.demote(tier)  # type: ignore[arg-type]
        for prompt, wanted in zip(prompts, expected, strict=True):
            same(handle.ask(prompt), wanted)
        for prompt, wanted in zip(prompts, expected, strict=True):
            same(handle.ask(prompt), wanted)
