"""Models of Hugging Face as GGUF files, written as llama.cpp's converter does: names, order of rows, metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter

ARCHITECTURES = {"phi": "phi2"}  # where the name is another one
NAMES = {
    "llama": {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "self_attn.o_proj": "attn_output",
        "self_attn.dense": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "mlp.fc1": "ffn_up",
        "mlp.fc2": "ffn_down",
        "model.final_layernorm": "output_norm",
    },
    "falcon": {
        "transformer.word_embeddings": "token_embd",
        "transformer.ln_f": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "ln_mlp": "attn_norm",
        "ln_attn": "attn_norm_2",
        "self_attention.query_key_value": "attn_qkv",
        "self_attention.dense": "attn_output",
        "mlp.dense_h_to_4h": "ffn_up",
        "mlp.dense_4h_to_h": "ffn_down",
    },
}


def describe(writer: GGUFWriter, config: Any, freqs: dict[str, Any]) -> None:
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(getattr(config, "ffn_hidden_size", None) or config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads(config))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(getattr(config, "layer_norm_eps", None) or config.layer_norm_epsilon)
    writer.add_rope_dimension_count(int(head_dim * freqs.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(freqs["rope_theta"])
    kind = freqs["rope_type"]
    if kind in ("linear", "yarn"):
        writer.add_string(f"{writer.arch}.rope.scaling.type", kind)
        writer.add_rope_scaling_factor(freqs["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(freqs["original_max_position_embeddings"])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)


def kv_heads(config: Any) -> int:
    if config.model_type != "falcon":
        return int(config.num_key_value_heads)
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
    """The tensors of a model by llama.cpp's names. `fused`: q, k and v are one tensor."""
    config, found = model.config, {}
    for name, tensor in model.state_dict().items():
        module, _, kind = name.rpartition(".")
        if module == "lm_head" and config.tie_word_embeddings:
            continue
        names = NAMES.get(config.model_type, NAMES["llama"])
        if ".layers." in module or ".h." in module:
            _, _, number, rest = module.split(".", 3)
            target = f"blk.{number}.{names[rest]}.{kind}"
        else:
            target = f"{names[module]}.{kind}"
        if config.model_type == "llama" and "attn_q." in target:
            tensor = neighbours(tensor, config.num_attention_heads)
        if config.model_type == "llama" and "attn_k." in target:
            tensor = neighbours(tensor, config.num_key_value_heads)
        if "attn_qkv" in target:
            tensor = sorted_qkv(tensor, config.num_attention_heads, kv_heads(config))
        found[target] = tensor
    for name in [name for name in found if fused and "attn_q." in name]:
        parts = [found.pop(name.replace("attn_q", f"attn_{x}")) for x in "qkv"]
        found[name.replace("attn_q", "attn_qkv")] = torch.cat(parts)
    return found


def write_model(path: Path, model: Any, *, fused: bool = False) -> None:
    """Write a model in float32, without a tokenizer."""
    config = model.config
    freqs = config.rope_parameters
    writer = GGUFWriter(path, ARCHITECTURES.get(config.model_type, config.model_type))
    describe(writer, config, freqs)
    if freqs["rope_type"] == "llama3":  # the converter writes the formula's result
        inverse = next(module for name, module in model.named_modules() if name.endswith("rotary_emb")).inv_freq
        plain = freqs["rope_theta"] ** -(torch.arange(0, 2 * len(inverse), 2) / (2 * len(inverse)))
        writer.add_tensor("rope_freqs.weight", (plain / inverse).float().numpy())
    for name, tensor in gguf_tensors(model, fused=fused).items():
        writer.add_tensor(name, np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
