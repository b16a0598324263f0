"""Draw tokens from logits, for the whole batch at once. Knows no jobs, caches or text."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from afterglow.engine.transfers import fetched
from afterglow.kernels.sending import on_device
from afterglow.request import SamplingParams, TokenLogprob

NEG_INF = float("-inf")


class Shaping:
    """Change a request's logits, in vLLM's order: no stop token before `min_tokens`, bias, repetition penalty, frequency and
    presence penalties.

    Remembers the generated tokens, also while the request waits to be resumed.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int], stop_tokens: Collection[int]) -> None:
        self._params = params
        self._prompt = prompt
        self._stops = sorted(stop_tokens)
        self._generated: list[int] = []
        self._tables: _Tables | None = None  # made for the first token: a waiting request needs none

    @staticmethod
    def wanted(params: SamplingParams) -> bool:
        penalties = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
        return bool(penalties or params.logit_bias or params.min_tokens)

    def shorten(self, prompt: Sequence[int]) -> None:
        """Note that the prompt was cut to these tokens."""
        self._prompt = prompt

    def apply(self, row: Tensor) -> None:
        """Change a row of logits [vocab] in place."""
        params = self._params
        if self._tables is None:
            self._tables = _Tables.of(params, self._prompt, self._generated, self._stops, row)
        tables = self._tables
        if len(self._generated) < params.min_tokens:
            row[tables.stops] = NEG_INF
        if tables.bias is not None:
            row += tables.bias
        if tables.seen is not None:
            scaled = torch.where(row > 0, row / params.repetition_penalty, row * params.repetition_penalty)
            torch.where(tables.seen, scaled, row, out=row)
        if tables.counts is not None:
            row -= params.frequency_penalty * tables.counts + params.presence_penalty * (tables.counts > 0)

    def drew(self, token: int) -> None:
        """Note that a token was drawn from the changed logits."""
        self._generated.append(token)
        if self._tables is not None:
            if self._tables.counts is not None:
                self._tables.counts[token] += 1
            if self._tables.seen is not None:
                self._tables.seen[token] = True

    @property
    def drawn(self) -> int:
        """Count the tokens that were drawn."""
        return len(self._generated)

    def go_back(self, drawn: int) -> None:
        """Forget all tokens but the first so many. The tables are made anew for the next token."""
        del self._generated[drawn:]
        self._tables = None


@dataclass(slots=True)
class _Tables:
    """Hold a request's shaping as tensors over the vocabulary; None: not wanted."""

    stops: Tensor  # token ids
    bias: Tensor | None
    seen: Tensor | None  # marks tokens in the prompt, and generated ones
    counts: Tensor | None  # how often each token was generated

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        prompt: Sequence[int],
        generated: Sequence[int],
        stops: Sequence[int],
        row: Tensor,
    ) -> _Tables:
        # Requests may name stop tokens, and a model its ends, that the vocabulary lacks: no draw is one of them.
        known = [token for token in stops if 0 <= token < row.shape[-1]]
        tables = cls(_ids(known, row), None, None, None)
        if params.logit_bias:
            tables.bias = torch.zeros_like(row)
            values = on_device(list(params.logit_bias.values()), row.device, row.dtype)
            tables.bias[_ids(list(params.logit_bias), row)] = values
        if params.repetition_penalty != 1:
            tables.seen = torch.zeros_like(row, dtype=torch.bool)
            tables.seen[_ids([*prompt, *generated], row)] = True
        if params.frequency_penalty or params.presence_penalty:
            tables.counts = torch.zeros_like(row)
            found = Counter(generated)
            tables.counts[_ids(list(found), row)] = on_device(list(found.values()), row.device, row.dtype)
        return tables


def _ids(tokens: Sequence[int], row: Tensor) -> Tensor:
    return on_device(list(tokens), row.device)


class DrawState(NamedTuple):
    """How far a request has drawn: the state of its own generator, and the tokens that its shaping knows."""

    state: Tensor | None
    tokens: int


@dataclass(slots=True)
class Sampler:
    """Hold how one request draws. A seeded request owns a generator, so that its tokens do not depend on other requests in the
    batch; all others share one, and are drawn in one launch."""

    params: SamplingParams
    generator: torch.Generator | None = None
    shaping: Shaping | None = None

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        device: torch.device,
        prompt: Sequence[int] = (),
        stop_tokens: Collection[int] = (),
    ) -> Sampler:
        """Make the sampler of a request. `prompt` and `stop_tokens`: for changes of the logits."""
        shaping = Shaping(params, prompt, stop_tokens) if Shaping.wanted(params) else None
        if params.temperature == 0:
            return cls(params, None, shaping)
        if params.seed is None:
            return cls(params, _shared(device), shaping)
        generator = torch.Generator(device=device)
        generator.manual_seed(params.seed % 2**63)
        return cls(params, generator, shaping)

    @property
    def state(self) -> DrawState:
        """Return how far the request has drawn."""
        seeded = self.generator is not None and self.params.seed is not None
        state = self.generator.get_state() if self.generator is not None and seeded else None
        return DrawState(state, 0 if self.shaping is None else self.shaping.drawn)

    def go_back(self, drawn: DrawState) -> None:
        """Go on from there: what was drawn later never was."""
        if drawn.state is not None and self.generator is not None:
            self.generator.set_state(drawn.state)
        if self.shaping is not None:
            self.shaping.go_back(drawn.tokens)


