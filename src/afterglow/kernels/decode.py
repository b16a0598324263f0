"""Attention of a step's decoding: few queries over each of many segments, merged by their log-sum-exp.

Decoding is one query for each job over rows that only this job has: as many small products as there are jobs, each of which
takes less time than the call that asks for it. On x86-64, in float32, `native/segments.c` does all of a layer's segments in
one call: those that one job reads, those that several read together (RelayAttention), and the merge. It is built when the
package is installed, if there is a GCC. Without it, and for everything else, each segment is a call of `attend`.

Measured on one core, 12 heads of 64: 32 jobs with 128 rows each 1.5 ms to 3.0 ms with a call for each; 32 queries over the
same 2,048 rows 2.3 ms to 3.6 ms (flash operator) and 4.2 ms (matrix products). It is ahead from 1 query to 128 and from 64
rows to 16,384, by 1.2 to 2.8 times.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from afterglow.kernels.attention import attend, merge_into
from afterglow.kernels.built import native

LANES = 16  # a head's dimensions must be a multiple of it
TILE = 64  # queries of a prefill that are computed together: with their group their results stay in the second cache


class Read(NamedTuple):
    """Rows [start, stop) of a context [layers, 2, kv_heads, capacity, head_dim] (keys, values), and the rows of the batch
    that see all of them; `causal`: that are their last ones, and see no row after themselves."""

    data: Tensor
    start: int
    stop: int
    queries: Sequence[int]
    causal: bool = False

    def tiles(self) -> Iterator[Read]:
        """The same, so that few queries of a read see less than all of its rows."""
        if not self.causal or len(self.queries) <= TILE:
            yield self
            return
        first = self.stop - len(self.queries)
        for at in range(0, len(self.queries), TILE):
            queries = self.queries[at : at + TILE]
            yield Read(self.data, self.start, first + at + len(queries), queries, True)


class Reads:
    """The segments of a step: prepared once, read in each layer. The contexts stay where they are meanwhile."""

    def __init__(self, reads: Sequence[Read], *, built: bool = True) -> None:
        """`reads`: at least one; contexts of one shape but for their capacity. `built`: with what has been built, if it
        suits them."""
        self._native: _Native | None = None
        library = _suited(reads) if built else None
        if library is not None:
            self._native = _Native(library, [tile for read in reads for tile in read.tiles()])
            return
        self._rounds = _rounds(reads)

    def attend(self, layer: int, q: Tensor, scale: float, out: Tensor, lse: Tensor) -> None:
        """Merge attention of `q` [batch, heads, head_dim] over the segments in one layer into `out` [batch, heads,
        head_dim] and `lse` [batch, heads], float32 and contiguous (natural log; -inf where nothing has been seen yet)."""
        if self._native is not None:
            self._native.attend(layer, q, scale, out, lse)
            return
        for rows, reads in self._rounds:
            asking = q[rows]
            size = asking.shape[0] // len(reads)
            parts = [
                attend(
                    asking[i * size : (i + 1) * size],
                    read.data[layer, 0, :, read.start : read.stop].transpose(0, 1),
                    read.data[layer, 1, :, read.start : read.stop].transpose(0, 1),
                    scale=scale,
                    causal=read.causal,
                )
                for i, read in enumerate(reads)
            ]
            part = parts[0] if len(parts) == 1 else (torch.cat([o for o, _ in parts]), torch.cat([x for _, x in parts]))
            merge_into(out, lse, rows, part)


class Appends:
    """Where a step's new rows go: each layer's keys and values of the whole batch in one call, which takes 12 us where 64
    copies take 330 (32 jobs, 12 heads of 64, one core)."""

    def __init__(self, rows: Sequence[Read]) -> None:
        """`rows`: row `queries[i]` of the batch becomes row `start + i` of the context. Only where that is `possible`."""
        library = _suited(rows)
        assert library is not None, "asked for what has not been built"
        self._library = library
        self._table = _Table(rows)

    @staticmethod
    def possible(rows: Sequence[Read]) -> bool:
        """Whether what has been built can do it."""
        return _suited(rows) is not None

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """`keys` and `values` [batch, kv_heads, head_dim], float32."""
        keys, values = _flat(keys), _flat(values)
        table = self._table
        self._library.afterglow_append_3(
            keys.data_ptr(),
            keys.stride(0),
            values.data_ptr(),
            values.stride(0),
            *keys.shape[1:],
            layer,
            *table.arguments,
        )


def _suited(reads: Sequence[Read]) -> ctypes.CDLL | None:
    """What has been built, if it knows such contexts."""
    data = reads[0].data
    if data.dtype != torch.float32 or data.device.type != "cpu" or data.shape[4] % LANES:
        return None
    return native() if all(read.data.is_contiguous() for read in reads) else None


class _Table:
    """Segments as the library wants them; holds on to their memory."""

    def __init__(self, reads: Sequence[Read]) -> None:
        rows: list[tuple[int, ...]] = []
        where: list[int] = []
        for data, start, stop, queries, causal in reads:
            rows.append((data.data_ptr(), data.shape[3], start, stop - start, len(where), len(queries), int(causal)))
            where += queries
        self._held = reads, np.array(rows, dtype=np.int64), np.array(where, dtype=np.int64)
        self.arguments = self._held[1].ctypes.data, len(rows), self._held[2].ctypes.data


class _Native:
    def __init__(self, library: ctypes.CDLL, reads: Sequence[Read]) -> None:
        self._library, self._width = library, library.afterglow_width_3()
        self._kv_heads = reads[0].data.shape[2]
        self._table = _Table(reads)
        self._threads = torch.get_num_threads()

    def attend(self, layer: int, q: Tensor, scale: float, out: Tensor, lse: Tensor) -> None:
        q = _flat(q)
        if not (out.is_contiguous() and lse.is_contiguous() and out.dtype == lse.dtype == torch.float32):
            raise ValueError(f"out and lse must be contiguous and float32, got {out.dtype} and {lse.dtype}")
        heads, head_dim = q.shape[1:]
        failed = self._library.afterglow_attend_3(
            *(q.data_ptr(), q.stride(0), out.data_ptr(), lse.data_ptr(), heads, self._kv_heads, head_dim, scale),
            *(layer, *self._table.arguments, self._threads, self._width),
        )
        if failed:
            raise MemoryError("no memory for what attention finds on the way")


def _flat(x: Tensor) -> Tensor:
    """`x` [rows, heads, head_dim] with each row in one run of memory."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _rounds(reads: Sequence[Read]) -> list[tuple[slice | Tensor, list[Read]]]:
    """Reads whose results can be merged into what there is at once, with the rows of the batch that they are for: those of
    one query side by side, the others by themselves."""
    single: list[dict[int, Read]] = []
    found: list[tuple[slice | Tensor, list[Read]]] = []
    for read in reads:
        if read.stop == read.start:
            continue
        if len(read.queries) == 1:
            turn = next((turn for turn in single if read.queries[0] not in turn), None)
            if turn is None:
                turn = {}
                single.append(turn)
            turn[read.queries[0]] = read
        else:
            found.append((rows_at(read.queries, read.data.device), [read]))
    device = reads[0].data.device
    return [(rows_at(list(turn), device), list(turn.values())) for turn in single] + found


def rows_at(rows: Sequence[int], device: torch.device) -> slice | Tensor:
    """An index of rows: a slice, where they follow each other."""
    if list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return torch.tensor(rows, device=device)
