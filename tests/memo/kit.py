"""Small models of both kinds and databases of their maps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from afterglow.choices import QuantizationName
from afterglow.memo.build import Builder
from afterglow.memo.database import MemoDatabase
from afterglow.memo.options import MemoOptions
from afterglow.memo.pooling import Pooling
from afterglow.memo.sequence_embedder import Embedder
from afterglow.model.encoder import Model
from afterglow.model.encoder_families import encoder_from_config
from afterglow.model.names import Names
from afterglow.model.presets import PRESETS
from afterglow.model.weights import WeightAssembler
from tests.memo.tiny import CONFIG, Large

CPU = torch.device("cpu")
EXACT = MemoOptions(projector="binned", accept="sentence", neighbours=1, dtype="float32", steps=20)


def model(kind: str, seed: int = 0, quantization: QuantizationName = "none") -> Model:
    if kind == "decoder":
        return WeightAssembler(PRESETS["tiny"], Names(), Large(seed), torch.float32, CPU, quantization).decoder()
    spec, names = encoder_from_config(CONFIG)
    return WeightAssembler(spec, names, Large(seed), torch.float32, CPU, quantization).encoder()


def embedder(kind: str, seed: int = 0, quantization: QuantizationName = "none") -> Embedder:
    return Embedder(model(kind, seed, quantization), Pooling("last" if kind == "decoder" else "mean"), max_tokens=48)


def sentences(count: int, seed: int = 0, lengths: tuple[int, ...] = (5, 8, 9)) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [[int(i) for i in random.integers(5, 60, random.choice(lengths))] for _ in range(count)]


def builder(
    embedder: Embedder, folder: Path, options: MemoOptions = EXACT, *, digest: str = "d" * 64, template: str = "{text}"
) -> Builder:
    return Builder(embedder, folder, options, model_digest=digest, quantisation="float32", template=template)


def build(embedder: Embedder, folder: Path, texts: list[list[int]], options: MemoOptions = EXACT) -> MemoDatabase:
    return builder(embedder, folder, options).run(texts)
