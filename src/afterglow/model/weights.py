"""From named tensors to a Decoder or an Encoder: checks every shape, fuses q, k, v and gate, up as they come, packs.

This file knows no files: a `WeightSource` may be a checkpoint or a random generator. At no time are there two full copies:
each fused matrix is filled tensor by tensor, in 8 bits straight from the file's rows, before the next one begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from afterglow.choices import KeptWeights, QuantizationName
from afterglow.kernels.device_blocks import FLOATS
from afterglow.model.decoder import Attention, Decoder, Layer, Norm
from afterglow.model.encoder import Encoder
from afterglow.model.experts import Experts, Mlp
from afterglow.model.keeping import Keeping, keeps_blocks, unrounded
from afterglow.model.linear import Linear, StackedLinear
from afterglow.model.names import Names
from afterglow.model.rotary import layer_ropes
from afterglow.model.spec import EncoderSpec, ModelSpec
from afterglow.model.tables import PackedTensor, Table


class WeightSource(Protocol):
    """A source of tensors by name."""

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor `name`, on the host, in its own dtype, or dequantised. Raises: ModelError if missing or of another shape."""
        ...

    def packed(self, name: str, shape: tuple[int, int]) -> PackedTensor | None:
        """Return the matrix `name` in blocks, None if the source has numbers for it. Raises: as `get`."""
        ...


@runtime_checkable
class UnpackingSource(WeightSource, Protocol):
    """A source that has some matrices packed, and gives those as [outputs, inputs] whatever the model's floats are."""

    def unpacks(self, name: str) -> bool:
        """Return whether the matrix `name` is packed."""
        ...


