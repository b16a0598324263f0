"""All layers of a decode step in one call of a compiled kernel: see `native/layers.c`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from afterglow.kernels.block import Block, Panelled
from afterglow.kernels.built import native
from afterglow.kernels.decode import Appends, Reads
from afterglow.kernels.rope import Rotation


class WholeLayer(NamedTuple):
    """A layer. `qkv` yields all query heads, then all key heads, then all value heads. `norms`: none, or those of queries and of keys,
    each a weight, of one head or of all, and the number that is added to the mean square. `sinks`: float32 [heads]. `scale` and `cap`: of scores, see `attend`."""

    qkv: Panelled
    block: Block
    scale: float
    cap: float
    norms: Sequence[tuple[Tensor, float]] = ()
    sinks: Tensor | None = None


class LayerRows(NamedTuple):
    """A step's rows in a layer: where they are appended, what they read, the layer's number in these contexts, and the rotation of
    the rows; None if the layer does not rotate."""

    appends: Appends
    reads: Reads
    number: int
    rotation: Rotation | None


class Layers:
    """Layers of a decoder, for steps of few rows. Float32 on CPU; needs the compiled kernels."""

    __slots__ = ("_count", "_heads", "_layers", "_library", "_memory")

    def __init__(self, layers: Sequence[WholeLayer], heads: int, kv_heads: int, head_dim: int) -> None:
        """Keep the layers. Raises: ValueError if the shape of a matrix does not fit."""
        library = native()
        assert library is not None, "there are no compiled kernels"
        self._library, self._count, self._heads = library, len(layers), (heads, kv_heads, head_dim)
        self._memory: list[object] = [layers]
        fields = []
        for layer in layers:
            outputs = (heads + 2 * kv_heads) * head_dim
            if (layer.qkv.inputs, layer.qkv.outputs, layer.block.inputs) != (
                layer.block.hidden,
                outputs,
                heads * head_dim,
            ):
                raise ValueError(
                    f"{heads} and {kv_heads} heads of {head_dim} do not fit {layer.qkv.inputs} -> {layer.qkv.outputs} and "
                    f"{layer.block.inputs} -> {layer.block.hidden}"
                )
            norms = [self._norm(*norm) for norm in layer.norms]
            about = {"qkv": layer.qkv.matrix[0], "rest": layer.block.layer, "scale": layer.scale, "cap": layer.cap}
            if norms:
                about |= {"query_norm": norms[0], "key_norm": norms[1]}
            if layer.sinks is not None:
                sinks = layer.sinks.float().contiguous()
                self._memory.append(sinks)
                about["sinks"] = sinks.data_ptr()
            fields.append(about)
        self._layers = library.new("afterglow_whole_layer[]", fields)

    def _norm(self, weight: Tensor, eps: float) -> object:
        weight = weight.float().contiguous()
        norm = self._library.new("afterglow_norm *", (weight.data_ptr(), len(weight), eps))
        self._memory += [weight, norm]
        return norm

    def __call__(self, x: Tensor, normed: Tensor, own: Sequence[LayerRows]) -> Tensor:
        """Take rows through all layers. `x` [rows, hidden], contiguous, the input of the first layer, becomes the output of the last;
        `normed`, of the same shape, is `x` after the norm that comes next. The contexts hold all other rows that are read, and get
        the new ones.

        Returns queries, keys and values [layers, rows, heads + 2 * kv_heads, head_dim], not rotated. Raises: MemoryError.
        """
        rows, (heads, kv_heads, head_dim) = len(x), self._heads
        assert x.is_contiguous()
        assert normed.is_contiguous()
        assert x.data_ptr() != normed.data_ptr()
        qkv = torch.empty(self._count, rows, heads + 2 * kv_heads, head_dim)
        found = self._library.new("afterglow_layer_rows[]", [_fields(layer) for layer in own])
        to = (x.data_ptr(), normed.data_ptr(), qkv.data_ptr(), rows, heads, kv_heads, head_dim)
        failed = self._library.lib.afterglow_go_through(
            *(self._layers, found, self._count, self._library.new("afterglow_pass *", to)),
            *(torch.get_num_threads(), self._library.width),
        )
        if failed:
            raise MemoryError(f"no memory for the intermediate results of {rows} rows in a layer")
        return qkv


def _fields(layer: LayerRows) -> tuple[object, ...]:
    appends, reads, number, rotation = layer
    table = reads.table
    assert table is not None
    if rotation is None:
        return appends.table, table, number, 0, 0, 0
    cos, sin = rotation
    return appends.table, table, number, cos.data_ptr(), sin.data_ptr(), cos.shape[1]
