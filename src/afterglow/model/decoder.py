"""The one decoder: embeddings, layers of norms, projections and MLPs, final norm, head. No class per family.

The decoder does not know where keys and values come from: each layer hands its normed input to an `Attend` and gets
the attention context back. Tokens of any number of sequences are one flat batch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from afterglow.choices import KeptWeights
from afterglow.kernels.attention import attend, with_sinks
from afterglow.kernels.block import Block, in_panels
from afterglow.kernels.device_passes import add_rms_norm
from afterglow.kernels.layers import LayerRows, Layers, WholeLayer
from afterglow.kernels.passes import rms_norm
from afterglow.kernels.rope import LayerRopes, LayerRotations, rotate
from afterglow.model.experts import Experts, Mlp
from afterglow.model.linear import Linear
from afterglow.model.spec import ModelSpec
from afterglow.model.tables import Table


class Norm:
    """RMS norm, or layer norm, over the last dimension."""

    __slots__ = ("_bias", "_eps", "_rms", "_shape", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, *, rms: bool, eps: float) -> None:
        """Keep `weight` and `bias` [size]; RMS norms have no bias. `weight` may be [heads, size]: each head has its own."""
        self._weight, self._bias, self._rms, self._eps = weight, bias, rms, eps
        self._shape = tuple(weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise `x` [..., size]; same shape and dtype."""
        if self._rms:
            return rms_norm(x, self._weight, self._eps)
        if len(self._shape) == 2:
            return F.layer_norm(x, self._shape[1:], None, None, self._eps).mul_(self._weight)
        return F.layer_norm(x, self._shape, self._weight, self._bias, self._eps)

    @property
    def rms(self) -> tuple[Tensor, float] | None:
        """Return weight and epsilon of an RMS norm; None for a layer norm."""
        return (self._weight, self._eps) if self._rms else None


