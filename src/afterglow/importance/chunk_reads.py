"""Read chunks of one request's prefix from disk, and hand them over when they are needed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from afterglow.config import BLOCK_ROWS
from afterglow.importance.chunk_cache import ChunkKey
from afterglow.importance.chunk_loader import ChunkLoader, RowsLost
from afterglow.importance.waits import Waits
from afterglow.memory.pages import allocate
from afterglow.plan.step import DEMAND, Selectable
from afterglow.store.extents.chunks import ChunkRead, ExtentChunks
from afterglow.store.extents.layout import MEANS, PROBES
from afterglow.store.moving.reading import Reading


@dataclass(slots=True)
class _Coming:
    """Hold a chunk on its way, as one of a run of so many `chunks`, which is number `run` of a `reading`. That fills `rows`, which lie in a
    buffer of the chunk's own."""

    reading: Reading
    run: int
    chunks: int
    rows: Tensor


class ChunkReads:
    """Read chunks ahead of need or on demand. `away`: seconds that the request has waited for them."""

    def __init__(self, loader: ChunkLoader, views: Sequence[Selectable]) -> None:
        self._loader = loader
        self._layout = loader.layout
        self._rows = {view.extent: view.rows for view in views}
        self._coming: dict[ChunkKey, _Coming] = {}
        self._readings: list[Reading] = []  # whose bytes are not counted
        self._bytes = 0
        self.away = 0.0

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._coming

    @property
    def bytes(self) -> int:
        """Count the bytes that have been read for this request so far."""
        self._count()
        return self._bytes

    def _count(self) -> None:
        self._bytes += sum(reading.bytes for reading in self._readings if reading.ended)
        self._readings = [reading for reading in self._readings if not reading.ended]

    def asked(self, layer: int, tensor: int) -> list[ChunkKey]:
        """List the chunks of a layer's keys or values that were asked for."""
        return [key for key in self._coming if key.layer == layer and key.tensor == tensor]

    def has_come(self, key: ChunkKey) -> bool:
        """Tell whether the read of a chunk has ended."""
        return self._coming[key].reading.ended

    def clear(self) -> None:
        """Forget all chunks. Buffers that are still being filled live on until their reads end."""
        self._count()
        self._coming.clear()

    def leave(self, layer: int) -> None:
        """Forget the chunks of a layer that has all its rows, and of earlier layers."""
        self._count()
        self._coming = {key: coming for key, coming in self._coming.items() if key.layer > layer}

    def ask(self, keys: Sequence[ChunkKey], priority: int) -> None:
        """Read the chunks that are neither cached nor on their way. With priority DEMAND, urge chunks that are on their way."""
        loader = self._loader
        assert loader.reader is not None or not keys
        urgent: list[Reading] = []
        by_extent: dict[str, list[ChunkKey]] = {}
        for key in dict.fromkeys(keys):
            coming = self._coming.get(key)
            if coming is not None:
                if priority == DEMAND and not coming.reading.ended:
                    urgent.append(coming.reading)
            elif loader.cache.look(key) is None:
                by_extent.setdefault(key.extent, []).append(key)
        if loader.reader is None:
            return
        if urgent:
            loader.reader.urge(list(dict.fromkeys(urgent)))
        if not by_extent:
            return
        runs: list[tuple[list[ChunkKey], ChunkRead]] = []
        asked: list[ExtentChunks] = []
        for extent, wanted in by_extent.items():
            rows = self._rows[extent]
            more = [(run, self._read(run[0], len(run), rows)) for run in _runs(sorted(wanted))]
            asked.append(ExtentChunks(extent, rows, wanted[0].edition, [read for _, read in more]))
            runs += more
        reading = loader.read(asked, priority)
        self._readings.append(reading)
        for number, (run, read) in enumerate(runs):
            for key, memory in zip(run, read.into, strict=True):
                self._coming[key] = _Coming(reading, number, len(run), self._as_rows(memory, key.tensor))

    def _read(self, key: ChunkKey, chunks: int, rows: int) -> ChunkRead:
        """Describe the read of a run of chunks from `key` on, of an extent of `rows` rows, each to a buffer of its own."""
        loader, layout = self._loader, self._layout
        if key.tensor == PROBES:
            first, stop = 0, layout.blocks(rows)
            into = [allocate(stop * layout.probe_chunk_bytes)]
        elif key.tensor == MEANS:
            first, stop, into = 0, 1, [allocate(layout.mean_bytes(rows))]
        else:
            first, stop = self._parts(key.chunk, chunks, rows)
            into = [loader.buffers.take() for _ in range(chunks - 1)]
            last = (stop - first) * layout.part_bytes - len(into) * loader.chunk_bytes
            # A part of a whole chunk's memory would hold the whole, and the cache counts what it shows.
            into.append(loader.buffers.take() if last == loader.chunk_bytes else allocate(last))
        return ChunkRead(key.layer, key.tensor, first, stop, into)

    def take_back(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Take back chunks that are not wanted after all, unless their read has begun, or their run holds a wanted chunk. Returns those
        taken back."""
        runs: dict[tuple[int, int], list[ChunkKey]] = {}
        for key in keys:
            if key in self._coming:
                runs.setdefault((id(self._coming[key].reading), self._coming[key].run), []).append(key)
        gone: list[ChunkKey] = []
        for run in runs.values():
            coming = self._coming[run[0]]
            if len(run) == coming.chunks and coming.reading.take_back(coming.run):
                gone += run
        for key in gone:
            del self._coming[key]
        return gone

    def fetch(self, keys: Sequence[ChunkKey]) -> Waits[dict[ChunkKey, Tensor]]:
        """Get chunks from the cache, and the others from disk: stored rows [rows, heads, stored width] by key.

        Raises: `RowsLost`.
        """
        cache, found = self._loader.cache, {}
        for key in keys:  # now: while other chunks come, these may leave the cache
            if (rows := cache.look(key)) is not None:
                found[key] = rows
        self.ask([key for key in keys if key not in found], DEMAND)
        for key in keys:
            if key in found:
                continue
            coming = self._coming[key]
            yield from self.wait_for(coming.reading, key.extent)
            found[key] = coming.rows
        self._loader.count_reads()
        return found

    def wait_for(self, reading: Reading, extent: str) -> Waits[None]:
        """Wait for a reading of an extent's file, and perhaps of others.

        Raises: `RowsLost`, where the reading has failed, or a file is another one now.
        """
        if not reading.ended:
            began = time.perf_counter()
            yield reading
            self.away += time.perf_counter() - began
        if not reading.wait(0):
            lost, reader = reading.lost or extent, self._loader.reader
            # An error may pass, and what is known of the rows is wanted then.
            if not reading.stale and (reader is None or not reader.has(lost)):
                self._loader.forget(lost)
            raise RowsLost(lost, reading.stale)

    def _parts(self, chunk: int, chunks: int, rows: int) -> tuple[int, int]:
        """Return the first part of a run of chunks, and the part behind it. The last chunk may have fewer than the others."""
        each, layout = self._loader.chunk_rows // self._layout.part_rows, self._layout
        return chunk * each, min((chunk + chunks) * each, layout.blocks(rows) * BLOCK_ROWS // layout.part_rows)

    def _as_rows(self, memory: np.ndarray, tensor: int) -> Tensor:
        if tensor == MEANS:
            return torch.from_numpy(memory).view(torch.float32).view(-1, self._layout.kv_heads, self._layout.head_dim)
        heads = self._layout.probe_heads if tensor == PROBES else self._layout.kv_heads
        width = self._layout.width * self._loader.arena.element_size()
        return torch.from_numpy(memory.reshape(-1, heads, width)).view(self._loader.arena.dtype)


def _runs(keys: Sequence[ChunkKey]) -> Iterator[list[ChunkKey]]:
    """Group chunks that lie side by side in the file."""
    run: list[ChunkKey] = []
    for key in keys:
        if run and (key[:4] != run[-1][:4] or key.chunk != run[-1].chunk + 1):
            yield run
            run = []
        run.append(key)
    if run:
        yield run
