"""Cached chunks: where `plan.score` says that they are, with their bytes (SPEC §IV-B; spec S14, S15)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from afterglow.plan.score import Place, ScoreCache


class Name(NamedTuple):
    """One chunk of an extent's file, of the version that it was read from. `tensor`: keys 0, values 1, probe keys 2 (of
    which all chunks of a layer go together, under number 0)."""

    extent: str
    version: int
    layer: int
    tensor: int
    chunk: int


class Shelf:
    """Rows of chunks that were of use, on the device and in host memory."""

    def __init__(self, cache: ScoreCache[Name], device: torch.device) -> None:
        self.cache = cache
        self.device = device
        self._rows: dict[Name, Tensor] = {}

    def look(self, name: Name) -> Tensor | None:
        """The rows of a chunk, [rows, heads, head_dim], on whichever side they are."""
        return self._rows.get(name)

    def used(self, name: Name, rows: Tensor, tokens: int, wanted: int) -> Place:
        """A request has used `wanted` of a chunk's `tokens` rows; `rows` are they all, which nobody
        writes to any more. Where the chunk was before."""
        size = rows.numel() * rows.element_size()
        was, moves = self.cache.access(name, size, tokens, wanted)
        for move in moves:
            if move.target == "disk":
                del self._rows[move.chunk]
            else:
                held = self._rows.get(move.chunk, rows)
                where = self.device if move.target == "device" else torch.device("cpu")
                self._rows[move.chunk] = held.to(where)
        return was

    def forget(self, extent: str) -> None:
        """An extent is no more, or has been rewritten."""
        for name in [name for name in self._rows if name.extent == extent]:
            self.cache.forget(name)
            del self._rows[name]

    @property
    def bytes(self) -> tuple[int, int]:
        """On the device, and in host."""
        return self.cache.device.used, self.cache.host.used
