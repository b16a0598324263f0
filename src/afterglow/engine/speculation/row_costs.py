"""What a decode step costs by its number of rows: measured on this machine, for this model."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from afterglow.engine.hardware import now_on
from afterglow.engine.kv_shape import KVShape
from afterglow.kernels.context_pages import Pages
from afterglow.kernels.decode import Read, Reads
from afterglow.model.decoder import Attention, Decoder

PROBE_ROWS = (1, 2, 4, 8, 12, 16)
PROBE_LAYERS = 4
PROBE_CONTEXT, PROBE_QUERIES = 1024, 8
PROBE_SECONDS = 0.2  # after which no further round begins
SLOW_SECONDS = 0.02  # of one row through one layer and the head: without compiled kernels, say


@dataclass(frozen=True, slots=True)
class RowCosts:
    """Predict seconds of a step without its attention. `seconds`: by the number of rows, ascending from 1."""

    seconds: tuple[tuple[int, float], ...]

    @classmethod
    def measured(cls, decoder: Decoder) -> RowCosts:
        """Measure some layers and the head, in a few tenths of a second; where that is slow, one layer once."""
        _pass(decoder, 1, 1)  # the first one finds cold memory
        slow = sum(_pass(decoder, 1, 1)) > SLOW_SECONDS
        layers = 1 if slow else min(PROBE_LAYERS, decoder.spec.layers)
        best = dict.fromkeys(PROBE_ROWS, float("inf"))
        began, rounds = time.perf_counter(), 0
        while not rounds or time.perf_counter() - began < PROBE_SECONDS:
            for rows in PROBE_ROWS:
                of_layers, of_head = _pass(decoder, rows, layers)
                best[rows] = min(best[rows], of_layers * decoder.spec.layers / layers + of_head)
            rounds += 1
        return cls.of(best)

    @classmethod
    def of(cls, measured: dict[int, float]) -> RowCosts:
        """Take measurements, by the number of rows. Other work of the machine can only have made them longer, and a step takes no
        longer than one of more rows."""
        found: list[tuple[int, float]] = []
        least = float("inf")
        for rows, seconds in sorted(measured.items(), reverse=True):
            least = min(least, seconds)
            found.append((rows, least))
        return cls(tuple(reversed(found)))

    def step(self, rows: int) -> float:
        """Predict the seconds of a step of `rows` rows. Beyond the measured ones, rows go on to cost what the last ones did."""
        above = next((n for n, (most, _) in enumerate(self.seconds) if rows <= most), len(self.seconds) - 1)
        (low, a), (high, b) = self.seconds[max(0, above - 1)], self.seconds[max(1, above)]
        return a + (b - a) * (max(rows, low) - low) / (high - low)


def attention_costs(shape: KVShape, heads: int) -> tuple[float, float]:
    """Measure attention to one row of context, in all layers: seconds for one query, and for each further query of the same
    reply."""
    layers = min(PROBE_LAYERS, shape.layers)
    size = (layers, 2, shape.kv_heads, PROBE_CONTEXT, shape.head_dim)
    data = Pages.of(torch.ones(size, dtype=shape.dtype, device=shape.device))
    q = torch.ones((PROBE_QUERIES, heads, shape.head_dim), dtype=shape.dtype, device=shape.device)
    out = torch.zeros(q.shape, dtype=torch.float32, device=shape.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=shape.device)
    found = []
    for queries in (1, PROBE_QUERIES):
        reads = Reads([Read(data, 0, PROBE_CONTEXT, range(queries), queries > 1)])
        best = float("inf")
        for turn in range(3 * layers):  # the layers take turns, as they do in a pass
            began = now_on(shape.device)
            reads.attend(turn % layers, q, 1.0, out, lse)
            best = min(best, now_on(shape.device) - began)
        found.append(best * shape.layers / PROBE_CONTEXT)
    one, several = found
    return one, max(0.0, several - one) / (PROBE_QUERIES - 1)


def _pass(decoder: Decoder, rows: int, layers: int) -> tuple[float, float]:
    """Time `rows` rows through the first layers, and through the head: seconds."""
    places = torch.arange(rows, device=decoder.device)
    hidden = decoder.begin(torch.zeros_like(places), places)
    began = now_on(decoder.device)
    decoder.go_on(hidden, _no_attention, stop=layers)
    between = now_on(decoder.device)
    decoder.logits(hidden.normed)
    return between - began, now_on(decoder.device) - between


def _no_attention(layer: int, attention: Attention, x: Tensor) -> Tensor:
    return attention.project(x)[0].flatten(1)
