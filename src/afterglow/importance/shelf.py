"""Cached chunks: where `plan.score` says that they are, with their bytes (SPEC §IV-B; spec S14, S15)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from afterglow.plan.score import Place, ScoreCache


class Name(NamedTuple):
    """One chunk of an extent's file, as it was when its `edition` was read (`store.chunks`). `tensor`: keys 0, values 1, probe
    keys 2 (of which all chunks of a layer go together, under number 0)."""

    extent: str
    edition: str
    layer: int
    tensor: int
    chunk: int


class Shelf:
    """Rows of chunks that were of use, on the device and in host memory; of files as they are now alone."""

    def __init__(self, cache: ScoreCache[Name], device: torch.device) -> None:
        self.cache = cache
        cache.forgot = lambda name: self._now[name.extent][1].pop(name, None)
        self.device = device
        self._rows: dict[Name, Tensor] = {}
        self._now: dict[str, tuple[str, dict[Name, None]]] = {}  # by extent: its edition, and what was used of that

    def look(self, name: Name) -> Tensor | None:
        """The rows of a chunk, [rows, heads, head_dim], on whichever side they are."""
        return self._rows.get(name)

    def now(self, extent: str, edition: str) -> None:
        """An extent's file is of this edition: what was known of another is forgotten."""
        if self._now.get(extent, ("",))[0] != edition:
            self.forget(extent)
            self._now[extent] = edition, {}

    def used(self, name: Name, rows: Tensor, tokens: int, wanted: int) -> Place:
        """A request has used `wanted` of a chunk's `tokens` rows; `rows` are they all, which nobody
        writes to any more. Where the chunk was before. Nothing is kept of an extent that is gone, or another one now."""
        edition, names = self._now.get(name.extent, ("", None))
        if names is None or edition != name.edition:
            return "disk"
        names[name] = None
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
        """An extent is no more, or another one."""
        for name in self._now.pop(extent, ("", {}))[1]:
            self.cache.forget(name)
            self._rows.pop(name, None)

    @property
    def bytes(self) -> tuple[int, int]:
        """On the device, and in host."""
        return self.cache.device.used, self.cache.host.used
