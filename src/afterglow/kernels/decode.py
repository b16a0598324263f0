"""Attention of a step's decoding: few queries over each of many segments, merged by their log-sum-exp.

Decoding is one query for each request over rows that only this request has: as many small products as there are requests. Each
takes less time than its call. On x86-64, in float32, `native/segments.c` computes all segments of a layer in one call: segments
that one request reads, segments that several read together (RelayAttention), and the merge. On CUDA, `device_reads` does the same.
Without these kernels, and for other dtypes and devices, each segment is a call of `attend`.

Measured on one core, 12 heads of 64: 32 requests with 128 rows each 1.5 ms to 3.0 ms with a call for each; 32 queries over the
same 2,048 rows 2.3 ms to 3.6 ms (flash operator) and 4.2 ms (matrix products). The kernel is ahead from 1 query to 128 and from
64 rows to 16,384, by 1.2 to 2.8 times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from afterglow.kernels.attention import attend, merge_into
from afterglow.kernels.built import Native, native
from afterglow.kernels.context_pages import Pages
from afterglow.kernels.device_reads import MOST_SHARED, DeviceReads
from afterglow.kernels.paged_parts import DECODED, PagedPart, part_of
from afterglow.kernels.sending import on_device

LANES = 16  # head_dim must be a multiple
TILE = 64  # queries of a prefill that are computed together: their results stay in the second cache


class Read(NamedTuple):
    """Rows [start, stop) of a context, and the rows of the batch that read them. `causal`: the queries are those of the last rows, and a query sees no row after its own; otherwise each
    query sees all rows. `window`: a query of a causal read sees no more than so many rows, its own included; 0: all."""

    pages: Pages
    start: int
    stop: int
    queries: Sequence[int]
    causal: bool = False
    window: int = 0

    def tiles(self) -> Iterator[Read]:
        """Yield the same read in tiles of queries, so that a tile does not compute many rows that its queries do not see."""
        if not self.causal or len(self.queries) <= TILE:
            yield self
            return
        first = self.stop - len(self.queries)
        for at in range(0, len(self.queries), TILE):
            queries = self.queries[at : at + TILE]
            start = max(self.start, first + at + 1 - self.window) if self.window else self.start
            yield Read(self.pages, start, first + at + len(queries), queries, True, self.window)

    def decoded(self) -> Iterator[Read]:
        """Yield the same read query by query if it is a decode step's: what a query's attention is rounded to then does not depend on
        the rows behind its own. The compiled kernel sees to that by itself."""
        if not self.causal or len(self.queries) > DECODED:
            yield self
            return
        first = self.stop - len(self.queries) + 1
        for at, query in enumerate(self.queries):
            yield Read(self.pages, self.start, first + at, (query,), self.window > 0, self.window)

    def part(self, most: int | None = None) -> PagedPart | None:
        """Return what a kernel for CUDA reads if few queries do, `most` of them; else None."""
        n = len(self.queries)
        if self.start >= self.stop or n > (most or (DECODED if self.causal else MOST_SHARED)):
            return None
        return part_of(*self)


class Reads:
    """The segments of a step: prepared once, read in each layer. No page comes or goes meanwhile."""

    def __init__(self, reads: Sequence[Read], *, cap: float = 0.0, built: bool = True) -> None:
        """Prepare at least one read; pages have one shape. `cap`: of scores, see `attend`. `built`: use the
        compiled kernel if it takes such contexts."""
        self._cap = cap
        self._native: _NativeReads | None = None
        library = _suited(reads) if built else None
        if library is not None:
            self._native = _NativeReads(library, [tile for read in reads for tile in read.tiles()], cap)
            return
        parts = [read.part() if built and read.pages.data.device.type == "cuda" else None for read in reads]
        few = [part for part in parts if part is not None]
        self._few = DeviceReads(few, cap) if few else None
        self._reads = reads
        self._rounds = _rounds([read for read, part in zip(reads, parts, strict=True) if part is None])

    @property
    def table(self) -> Any:
        """Return the segments as the compiled kernels take them; None where those do not read them."""
        return None if self._native is None else self._native.table

    def attend(self, layer: int, q: Tensor, scale: float, out: Tensor, lse: Tensor) -> None:
        """Merge attention of `q` [batch, heads, head_dim] over the segments in one layer into `out` [batch, heads,
        head_dim] and `lse` [batch, heads], float32 and contiguous (natural log; -inf where no row has been seen yet)."""
        if self._native is not None:
            self._native.attend(layer, q, scale, out, lse)
            return
        if self._few is not None and not self._few.attend(layer, q, scale, out, lse):
            self._few, self._rounds = None, _rounds(self._reads)
        for rows, reads in self._rounds:
            asking = q[rows]
            size = asking.shape[0] // len(reads)
            parts = [
                attend(
                    asking[i * size : (i + 1) * size],
                    *read.pages.read(layer, read.start, read.stop),
                    scale=scale,
                    causal=read.causal,
                    window=read.window,
                    cap=self._cap,
                )
                for i, read in enumerate(reads)
            ]
            part = parts[0] if len(parts) == 1 else (torch.cat([o for o, _ in parts]), torch.cat([x for _, x in parts]))
            merge_into(out, lse, rows, part)


class Appends:
    """Write a step's new rows into their contexts: each layer's keys and values of the whole batch in one call, which takes
    12 us where 64 copies take 330 (32 requests, 12 heads of 64, one core)."""

    def __init__(self, rows: Sequence[Read]) -> None:
        """Prepare `rows`: row `queries[i]` of the batch becomes row `start + i` of the context. Needs `possible(rows)`."""
        library = _suited(rows)
        assert library is not None, "there are no compiled kernels"
        self._library = library
        self._memory = _Table(library, rows)
        self.table = self._memory.table

    @staticmethod
    def possible(rows: Sequence[Read]) -> bool:
        """Return whether the compiled kernel takes such contexts."""
        return _suited(rows) is not None

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write `keys` and `values` [batch, kv_heads, head_dim], float32, to a layer."""
        keys, values = _flat(keys), _flat(values)
        self._library.lib.afterglow_append(
            self.table, layer, keys.data_ptr(), keys.stride(0), values.data_ptr(), values.stride(0)
        )


