"""Tiny random Hugging Face models of every family, and their directories."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_FALCON = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
    "alibi": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_OPT = {
    "vocab_size": 97,
    "hidden_size": 48,
    "ffn_dim": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
    "word_embed_proj_dim": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _rope(kind: str, **params: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **params}}


_LLAMA3 = _rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=64)
_YARN_MSCALE = _rope(
    "yarn",
    factor=4.0,
    original_max_position_embeddings=64,
    beta_fast=16.0,
    beta_slow=2.0,
    mscale=0.7,
    mscale_all_dim=0.3,
    truncate=False,
)
_LONGROPE = {
    **_rope(
        "longrope",
        factor=2.0,
        original_max_position_embeddings=128,
        short_factor=[1.0, 1.1, 1.3, 2.0],
        long_factor=[4.0, 5.0, 6.0, 7.0],
    ),
}

_MINISTRAL3 = _rope(
    "yarn",
    factor=4.0,
    original_max_position_embeddings=64,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
    llama_4_scaling_beta=0.1,
)
_MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_OSS = {"head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 20}
_WINDOW = {"use_sliding_window": True, "sliding_window": 12}
_GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.5,
}
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "tie_word_embeddings": True}
_GPT2 = {
    "vocab_size": 97,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 6,
    "n_positions": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# name -> (transformers module, class prefix, config)
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "Llama", _SMALL),
    "llama-mha": ("llama", "Llama", _SMALL | {"num_key_value_heads": 6}),
    "llama-mqa": ("llama", "Llama", _SMALL | {"num_key_value_heads": 1}),
    "llama-tied": ("llama", "Llama", _SMALL | {"tie_word_embeddings": True}),
    "llama-bias": ("llama", "Llama", _SMALL | {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", "Llama", _SMALL | {"head_dim": 16}),
    "llama-theta": (
        "llama",
        "Llama",
        _SMALL | {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}},
    ),
    "llama-llama3": ("llama", "Llama", _SMALL | _LLAMA3),
    "llama-linear": ("llama", "Llama", _SMALL | _rope("linear", factor=3.0)),
    "llama-yarn": ("llama", "Llama", _SMALL | _YARN),
    "llama-yarn-mscale": ("llama", "Llama", _SMALL | _YARN_MSCALE),
    # Only Phi's rotary embedding knows this factor: transformers turns whole heads of the others all the same.
    "llama-partial": ("llama", "Llama", _SMALL | _rope("default", partial_rotary_factor=0.5)),
    "qwen2-partial": ("qwen2", "Qwen2", _SMALL | _rope("default", partial_rotary_factor=0.5)),
    "llama-dynamic": ("llama", "Llama", _SMALL | _rope("dynamic", factor=2.0)),
    "llama-longrope": ("llama", "Llama", _SMALL | _LONGROPE),
    "mistral": ("mistral", "Mistral", _SMALL | {"sliding_window": None}),
    "mistral-window": ("mistral", "Mistral", _SMALL | {"sliding_window": 11}),
    "qwen2": ("qwen2", "Qwen2", _SMALL),
    "qwen2-window": ("qwen2", "Qwen2", _SMALL | _WINDOW | {"max_window_layers": 1}),
    "qwen2-tied": ("qwen2", "Qwen2", _SMALL | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", "Qwen3", _SMALL | {"head_dim": 16}),
    "qwen3-window": (
        "qwen3",
        "Qwen3",
        _SMALL | _WINDOW | {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen3-bias": ("qwen3", "Qwen3", _SMALL | {"head_dim": 16, "attention_bias": True}),
    "phi": ("phi", "Phi", _SMALL | {"num_key_value_heads": 6}),
    "phi-gqa": ("phi", "Phi", _SMALL),
    "phi-2": (
        "phi",
        "Phi",
        _SMALL | {"hidden_size": 60, "num_key_value_heads": 6} | _rope("default", partial_rotary_factor=0.4),
    ),
    "falcon-mqa": ("falcon", "Falcon", _FALCON),
    "falcon-mqa-bias": ("falcon", "Falcon", _FALCON | {"bias": True}),
    "falcon-mha": ("falcon", "Falcon", _FALCON | {"multi_query": False}),
    "falcon-sequential": ("falcon", "Falcon", _FALCON | {"parallel_attn": False, "bias": True}),
    "falcon-new": ("falcon", "Falcon", _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-new-bias": (
        "falcon",
        "Falcon",
        _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 3, "bias": True, "ffn_hidden_size": 100},
    ),
    "falcon-new-one-norm": (
        "falcon",
        "Falcon",
        _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "ministral": (
        "ministral",
        "Ministral",
        _SMALL | {"layer_types": ["sliding_attention", "full_attention"], "head_dim": 8, "sliding_window": 9},
    ),
    "ministral-full": ("ministral", "Ministral", _SMALL | {"layer_types": ["full_attention"] * 2, "head_dim": 16}),
    "ministral3": ("ministral3", "Ministral3", _SMALL | {"head_dim": 16} | _MINISTRAL3),
    "mixtral": ("mixtral", "Mixtral", _SMALL | {"num_local_experts": 4}),
    "mixtral-window": ("mixtral", "Mixtral", _SMALL | {"num_local_experts": 3, "sliding_window": 7}),
    "mixtral-gelu": (
        "mixtral",
        "Mixtral",
        _SMALL | {"num_local_experts": 3, "num_experts_per_tok": 1, "hidden_act": "gelu", "head_dim": 16},
    ),
    "qwen2-moe": ("qwen2_moe", "Qwen2Moe", _SMALL | _MOE | {"shared_expert_intermediate_size": 40}),
    "qwen2-moe-window": (
        "qwen2_moe",
        "Qwen2Moe",
        _SMALL
        | _MOE
        | _WINDOW
        | {"shared_expert_intermediate_size": 24, "num_hidden_layers": 4, "max_window_layers": 3},
    ),
    "qwen3-moe-window": ("qwen3_moe", "Qwen3Moe", _SMALL | _MOE | _WINDOW | {"head_dim": 16}),
    "qwen2-moe-step": (
        "qwen2_moe",
        "Qwen2Moe",
        _SMALL
        | _MOE
        | {
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "norm_topk_prob": True,
            "qkv_bias": False,
        },
    ),
    "qwen3-moe": ("qwen3_moe", "Qwen3Moe", _SMALL | _MOE | {"head_dim": 16, "norm_topk_prob": True}),
    "qwen3-moe-bias": (
        "qwen3_moe",
        "Qwen3Moe",
        _SMALL | _MOE | {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "olmoe": ("olmoe", "Olmoe", _SMALL | {"num_experts": 6, "num_experts_per_tok": 3}),
    "olmoe-normed": (
        "olmoe",
        "Olmoe",
        _SMALL | {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "tie_word_embeddings": True},
    ),
    "gpt-oss": ("gpt_oss", "GptOss", _SMALL | _OSS),
    "gpt-oss-plain": (
        "gpt_oss",
        "GptOss",
        _SMALL
        | _OSS
        | {
            "head_dim": 8,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "num_experts_per_tok": 1,
            "swiglu_limit": 0.5,
        }
        | _rope("default"),
    ),
    "phi3": ("phi3", "Phi3", _SMALL),
    "phi3-mha": ("phi3", "Phi3", _SMALL | {"num_key_value_heads": 6, "tie_word_embeddings": True}),
    "phi3-window": ("phi3", "Phi3", _SMALL | {"sliding_window": 13}),
    "phi3-longrope": ("phi3", "Phi3", _SMALL | {"original_max_position_embeddings": 128} | _LONGROPE),
    "phi4-mini": (
        "phi3",
        "Phi3",
        _SMALL
        | {"hidden_size": 96, "original_max_position_embeddings": 128, "tie_word_embeddings": True}
        | _rope(
            "longrope", partial_rotary_factor=0.75, short_factor=[1.0] * 6, long_factor=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
        ),
    ),
    "smollm3": ("smollm3", "SmolLM3", _SMALL | {"num_hidden_layers": 4}),
    "smollm3-bias": (
        "smollm3",
        "SmolLM3",
        _SMALL
        | {"no_rope_layers": [0, 1], "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
        | _rope("linear", factor=2.0),
    ),
    "smollm3-window": (
        "smollm3",
        "SmolLM3",
        _SMALL | {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 10},
    ),
    "olmo2": ("olmo2", "Olmo2", _SMALL),
    "olmo2-bias": ("olmo2", "Olmo2", _SMALL | {"attention_bias": True, "head_dim": 16, "tie_word_embeddings": True}),
    "granite": ("granite", "Granite", _SMALL | _GRANITE),
    "granite-bias": (
        "granite",
        "Granite",
        _SMALL | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "attention_multiplier": 0.2},
    ),
    "glm": ("glm", "Glm", _SMALL | {"head_dim": 16}),
    "glm4": ("glm4", "Glm4", _SMALL | {"head_dim": 16}),
    "glm4-plain": (
        "glm4",
        "Glm4",
        _SMALL | {"head_dim": 8, "attention_bias": False} | _rope("default", partial_rotary_factor=1.0),
    ),
    "starcoder2": ("starcoder2", "Starcoder2", _SMALL | {"tie_word_embeddings": True}),
    "starcoder2-plain": ("starcoder2", "Starcoder2", _SMALL | {"use_bias": False, "sliding_window": 64}),
    "starcoder2-window": ("starcoder2", "Starcoder2", _SMALL | {"sliding_window": 16}),
    "gpt-neox": ("gpt_neox", "GPTNeoX", _SMALL | {"hidden_size": 96}),
    "gpt-neox-sequential": (
        "gpt_neox",
        "GPTNeoX",
        _SMALL
        | {"use_parallel_residual": False, "attention_bias": False, "tie_word_embeddings": True}
        | _rope("default", partial_rotary_factor=1.0),
    ),
    "gpt2": ("gpt2", "GPT2", _GPT2),
    "gpt2-untied": ("gpt2", "GPT2", _GPT2 | {"n_inner": 100, "tie_word_embeddings": False}),
    "gpt2-relu": ("gpt2", "GPT2", _GPT2 | {"activation_function": "relu"}),
    "stablelm": ("stablelm", "StableLm", _SMALL | {"hidden_size": 96}),
    "stablelm-parallel": (
        "stablelm",
        "StableLm",
        _SMALL
        | {"use_parallel_residual": True, "use_qkv_bias": True, "qk_layernorm": True, "tie_word_embeddings": True}
        | _rope("default", partial_rotary_factor=0.5),
    ),
    "cohere": ("cohere", "Cohere", _SMALL | {"tie_word_embeddings": True, "logit_scale": 0.5}),
    "cohere-norms": (
        "cohere",
        "Cohere",
        _SMALL | {"use_qk_norm": True, "logit_scale": 0.8, "head_dim": 16, "tie_word_embeddings": True},
    ),
    "cohere-bias": ("cohere", "Cohere", _SMALL | {"attention_bias": True, "logit_scale": 0.8}),
    "gemma": ("gemma", "Gemma", _SMALL | {"head_dim": 16, "tie_word_embeddings": True, "hidden_act": "gelu"}),
    "gemma-bias": ("gemma", "Gemma", _SMALL | {"head_dim": 8, "attention_bias": True, "num_key_value_heads": 1}),
    "gemma2": ("gemma2", "Gemma2", _SMALL | _GEMMA | {"sliding_window": 8, "num_hidden_layers": 3}),
    "gemma2-usual": (
        "gemma2",
        "Gemma2",
        _SMALL | _GEMMA | {"query_pre_attn_scalar": 16, "sliding_window": 9, "attn_logit_softcapping": 2.0},
    ),
    "gemma3-usual": (
        "gemma3",
        "Gemma3",
        _SMALL
        | _GEMMA
        | {"query_pre_attn_scalar": 16, "sliding_window": 9, "num_hidden_layers": 7}
        | {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            }
        },
    ),
    "gemma2-caps": (
        "gemma2",
        "Gemma2",
        _SMALL | {"head_dim": 8, "sliding_window": 16, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0},
    ),
    "gemma2-plain": (
        "gemma2",
        "Gemma2",
        _SMALL
        | {"head_dim": 16, "sliding_window": 5, "attn_logit_softcapping": None, "final_logit_softcapping": None}
        | {"layer_types": ["full_attention", "sliding_attention"], "attention_bias": True, "num_key_value_heads": 6},
    ),
    "gemma3": ("gemma3", "Gemma3", _SMALL | _GEMMA | {"sliding_window": 8, "num_hidden_layers": 7}),
    "gemma3-ropes": (
        "gemma3",
        "Gemma3",
        _SMALL
        | {"head_dim": 16, "sliding_window": 12, "num_hidden_layers": 4, "query_pre_attn_scalar": 20}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2}
        | {"final_logit_softcapping": 4.0}
        | {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
            }
        },
    ),
    "olmo3": ("olmo3", "Olmo3", _SMALL | {"sliding_window": 8, "num_hidden_layers": 4}),
    "olmo3-yarn": (
        "olmo3",
        "Olmo3",
        _SMALL
        | {"sliding_window": 12, "layer_types": ["full_attention", "sliding_attention"], "attention_bias": True}
        | {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
                "full_attention": {**_YARN["rope_parameters"]},
            }
        },
    ),
    "exaone4": ("exaone4", "Exaone4", _SMALL | {"sliding_window": 8, "num_hidden_layers": 4, "head_dim": 16}),
    "exaone4-full": (
        "exaone4",
        "Exaone4",
        _SMALL | {"sliding_window": None, "layer_types": ["full_attention"] * 2, "tie_word_embeddings": True},
    ),
    "cohere2": (
        "cohere2",
        "Cohere2",
        _SMALL | {"sliding_window": 8, "num_hidden_layers": 4, "logit_scale": 0.5, "tie_word_embeddings": True},
    ),
    "cohere2-bias": (
        "cohere2",
        "Cohere2",
        _SMALL
        | {"sliding_window": 10, "layer_types": ["full_attention", "sliding_attention"], "attention_bias": True}
        | {"logit_scale": 0.8},
    ),
    "opt": ("opt", "OPT", _OPT),
    "opt-plain": ("opt", "OPT", _OPT | {"enable_bias": False, "tie_word_embeddings": False}),
    "opt-gelu": ("opt", "OPT", _OPT | {"activation_function": "gelu"}),
}

# The longest context that a case can have.
LIMITS = {
    "llama-longrope": 128,
    "ministral3": 64,
    "phi3-longrope": 128,
    "phi4-mini": 128,
}


def make_hf(case: str, seed: int = 0) -> Any:
    """The Hugging Face model of a case, all parameters random (norms around 1), eager attention, float32."""
    package, prefix, config = CASES[case]
    settings = importlib.import_module(f"transformers.models.{package}.configuration_{package}")
    modeling = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    kind = "GPT2LMHeadModel" if prefix == "GPT2" else f"{prefix}ForCausalLM"
    model = getattr(modeling, kind)(
        getattr(settings, "Gemma3TextConfig" if prefix == "Gemma3" else f"{prefix}Config")(**config)
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
            if parameter.ndim == 1 and name.endswith("weight"):
                parameter.add_(1.0)
    return model.eval()


def save_case(case: str, directory: Path, **options: Any) -> Any:
    """Writes the model of `case` to `directory`, and returns it."""
    model = make_hf(case)
    model.save_pretrained(directory, **options)
    return model


def save_mxfp4(model: Any, directory: Path) -> Any:
    """Write a model of gpt-oss with random experts in MXFP4 as its makers do. Returns the model, with the weights that these mean."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(2)
    stored: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            count, inputs, outputs = parameter.shape
            shape = (count, outputs, inputs // 32)
            blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(120, 124, shape, generator=generator, dtype=torch.uint8)
            parameter.data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if f"{name}_blocks" not in stored}
    save_file(kept | stored, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    about = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": about}))
    return model
