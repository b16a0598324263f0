"""Texts' tokens to vectors, in batches without padding. The only user of an `Attend` besides the engine.

No keys and values are kept and no decode follows (AttnCache §3.4): a pass leaves nothing behind but its vectors. It
reads the weights and writes nothing, so that it may run beside an engine that uses the same decoder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from afterglow.errors import RequestError
from afterglow.memo.pooling import Pooling
from afterglow.model.decoder import Attend
from afterglow.model.encoder import BatchAttend, Model, runs

BATCH_TOKENS = 1024  # of one forward pass


class MemoAttend(Attend, Protocol):
    """An `Attend` of one flat batch that may take whole sequences' attention maps from a memo."""

    @property
    def hits(self) -> Sequence[bool]:
        """For each sequence of the batch, whether its maps came from the memo; known when the pass has ended."""
        ...


class Memo(Protocol):
    """Attention maps of earlier texts, of one model."""

    def attend(self, model: Model, positions: Tensor, lengths: Sequence[int]) -> MemoAttend:
        """For one pass: `positions` int64 [tokens] of a flat batch, `lengths` of its sequences, in which equal ones
        are neighbours."""
        ...


@dataclass(frozen=True, slots=True)
class EmbedResult:
    """`vectors` float32 [n, dimensions] on the host, of unit length. `tokens`: all that were read. `hits`: for each
    sequence, whether its attention maps came from the memo."""

    vectors: Tensor
    tokens: int
    hits: tuple[bool, ...]

    @property
    def memo_hits(self) -> int:
        return sum(self.hits)


class SequenceLimits:
    """What sequences a model can embed: of ids below `vocab`, and at most `max_tokens` of them, to vectors of so many `dimensions`."""

    def __init__(self, vocab: int, dimensions: int, max_tokens: int) -> None:
        self.vocab, self.dimensions, self.max_tokens = vocab, dimensions, max_tokens

    def check(self, ids: Sequence[int], name: str = "input", param: str = "input") -> None:
        """Raises: RequestError for a sequence that cannot be embedded; `name` is what to call it, `param` its field."""
        if not ids:
            raise RequestError(f"{name}: there is nothing to embed in an empty sequence; leave it out", param=param)
        if len(ids) > self.max_tokens:
            raise RequestError(
                f"{name} has {len(ids)} tokens, and this model embeds at most {self.max_tokens} at once; split it, or "
                f"have its end cut off ({'truncate_prompt_tokens: ' if param != 'texts' else 'truncate='}{self.max_tokens})",
                param=param,
                code="context_length_exceeded",
            )
        if not 0 <= min(ids) <= max(ids) < self.vocab:
            bad = next(i for i in ids if not 0 <= i < self.vocab)
            raise RequestError(
                f"{name}: token id {str(bad)[:40]} is outside the vocabulary of {self.vocab} tokens; ids are 0 to {self.vocab - 1}",
                param=param,
            )


class Embedder(SequenceLimits):
    """One model, how its states are pooled, and a memo, if there is one."""

    def __init__(
        self,
        model: Model,
        pooling: Pooling,
        *,
        memo: Memo | None = None,
        max_tokens: int | None = None,
        batch_tokens: int = BATCH_TOKENS,
    ) -> None:
        """`max_tokens`: longest sequence that is taken, where that is less than the model and `pooling` allow."""
        self.model, self.pooling, self.memo = model, pooling, memo
        limits = (model.spec.max_positions, model.spec.position_limit, pooling.max_tokens, max_tokens)
        super().__init__(model.spec.vocab, model.spec.hidden, min(limit for limit in limits if limit is not None))
        self._batch_tokens = batch_tokens

    def embed(self, sequences: Sequence[Sequence[int]]) -> EmbedResult:
        """One vector for each sequence of token ids, in order. Raises: RequestError (see `check`)."""
        for ids in sequences:
            self.check(ids)
        vectors = torch.empty(len(sequences), self.dimensions)
        hits = [False] * len(sequences)
        order = sorted(range(len(sequences)), key=lambda index: len(sequences[index]))
        for batch in self._batches(order, sequences):
            found, memoised = self._pass([sequences[index] for index in batch])
            vectors[batch] = found
            for index, hit in zip(batch, memoised, strict=True):
                hits[index] = hit
        return EmbedResult(vectors, sum(map(len, sequences)), tuple(hits))

    def _batches(self, order: Sequence[int], sequences: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """`order` cut up into passes of at most `batch_tokens` tokens, or one sequence."""
        batch: list[int] = []
        size = 0
        for index in order:
            if batch and size + len(sequences[index]) > self._batch_tokens:
                yield batch
                batch, size = [], 0
            batch.append(index)
            size += len(sequences[index])
        if batch:
            yield batch

    @torch.inference_mode()
    def _pass(self, sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Sequence[bool]]:
        """Embed sequences of ascending length as one flat batch -> their vectors, and for each whether the memo had it."""
        lengths = [len(ids) for ids in sequences]
        device = self.model.device
        ids = torch.tensor([i for sequence in sequences for i in sequence], device=device)
        positions = torch.cat([torch.arange(length, device=device) for length in lengths])
        plain = [False] * len(sequences)
        if self.memo is None:
            states = self.model.forward(ids, positions, BatchAttend(self.model, positions, lengths))
        else:
            attend = self.memo.attend(self.model, positions, lengths)
            states = self.model.forward(ids, positions, attend)
            plain = list(attend.hits)
        return self.pooling(states, runs(lengths)).cpu(), plain
