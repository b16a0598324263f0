"""Scaled inverse frequencies against the functions of transformers, beyond what tiny models show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.configuration_llama import LlamaConfig

from afterglow.model.rotary import read_rope, rope_table

SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.707},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
        "beta_fast": 40,
        "beta_slow": 2,
    },
    {
        "rope_type": "yarn",
        "factor": 2.0,
        "attention_factor": 1.5,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    {
        "rope_type": "longrope",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "short_factor": [1.0 + i / 10 for i in range(32)],
        "long_factor": [4.0 + i for i in range(32)],
    },
    {
        "rope_type": "longrope",
        "original_max_position_embeddings": 4096,
        "short_factor": [1.0] * 32,
        "long_factor": [2.0] * 32,
    },
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s["rope_type"])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_inverse_frequencies(scaling: dict[str, Any], theta: float) -> None:
    config = LlamaConfig(
        hidden_size=512,
        num_attention_heads=8,
        max_position_embeddings=131072,
        rope_parameters={**scaling, "rope_theta": theta},
    )
    theirs, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")
    rope = read_rope({"max_position_embeddings": 131072, "rope_parameters": {**scaling, "rope_theta": theta}}, 64)
    ours = rope_table(rope["rope"])
    torch.testing.assert_close(ours.inv_freq, theirs, rtol=1e-6, atol=0)
    assert ours.attention_factor == pytest.approx(factor, rel=1e-12)
    if scaling["rope_type"] != "dynamic":
        plain = rope_table(read_rope({"rope_theta": theta}, 64)["rope"])
        assert not torch.equal(ours.inv_freq, plain.inv_freq) or ours.attention_factor != 1.0
