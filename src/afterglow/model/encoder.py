"""The one encoder: token, position and type embeddings, layers of bidirectional attention and MLPs with the norm
after each residual. And exact attention over batches of whole sequences, for encoders and decoders alike.

Like the decoder, the encoder hands each layer's input to an `Attend`, so that code that replaces attention (memoised
maps) serves both.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from afterglow.choices import KeptWeights
from afterglow.kernels.rope import LayerRotations
from afterglow.model.decoder import Attend, Attention, Decoder, Layer, Norm
from afterglow.model.spec import EncoderSpec
from afterglow.model.tables import Table


class Encoder:
    """A bidirectional encoder (BERT's family). Runs without autograd; its tensors live on `device`, in `dtype`.

    A pass reads the weights and writes nothing: any number of threads may run one at the same time.
    """

    def __init__(
        self,
        spec: EncoderSpec,
        *,
        embed: Table,
        positions: Tensor,
        token_type: Tensor | None,
        embed_norm: Norm,
        layers: Sequence[Layer],
        dtype: torch.dtype,
        quantization: KeptWeights = "none",
    ) -> None:
        """Put the encoder together. `embed` has a row of `hidden` for each token; `positions` [rows, hidden] may be
        narrower than `dtype`.
        `token_type` [hidden]: the embedding of the first segment; a single text has no second one."""
        self.spec = spec
        self.dtype = dtype
        self.quantization = quantization
        self.device = embed.device
        self.layers = tuple(layers)
        self._embed, self._positions, self._token_type = embed, positions, token_type
        self._embed_norm = embed_norm

    def rotation(self, positions: Tensor) -> LayerRotations | None:
        """Return None: learned positions are part of the embeddings (see `Decoder.rotation`)."""
        return None

    @torch.inference_mode()
    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Compute the last layer's states [tokens, hidden] of `ids` and `positions`, int64 [tokens], of a flat batch."""
        x = self._embed(ids, self.dtype)
        if self._token_type is not None:
            x = x + self._token_type
        x = self._embed_norm(x + F.embedding(positions + self.spec.position_offset, self._positions))
        for index, layer in enumerate(self.layers):
            assert layer.attn_norm is not None
            assert layer.mlp_norm is not None
            x = layer.attn_norm(layer.out(attend(index, layer.attention, x)).add_(x))
            x = layer.mlp_norm(layer.mlp(x).add_(x))
        return x


Model: TypeAlias = Decoder | Encoder
"""Whatever turns tokens into states under an `Attend`."""


class BatchAttend:
    """Exact attention of independent whole sequences, nothing cached: causal in a decoder, of all tokens to all in an
    encoder. Neighbours of equal length are one call, and nothing is padded."""

    def __init__(self, model: Model, positions: Tensor, lengths: Sequence[int]) -> None:
        """Take `positions`, int64 [tokens], of the flat batch, and the `lengths` of its sequences, which add up to tokens."""
        assert sum(lengths) == positions.shape[0]
        self._rotation = model.rotation(positions)
        self._causal = model.spec.causal
        self._plain = model.spec.within(max(lengths, default=0)).plain_scores
        self._runs = runs(lengths)

    def __call__(self, layer: int, attention: Attention, x: Tensor) -> Tensor:
        q, k, v = attention.project(x)
        q, k = attention.rotate(q, self._rotation), attention.rotate(k, self._rotation)
        out = x.new_empty(x.shape[0], q.shape[1], q.shape[2])
        start = 0
        for count, length in self._runs:
            where = slice(start, start + count * length)
            if not self._plain:
                for one in range(start, where.stop, length):
                    rows = slice(one, one + length)
                    out[rows] = attention.attend(q[rows], k[rows], v[rows])
                start = where.stop
                continue
            queries, keys, values = (t[where].view(count, length, -1, t.shape[2]).transpose(1, 2) for t in (q, k, v))
            attended = attend_whole(attention, queries, keys, values, causal=self._causal)
            out[where].view(count, length, -1, out.shape[2]).copy_(attended.transpose(1, 2))
            start = where.stop
        return out.flatten(1)


def attend_whole(attention: Attention, queries: Tensor, keys: Tensor, values: Tensor, *, causal: bool) -> Tensor:
    """Attend within whole sequences of equal length: [sequences, heads or kv_heads, length, head_dim], as the result."""
    return F.scaled_dot_product_attention(
        queries,
        keys,
        values,
        is_causal=causal,
        scale=attention.scale,
        enable_gqa=attention.heads != attention.kv_heads,
    )


def runs(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return neighbours of equal length as (how many, length): `[5, 5, 9]` -> `[(2, 5), (1, 9)]`."""
    return [(len(list(group)), length) for length, group in itertools.groupby(lengths)]
