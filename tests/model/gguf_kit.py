"""Models of Hugging Face as GGUF files, written as llama.cpp's converter does: names, order of rows, metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map

ARCHITECTURES = {
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    "phi": "phi2",
    "gpt_neox": "gptneox",
    "cohere": "command-r",
    "gemma3_text": "gemma3",
}  # where the name is another one
NORMAL = ("llama", "mixtral", "smollm3", "granite")  # whose rows of q and k the converter sorts
SIZES = {"gpt2": {"intermediate_size": "n_inner"}, "falcon": {"intermediate_size": "ffn_hidden_size"}}


def describe(writer: GGUFWriter, config: Any, freqs: dict[str, Any]) -> None:
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    ffn = getattr(config, SIZES.get(config.model_type, {}).get("intermediate_size", "intermediate_size"))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(ffn or 4 * config.hidden_size)
    writer.add_head_count(heads)
    if config.model_type not in ("gpt_neox", "gpt2"):
        writer.add_head_count_kv(kv_heads(config))
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        names = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
        writer.add_layer_norm_eps(next(getattr(config, name) for name in names if hasattr(config, name)))
    if freqs:
        describe_rope(writer, head_dim, freqs)
    scales = {
        "embedding_multiplier": writer.add_embedding_scale,
        "attention_multiplier": writer.add_attention_scale,
        "residual_multiplier": writer.add_residual_scale,
        "logits_scaling": writer.add_logit_scale,
        "logit_scale": writer.add_logit_scale,
        "use_parallel_residual": writer.add_parallel_residual,
    }
    for name, add in scales.items():
        if hasattr(config, name):
            add(getattr(config, name))
    if hasattr(config, "num_experts_per_tok"):
        count: int = getattr(config, "num_local_experts", None) or config.num_experts
        writer.add_expert_count(count)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type in ("phi3", "gpt_oss", "gemma2", "gemma3_text", "cohere2"):
        writer.add_sliding_window(config.sliding_window or 0)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)


def describe_rope(writer: GGUFWriter, head_dim: int, freqs: dict[str, Any]) -> None:
    writer.add_rope_dimension_count(int(head_dim * freqs.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(freqs["rope_theta"])
    kind = freqs["rope_type"]
    if kind in ("linear", "yarn"):
        writer.add_string(f"{writer.arch}.rope.scaling.type", kind)
        writer.add_rope_scaling_factor(freqs["factor"])
    if kind in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(freqs["original_max_position_embeddings"])


def kv_heads(config: Any) -> int:
    if config.model_type == "gpt_neox":
        return int(config.num_attention_heads)
    if config.model_type != "falcon":
        return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    if config.new_decoder_architecture:
        return int(config.num_kv_heads)
    return 1 if config.multi_query else int(config.num_attention_heads)


def neighbours(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp turns neighbours where Hugging Face turns halves of a head."""
    split = tensor.unflatten(0, (heads, 2, -1))
    return split.transpose(1, 2).reshape(tensor.shape)


