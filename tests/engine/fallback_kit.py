"""Tiny models of the architectures that run through transformers."""

from __future__ import annotations

from typing import Any

MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}

# By model type: what differs from a tiny Llama's config.
MODELS: dict[str, dict[str, Any]] = {
    "apertus": {"hidden_act": "xielu"},
    "arcee": {"hidden_act": "relu2"},
    "biogpt": {"num_key_value_heads": None, "hidden_act": "gelu"},
    "cwm": {
        "head_dim": 8,
        "bos_token_id": 1,
        "eos_token_id": 99,
        "pad_token_id": 0,
        "sliding_window": 72,
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "dots1": {
        **MOE,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "ernie4_5": {"head_dim": 8},
    "ernie4_5_moe": {**MOE, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1},
    "flex_olmo": {**MOE, "num_experts": 4},
    "glm4_moe": {
        **MOE,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "head_dim": 8,
        "use_qk_norm": True,
    },
    "gpt_bigcode": {},
    "granitemoe": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "logits_scaling": 2.0,
        "embedding_multiplier": 3.0,
    },
    "granitemoeshared": {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24},
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "hyperclovax": {
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
        "embedding_multiplier": 2.0,
        "logits_scaling": 2.0,
        "use_post_norm": True,
    },
    "jais2": {"hidden_act": "relu2"},
    "minimax_m2": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "nanochat": {"hidden_act": "relu2", "final_logit_softcapping": 15.0},
    "nemotron": {"hidden_act": "relu2", "partial_rotary_factor": 0.5},
    "olmo": {"clip_qkv": 4.0},
    "persimmon": {"num_key_value_heads": None, "hidden_act": "relu2", "partial_rotary_factor": 0.5},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 72},
    "seed_oss": {"head_dim": 8, "attention_bias": True},
    "solar_open": {**MOE, "head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1},
}


def fallback_config(kind: str, llama: dict[str, Any]) -> dict[str, Any]:
    """Return a tiny config; `llama` is that of a tiny Llama."""
    if kind == "gpt_bigcode":
        sizes = {"vocab_size": llama["vocab_size"], "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
        return {"model_type": kind, **sizes, "eos_token_id": None, "bos_token_id": None}
    config = {**llama, "model_type": kind, **MODELS[kind]}
    return {key: value for key, value in config.items() if value is not None or key.endswith("token_id")}
