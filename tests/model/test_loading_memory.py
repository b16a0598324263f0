"""Loading in fewer bits takes the memory of the finished model, and little more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from afterglow.kernels.matrix import has_bytes
from afterglow.model.presets import llama_config
from afterglow.model.spec import ModelSpec, RopeSpec

SPEC = ModelSpec(
    family="llama", layers=12, hidden=1536, heads=12, kv_heads=4, head_dim=128, ffn=4096, vocab=16000,
    max_positions=2048, rope=RopeSpec(dim=128, base=10000.0), bos_id=1, eos_ids=(2,),
)  # fmt: skip

LOAD = """
import sys, torch
from afterglow.model.loader import load_model
def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
before = peak()
model = load_model(sys.argv[1], quantization=sys.argv[2])
print(peak() - before)
"""


def write_bfloat16(directory: Path) -> int:
    """Write a model of SPEC with random numbers; return its matrices' weights, embedding and head apart."""
    width, kv = SPEC.heads * SPEC.head_dim, SPEC.kv_heads * SPEC.head_dim
    matrices = {
        "self_attn.q_proj": (width, SPEC.hidden), "self_attn.k_proj": (kv, SPEC.hidden),
        "self_attn.v_proj": (kv, SPEC.hidden), "self_attn.o_proj": (SPEC.hidden, width),
        "mlp.gate_proj": (SPEC.ffn, SPEC.hidden), "mlp.up_proj": (SPEC.ffn, SPEC.hidden),
        "mlp.down_proj": (SPEC.hidden, SPEC.ffn),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        f"model.layers.{layer}.{name}.weight": shape for layer in range(SPEC.layers) for name, shape in matrices.items()
    }
    count = sum(rows * columns for rows, columns in matrices.values()) * SPEC.layers
    for layer in range(SPEC.layers):
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{name}.weight"] = (SPEC.hidden,)
    shapes |= {"model.norm.weight": (SPEC.hidden,)}
    shapes |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (SPEC.vocab, SPEC.hidden))
    values = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    directory.mkdir()
    tensors = {name: values.repeat(-(-torch.Size(s).numel() // len(values)))[: torch.Size(s).numel()].view(s) for name, s in shapes.items()}  # fmt: skip
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(llama_config(SPEC)))
    return count


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")
@pytest.mark.skipif(not has_bytes(), reason="no products in 8 bits of our own on this machine")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_loading_in_few_bits_takes_little_more_memory_than_the_model(quantization: str, tmp_path: Path) -> None:
    count = write_bfloat16(tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path / "model"), quantization], capture_output=True, text=True, check=True
    )
    table = SPEC.vocab * SPEC.hidden
    if quantization == "int8":  # a byte each; the embedding stays in bfloat16
        most = 1.3 * (count + table + 2 * table)
    else:  # 18 bytes for 32 weights, 34 in embedding and head; besides, the head as the file has it and its blocks, and code
        most = count * 18 / 32 + 2 * table * 34 / 32 + table * (2 + 34 / 32) + (64 << 20)
    assert int(done.stdout) < most