@functools.cache
def _shared(device: torch.device) -> torch.Generator:
    """Return the generator of requests without a seed."""
    generator = torch.Generator(device=device)
    generator.seed()
    return generator


Meanwhile: TypeAlias = Callable[[Tensor], None]
"""Launches work that goes on from tokens on the device, int64 [rows], before they are waited for."""


def sample(logits: Tensor, samplers: Sequence[Sampler], meanwhile: Meanwhile | None = None) -> list[int]:
    """Draw one token per row of `logits` [rows, vocab] (float32), which stay as they are."""
    shapings = [(i, s.shaping) for i, s in enumerate(samplers) if s.shaping is not None]
    if shapings:
        logits = logits.clone()
        for i, shaping in shapings:
            shaping.apply(logits[i])
    drawn = _drawn(logits, samplers)
    going_on = None if meanwhile is None else functools.partial(meanwhile, drawn)
    tokens = cast("list[int]", fetched(drawn, meanwhile=going_on)[0])
    for i, shaping in shapings:
        shaping.drew(tokens[i])
    return tokens


def _drawn(logits: Tensor, samplers: Sequence[Sampler]) -> Tensor:
    if all(s.generator is None for s in samplers):
        return logits.argmax(dim=-1)
    drawn = [i for i, s in enumerate(samplers) if s.generator is not None]
    rows = None if len(drawn) == len(samplers) else on_device(drawn, logits.device)
    probs = _filtered(logits if rows is None else logits[rows], [samplers[i].params for i in drawn])
    # The exponential race draws from `probs` without normalising them; argmax of p/E is a categorical draw.
    noise = torch.empty_like(probs)
    shared = next((samplers[i].generator for i in drawn if samplers[i].params.seed is None), None)
    if shared is not None:
        noise.exponential_(generator=shared)
    for row, i in enumerate(drawn):
        if samplers[i].params.seed is not None:
            noise[row].exponential_(generator=samplers[i].generator)
    tokens = (probs / noise.clamp_min_(1e-30)).argmax(dim=-1)
    if rows is not None:
        tokens = logits.argmax(dim=-1).index_copy_(0, rows, tokens)
    return tokens


def _filtered(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Compute probabilities after temperature, top-k, top-p and min-p, in this order, each over the tokens that the last one left.

    logits [rows, vocab] -> [rows, vocab], zeros where a token is cut. The most likely token always stays.
    """

    vocab = logits.shape[-1]
    top_k = [p.top_k if p.top_k > 0 else vocab for p in params]
    columns = [
        [max(p.temperature, 1e-5) for p in params],
        [float(min(k, vocab)) for k in top_k],
        [max(p.top_p, 1e-30) if p.top_p < 1 else 2.0 for p in params],  # as float32 it must not be 0, which cuts all
        [p.min_p for p in params],
    ]
    temperature, most, mass, least = on_device(columns, logits.device, torch.float32).unsqueeze(2)
    probs = torch.softmax(logits / temperature, dim=-1)
    if min(top_k) >= vocab and all(p.top_p >= 1 and p.min_p <= 0 for p in params):
        return probs
    ordered, order = probs.sort(dim=-1, descending=True)
    rank = torch.arange(vocab, device=logits.device)
    ordered = torch.where(rank < most, ordered, 0.0)
    ordered = ordered / ordered.sum(dim=-1, keepdim=True)
    before = ordered.cumsum(dim=-1) - ordered  # mass of the more likely tokens
    ordered = torch.where(before < mass, ordered, 0.0)
    ordered = torch.where(ordered >= least * ordered[:, :1], ordered, 0.0)
    return torch.zeros_like(probs).scatter_(1, order, ordered)


def logprobs_of(logits: Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenLogprob]:
    """Compute the log-probability, the rank and the `tops[i]` best alternatives of `tokens[i]` under row i of `logits`
    [rows, vocab], before penalties, bias, temperature and filters (vLLM's `raw_logprobs`, its default). Tokens that a
    grammar forbids are no alternatives."""
    logp = torch.log_softmax(logits.float(), dim=-1)
    chosen = logp.gather(1, on_device(tokens, logits.device).unsqueeze(1))
    ranks = (logp > chosen).sum(dim=-1) + 1
    most = min(max(tops, default=0), logits.shape[-1])
    of_tokens, ranked, *top = fetched(chosen.squeeze(1), ranks, *(logp.topk(most, dim=-1) if most else ()))
    best: list[list[tuple[int, float]]] = [[] for _ in tokens]
    if top:
        pairs = (zip(i, v, strict=True) for v, i in zip(*top, strict=True))
        best = [[(token, value) for token, value in row if value > NEG_INF] for row in pairs]
    return [
        TokenLogprob(token, value, rank, tuple(best[i][: tops[i]]))
        for i, (token, value, rank) in enumerate(zip(tokens, of_tokens, ranked, strict=True))
    ]
