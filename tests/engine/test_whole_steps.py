"""A step that decodes goes through all layers in one call, and computes the same bits as with calls for each layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from afterglow.engine import cached_attention
from afterglow.engine.engine import Completion
from afterglow.kernels.layers import Layers
from afterglow.kernels.matrix import has_bytes
from afterglow.request import Request, SamplingParams
from tests.engine.conftest import FAMILIES, VOCAB, write_model

Start = Callable[..., Any]

pytestmark = pytest.mark.skipif(not has_bytes(), reason="no compiled products in 8 bits on this machine")

WIDE = {"head_dim": 16}  # that the compiled kernels take
FEW = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # the same of a family whose norms of queries are as wide as the model


class Calls:
    """Counts the rows of calls through all layers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        called = Layers.__call__

        def counted(layers: Layers, x: Any, *rest: Any) -> Any:
            self.rows.append(len(x))
            return called(layers, x, *rest)

        monkeypatch.setattr(Layers, "__call__", counted)


def talk(start: Start, model: Path, folder: Path, **options: Any) -> list[Completion]:
    """Three requests at once that share a prefix, then a next turn of each, from host memory."""
    handle = start(model, folder, warm_start=False, **options)
    shared = [i * 7 % VOCAB for i in range(130)]
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=5)
    prompts = [[*shared, *(i * (3 + n) % VOCAB for i in range(9 + n))] for n in range(3)]
    answers: list[Completion] = handle.engine.generate([Request(f"a{n}", p, params) for n, p in enumerate(prompts)])
    handle.engine.settle()
    handle.engine.demote("host")
    longer = [[*prompt, *answer.tokens, 5] for prompt, answer in zip(prompts, answers, strict=True)]
    answers += handle.engine.generate([Request(f"b{n}", p, params) for n, p in enumerate(longer)])
    assert all(answer.cached.host >= 130 for answer in answers[3:])
    return answers


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "smollm3", "mixtral", "qwen3_moe", "mistral-window", "gpt_oss", "olmoe"]
)
def test_the_bits_are_those_of_calls_for_each_layer(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, quantization: str
) -> None:
    model = write_model({**FAMILIES[family], **(FEW if family == "olmoe" else WIDE)}, tmp_path / "model")
    calls = Calls(monkeypatch)
    whole = talk(start, model, tmp_path / "whole", quantization=quantization)
    assert len(calls.rows) >= 16  # of at most 46, fewer where guesses were right
    assert max(calls.rows) >= 3
    with monkeypatch.context() as patch:
        patch.setattr(cached_attention, "MOST_AT_ONCE", 0)
        calls.rows.clear()
        apart = talk(start, model, tmp_path / "apart", quantization=quantization)
    assert not calls.rows
    for a, b in zip(whole, apart, strict=True):
        assert a.tokens == b.tokens
        assert [x.top for x in a.logprobs] == [x.top for x in b.logprobs]
