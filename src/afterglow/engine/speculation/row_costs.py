"""What a decode step costs by its number of rows: measured on this machine, for this model."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from afterglow.model.decoder import Attention, Decoder

PROBE_ROWS = (1, 2, 4, 8, 12, 16, 32)
PROBE_LAYERS = 4
PROBE_SECONDS = 0.2  # after which no further round begins


@dataclass(frozen=True, slots=True)
class RowCosts:
    """Predict seconds of a step without its attention. `seconds`: by the number of rows, ascending from 1."""

    seconds: tuple[tuple[int, float], ...]

    @classmethod
    def measured(cls, decoder: Decoder) -> RowCosts:
        """Measure some layers and the head, in a few tenths of a second."""
        layers = min(PROBE_LAYERS, decoder.spec.layers)
        best = dict.fromkeys(PROBE_ROWS, float("inf"))
        began = time.perf_counter()
        _pass(decoder, 1, layers)  # the first one finds cold memory
        while True:
            for rows in PROBE_ROWS:
                of_layers, of_head = _pass(decoder, rows, layers)
                best[rows] = min(best[rows], of_layers * decoder.spec.layers / layers + of_head)
            if time.perf_counter() - began > PROBE_SECONDS:
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


def _pass(decoder: Decoder, rows: int, layers: int) -> tuple[float, float]:
    """Time `rows` rows through the first layers, and through the head: seconds."""
    places = torch.arange(rows, device=decoder.device)
    hidden = decoder.begin(torch.zeros_like(places), places)
    began = _now(decoder.device)
    decoder.go_on(hidden, _no_attention, stop=layers)
    between = _now(decoder.device)
    decoder.logits(hidden.normed)
    return between - began, _now(decoder.device) - between


def _no_attention(layer: int, attention: Attention, x: Tensor) -> Tensor:
    return attention.project(x)[0].flatten(1)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
