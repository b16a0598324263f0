"""int8 weights: rows are kept and found as with others, and never by a model of other arithmetic."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from afterglow.model.linear import int8_levels
from tests.engine.conftest import FAMILIES, VOCAB, Handle, in_turn

Start = Callable[..., Handle]
Models = Callable[[str], Path]

pytestmark = pytest.mark.skipif(not int8_levels(), reason="no int8 products on this machine")


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.parametrize("family", in_turn(FAMILIES))
def test_reuse_is_as_near_as_rounding_lets_it(
    start: Start, model_of: Models, tmp_path: Path, family: str, tier: str
) -> None:
    """A sum in another order may round to the next of 127 steps: that, and nothing that looks like a wrong row."""
    rng = random.Random(family + tier)
    handle = start(model_of(family), tmp_path, quantization="int8")
    prompt = [rng.randrange(VOCAB) for _ in range(150)]
    handle.ask(prompt)
    if tier != "device":
        handle.engine.demote(tier)
    asked = [*prompt[:120], (prompt[120] + 1) % VOCAB, *(rng.randrange(VOCAB) for _ in range(20))]
    reused = handle.ask(asked, max_tokens=1)
    plain = handle.ask(asked, reuse=False, max_tokens=1)
    assert getattr(reused.cached, tier) == 120
    left, right = dict(reused.logprobs[0].top), dict(plain.logprobs[0].top)
    common = left.keys() & right.keys()
    assert len(common) > len(left) // 2
    assert max(abs(left[t] - right[t]) for t in common) < 0.02


def test_another_arithmetic_finds_nothing(start: Start, model_of: Models, tmp_path: Path) -> None:
    prompt = [i * 7 % VOCAB for i in range(200)]
    for quantization, found in (("int8", 0), ("none", 0), ("int8", len(prompt) - 1)):
        handle = start(model_of("llama"), tmp_path, quantization=quantization)
        assert handle.ask(prompt).cached.total == found
        handle.engine.settle()
        handle.engine.close()
