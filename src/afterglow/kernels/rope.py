"""Rotary position embedding: tables and the rotation itself.

Half layout (Llama, GPT-NeoX): dimension i of the first half turns together with dimension i of the second
half. No supported family needs the interleaved layout. Partial rotary (Phi): only the first `dim` of the
head's dimensions turn, the rest pass through.

Tables and positions are float32 always and a narrower result is rounded once, at the end: bfloat16 positions
alias (769 distinct values below 4096) and bfloat16 tables cost as much again as storing the keys in bfloat16.
Knows nothing of models: the (scaled) inverse frequencies are an argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from afterglow.kernels.passes import suited

Rotation: TypeAlias = tuple[Tensor, Tensor]
"""`(cos, sin)` of some rows, each float32 [rows, dim]; `sin` carries the sign of its half: `[-sin | sin]`."""


class RopeTable:
    """The rotation of every position, computed when a step needs it.

    Not precomputed: the tables of 131,072 positions would take 64 MiB, and the angles of one step cost
    microseconds.
    """

    def __init__(self, inv_freq: Tensor, *, attention_factor: float = 1.0) -> None:
        """`inv_freq`: float32 [dim / 2], radians per position, any scaling already applied.

        `attention_factor` multiplies cos and sin (YaRN, LongRoPE), so that scores grow by its square.
        """
        if inv_freq.dtype != torch.float32 or inv_freq.ndim != 1:
            raise ValueError(
                f"inv_freq must be one float32 vector, got {inv_freq.dtype} of shape {tuple(inv_freq.shape)}"
            )
        self.inv_freq = inv_freq
        self.attention_factor = attention_factor

    @property
    def dim(self) -> int:
        """Return how many of a head's first dimensions turn."""
        return 2 * int(self.inv_freq.shape[0])

    def cos_sin(self, positions: Tensor) -> Rotation:
        """Return the rotation of `positions` (int64 [rows], on the table's device)."""
        # float32 holds every position below 2**24 exactly.
        angles = positions.to(torch.float32)[:, None] * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        if self.attention_factor != 1.0:
            cos *= self.attention_factor
            sin *= self.attention_factor
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


class LayerRotations:
    """The rotation of some rows in each layer. Layers with one table share it."""

    __slots__ = ("_of_layer", "_rotations")

    def __init__(self, rotations: Sequence[Rotation], of_layer: Sequence[int | None]) -> None:
        """Keep `rotations`, and which of them each layer has; None: the layer's rows are not rotated."""
        self._rotations, self._of_layer = rotations, of_layer

    def at(self, layer: int) -> Rotation | None:
        """Return the rotation of the rows in one layer; None if they are not rotated there."""
        which = self._of_layer[layer]
        return None if which is None else self._rotations[which]

    def averaged(self, places: Tensor, count: int) -> LayerRotations:
        """Return the mean rotation of the rows in each of `count` places. `places` int64 [rows]; rows in place `count` are left out."""
        rows = places.bincount(minlength=count)[:count, None]

        def mean(x: Tensor) -> Tensor:
            return x.new_zeros(count + 1, x.shape[1]).index_add_(0, places, x)[:count] / rows

        return LayerRotations([(mean(cos), mean(sin)) for cos, sin in self._rotations], self._of_layer)


class LayerRopes:
    """The rope tables of a model: one for all layers, or one for some and another for the rest."""

    def __init__(self, tables: Sequence[RopeTable], of_layer: Sequence[int | None]) -> None:
        """Keep `tables`, and which of them each layer has; None: the layer has no positions."""
        self.tables, self._of_layer = tuple(tables), tuple(of_layer)

    def cos_sin(self, positions: Tensor) -> LayerRotations:
        """Return the rotations of `positions` (int64 [rows]) in all layers."""
        return LayerRotations([table.cos_sin(positions) for table in self.tables], self._of_layer)


def inverse(rotation: Rotation) -> Rotation:
    """Return the rotation that undoes another one, but for rounding."""
    cos, sin = rotation
    size = cos * cos + sin * sin
    return cos / size, -sin / size


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Return `x` [rows, heads, head_dim] turned by `rotation`: a new tensor of the same shape and dtype."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rotate_into(x, rotation, out)
    return out


def rotate_into(x: Tensor, rotation: Rotation, out: Tensor) -> None:
    """Write `x` [rows, heads, head_dim], turned by `rotation`, into `out` of the same shape.

    Both may have any strides and dtypes, but must not overlap: gathering stored keys into a segment
    ([heads, rows, head_dim] storage seen as [rows, heads, head_dim]) and turning them is one pass.
    """
    cos, sin = rotation
    dim = cos.shape[-1]
    library = suited(x, out, cos, sin)
    if library is not None:
        cos, sin = cos.contiguous(), sin.contiguous()
        (rows, heads, size), (x_row, x_head, _), (out_row, out_head, _) = x.shape, x.stride(), out.stride()
        job = {
            "x": (x.data_ptr(), x_row, x_head),
            "out": (out.data_ptr(), out_row, out_head),
            "cos": cos.data_ptr(),
            "sin": sin.data_ptr(),
            "rows": rows,
            "heads": heads,
            "head_dim": size,
            "rotary_dim": dim,
        }
        library.lib.afterglow_rotate(library.new("afterglow_rotation *", job), torch.get_num_threads(), library.width)
        return
    whole = dim == x.shape[-1]
    source = x if whole else x[..., :dim]
    target = out if whole else out[..., :dim]
    # Rolling by half swaps the halves. Measured against four half-width products written into the
    # destination: 1.6 times as fast (2048 rows x 4 heads x 64 x 12 layers: 9.7 ms to 15.8 ms on one core),
    # because every inner loop of the others is only half a head long.
    swapped = source.roll(dim // 2, -1)
    if out.dtype == torch.float32:
        torch.mul(source, cos[:, None], out=target).addcmul_(swapped, sin[:, None])
    else:
        target.copy_((source * cos[:, None]).addcmul_(swapped, sin[:, None]))
    if not whole:
        out[..., dim:].copy_(x[..., dim:])
