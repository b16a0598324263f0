"""Writes a float32 or bfloat16 Llama directory of Hugging Face as GGUF of the same numbers. Runs in llama.cpp's environment (numpy, gguf).

    python to_gguf.py DIRECTORY OUT.gguf

llama.cpp rotates neighbours (0, 1), (2, 3), ... of a head where Hugging Face rotates halves (0, d/2), (1, d/2 + 1), ...: the rows
of the query and key projections are permuted accordingly. Tokens are words (`t0`, `t1`, ...); none is special.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
DTYPES = {"F32": np.float32, "BF16": np.uint16}
LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Names and tensors of a safetensors file, one by one: float32, or the uint16 of bfloat16; vectors always float32."""
    data = np.memmap(path, np.uint8, "r")
    size = int.from_bytes(data[:8].tobytes(), "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + size].tobytes())
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise SystemExit(f"{name} is {entry['dtype']}, not {' or '.join(DTYPES)}")
        start, stop = entry["data_offsets"]
        numbers = data[8 + size + start : 8 + size + stop].view(DTYPES[entry["dtype"]])
        if numbers.dtype == np.uint16 and len(entry["shape"]) == 1:
            numbers = (numbers.astype(np.uint32) << 16).view(np.float32)
        yield name, numbers.reshape(entry["shape"])


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """[heads * d, hidden]: each head's halves become neighbours."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def renamed(name: str, tensor: np.ndarray, config: dict[str, Any]) -> tuple[str, np.ndarray]:
    if name in NAMES:
        return NAMES[name], tensor
    _, _, layer, rest = name.split(".", 3)
    if rest == "self_attn.q_proj.weight":
        tensor = permuted(tensor, config["num_attention_heads"])
    if rest == "self_attn.k_proj.weight":
        tensor = permuted(tensor, config["num_key_value_heads"])
    return f"blk.{layer}.{LAYER_NAMES[rest]}", tensor


def main(source: Path, target: Path) -> None:
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(str(target), "llama")
    writer.add_name("random weights")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    words = [f"\N{LOWER ONE EIGHTH BLOCK}t{token}".encode() for token in range(config["vocab_size"])]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * len(words))
    writer.add_token_types([gguf.TokenType.NORMAL] * len(words))
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"][0])
    writer.add_add_bos_token(False)
    for name, tensor in tensors(source / "model.safetensors"):
        raw = gguf.GGMLQuantizationType.BF16 if tensor.dtype == np.uint16 else None
        writer.add_tensor(*renamed(name, tensor, config), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
