"""Random GGUF files: every format is read back by the library, with weights of the spread that was asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from benchmarks.peers.random_gguf import SPREAD, write_random
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from afterglow.gguf_file import open_gguf
from afterglow.model.spec import ModelSpec, RopeSpec

SPEC = ModelSpec(
    family="llama",
    layers=1,
    hidden=256,
    heads=4,
    kv_heads=2,
    head_dim=64,
    ffn=512,
    vocab=300,
    max_positions=128,
    rope=RopeSpec(dim=64, base=10000.0),
)


@pytest.mark.parametrize("block_format", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "MXFP4"])
def test_weights_have_the_spread_of_trained_ones(block_format: str, tmp_path: Path) -> None:
    path = tmp_path / "random.gguf"
    write_random(path, SPEC, block_format, head_format="Q8_0")
    file = open_gguf(path)
    assert len(file.metadata["tokenizer.ggml.tokens"]) == SPEC.vocab
    tensors = file.tensors
    assert tensors["output.weight"].block_format == "Q8_0"
    for name in ("token_embd", "blk.0.ffn_down", "output"):
        tensor = tensors[f"{name}.weight"]
        dense = dequantize(tensor.blocks, GGMLQuantizationType[tensor.block_format])
        assert dense.shape == tensor.shape
        # Uniform numbers instead of normal ones, and MXFP4 knows powers of two: within a factor.
        assert SPREAD / 1.5 < dense.std() < SPREAD * 1.5
        assert abs(dense.mean()) < SPREAD / 5
    np.testing.assert_allclose(tensors["output_norm.weight"].blocks.view(np.float32), 1, atol=0.1)
