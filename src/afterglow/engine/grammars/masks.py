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

from afterglow.kernels.sending import sent
from afterglow.request import SamplingParams

SLOW_SECONDS = 0.05  # a mask that took longer made other requests wait for it
MAX_SLOW = 8  # such masks of one request, before it is given up; and of its guesses, before nothing is guessed any more

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
        self._slow_ahead = 0  # masks behind guesses: these end no reply, but its guesses
        self._size = size
        self._bits = np.zeros_like(self._stops)
        self._bytes: list[NDArray[np.float32]] = []  # of each position, [bytes of a mask, 8]
        self.positions = 0  # masks there are: of the next token, and behind each guess
        self.error: str | None = None
        self.under_way: Future[None] | None = None

    def bias(self, position: int = 0) -> NDArray[np.float32]:
        """What to add to the logits of the next token, or of the one behind the first `position` guesses: 0 for tokens that may
        come there, else minus infinity; [vocab]."""
        return self._bytes[position].reshape(-1)[: self._size]

    @property
    def forbidden(self) -> NDArray[np.bool_]:
        """The tokens that may not come next: [vocab]."""
        return np.isneginf(self.bias())

    def took(self, tokens: Sequence[int]) -> None:
        """Take in tokens that were drawn."""
        self._drawn += len(tokens)
        if not self._matcher.consume_tokens(list(tokens)):
            self.error = self._matcher.get_error().partition("\n")[0] or "the reply has left its grammar"

    def allowed(self, guesses: Sequence[int]) -> int:
        """Count the first of the guesses that the grammar lets through."""
        if self.error is not None or self._slow_ahead > MAX_SLOW:
            return 0
        return self._matcher.deep_copy().validate_tokens(list(guesses))

    def compute(self, guesses: Sequence[int] = ()) -> None:
        """Compute the masks of the next token, and behind each guess; all guesses are allowed. Or `error`, if the grammar cannot
        go on. Behind a guess there is then no mask, and no further one: the reply may never come there."""
        self.positions = 0
        self.error = self._mask(self._matcher, 0)
        if self.error is not None:
            return
        self.positions = 1
        ahead = self._matcher.deep_copy() if guesses else self._matcher  # what goes wrong there must not end the reply
        for position, guess in enumerate(guesses, 1):
            if self._slow_ahead > MAX_SLOW or not ahead.consume_token(guess) or self._mask(ahead, position) is not None:
                return
            self.positions += 1

    def _mask(self, matcher: LLMatcher, position: int) -> str | None:
        """Compute the mask of a position that `matcher` is at. Returns what is wrong."""
        began = time.thread_time()  # other work of a busy machine does not count
        bits = self._bits
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        ends = matcher.is_accepting()
        if matcher.is_error():
            return matcher.get_error().partition("\n")[0]
        bits &= self._text
        as_text = bits & self._stops
        bits &= ~self._stops
        if ends and self._drawn + position >= self._min_tokens:
            bits |= self._wished
        if not bits.any():  # the end of the grammar, or a stop token that is also the only text that may follow
            bits |= self._stops if ends else as_text
        if len(self._bytes) == position:
            self._bytes.append(np.zeros((len(bits), 8), dtype=np.float32))
        np.take(_BIAS_OF, bits, axis=0, out=self._bytes[position], mode="clip")
        slow = time.thread_time() - began > SLOW_SECONDS
        if position:
            self._slow_ahead += slow
        else:
            self._slow += slow
        if self._slow > MAX_SLOW:
            return "it is too ambiguous: finding the tokens that may come next takes too long"
        return None if bits.any() else "no token of this model's vocabulary can come next"


def _packed(tokens: Collection[int] | slice, bits: int) -> NDArray[np.uint8]:
    """Write a set of tokens as the library writes masks: a bit each, in words of 32. Ids outside of them are left out."""
    mask = np.zeros(-(-bits // 32) * 32, dtype=np.uint8)
    mask[tokens if isinstance(tokens, slice) else [token for token in tokens if 0 <= token < bits]] = 1
    return np.packbits(mask, bitorder="little")


Drawn = tuple[Constraint, Sequence[int], Sequence[int]]  # with tokens to take in, and allowed guesses of the next ones


class Masks:
    """Compute the masks of a batch in a thread of their own, while the engine plans and computes the next step."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "afterglow-masks")  # which begins with the first mask

    def begin(self, constraint: Constraint) -> None:
        """Compute the first mask of a reply."""
        constraint.under_way = self._thread.submit(constraint.compute)

    def drew(self, drawn: Sequence[Drawn]) -> None:
        """Take in the tokens that were drawn in a step, unless they end their replies."""
        if drawn:
            under_way = self._thread.submit(_take_in, drawn)
            for constraint, _, _ in drawn:
                constraint.under_way = under_way

    def thread_time(self) -> float:
        """Return the CPU seconds of the thread so far, once all its work is done: for benchmarks."""
        return self._thread.submit(time.thread_time).result()

    def apply(self, logits: Tensor, rows: Sequence[tuple[int, Constraint]], position: int = 0) -> None:
        """Make forbidden tokens impossible in rows of `logits` [rows, vocab], in place: rows behind `position` guesses. The other
        rows stay as they are, and so do rows whose grammar cannot go on."""
        for row, constraint in rows:
            if constraint.under_way is not None:
                constraint.under_way.result()
            if constraint.error is not None:
                continue
            if logits.device.type == "cpu":  # one thread of NumPy is done before a team of torch's has begun
                values = logits[row].numpy()
                values += constraint.bias(position)
            else:
                logits[row] += sent(torch.from_numpy(constraint.bias(position)), logits.device)


def _take_in(drawn: Sequence[Drawn]) -> None:
    for constraint, tokens, guesses in drawn:
        if constraint.error is None and tokens:
            constraint.took(tokens)
        if constraint.error is None:
            constraint.compute(guesses)
