"""Find out by a trial how a model's modules turn keys: the same tokens at far positions and at position 0.

In the trial each row attends to itself alone. So what a layer computes for a token depends on its position only as far as the
modules make it depend, and keys that differ by a rotation alone are the same once it is taken back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from afterglow.errors import ModelError
from afterglow.kernels.rope import RopeTable
from afterglow.model.decoder import Attention, Decoder
from afterglow.model.fallback.handing import Turning
from afterglow.model.fallback.module_decoder import FallbackDecoder
from afterglow.model.spec import ModelSpec

ROWS = 16
# Largest difference of keys and values that counts as none, as a part of the layer's largest number. Rounding leaves 1e-6.
NEAR = 1e-5


def tried(spec: ModelSpec, model: Any, context: int) -> FallbackDecoder:
    """Make the decoder of `model`, with keys that are turned back where that is exact, for contexts of so many tokens.

    Raises: ModelError where the modules do not call our attention as it has to be called.
    """
    decoder = FallbackDecoder(spec, model, Turning())
    far = torch.linspace(0, spec.position_limit or spec.max_positions, ROWS + 1).long()[1:] - 1
    seen = _Rows.of(decoder, far), _Rows.of(decoder, torch.zeros_like(far))
    spec = _with_windows(spec, decoder.windows).within(context)
    unturned = tuple(layer for layer in range(spec.layers) if _same(seen[0].keys[layer], seen[1].keys[layer]))
    values_stay = all(_same(a, b) for a, b in zip(seen[0].values, seen[1].values, strict=True))
    if values_stay and len(unturned) < spec.layers:
        turned_spec = dataclasses.replace(spec, unturned=unturned)
        for turning in _candidates(spec, model):
            turned = FallbackDecoder(turned_spec, model, turning)
            back = _Rows.of(turned, far), _Rows.of(turned, torch.zeros_like(far))
            if all(_same(a, b) for a, b in zip(back[0].keys, back[1].keys, strict=True)):
                return turned
    return FallbackDecoder(spec, model, Turning())


def _with_windows(spec: ModelSpec, windows: dict[int, int]) -> ModelSpec:
    """Return the spec with the windows of some layers. Raises: ModelError where these differ."""
    sizes = sorted(set(windows.values()))
    if len(sizes) > 1:
        raise ModelError(f"its layers have windows of {sizes[0]} and {sizes[1]} tokens; one size for all is supported")
    return dataclasses.replace(spec, window=sizes[0], sliding=tuple(sorted(windows))) if sizes else spec


class _Rows:
    """An `Attend` that notes keys and values of each layer; each row attends to itself alone: its context is its own value."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    @classmethod
    def of(cls, decoder: Decoder, positions: Tensor) -> _Rows:
        """Take some tokens through the decoder, at `positions`, int64 [rows]."""
        rows = cls()
        ids = torch.arange(1, len(positions) + 1) * 7919 % decoder.spec.vocab
        decoder.forward(ids.to(decoder.device), positions.to(decoder.device), rows)
        return rows

    def __call__(self, layer: int, attention: Attention, x: Tensor) -> Tensor:
        _, k, v = attention.project(x)
        self.keys.append(k)
        self.values.append(v)
        return v.repeat_interleave(attention.heads // attention.kv_heads, dim=1).flatten(1)


def _same(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= NEAR * b.abs().max())


def _candidates(spec: ModelSpec, model: Any) -> Iterator[Turning]:
    """Yield ways to turn with the frequencies of the model: pairs half a table apart, or neighbours, both ways round."""
    for table in _tables(model):
        size = table.dim
        if size > spec.head_dim:
            continue
        pairs = torch.arange(spec.head_dim, device=table.inv_freq.device)
        pairs[:size] = torch.cat((torch.arange(0, size, 2), torch.arange(1, size, 2)))
        for sign in (1, -1):
            turned = RopeTable(sign * table.inv_freq, attention_factor=table.attention_factor)
            yield from (Turning(turned), Turning(turned, pairs))


def _tables(model: Any) -> Iterator[RopeTable]:
    """Yield the rotary tables of the model's modules."""
    for module in model.modules():
        inv_freq = getattr(module, "inv_freq", None)
        if isinstance(inv_freq, Tensor) and inv_freq.ndim == 1:
            x = torch.zeros(1, 1, 1, device=inv_freq.device)
            cos, _ = module(x, position_ids=torch.zeros(1, 1, dtype=torch.int64, device=inv_freq.device))
            yield RopeTable(inv_freq.float().clone(), attention_factor=float(cos.max()))  # the cosine of 0 is 1
