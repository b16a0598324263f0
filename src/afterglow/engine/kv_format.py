"""How the KV of a model is stored, and the digest that names the folder of files in this format."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path

import torch

from afterglow.config import BLOCK_ROWS, EngineConfig
from afterglow.model.decoder import Decoder
from afterglow.model.digest import model_digest, numeric_mode
from afterglow.model.loader import DTYPES
from afterglow.store.extents.layout import KVLayout

Progress = Callable[[str, int, int], None]

PROBE_HEADS = 3  # of each layer, the first (SPEC §IV-B)
_STORED = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int8: "I8"}


def kv_dtype(decoder: Decoder, config: EngineConfig) -> torch.dtype:
    """Return the dtype of rows below the device."""
    if config.kv_dtype == "auto":
        return decoder.dtype
    return torch.int8 if config.kv_dtype == "int8" else DTYPES[config.kv_dtype]


def kv_format(
    model: str | Path, decoder: Decoder, config: EngineConfig, progress: Progress | None
) -> tuple[KVLayout, str]:
    """Describe how KV is stored, and compute the digest that names the model's folder."""
    spec, dtype = decoder.spec, kv_dtype(decoder, config)
    mode = numeric_mode(str(decoder.dtype), str(dtype), decoder.quantization)
    digest = model_digest(
        model,
        f"{mode},{decoder.arithmetic}" if decoder.arithmetic else mode,
        context=spec.context(config.max_model_len),
        progress=functools.partial(progress, "digest of the weights") if progress else None,
    )
    probes = min(PROBE_HEADS, spec.kv_heads) if config.importance is not None else 0
    if probes:  # their keys are also stored apart: another format, and so another folder
        digest = hashlib.sha256(f"{digest} with {probes} probe heads".encode()).hexdigest()
    parts = min(BLOCK_ROWS, config.importance_chunk) if probes else BLOCK_ROWS
    if parts < BLOCK_ROWS:
        digest = hashlib.sha256(f"{digest} in parts of {parts} rows".encode()).hexdigest()
    means = bool(probes) and config.importance_rest == "means"
    if means:
        digest = hashlib.sha256(f"{digest} with means".encode()).hexdigest()
    return KVLayout(spec.layers, spec.kv_heads, spec.head_dim, _STORED[dtype], probes, parts, means), digest


def probe_part(layout: KVLayout) -> float:
    """Return the part of an extent's bytes that jobs which select read in any case: probe keys and means."""
    always = layout.probe_row_bytes + 2 * layout.mean_row_bytes / BLOCK_ROWS
    return always / (2 * layout.row_bytes + always)
