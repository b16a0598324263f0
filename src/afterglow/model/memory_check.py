"""Whether a model's weights fit into memory: found out before they are read."""

from __future__ import annotations

from pathlib import Path

import torch

from afterglow.choices import QuantizationName
from afterglow.config import format_size
from afterglow.errors import ModelError
from afterglow.memory.free import free_bytes
from afterglow.model.keeping import keeps_blocks
from afterglow.model.spec import ModelSpec

# Bytes of a rounded weight, its part of the scales included.
ROUNDED = {"int8": 1.0, "int4": 4.5 / 8}


def check_memory(model: Path, parameters: int, weights: int, kv_bytes: int, device: torch.device) -> None:
    """Refuse a model of so many `parameters` whose `weights` (bytes) are more than what is free. `kv_bytes` is what is needed besides.

    Raises: ModelError.
    """
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_bytes()
    if free is None or weights <= free:
        return
    kv = f", besides up to {format_size(kv_bytes)} for keys and values" if kv_bytes else ""
    where = "this machine" if device.type == "cpu" else str(device)
    raise ModelError(
        f"{model}: {parameters / 1e9:.2f} billion weights need about {format_size(weights)}{kv}, and {where} has "
        f"{format_size(free)} free; use a smaller model, a file of fewer bits, or --quantization int8 or int4"
    )


def weight_bytes(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, quantization: QuantizationName, blocks: int | None
) -> int:
    """Return about how many bytes the weights take as they are kept. `blocks`: bytes of the weights where files have blocks, as these
    are kept if they are."""
    if quantization == "auto" and blocks is not None and keeps_blocks(dtype, device):
        return blocks
    table = spec.vocab * spec.hidden
    matrices = spec.num_parameters - (0 if spec.tied_embeddings else table)  # a tied head is reordered: a copy
    looked_up = table * (4 if blocks is not None or spec.dtype == "float32" else 2)
    return int(matrices * ROUNDED.get(quantization, dtype.itemsize)) + looked_up
