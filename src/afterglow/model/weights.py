"""From named tensors to a Decoder or an Encoder: checks every shape, fuses q, k, v and gate, up as they come, packs.

This file knows no files: a `WeightSource` may be a checkpoint or a random generator. At no time are there two full copies:
each fused matrix is filled tensor by tensor, in 8 bits straight from the file's rows, before the next one begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from afterglow.choices import KeptWeights, QuantizationName
from afterglow.model.decoder import Attention, Decoder, Layer, Norm
from afterglow.model.encoder import Encoder
from afterglow.model.families import Names
from afterglow.model.keeping import Keeping, blocks_work
from afterglow.model.linear import BlockLinear, Linear, ReorderedLinear, StackedLinear
from afterglow.model.rotary import rope_table
from afterglow.model.spec import EncoderSpec, ModelSpec
from afterglow.model.tables import BlockTable, PackedTensor, Table


class WeightSource(Protocol):
    """A source of tensors by name."""

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor `name`, on the host, in its own dtype, or dequantised. Raises: ModelError if missing or of another shape."""
        ...

    def packed(self, name: str, shape: tuple[int, int]) -> PackedTensor | None:
        """Return the matrix `name` in blocks, None if the source has numbers for it. Raises: as `get`."""
        ...


class WeightAssembler:
    """Build the parts of one decoder, or encoder, from `source`."""

    def __init__(
        self,
        spec: ModelSpec,
        names: Names,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        quantization: QuantizationName = "auto",
    ) -> None:
        """Choose how to keep matrices. Raises: ConfigError if the model cannot be quantised so."""
        self._spec, self._names, self._source = spec, names, source
        self._dtype, self._device = dtype, device
        self._keeps_blocks = quantization == "auto" and blocks_work(dtype, device)
        self._kept: KeptWeights = "none" if quantization == "auto" else quantization
        self._keeping = Keeping(dtype, device, quantization)

    def decoder(self) -> Decoder:
        """Build the whole decoder. Raises: ModelError at the first tensor that is missing or has another shape."""
        spec, names = self._spec, self._names
        embed = self._embedding()
        positions = self._positions() if spec.positions == "learned" else None
        layers = [self._layer(index) for index in range(spec.layers)]
        return Decoder(
            spec,
            embed=embed,
            positions=positions,
            layers=layers,
            final_norm=self._norm(names.final_norm, spec.hidden),
            head=self._head(embed),
            rope=None if spec.rope is None else rope_table(spec.rope, self._device),
            dtype=self._dtype,
            quantization=self._kept,
        )

    def encoder(self) -> Encoder:
        """Build the whole encoder. Raises: ModelError at the first tensor that is missing or has another shape."""
        spec, names = self._spec, self._names
        assert isinstance(spec, EncoderSpec)
        embed = self._embedding()
        types = None
        if spec.token_types:
            types = self._get(names.token_types + ".weight", spec.token_types, spec.hidden)[0].clone()
        return Encoder(
            spec,
            embed=embed,
            positions=self._positions(),
            token_type=types,
            embed_norm=self._norm(names.embed_norm, spec.hidden),
            layers=[self._layer(index) for index in range(spec.layers)],
            dtype=self._dtype,
            quantization=self._kept,
        )

    def _positions(self) -> Tensor:
        rows = self._spec.max_positions + self._spec.position_offset
        return self._keeping.narrow(self._source.get(self._names.positions + ".weight", (rows, self._spec.hidden)))

    def _layer(self, index: int) -> Layer:
        spec, names = self._spec, self._names

        def at(template: str) -> str:
            return template.format(l=index)

        q_norm = k_norm = None
        if spec.qk_norm:
            q_norm = self._norm(at(names.q_norm), spec.head_dim, rms=True)
            k_norm = self._norm(at(names.k_norm), spec.head_dim, rms=True)
        width = spec.heads * spec.head_dim
        mlp = [(at(name), spec.ffn) for name in names.mlp]
        return Layer(
            attn_norm=self._norm(at(names.attn_norm), spec.hidden),
            attention=Attention(index, spec, self._qkv(index), q_norm, k_norm),
            out=self._linear([(at(names.out), spec.hidden)], width, spec.out_bias),
            mlp_norm=self._norm(at(names.mlp_norm), spec.hidden) if spec.mlp_norm else None,
            mlp_in=self._linear(mlp, spec.hidden, spec.mlp_bias),
            mlp_out=self._linear([(at(names.mlp_out), spec.hidden)], spec.ffn, spec.mlp_bias),
        )

    def _get(self, name: str, *shape: int) -> Tensor:
        return self._source.get(name, shape).to(self._device, self._dtype)

    def _packed(self, name: str, shape: tuple[int, int]) -> PackedTensor | None:
        found = self._source.packed(name, shape) if self._keeps_blocks else None
        if found is not None:
            self._kept = "blocks"
        return found

    def _embedding(self) -> Table:
        name, shape = self._names.embed + ".weight", (self._spec.vocab, self._spec.hidden)
        found = self._packed(name, shape)
        return (
            self._keeping.table(self._source.get(name, shape))
            if found is None
            else BlockTable(found[0].clone(), found[1])
        )

    def _norm(self, name: str, size: int, *, rms: bool | None = None) -> Norm:
        rms = self._spec.norm == "rms" if rms is None else rms
        weight = self._get(name + ".weight", size).clone()
        bias = None if rms else self._get(name + ".bias", size).clone()
        return Norm(weight, bias, rms=rms, eps=self._spec.norm_eps)

    def _linear(self, parts: Sequence[tuple[str, int]], inputs: int, bias: bool, *, head: bool = False) -> Linear:
        """Build one matrix out of the modules `parts` (name, outputs), stacked in order. Neighbours of one layout become one."""
        found = [(name, size, self._packed(name + ".weight", (size, inputs))) for name, size in parts]
        stack: list[Linear] = []
        for _, same in groupby(found, key=_layout):
            run = list(same)
            biases = torch.cat([self._bias(name, size) for name, size, _ in run]) if bias else None
            blocks = [part for _, _, part in run if part is not None]
            if blocks:
                whole = blocks[0].blocks if len(blocks) == 1 else torch.cat([part.blocks for part in blocks])
                stack.append(_of_blocks(blocks[0]._replace(blocks=whole), inputs, biases))
                continue
            matrix = self._keeping.begin(sum(size for _, size, _ in run), inputs, head=head)
            start = 0
            for name, size, _ in run:
                matrix.fill(start, self._source.get(name + ".weight", (size, inputs)))
                start += size
            stack.append(matrix.done(biases))
        return stack[0] if len(stack) == 1 else StackedLinear(stack)

    def _bias(self, name: str, size: int) -> Tensor:
        return self._get(name + ".bias", size).clone()

    def _qkv(self, index: int) -> Linear:
        spec = self._spec
        names = [name.format(l=index) for name in self._names.qkv]
        sizes = [heads * spec.head_dim for heads in (spec.heads, spec.kv_heads, spec.kv_heads)]
        if len(names) == 3:
            return self._linear(list(zip(names, sizes, strict=True)), spec.hidden, spec.qkv_bias)
        # Falcon: per KV head its query heads, its key, its value; sorted here, so that the decoder sees one
        # order.
        group = spec.heads // spec.kv_heads
        rows = torch.arange(sum(sizes)).reshape(spec.kv_heads, group + 2, spec.head_dim)
        order = torch.cat((rows[:, :group].flatten(), rows[:, group].flatten(), rows[:, group + 1].flatten()))
        shape = (sum(sizes), spec.hidden)
        bias = self._bias(names[0], sum(sizes))[order.to(self._device)] if spec.qkv_bias else None
        found = self._packed(names[0] + ".weight", shape)
        if found is not None:
            return _of_blocks(found._replace(blocks=found.blocks[order]), spec.hidden, bias)
        return self._keeping(self._source.get(names[0] + ".weight", shape)[order], bias)

    def _head(self, embed: Table) -> Linear:
        spec = self._spec
        if not spec.tied_embeddings:
            return self._linear([(self._names.head, spec.vocab)], spec.hidden, spec.head_bias, head=True)
        return self._keeping.tied(embed, self._bias(self._names.head, spec.vocab) if spec.head_bias else None)


def _layout(part: tuple[str, int, PackedTensor | None]) -> tuple[str, bytes | None] | None:
    """Return what parts of one matrix in blocks have in common; None if a part has numbers."""
    found = part[2]
    if found is None:
        return None
    return found.block_format, None if found.order is None else found.order.numpy().tobytes()


def _of_blocks(tensor: PackedTensor, inputs: int, bias: Tensor | None) -> Linear:
    matrix = BlockLinear(tensor.blocks, tensor.block_format, inputs, bias)
    return matrix if tensor.order is None else ReorderedLinear(matrix, tensor.order)
