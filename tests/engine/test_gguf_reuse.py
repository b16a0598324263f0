"""Packed models of GGUF files: rows are kept and found in every tier and over a restart, as with other weights."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.peers.random_gguf import write_random

from afterglow.model.spec import ModelSpec, RopeSpec
from tests.engine.conftest import Handle

Start = Callable[..., Handle]

VOCAB = 300
SPEC = ModelSpec(
    family="llama",
    layers=2,
    hidden=256,
    heads=4,
    kv_heads=2,
    head_dim=64,
    ffn=256,
    vocab=VOCAB,
    max_positions=1024,
    rope=RopeSpec(dim=64, base=10000.0),
    bos_id=1,
    eos_ids=(2,),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "random.gguf"
    write_random(path, SPEC, "Q4_0", head_format="Q6_K")
    return path


@pytest.mark.parametrize("tier", ["device", "host", "disk", "restart"])
def test_reuse_is_as_near_as_rounding_lets_it(start: Start, model: Path, tmp_path: Path, tier: str) -> None:
    """Attention sums in another order after a hit: a number of a row may round to the next of 127 steps, and no more."""
    rng = random.Random(tier)
    handle = start(model, tmp_path)
    assert handle.engine.decoder.quantization == "blocks"
    assert handle.engine.model_name == "random"
    prompt = [rng.randrange(3, VOCAB) for _ in range(150)]
    handle.ask(prompt)
    handle.engine.settle()
    if tier == "restart":
        handle.engine.close()
        handle = start(model, tmp_path)
    elif tier != "device":
        handle.engine.demote(tier)
    asked = [*prompt[:120], *(rng.randrange(3, VOCAB) for _ in range(20))]
    reused = handle.ask(asked, max_tokens=1)
    plain = handle.ask(asked, reuse=False, max_tokens=1)
    assert getattr(reused.cached, "disk" if tier == "restart" else tier) == 120
    left, right = dict(reused.logprobs[0].top), dict(plain.logprobs[0].top)
    common = left.keys() & right.keys()
    assert len(common) > len(left) // 2
    assert max(abs(left[t] - right[t]) for t in common) < 0.02


def test_floats_and_blocks_find_nothing_of_each_other(start: Start, model: Path, tmp_path: Path) -> None:
    prompt = [3 + i * 7 % (VOCAB - 3) for i in range(200)]
    for quantization, found in (("auto", 0), ("none", 0), ("int8", 0), ("auto", len(prompt) - 1)):
        handle = start(model, tmp_path, quantization=quantization)
        assert handle.ask(prompt).cached.total == found
        handle.engine.settle()
        handle.engine.close()