class Attention:
    """One layer's attention block as `Attend` sees it: hidden rows in, queries, keys and values out."""

    __slots__ = (
        "_k_norm",
        "_q_norm",
        "_qkv",
        "_values",
        "_wide_norm",
        "cap",
        "head_dim",
        "heads",
        "kv_heads",
        "layer",
        "scale",
        "sinks",
        "window",
    )

    def __init__(
        self,
        layer: int,
        spec: ModelSpec,
        qkv: Linear,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Keep the weights. `qkv` yields all query heads, then all key heads, then all value heads. `sinks`: float32 [heads], see
        `with_sinks`."""
        self.sinks = sinks
        self.layer, self.heads, self.kv_heads = layer, spec.heads, spec.kv_heads
        self.head_dim, self.scale = spec.head_dim, spec.scale
        self.window, self.cap = spec.window_of(layer), spec.score_cap or 0.0
        self._qkv, self._q_norm, self._k_norm = qkv, q_norm, k_norm
        self._wide_norm = spec.qk_norm_over == "width"
        self._values: Linear | None = None

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project `x` [tokens, hidden], normed, to q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim].

        Keys and queries carry no position yet; norms on them (Qwen3) are applied. All three are views of one
        buffer where there is no such norm.
        """
        heads, keys_end = self.heads, self.heads + self.kv_heads
        qkv = self._qkv(x).view(x.shape[0], keys_end + self.kv_heads, self.head_dim)
        q, k, v = qkv[:, :heads], qkv[:, heads:keys_end], qkv[:, keys_end:]
        if self._q_norm is None or self._k_norm is None:
            return q, k, v
        if self._wide_norm:
            q, k = self._q_norm(q.flatten(1)).view(q.shape), self._k_norm(k.flatten(1)).view(k.shape)
        else:
            q, k = self._q_norm(q), self._k_norm(k)
        return q, k, v

    def whole(self, block: Block) -> WholeLayer | None:
        """Return the layer as one call, with `block` the part after attention; None if its operations must be called one by one."""
        norms = [norm.rms for norm in (self._q_norm, self._k_norm) if norm is not None]
        if not in_panels(self._qkv) or None in norms:
            return None
        return WholeLayer(
            self._qkv, block, self.scale, self.cap, [norm for norm in norms if norm is not None], self.sinks
        )

    def value(self, x: Tensor) -> Tensor:
        """Project to v alone, [tokens, kv_heads, head_dim], for attention whose map is known. The first call keeps the values'
        part of the fused weights apart; where the weights are packed, that part takes its memory twice."""
        if self._values is None:
            keys_end = (self.heads + self.kv_heads) * self.head_dim
            self._values = self._qkv.rows(keys_end, keys_end + self.kv_heads * self.head_dim)
        return self._values(x).view(x.shape[0], self.kv_heads, self.head_dim)

    def rotate(self, x: Tensor, rotations: LayerRotations | None) -> Tensor:
        """Rotate queries or keys [tokens, any heads, head_dim] to the positions of `rotations`.

        `rotations` comes from `Decoder.rotation`; None, for learned positions, returns `x` itself, as does a layer without positions.
        """
        rotation = None if rotations is None else rotations.at(self.layer)
        return x if rotation is None else rotate(x, rotation)

    def rotate_both(self, q: Tensor, k: Tensor, rotations: LayerRotations | None) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys as `project` returns them, in one call if they lie side by side."""
        rotation = None if rotations is None else rotations.at(self.layer)
        if rotation is None:
            return q, k
        rows, heads, size = q.shape
        if k.stride() != q.stride() or k.data_ptr() - q.data_ptr() != heads * size * q.element_size():
            return rotate(q, rotation), rotate(k, rotation)
        both = rotate(q.as_strided((rows, heads + self.kv_heads, size), q.stride()), rotation)
        return both[:, :heads], both[:, heads:]

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend causally with the last rows of a context, whose first row is the context's, or before all windows. For shapes see
        `kernels.attention.attend`."""
        out, lse = attend(q, keys, values, scale=self.scale, causal=True, window=self.window, cap=self.cap)
        return out if self.sinks is None else with_sinks(out, lse, self.sinks)[0]


class Attend(Protocol):
    """The seam where attention is computed. The engine implements it over caches, tests without a cache."""

    def __call__(self, layer: int, attention: Attention, x: Tensor) -> Tensor:
        """Attend from `x` [tokens, hidden], normed: context [tokens, heads * head_dim], not yet projected out."""
        ...


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer. Norms are None where there are none, `mlp_norm` also where the MLP shares the attention's norm.
    `attn_after` and `mlp_after` are norms of what attention and MLP add."""

    attn_norm: Norm | None
    attention: Attention
    out: Linear
    mlp_norm: Norm | None
    mlp: Mlp | Experts
    attn_after: Norm | None = None
    mlp_after: Norm | None = None

    @property
    def dense(self) -> Mlp:
        """Return the MLP of a layer without experts."""
        assert isinstance(self.mlp, Mlp)
        return self.mlp


@dataclass(slots=True, eq=False)
class Hidden:
    """Rows on their way through the decoder: `x` [rows, hidden] before layer `layer`, `normed` the input of that layer."""

    x: Tensor
    normed: Tensor
    layer: int = 0

    def part(self, rows: slice) -> Hidden:
        """Return a copy of some rows."""
        return Hidden(self.x[rows].clone(), self.normed[rows].clone(), self.layer)


def _normed(norm: Norm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


class Decoder:
    """A causal language model. Runs without autograd; its tensors live on `device`, computed in `dtype`."""

    divisible = True  # passes can be left between layers
    _whole: Layers | None = None

    def __init__(
        self,
        spec: ModelSpec,
        *,
        embed: Table,
        positions: Tensor | None,
        layers: Sequence[Layer],
        final_norm: Norm,
        head: Linear,
        rope: LayerRopes | None,
        dtype: torch.dtype,
        quantization: KeptWeights = "none",
    ) -> None:
        """Put the decoder together. `embed` has a row of `hidden` for each token; `positions` [rows, hidden] may be
        narrower than `dtype`."""
        self.spec = spec
        self.quantization = quantization
        self.rope = rope
        self.dtype = dtype
        self.device = embed.device
        self._embed, self._positions = embed, positions
        self._final_norm, self._head = final_norm, head
        self.layers = tuple(layers)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers in order. May be set to others."""
        return self._layers

    @layers.setter
    def layers(self, layers: tuple[Layer, ...]) -> None:
        self._layers = layers
        self._norms = (*(layer.attn_norm for layer in layers), self._final_norm)
        self._blocks = [self._block(layer, after) for layer, after in zip(layers, self._norms[1:], strict=True)]
        self._whole = self._all_layers()

    @property
    def static_rows(self) -> int:
        """Return of how many rows a pass launches the same work whatever they are, 0 for none: experts, if any, are found on the device."""
        of_experts = [layer.mlp.static_rows(self.dtype) for layer in self._layers if isinstance(layer.mlp, Experts)]
        return min(of_experts, default=sys.maxsize) if self.divisible else 0

    @property
    def arithmetic(self) -> str:
        """Name what stored keys and values depend on besides files, dtypes and the way weights are kept."""
        return ""

    def rotation(self, positions: Tensor) -> LayerRotations | None:
        """Return cos and sin of `positions` (int64 [rows]) in all layers, once per step; None for learned positions."""
        return None if self.rope is None else self.rope.cos_sin(positions)

    @torch.inference_mode()
    def forward(self, ids: Tensor, positions: Tensor, attend: Attend, wanted: Tensor | None = None) -> Tensor:
        """Compute the final-normed hidden rows [tokens, hidden] of `ids` and `positions`, int64 [tokens]; or only the rows
        `wanted` (int64), so that the last layer's MLP skips the others."""
        hidden = self.begin(ids, positions)
        self.go_on(hidden, attend, wanted)
        return hidden.normed

    @torch.inference_mode()
    def begin(self, ids: Tensor, positions: Tensor) -> Hidden:
        """Begin a pass that can be left between layers: return it before its first layer."""
        x = self._embed(ids, self.dtype)
        if self.spec.embed_scale != 1:
            x = x * self.spec.embed_scale
        if self._positions is not None:
            x = x + F.embedding(positions + self.spec.position_offset, self._positions)
        return Hidden(x, _normed(self._norms[0], x))

    @torch.inference_mode()
    def go_on(self, hidden: Hidden, attend: Attend, wanted: Tensor | None = None, stop: int | None = None) -> None:
        """Take the pass through its next layers, up to layer `stop` (None: all layers). If `attend` raises, the pass stays before
        that layer, and can go on from there."""
        while hidden.layer < (len(self._layers) if stop is None else stop):
            index = hidden.layer
            layer, block = self._layers[index], self._blocks[index]
            x, normed = hidden.x, hidden.normed
            attended = attend(index, layer.attention, normed)
            if wanted is not None and index == len(self._layers) - 1:
                x, normed, attended = x[wanted], normed[wanted], attended[wanted]
            if block is not None:
                normed = block(x, attended)
            else:
                x, normed = self._after_attention(layer, x, normed, attended, self._norms[index + 1])
            hidden.x, hidden.normed, hidden.layer = x, normed, index + 1

    @torch.inference_mode()
    def go_through(self, hidden: Hidden, own: Sequence[LayerRows]) -> Tensor:
        """Take a pass that has begun through all layers in one call. Needs `whole`. Returns queries, keys and values
        [layers, tokens, heads + 2 * kv_heads, head_dim], not rotated."""
        assert self._whole is not None
        qkv = self._whole(hidden.x, hidden.normed, own)
        hidden.layer = len(self._layers)
        return qkv

    @property
    def whole(self) -> bool:
        """Tell whether compiled kernels take rows through all layers in one call."""
        return self._whole is not None

    def _all_layers(self) -> Layers | None:
        if self._norms[0] is None or self._norms[0].rms is None:
            return None
        found = [
            None if block is None else layer.attention.whole(block)
            for layer, block in zip(self._layers, self._blocks, strict=True)
        ]
        whole = [layer for layer in found if layer is not None]
        if not whole or len(whole) < len(found):
            return None
        return Layers(whole, self.spec.heads, self.spec.kv_heads, self.spec.head_dim)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits, float32 [rows, vocab], of `hidden` [rows, hidden] from `forward`."""
        logits, cap = self._head(hidden).float(), self.spec.logit_cap
        if self.spec.logit_scale != 1:
            logits.mul_(self.spec.logit_scale)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _block(self, layer: Layer, after: Norm | None) -> Block | None:
        """Return the part of the layer after attention as one call; None if its operations must be called one by one."""
        if self.spec.residual == "parallel" or self.spec.norm_after or self.spec.residual_scale != 1:
            return None
        if layer.mlp_norm is None or layer.mlp_norm.rms is None or after is None or after.rms is None:
            return None
        mlp = layer.mlp.panels
        if mlp is None or not in_panels(layer.out):
            return None
        return Block(layer.out, layer.mlp_norm.rms, mlp, after.rms)

    def _after_attention(
        self, layer: Layer, x: Tensor, normed: Tensor, attended: Tensor, after: Norm | None
    ) -> tuple[Tensor, Tensor]:
        """Return the layer's output for `x` [rows, hidden], given its norm and attention's context, and the output's norm `after`."""
        if self.spec.residual == "parallel":
            inner = normed if layer.mlp_norm is None else layer.mlp_norm(x)
            x = self._added(x, layer.out(attended), layer.attn_after)
        else:
            x, inner = self._added_and_normed(x, layer.out(attended), layer.attn_after, layer.mlp_norm)
        return self._added_and_normed(x, layer.mlp(inner), layer.mlp_after, after)

    def _added_and_normed(
        self, x: Tensor, part: Tensor, norm: Norm | None, after: Norm | None
    ) -> tuple[Tensor, Tensor]:
        """Return `x` with what attention or MLP add to it, and the norm `after` of that, all [rows, hidden]."""
        if (
            x.device.type == "cuda"
            and norm is None
            and self.spec.residual_scale == 1
            and after is not None
            and after.rms
        ):
            fused = add_rms_norm(x, part, *after.rms)
            if fused is not None:
                return fused
        x = self._added(x, part, norm)
        return x, _normed(after, x)

    def _added(self, x: Tensor, part: Tensor, norm: Norm | None) -> Tensor:
        """Return `x` with what attention or MLP add to it, all [rows, hidden]."""
        return torch.add(x, _normed(norm, part), alpha=self.spec.residual_scale)


class PlainAttend:
    """Causal attention of independent whole sequences, nothing cached: the simplest `Attend`."""

    def __init__(self, decoder: Decoder, positions: Tensor, lengths: Sequence[int]) -> None:
        """Take `positions`, int64 [tokens], of the flat batch, and the `lengths` of its sequences, which add up to tokens."""
        assert sum(lengths) == positions.shape[0]
        self._rotations = decoder.rotation(positions)
        self._lengths = list(lengths)

    def __call__(self, layer: int, attention: Attention, x: Tensor) -> Tensor:
        q, k, v = attention.project(x)
        q, k = attention.rotate(q, self._rotations), attention.rotate(k, self._rotations)
        parts = [
            attention.attend(*sequence)
            for sequence in zip(*(torch.split(t, self._lengths) for t in (q, k, v)), strict=True)
        ]
        return torch.cat(parts).flatten(1)
