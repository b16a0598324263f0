"""Models of known shapes with random weights, and random maps: for times alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from afterglow.choices import QuantizationName
from afterglow.memo.packing import pack
from afterglow.model.encoder import Model
from afterglow.model.encoder_families import encoder_from_config
from afterglow.model.names import Names
from afterglow.model.spec import ModelSpec, RopeSpec
from afterglow.model.weights import WeightAssembler

# hidden, heads, kv heads, ffn, layers, rotary base (None: an encoder of BERT's family)
SHAPES = {
    "Llama-2-7B": (4096, 32, 32, 11008, 32, 10000.0),
    "Llama-3-8B and Mistral-7B": (4096, 32, 8, 14336, 32, 500000.0),  # alike but for the rotary base
    "Llama-3.2-3B": (3072, 24, 8, 8192, 28, 500000.0),
    "SmolLM2-135M": (576, 9, 3, 1536, 30, 10000.0),
    "BERT base": (768, 12, 12, 3072, 12, None),
}
VOCAB = 64


def random_model(name: str, seed: int, quantization: QuantizationName = "none", *, layers: int | None = None) -> Model:
    """Make a model of a shape; `layers`: only so many."""
    hidden, heads, kv_heads, ffn, every, base = SHAPES[name]
    count = every if layers is None else layers
    weights, cpu = Repeated(seed), torch.device("cpu")
    if base is None:
        sizes = {"hidden_size": hidden, "num_attention_heads": heads, "intermediate_size": ffn}
        config = {"model_type": "bert", "vocab_size": VOCAB, "max_position_embeddings": 512, **sizes}
        bert, names = encoder_from_config({**config, "num_hidden_layers": count})
        return WeightAssembler(bert, names, weights, torch.float32, cpu, quantization).encoder()
    spec = ModelSpec(
        family="llama",
        layers=count,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        ffn=ffn,
        vocab=VOCAB,
        max_positions=4096,
        rope=RopeSpec(dim=hidden // heads, base=base),
        tied_embeddings=True,
    )
    return WeightAssembler(spec, Names(), weights, torch.float32, cpu, quantization).decoder()


def random_maps(model: Model, sentences: int, length: int, generator: torch.Generator) -> NDArray[Any]:
    """Draw maps of so many sentences, as a store has them: half precision [sentences, layers, heads, packed]."""
    spec = model.spec
    scores = torch.randn(sentences, spec.layers, spec.heads, length, length, generator=generator)
    if spec.causal:
        scores.masked_fill_(torch.ones(length, length).triu(1).bool(), -torch.inf)
    return pack(scores.softmax(-1).numpy(), causal=spec.causal).astype(np.float16)


class Repeated:
    """Weights of a few random numbers over and over: only their shapes matter here, and billions take long to draw."""

    def __init__(self, seed: int) -> None:
        self._block = torch.randn(1 << 20, generator=torch.Generator().manual_seed(seed)) * 0.02

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        size = math.prod(shape)
        return self._block.repeat(-(-size // len(self._block)))[:size].view(shape)

    def packed(self, name: str, shape: tuple[int, int]) -> None:
        return None
