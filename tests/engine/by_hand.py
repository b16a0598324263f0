"""What a truncated conversation must give, computed without any engine, and how to ask an engine for it.

Keys and values of the whole text, those of what survived taken out and embedded anew, the new tokens computed on top of
them; attention weights by the formula.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

from afterglow.engine.engine import Engine
from afterglow.model.decoder import Attention, Decoder
from afterglow.plan.prefix.ranges import Rows, complement
from afterglow.request import Output, Request, SamplingParams
from tests.engine.conftest import VOCAB

IDS = count()


class Growing:
    """`Attend` over plain tensors: un-rotated keys and values of the context, and what comes after it. `sums`: what
    attention each row gets, by the formula."""

    def __init__(self, decoder: Decoder, kept: dict[int, tuple[Tensor, Tensor]] | None = None) -> None:
        self.decoder = decoder
        self.rows = dict(kept or {})
        self.sums: Tensor | float = 0.0

    def __call__(self, layer: int, attention: Attention, x: Tensor) -> Tensor:
        q, k, v = attention.project(x)
        if layer in self.rows:
            k, v = torch.cat([self.rows[layer][0], k]), torch.cat([self.rows[layer][1], v])
        self.rows[layer] = (k.clone(), v.clone())
        rope = self.decoder.rope
        assert rope is not None
        q = attention.rotate(q, rope.cos_sin(torch.arange(len(k) - len(q), len(k), device=k.device)))
        k = attention.rotate(k, rope.cos_sin(torch.arange(len(k), device=k.device)))
        self.sums = self.sums + sums(q, k, attention)
        return attention.attend(q, k, v).flatten(1)


def sums(q: Tensor, k: Tensor, attention: Attention) -> Tensor:
    """Column sums of the attention weights, [rows]."""
    keys = k.repeat_interleave(attention.heads // attention.kv_heads, 1)
    weights = torch.einsum("qhd,khd->hqk", q, keys) * attention.scale
    ahead = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).triu(1 + len(k) - len(q))
    return weights.masked_fill(ahead, -torch.inf).softmax(-1).sum((0, 1))


@torch.inference_mode()
def importance(decoder: Decoder, seen: Sequence[int]) -> Tensor:
    """The attention that each token gets in all of a text."""
    full = Growing(decoder)
    decoder.forward(torch.tensor(seen, device=decoder.device), torch.arange(len(seen), device=decoder.device), full)
    assert isinstance(full.sums, Tensor)
    return full.sums


@dataclass
class Cut:
    """A conversation was cut when it had these tokens: those between `first` and `first + dropped` are out since. The first
    `kept` rows of the rest were taken from the context `before` (None: it was never cut); the others were computed on
    top."""

    text: Sequence[int]
    first: int
    dropped: int
    kept: int
    before: Cut | None = None

    def compact(self, text: Sequence[int]) -> list[int]:
        """Cut a text that goes on from there."""
        return [*text[: self.first], *text[self.first + self.dropped :]]


@torch.inference_mode()
def rows_of(decoder: Decoder, cut: Cut) -> dict[int, tuple[Tensor, Tensor]]:
    """Keys and values of the rows that were kept, computed from the beginning."""
    before = cut.before
    text = before.compact(cut.text) if before is not None else cut.text
    out = cut.dropped - (before.dropped if before is not None else 0)  # in the rest from before
    stop = cut.kept if cut.kept <= cut.first else cut.kept + out
    there = Growing(decoder, rows_of(decoder, before) if before is not None else None)
    begin = before.kept if before is not None else 0
    if stop > begin:
        decoder.forward(torch.tensor(text[begin:stop]), torch.arange(begin, stop), there)
    left = torch.tensor([*range(min(cut.kept, cut.first)), *range(cut.first + out, stop)], dtype=torch.long)
    return {i: (k[left], v[left]) for i, (k, v) in there.rows.items()}


@torch.inference_mode()
def behind(decoder: Decoder, cut: Cut, prompt: Sequence[int], reply: Sequence[int]) -> Tensor:
    """Log-probabilities of each token of a reply to a prompt that goes on from where it was cut: [tokens, vocabulary]."""
    new = [*cut.compact(prompt)[cut.kept :], *reply[:-1]]
    kept = rows_of(decoder, cut) if cut.kept else None
    positions = torch.arange(cut.kept, cut.kept + len(new), device=decoder.device)
    hidden = decoder.forward(torch.tensor(new, device=decoder.device), positions, Growing(decoder, kept))
    return torch.log_softmax(decoder.logits(hidden[-len(reply) :]).float(), dim=-1)


@torch.inference_mode()
def reference(decoder: Decoder, seen: Sequence[int], dropped: Sequence[Rows], new: Sequence[int]) -> Tensor:
    """Log-probabilities after `new`, when `dropped` was cut out of `seen` after all rows were computed."""
    full = Growing(decoder)
    decoder.forward(torch.tensor(seen, device=decoder.device), torch.arange(len(seen), device=decoder.device), full)
    left = torch.tensor([row for a, b in complement(dropped, len(seen)) for row in range(a, b)], device=decoder.device)
    kept = {i: (k[left], v[left]) for i, (k, v) in full.rows.items()}
    positions = torch.arange(len(left), len(left) + len(new), device=decoder.device)
    hidden = decoder.forward(torch.tensor(new, device=decoder.device), positions, Growing(decoder, kept))
    return torch.log_softmax(decoder.logits(hidden[-1:])[0].float(), dim=-1)


def submit_truncated(
    engine: Engine, tokens: Sequence[int], max_tokens: int = 2, **more: Any
) -> tuple[list[Output], threading.Event]:
    """Submit a turn that may be truncated. Its outputs, with the distribution of each token, come in until the event is set."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=VOCAB, ignore_eos=True)
    outputs: list[Output] = []
    ended = threading.Event()

    def take(output: Output) -> None:
        outputs.append(output)
        if output.finish_reason is not None:
            ended.set()

    engine.submit(Request(f"turn-{next(IDS)}", list(tokens), params, truncation=True, **more), take)
    return outputs, ended


def ask_truncated(engine: Engine, tokens: Sequence[int], max_tokens: int = 2, **more: Any) -> list[Output]:
    """All outputs of a turn that may be truncated."""
    outputs, ended = submit_truncated(engine, tokens, max_tokens, **more)
    assert ended.wait(60)
    return outputs


def logprobs(outputs: Sequence[Output]) -> Tensor:
    """The distribution of the first token that was generated."""
    (first,) = outputs[0].logprobs
    found = torch.empty(VOCAB)
    for token, value in first.top:
        found[token] = value
    return found
