"""Models of random weights: shapes to measure speed with, and small ones for tests. A model is a spec and a seed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from afterglow.choices import QuantizationName
from afterglow.model.decoder import Decoder
from afterglow.model.names import Names
from afterglow.model.spec import ModelSpec, RopeSpec
from afterglow.model.weights import WeightAssembler


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, positions: int) -> ModelSpec:
    return ModelSpec(
        family="llama",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        ffn=ffn,
        vocab=vocab,
        max_positions=positions,
        rope=RopeSpec(dim=hidden // heads, base=10000.0),
        bos_id=1,
        eos_ids=(2,),
    )


PRESETS = {
    "bench-56m": _llama(8, 512, 8, 4, ffn=1408, vocab=32000, positions=8192),
    "bench-100m": _llama(12, 768, 12, 4, ffn=2048, vocab=32000, positions=8192),
    "tiny": _llama(2, 64, 4, 2, ffn=128, vocab=512, positions=2048),
}

INIT_STD = 0.02


class RandomSource:
    """Weights drawn from (seed, name), so that their order does not matter."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.taken: dict[str, Tensor] | None = None  # set to a dict to keep the drawn tensors

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Draw a tensor: see `WeightSource.get`. Float32; matrices and biases N(0, 0.02), norm weights around 1."""
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        tensor = torch.randn(shape, generator=generator).mul_(INIT_STD)
        if len(shape) == 1 and name.endswith(".weight"):
            tensor.add_(1.0)
        if self.taken is not None:
            self.taken[name] = tensor
        return tensor

    def packed(self, name: str, shape: tuple[int, int]) -> None:
        """Return None: all weights are numbers."""
        return


def random_model(
    spec: ModelSpec,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    quantization: QuantizationName = "auto",
) -> Decoder:
    """Make a decoder of Llama's weight names with random weights; equal for equal (spec, seed)."""
    return WeightAssembler(spec, Names(), RandomSource(seed), dtype, torch.device(device), quantization).decoder()


def save_hf(model: str | ModelSpec, directory: Path, *, seed: int = 0) -> None:
    """Write the weights of `random_model(spec, seed)` as a float32 Hugging Face Llama directory.

    `model` is a preset's name or a Llama-shaped spec. Other programs (those that benchmarks compare with) can
    then load the same model.
    """
    spec = PRESETS[model] if isinstance(model, str) else model
    source = RandomSource(seed)
    source.taken = {}
    WeightAssembler(spec, Names(), source, torch.float32, torch.device("cpu")).decoder()
    directory.mkdir(parents=True, exist_ok=True)
    save_file(source.taken, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(llama_config(spec), indent=2) + "\n", encoding="utf-8")


def llama_config(spec: ModelSpec) -> dict[str, Any]:
    """Return `config.json` of a Llama-shaped spec with plain rotary positions, readable by transformers 4 and 5."""
    rope = spec.rope
    if spec.family != "llama" or rope is None or rope.type != "default" or rope.dim != spec.head_dim:
        raise ValueError(f"only plain Llama shapes can be written, not {spec}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": spec.qkv_bias,
        "bos_token_id": spec.bos_id,
        "dtype": "float32",
        "eos_token_id": list(spec.eos_ids),
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn,
        "max_position_embeddings": spec.max_positions,
        "mlp_bias": spec.mlp_bias,
        "num_attention_heads": spec.heads,
        "num_hidden_layers": spec.layers,
        "num_key_value_heads": spec.kv_heads,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": rope.base,
        "tie_word_embeddings": spec.tied_embeddings,
        "torch_dtype": "float32",
        "vocab_size": spec.vocab,
    }
