"""Drawing tokens from logits, for the whole batch at once. Knows nothing of jobs, caches or text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from afterglow.request import SamplingParams, TokenLogprob

NEG_INF = float("-inf")


@dataclass(slots=True)
class Sampler:
    """One request's way of drawing. A seeded request owns a generator, so that what it draws does not depend on
    what else is in the batch."""

    params: SamplingParams
    generator: torch.Generator | None = None

    @classmethod
    def of(cls, params: SamplingParams, device: torch.device) -> Sampler:
        if params.temperature == 0:
            return cls(params)
        generator = torch.Generator(device=device)
        if params.seed is None:
            generator.seed()
        else:
            generator.manual_seed(params.seed % 2**63)
        return cls(params, generator)


def sample(logits: Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """One token per row of `logits` [rows, vocab] (float32)."""
    if all(s.generator is None for s in samplers):
        return [int(t) for t in logits.argmax(dim=-1).tolist()]
    greedy = logits.argmax(dim=-1)
    drawn = [i for i, s in enumerate(samplers) if s.generator is not None]
    probs = _filtered(logits[drawn], [samplers[i].params for i in drawn])
    # The exponential race draws from `probs` without normalising them; argmax of p/E is a categorical draw.
    noise = torch.empty_like(probs)
    for row, i in enumerate(drawn):
        noise[row].exponential_(generator=samplers[i].generator)
    greedy[drawn] = (probs / noise.clamp_min_(1e-30)).argmax(dim=-1)
    return [int(t) for t in greedy.tolist()]


def _filtered(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Probabilities after temperature, top-k, top-p and min-p, in this order, each over what the last one left.

    logits [rows, vocab] -> [rows, vocab], zeros where a token is cut. The most likely token always stays.
    """

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=logits.device, dtype=torch.float32).unsqueeze(1)

    probs = torch.softmax(logits / column([max(p.temperature, 1e-5) for p in params]), dim=-1)
    vocab = logits.shape[-1]
    top_k = [p.top_k if p.top_k > 0 else vocab for p in params]
    if min(top_k) >= vocab and all(p.top_p >= 1 and p.min_p <= 0 for p in params):
        return probs
    ordered, order = probs.sort(dim=-1, descending=True)
    rank = torch.arange(vocab, device=logits.device)
    ordered = torch.where(rank < column([float(min(k, vocab)) for k in top_k]), ordered, 0.0)
    ordered = ordered / ordered.sum(dim=-1, keepdim=True)
    before = ordered.cumsum(dim=-1) - ordered  # mass of the more likely tokens
    ordered = torch.where(before < column([p.top_p if p.top_p < 1 else 2.0 for p in params]), ordered, 0.0)
    ordered = torch.where(ordered >= column([p.min_p for p in params]) * ordered[:, :1], ordered, 0.0)
    return torch.zeros_like(probs).scatter_(1, order, ordered)


def logprobs_of(logits: Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenLogprob]:
    """Log-probability, rank and the `tops[i]` best alternatives of `tokens[i]` under row i of `logits`
    [rows, vocab], before temperature and filters (as OpenAI's API reports them)."""
    logp = torch.log_softmax(logits.float(), dim=-1)
    chosen = logp.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1))
    ranks = ((logp > chosen).sum(dim=-1) + 1).tolist()
    most = max(tops, default=0)
    if most:
        values, ids = logp.topk(min(most, logits.shape[-1]), dim=-1)
        best = [list(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
    else:
        best = [[] for _ in tokens]
    return [
        TokenLogprob(token, value, rank, tuple(best[i][: tops[i]]))
        for i, (token, value, rank) in enumerate(zip(tokens, chosen.squeeze(1).tolist(), ranks, strict=True))
    ]
