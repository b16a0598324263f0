"""The tokens that may come next in replies that must follow a grammar, computed beside the forward pass."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from llguidance import LLMatcher
from numpy.typing import NDArray
from torch import Tensor

from afterglow.request import SamplingParams

SLOW_SECONDS = 0.05  # a mask that took longer made other requests wait for it
MAX_SLOW = 8  # such masks of one request, before it is given up

# Of a byte of a mask, lowest bit first: what to add to 8 logits.
_BIAS_OF = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0.0, -np.inf
).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Describe the tokens that masks are about. `size`: of the logits; `bits`: of the library's masks, which may have more:
    tokens of the tokenizer that the model lacks."""

    size: int
    bits: int
    eos_ids: tuple[int, ...]


class Constraint:
    """Follow one reply through its grammar, and compute which tokens may come next.

    The state belongs to the request, not to its place in a batch: a request that is sent back to the queue goes on with it.
    """

    def __init__(self, matcher: LLMatcher, params: SamplingParams, vocabulary: Vocabulary) -> None:
        """`matcher` is at the beginning of the grammar."""
        size, bits = vocabulary.size, vocabulary.bits
        self._matcher = matcher
        wished = params.stop_token_ids
        stops = {*wished, *vocabulary.eos_ids}  # end the reply
        self._stops = _packed(stops, bits)
        self._wished = _packed(wished, bits) if params.ignore_eos else self._stops
        # The library sees the model's own ends where the grammar may end; which tokens end this reply is up to the request.
        self._text = _packed(slice(0, size), bits) & ~_packed(vocabulary.eos_ids, bits)
        self._min_tokens = params.min_tokens
        self._drawn = 0
        self._slow = 0
        self._bits = np.zeros_like(self._stops)
        self._bytes = np.zeros((len(self._bits), 8), dtype=np.float32)
        self.bias = self._bytes.reshape(-1)[:size]
        self.error: str | None = None
        self.under_way: Future[None] | None = None

    @property
    def forbidden(self) -> NDArray[np.bool_]:
        """The tokens that may not come next: [vocab]."""
        return np.isneginf(self.bias)

    def compute(self) -> None:
        """Compute `bias` [vocab], to add to the logits: 0 for tokens that may come next, else minus infinity. Or `error`, if the
        grammar cannot go on."""
        began = time.perf_counter()
        bits = self._bits
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        ends = self._matcher.is_accepting()
        if self._matcher.is_error():
            self.error = self._matcher.get_error().partition("\n")[0]
            return
        bits &= self._text
        as_text = bits & self._stops
        bits &= ~self._stops
        if ends and self._drawn >= self._min_tokens:
            bits |= self._wished
        if not bits.any():  # the end of the grammar, or a stop token that is also the only text that may follow
            bits |= self._stops if ends else as_text
        np.take(_BIAS_OF, bits, axis=0, out=self._bytes, mode="clip")
        self._slow += time.perf_counter() - began > SLOW_SECONDS
        if self._slow > MAX_SLOW:
            self.error = "it is too ambiguous: finding the tokens that may come next takes too long"
        elif not bits.any():
            self.error = "no token of this model's vocabulary can come next"

    def drew(self, token: int) -> None:
        """Take in the token that was drawn, and compute the mask of the next one."""
        self._drawn += 1
        if not self._matcher.consume_token(token):
            self.error = self._matcher.get_error().partition("\n")[0] or "the reply has left its grammar"
            return
        self.compute()


def _packed(tokens: Collection[int] | slice, bits: int) -> NDArray[np.uint8]:
    """Write a set of tokens as the library writes masks: a bit each, in words of 32. Ids outside of them are left out."""
    mask = np.zeros(-(-bits // 32) * 32, dtype=np.uint8)
    mask[tokens if isinstance(tokens, slice) else [token for token in tokens if 0 <= token < bits]] = 1
    return np.packbits(mask, bitorder="little")


class Masks:
    """Compute the masks of a batch in a thread of their own, while the engine plans and computes the next step."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "afterglow-masks")  # which begins with the first mask

    def begin(self, constraint: Constraint) -> None:
        """Compute the first mask of a reply."""
        constraint.under_way = self._thread.submit(constraint.compute)

    def drew(self, drawn: Sequence[tuple[Constraint, int]]) -> None:
        """Take in the tokens that were drawn in a step, unless they end their replies."""
        if drawn:
            under_way = self._thread.submit(_take_in, drawn)
            for constraint, _ in drawn:
                constraint.under_way = under_way

    def thread_time(self) -> float:
        """Return the CPU seconds of the thread so far, once all its work is done: for benchmarks."""
        return self._thread.submit(time.thread_time).result()

    def apply(self, logits: Tensor, rows: Sequence[tuple[int, Constraint]]) -> None:
        """Make forbidden tokens impossible in rows of `logits` [rows, vocab], in place. The other rows stay as they are, and
        so do rows whose grammar cannot go on."""
        for row, constraint in rows:
            if constraint.under_way is not None:
                constraint.under_way.result()
            if constraint.error is not None:
                continue
            if logits.device.type == "cpu":  # one thread of NumPy is done before a team of torch's has begun
                values = logits[row].numpy()
                values += constraint.bias
            else:
                logits[row] += torch.from_numpy(constraint.bias).to(logits.device)


def _take_in(drawn: Sequence[tuple[Constraint, int]]) -> None:
    for constraint, token in drawn:
        if constraint.error is None:
            constraint.drew(token)