def _suited(reads: Sequence[Read]) -> Native | None:
    """Return the compiled kernels if they take such contexts."""
    data = reads[0].pages.data
    if data.dtype != torch.float32 or data.device.type != "cpu" or data.shape[4] % LANES:
        return None
    return native()


class _Table:
    """Segments as the library reads them. Keeps their memory."""

    def __init__(self, library: Native, reads: Sequence[Read]) -> None:
        segments: list[tuple[int, ...]] = []
        where: list[int] = []
        for pages, start, stop, queries, causal, window in reads:
            segments.append(
                (pages.table, pages.apart, start, stop - start, len(where), len(queries), int(causal), window)
            )
            where += queries
        of_segments, of_rows = library.new("afterglow_segment[]", segments), library.new("int64_t[]", where)
        self._memory = reads, of_segments, of_rows
        _, _, kv_heads, _, head_dim = reads[0].pages.data.shape
        fields = (of_segments, len(segments), library.address(of_rows), kv_heads, head_dim)
        self.table = library.new("afterglow_table *", fields)


class _NativeReads:
    """Attention of a step's queries over its segments, by the compiled kernel."""

    def __init__(self, library: Native, reads: Sequence[Read], cap: float) -> None:
        self._library, self._width, self._cap = library, library.width, cap
        self._memory = _Table(library, reads)
        self.table = self._memory.table
        self._threads = torch.get_num_threads()

    def attend(self, layer: int, q: Tensor, scale: float, out: Tensor, lse: Tensor) -> None:
        q = _flat(q)
        if not (out.is_contiguous() and lse.is_contiguous() and out.dtype == lse.dtype == torch.float32):
            raise ValueError(f"out and lse must be contiguous and float32, got {out.dtype} and {lse.dtype}")
        fields = (q.data_ptr(), q.stride(0), q.shape[1], scale, self._cap, out.data_ptr(), lse.data_ptr())
        batch = self._library.new("afterglow_queries *", fields)
        if self._library.lib.afterglow_attend(self.table, layer, batch, self._threads, self._width):
            raise MemoryError("no memory for the results of attention's tasks")


def _flat(x: Tensor) -> Tensor:
    """Return `x` [rows, heads, head_dim] with each row in one run of memory."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _rounds(reads: Sequence[Read]) -> list[tuple[slice | Tensor, list[Read]]]:
    """Group reads whose results can be merged at once, each group with its rows of the batch: reads of one query side by
    side, other reads by themselves. A decode step's reads are divided first."""
    single: list[dict[int, Read]] = []
    found: list[tuple[slice | Tensor, list[Read]]] = []
    for read in (each for whole in reads for each in whole.decoded()):
        if read.stop == read.start:
            continue
        if len(read.queries) == 1:
            turn = next((turn for turn in single if read.queries[0] not in turn), None)
            if turn is None:
                turn = {}
                single.append(turn)
            turn[read.queries[0]] = read
        else:
            found.append((rows_at(read.queries, read.pages.data.device), [read]))
    turns = [list(turn.values()) for turn in single]
    return [(rows_at([read.queries[0] for read in turn], turn[0].pages.data.device), turn) for turn in turns] + found


def rows_at(rows: Sequence[int], device: torch.device) -> slice | Tensor:
    """Return an index of rows: a slice if the rows follow each other."""
    if list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return on_device(rows, device)
