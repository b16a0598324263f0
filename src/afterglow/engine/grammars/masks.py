"""The tokens that may come next in replies that must follow a grammar, computed beside the forward pass."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from llguidance import LLMatcher
from torch import Tensor

from afterglow.request import SamplingParams

SLOW_SECONDS = 0.05  # a mask that took longer made other requests wait for it
MAX_SLOW = 8  # such masks of one request, before it is given up


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
        eos_ids = vocabulary.eos_ids
        self._matcher = matcher
        wished = list(params.stop_token_ids)
        self._stops = np.array(sorted({*wished, *eos_ids}), dtype=np.int64)  # end the reply
        self._wished = np.array(wished, dtype=np.int64) if params.ignore_eos else self._stops
        self._eos = np.array(eos_ids, dtype=np.int64)
        self._min_tokens = params.min_tokens
        self._drawn = 0
        self._slow = 0
        self._size = vocabulary.size
        self._bits = np.zeros(-(-vocabulary.bits // 32) * 4, dtype=np.uint8)
        self.forbidden = np.zeros(self._size, dtype=np.bool_)
        self.error: str | None = None
        self.under_way: Future[None] | None = None

    def compute(self) -> None:
        """Compute `forbidden` [vocab]: the tokens that may not come next; or `error`, if the grammar cannot go on."""
        began = time.perf_counter()
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        ends = self._matcher.is_accepting()
        if self._matcher.is_error():
            self.error = self._matcher.get_error().partition("\n")[0]
            return
        allowed = np.unpackbits(self._bits, bitorder="little", count=self._size)
        allowed[self._eos] = 0  # as the library sees it; which tokens end this reply is up to the request
        as_text = allowed[self._stops]
        allowed[self._stops] = 0
        if ends and self._drawn >= self._min_tokens:
            allowed[self._wished] = 1
        if not allowed.any():  # the end of the grammar, or a stop token that is also the only text that may follow
            allowed[self._stops] = 1 if ends else as_text
        self.forbidden = allowed == 0
        self._slow += time.perf_counter() - began > SLOW_SECONDS
        if self._slow > MAX_SLOW:
            self.error = "it is too ambiguous: finding the tokens that may come next takes too long"
        elif self.forbidden.all():
            self.error = "no token of this model's vocabulary can come next"

    def drew(self, token: int) -> None:
        """Take in the token that was drawn, and compute the mask of the next one."""
        self._drawn += 1
        if not self._matcher.consume_token(token):
            self.error = self._matcher.get_error().partition("\n")[0] or "the reply has left its grammar"
            return
        self.compute()


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
                np.copyto(values, -np.inf, where=constraint.forbidden)
            else:
                logits[row].masked_fill_(torch.from_numpy(constraint.forbidden).to(logits.device), float("-inf"))


def _take_in(drawn: Sequence[tuple[Constraint, int]]) -> None:
    for constraint, token in drawn:
        if constraint.error is None:
            constraint.drew(token)
