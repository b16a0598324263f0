"""From named tensors to a Decoder or an Encoder: checks every shape, fuses q, k, v and gate, up as they come, packs.

This file knows no files: a `WeightSource` may be a checkpoint or a random generator. At no time are there two full copies:
each fused matrix is filled tensor by tensor, in 8 bits straight from the file's rows, before the next one begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from afterglow.choices import QuantizationName
from afterglow.model.decoder import Attention, Decoder, Layer, Norm
from afterglow.model.encoder import Encoder
from afterglow.model.families import Names
from afterglow.model.linear import Keeping, Linear
from afterglow.model.rotary import rope_table
from afterglow.model.spec import EncoderSpec, ModelSpec


class WeightSource(Protocol):
    """A source of tensors by name."""

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor `name`, on the host, in its own dtype. Raises: ModelError if missing or of another shape."""
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
        quantization: QuantizationName = "none",
    ) -> None:
        """Choose how to keep matrices. Raises: ConfigError if the model cannot be quantised so."""
        self._spec, self._names, self._source = spec, names, source
        self._dtype, self._device, self._quantization = dtype, device, quantization
        self._keeping = Keeping(dtype, device, quantization)

    def decoder(self) -> Decoder:
        """Build the whole decoder. Raises: ModelError at the first tensor that is missing or has another shape."""
        spec, names = self._spec, self._names
        embed = self._table(names.embed + ".weight", spec.vocab)
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
            quantization=self._quantization,
        )

    def encoder(self) -> Encoder:
        """Build the whole encoder. Raises: ModelError at the first tensor that is missing or has another shape."""
        spec, names = self._spec, self._names
        assert isinstance(spec, EncoderSpec)
        embed = self._table(names.embed + ".weight", spec.vocab)
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
            quantization=self._quantization,
        )

    def _positions(self) -> Tensor:
        return self._table(self._names.positions + ".weight", self._spec.max_positions + self._spec.position_offset)

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

    def _table(self, name: str, rows: int) -> Tensor:
        """Return an embedding table. It stays narrow where we compute in float32: widening looked-up rows is exact."""
        table = self._source.get(name, (rows, self._spec.hidden))
        dtype = table.dtype if self._dtype == torch.float32 else self._dtype
        # NOTE: a checkpoint's tensors may be views of a mapped file, which another program may overwrite.
        return table.to(self._device, dtype, copy=True)

    def _norm(self, name: str, size: int, *, rms: bool | None = None) -> Norm:
        rms = self._spec.norm == "rms" if rms is None else rms
        weight = self._get(name + ".weight", size).clone()
        bias = None if rms else self._get(name + ".bias", size).clone()
        return Norm(weight, bias, rms=rms, eps=self._spec.norm_eps)

    def _linear(self, parts: Sequence[tuple[str, int]], inputs: int, bias: bool) -> Linear:
        """Build one matrix out of the modules `parts` (name, outputs), stacked in order."""
        outputs = sum(size for _, size in parts)
        matrix = self._keeping.begin(outputs, inputs)
        start = 0
        for name, size in parts:
            matrix.fill(start, self._source.get(name + ".weight", (size, inputs)))
            start += size
        return matrix.done(torch.cat([self._bias(name, size) for name, size in parts]) if bias else None)

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
        weight = self._source.get(names[0] + ".weight", (sum(sizes), spec.hidden))[order]
        return self._keeping(
            weight, self._bias(names[0], sum(sizes))[order.to(self._device)] if spec.qkv_bias else None
        )

    def _head(self, embed: Tensor) -> Linear:
        spec = self._spec
        if not spec.tied_embeddings:
            return self._linear([(self._names.head, spec.vocab)], spec.hidden, spec.head_bias)
        # Lookups need plain rows, so packing a tied head costs a second copy of this one matrix. It is the
        # largest of all and read at every token: packed it takes 4.1 ms instead of 6.8 (768 x 32000, one
        # row).
        return self._keeping(embed, self._bias(self._names.head, spec.vocab) if spec.head_bias else None)