def sorted_qkv(tensor: torch.Tensor, heads: int, groups: int) -> torch.Tensor:
    """All queries, all keys, all values, where Falcon has them group by group."""
    parts = tensor.unflatten(0, (groups, heads // groups + 2, -1))
    return torch.cat([parts[:, :-2].flatten(0, 2), parts[:, -2].flatten(0, 1), parts[:, -1].flatten(0, 1)])


def gguf_tensors(model: Any, *, fused: bool = False) -> dict[str, torch.Tensor]:
    """The tensors of a model by llama.cpp's names, which the `gguf` library knows. `fused`: q, k and v are one tensor."""
    config, found = model.config, {}
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    kind = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(kind, config.num_hidden_layers)
    tensors: dict[str, torch.Tensor] = dict(model.state_dict())
    for name in [name for name in tensors if name.endswith("_layernorm.norms.0.weight")]:  # StableLM: of each head
        start = name.removesuffix(".norms.0.weight")
        heads = [tensors.pop(key) for key in sorted_heads(tensors, start)]
        tensors[f"{start}.weight"] = torch.stack(heads)
    for name in [name for name in tensors if name.endswith(".experts.gate_up_proj")]:
        place = f"blk.{name.split('.')[2]}.ffn_"
        found[f"{place}gate_exps.weight"], found[f"{place}up_exps.weight"] = tensors.pop(name).chunk(2, 1)
        found[f"{place}down_exps.weight"] = tensors.pop(name.replace("gate_up", "down"))
        if config.model_type == "gpt_oss":
            take_turns(found, tensors, name, place)
    for name, tensor in tensors.items():
        if name.startswith("lm_head") and config.tie_word_embeddings:
            continue
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        if config.model_type in NORMAL and "attn_q." in target:
            tensor = neighbours(tensor, config.num_attention_heads)
        if config.model_type in NORMAL and "attn_k." in target:
            tensor = neighbours(tensor, config.num_key_value_heads)
        if config.model_type.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        if "attn_qkv" in target and config.model_type in ("falcon", "gpt_neox"):
            tensor = sorted_qkv(tensor, config.num_attention_heads, kv_heads(config))
        if config.model_type == "gpt2" and ".h." in name and tensor.ndim == 2:
            tensor = tensor.T
        found[target] = tensor[0] if target.endswith("ffn_gate_inp_shexp.weight") else tensor
    for name in [name for name in found if fused and "attn_q." in name]:
        parts = [found.pop(name.replace("attn_q", f"attn_{x}")) for x in "qkv"]
        found[name.replace("attn_q", "attn_qkv")] = torch.cat(parts)
    return found


def take_turns(found: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor], name: str, place: str) -> None:
    """Sort gates and other numbers, which take turns in gpt-oss, whose matrices are [inputs, outputs], and add biases and sinks."""
    both = torch.cat((found[f"{place}gate_exps.weight"], found[f"{place}up_exps.weight"]), 1)
    bias = tensors.pop(name + "_bias")
    for which, part in enumerate(("gate", "up")):
        found[f"{place}{part}_exps.weight"] = both[..., which::2].transpose(1, 2)
        found[f"{place}{part}_exps.bias"] = bias[:, which::2]
    found[f"{place}down_exps.weight"] = found[f"{place}down_exps.weight"].transpose(1, 2)
    found[f"{place}down_exps.bias"] = tensors.pop(name.replace("gate_up", "down") + "_bias")
    sinks = name.replace("mlp.experts.gate_up_proj", "self_attn.sinks")
    found[place.replace("ffn_", "attn_sinks.weight")] = tensors.pop(sinks)
    router = name.replace("experts.gate_up_proj", "router")
    for kind in ("weight", "bias"):
        found[f"{place}gate_inp.{kind}"] = tensors.pop(f"{router}.{kind}")


def sorted_heads(tensors: dict[str, torch.Tensor], start: str) -> list[str]:
    return sorted(
        (name for name in tensors if name.startswith(f"{start}.norms.")), key=lambda name: int(name.split(".")[-2])
    )


def write_model(path: Path, model: Any, *, fused: bool = False, kinds: Mapping[str, GGMLQuantizationType] = {}) -> None:
    """Write a model without a tokenizer, in float32 but for tensors of other `kinds`."""
    config = model.config
    freqs = getattr(config, "rope_parameters", None) or {}
    freqs = freqs.get("full_attention", freqs)  # of Gemma 3, whose other base files do not say
    writer = GGUFWriter(path, ARCHITECTURES.get(config.model_type, config.model_type))
    describe(writer, config, freqs)
    if freqs.get("rope_type") == "longrope":
        for length in ("short", "long"):
            factors = np.array(freqs[f"{length}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)
        longer = config.max_position_embeddings / freqs["original_max_position_embeddings"]
        writer.add_rope_scaling_attn_factors(
            math.sqrt(1 + math.log(longer) / math.log(freqs["original_max_position_embeddings"]))
        )
    if freqs.get("rope_type") == "llama3":  # the converter writes the formula's result
        inverse = next(module for name, module in model.named_modules() if name.endswith("rotary_emb")).inv_freq
        plain = freqs["rope_theta"] ** -(torch.arange(0, 2 * len(inverse), 2) / (2 * len(inverse)))
        writer.add_tensor("rope_freqs.weight", (plain / inverse).float().numpy())
    for name, tensor in gguf_tensors(model, fused=fused).items():
        writer.add_tensor(name, np.ascontiguousarray(tensor.numpy()), raw_dtype=kinds.get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