class Part(NamedTuple):
    """Outputs of a matrix that are one module in the files. `order`, int64 [outputs]: which of its rows each output is, None if
    they are in order."""

    name: str
    outputs: int
    order: Tensor | None = None

    def sorted(self, rows: Tensor) -> Tensor:
        """Return the rows of the module, [outputs, ...], in the order of the outputs."""
        return rows if self.order is None else rows[self.order.to(rows.device)]


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
        self._keeps_blocks = quantization == "auto" and keeps_blocks(dtype, device)
        self._keeping = Keeping(dtype, device, quantization)
        self._kept: KeptWeights = self._keeping.kept

    def decoder(self) -> Decoder:
        """Build the whole decoder. Raises: ModelError at the first tensor that is missing or has another shape."""
        spec, names = self._spec, self._names
        embed = self._embedding()
        positions = self._positions() if spec.positions == "learned" else None
        layers = [self._layer(index) for index in range(spec.layers)]
        head = self._head(embed)
        self._keeping.say_memory()
        return Decoder(
            spec,
            embed=embed,
            positions=positions,
            layers=layers,
            final_norm=self._norm(names.final_norm, spec.hidden),
            head=head,
            rope=layer_ropes(spec, self._device),
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
        layers = [self._layer(index) for index in range(spec.layers)]
        self._keeping.say_memory()
        return Encoder(
            spec,
            embed=embed,
            positions=self._positions(),
            token_type=types,
            embed_norm=self._norm(names.embed_norm, spec.hidden),
            layers=layers,
            dtype=self._dtype,
            quantization=self._kept,
        )

    def _positions(self) -> Tensor:
        rows = self._spec.max_positions + self._spec.position_offset
        return self._keeping.narrow(self._source.get(self._names.positions + ".weight", (rows, self._spec.hidden)))

    def _layer(self, index: int) -> Layer:
        spec, names = self._spec, self._names

        def at(template: str) -> str:
            return template.replace("{l}", str(index))

        def norm(template: str, there: bool) -> Norm | None:
            return self._norm(at(template), spec.hidden) if there else None

        q_norm = k_norm = None
        if spec.qk_norm:
            q_norm = self._qk_norm(at(names.q_norm), spec.heads)
            k_norm = self._qk_norm(at(names.k_norm), spec.kv_heads)
        sinks = self._get(at(names.sinks), spec.heads).float().clone() if spec.sinks else None
        width = spec.heads * spec.head_dim
        return Layer(
            attn_norm=norm(names.attn_norm, spec.norm_before),
            attention=Attention(index, spec, self._qkv(index), q_norm, k_norm, sinks),
            out=self._linear([Part(at(names.out), spec.hidden)], width, spec.out_bias),
            mlp_norm=norm(names.mlp_norm, spec.norm_before and spec.mlp_norm),
            mlp=self._layer_mlp(index),
            attn_after=norm(names.attn_after, spec.norm_after),
            mlp_after=norm(names.mlp_after, spec.norm_after),
        )

    def _layer_mlp(self, index: int) -> Mlp | Experts:
        names, about, hidden = self._names, self._spec.experts, self._spec.hidden
        layer = str(index)
        if about is None or index not in about.layers:
            return self._mlp([name.replace("{l}", layer) for name in (*names.mlp, names.mlp_out)], self._spec.ffn)

        def gate(name: str, outputs: int, bias: bool = False) -> Linear:
            name = name.replace("{l}", layer)
            weight = self._get(name + ".weight", outputs, hidden)
            # It decides, and is small.
            return unrounded(weight, self._get(name + ".bias", outputs).clone() if bias else None)

        templates = [name.replace("{l}", layer) for name in (*names.expert_mlp, names.expert_mlp_out)]
        experts = [
            self._mlp([name.replace("{e}", str(expert)) for name in templates], about.ffn, turns=names.gates_in_turn)
            for expert in range(about.count)
        ]
        router = gate(names.router, about.count, self._spec.router_bias)
        if not about.shared_ffn:
            return Experts(about, router, experts)
        shared = self._mlp(
            [name.replace("{l}", layer) for name in (*names.shared_mlp, names.shared_mlp_out)], about.shared_ffn
        )
        return Experts(about, router, experts, shared, gate(names.shared_gate, 1))

    def _mlp(self, names: Sequence[str], width: int, *, turns: bool = False) -> Mlp:
        """Build one MLP out of the modules of its first matrix, and of its second one, which comes last. `turns`: gates and other
        numbers take turns in the first one."""
        spec, first = self._spec, names[:-1]
        outputs = width * (2 if spec.gated_mlp else 1) // len(first)
        order = torch.arange(outputs).view(-1, 2).T.flatten() if turns else None
        wide = self._linear([Part(name, outputs, order) for name in first], spec.hidden, spec.mlp_bias)
        narrow = self._linear([Part(names[-1], spec.hidden)], width, spec.mlp_bias)
        return Mlp(wide, narrow, spec.activation, spec.gated_mlp, spec.gate_clamp)

    def _get(self, name: str, *shape: int) -> Tensor:
        return self._source.get(name, shape).to(self._device, self._dtype)

    def _packed(self, name: str, shape: tuple[int, int]) -> PackedTensor | None:
        found = self._source.packed(name, shape) if self._keeps_blocks else None
        if found is not None:
            self._kept = "blocks" if self._device.type == "cpu" else "blocks alone"
        return found

    def _embedding(self) -> Table:
        name, shape = self._names.embed + ".weight", (self._spec.vocab, self._spec.hidden)
        found = self._packed(name, shape)
        if found is None or found.block_format == FLOATS:  # which are not looked up
            return self._keeping.table(self._source.get(name, shape))
        return self._keeping.block_table(found.blocks.clone(), found.block_format)

    def _norm(self, name: str, size: int) -> Norm:
        rms = self._spec.norm == "rms"
        weight = self._norm_weight(name, size).clone()
        bias = self._get(name + ".bias", size).clone() if not rms and self._spec.norm_bias else None
        return Norm(weight, bias, rms=rms, eps=self._spec.norm_eps)

    def _norm_weight(self, name: str, *shape: int) -> Tensor:
        """Return what a norm multiplies with."""
        if not self._spec.norm_plus_one:
            return self._get(name + ".weight", *shape)
        weight = self._source.get(name + ".weight", shape).to(self._device, torch.float32)
        return (weight + 1).to(self._dtype)

    def _qk_norm(self, name: str, heads: int) -> Norm:
        """Build the norm of queries, or of keys, which have so many heads."""
        spec, order = self._spec, self._head_order()
        size = spec.head_dim
        if spec.qk_norm_over == "width":
            weight = self._norm_weight(name, heads * size).view(heads, size)[:, order].flatten()
        elif spec.qk_norm_over == "head":
            weight = self._norm_weight(name, size)[order]
        elif "{h}" in name:
            weight = torch.stack([self._norm_weight(name.format(h=head), size)[order] for head in range(heads)])
        else:
            weight = self._norm_weight(name, heads, size)[:, order]
        return Norm(weight, None, rms=spec.norm == "rms", eps=spec.norm_eps)

    def _head_order(self) -> Tensor:
        """Return the row of a head in the files that each of its dimensions is, int64 [head_dim]."""
        rows = torch.arange(self._spec.head_dim)
        if not self._names.neighbours or self._spec.rope is None:
            return rows
        turned, rest = rows[: self._spec.rope.dim], rows[self._spec.rope.dim :]
        return torch.cat((turned[::2], turned[1::2], rest))

    def _linear(self, parts: Sequence[Part], inputs: int, bias: bool, *, head: bool = False) -> Linear:
        """Build one matrix out of the modules `parts`, stacked in order. Neighbours of one layout become one."""
        found = [(part, self._blocks(part, inputs)) for part in parts]
        stack: list[Linear] = []
        for _, same in groupby(found, key=_layout):
            run = list(same)
            biases = torch.cat([self._bias(part) for part, _ in run]) if bias else None
            blocks = [packed for _, packed in run if packed is not None]
            if blocks:
                stack.append(self._keeping.blocks(blocks, inputs, biases, _order([part for part, _ in run])))
                continue
            matrix = self._keeping.begin(sum(part.outputs for part, _ in run), inputs, head=head)
            start = 0
            for part, _ in run:
                matrix.fill(start, part.sorted(self._matrix(part, inputs)))
                start += part.outputs
            stack.append(matrix.done(biases))
        return stack[0] if len(stack) == 1 else StackedLinear(stack)

    def _matrix(self, part: Part, inputs: int) -> Tensor:
        """Return the weights of a module, [outputs, inputs], in the order of the file."""
        name, source = part.name + ".weight", self._source
        # Methods of packing have one layout for all models, so what they unpack is never transposed.
        packed = isinstance(source, UnpackingSource) and source.unpacks(name)
        if self._names.transposed and part.name != self._names.head and not packed:
            return source.get(name, (inputs, part.outputs)).T
        return source.get(name, (part.outputs, inputs))

    def _blocks(self, part: Part, inputs: int) -> PackedTensor | None:
        return self._packed(part.name + ".weight", (part.outputs, inputs))

    def _bias(self, part: Part) -> Tensor:
        return part.sorted(self._get(part.name + ".bias", part.outputs).clone())

    def _qkv(self, index: int) -> Linear:
        spec, group = self._spec, self._spec.heads // self._spec.kv_heads
        names = [name.format(l=index) for name in self._names.qkv]
        rows = torch.arange((spec.heads + 2 * spec.kv_heads) * spec.head_dim).view(-1, spec.head_dim)
        q, k, v = torch.split(rows, [spec.heads, spec.kv_heads, spec.kv_heads])
        if self._names.grouped:
            groups = rows.view(spec.kv_heads, group + 2, spec.head_dim)
            q, k, v = groups[:, :group].flatten(0, 1), groups[:, group], groups[:, group + 1]
        inside = self._head_order()
        orders = [q[:, inside].flatten(), k[:, inside].flatten(), v.flatten()]
        if len(names) == 1:
            orders = [torch.cat(orders)]
        parts = [_part(name, order - order.min()) for name, order in zip(names, orders, strict=True)]
        return self._linear(parts, spec.hidden, spec.qkv_bias)

    def _head(self, embed: Table) -> Linear:
        spec, part = self._spec, Part(self._names.head, self._spec.vocab)
        if not spec.tied_embeddings:
            return self._linear([part], spec.hidden, spec.head_bias, head=True)
        return self._keeping.tied(embed, self._bias(part) if spec.head_bias else None)


def _part(name: str, order: Tensor) -> Part:
    """Return a module of which all rows are used, in any order."""
    return Part(name, len(order), None if order.equal(torch.arange(len(order))) else order)


def _order(parts: Sequence[Part]) -> Tensor | None:
    """Return which row of the stacked modules each output is; None if they are in order."""
    if all(part.order is None for part in parts):
        return None
    orders, first = [], 0
    for part in parts:
        orders.append(first + (torch.arange(part.outputs) if part.order is None else part.order))
        first += part.outputs
    return torch.cat(orders)


def _layout(part: tuple[Part, PackedTensor | None]) -> tuple[str, bytes | None] | None:
    """Return what parts of one matrix in blocks have in common; None if a part has numbers."""
    found = part[1]
    if found is None:
        return None
    return found.block_format, None if found.order is None else found.order.numpy().tobytes()
