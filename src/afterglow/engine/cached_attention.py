"""Attend over cached context: the `Attend` that the engine passes to the decoder.

For each layer, in this order: project, tee the new un-rotated rows to the saver, rotate, bring in the layer's
cached rows (waiting for that layer only: CachedAttention §3.2.1, layer-wise pre-loading), attend.

RelayAttention reads rows that several jobs of a step share once for all these jobs: attention over a shared segment with the
queries of all jobs stacked, and over each job's own rows, merged by their log-sum-exp (RelayAttention §3.3, algorithm 1; spec
R1-R8). It is exact. A share is read together only where that is faster: the paper's count of memory reads (§3.4), with
constants measured on this machine, decides.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from afterglow.config import BLOCK_ROWS
from afterglow.engine.gather import BatchEntry, Gatherer
from afterglow.engine.kv_shape import KVShape
from afterglow.engine.recorder import NotRecorded, Recorder
from afterglow.engine.tee import Tee
from afterglow.kernels.context_pages import Pages
from afterglow.kernels.decode import Appends, Read, Reads
from afterglow.kernels.device_reads import possible
from afterglow.kernels.device_rows import DeviceRows
from afterglow.kernels.layers import LayerRows
from afterglow.kernels.paged_parts import DECODED
from afterglow.kernels.rope import LayerRotations
from afterglow.model.decoder import Attention, Decoder, Hidden
from afterglow.plan.options import STRIDE
from afterglow.plan.step import Share


class Beside(Protocol):
    """Attend for entries that `CachedAttend` leaves out."""

    def attend(self, layer: int, scale: float, q: Tensor, out: Tensor) -> None:
        """Fill in these entries' rows of `out` [rows, heads, head_dim]. `q`, of the same shape, is rotated; new keys and values
        are in the entries' contexts."""


class CachedAttend:
    """Attend exactly, each entry over its whole context. An `Attend` for one step.

    `beside`, if it is set, attends for the `entries` that are not in `whole`.
    """

    def __init__(
        self,
        entries: list[BatchEntry],
        angles: LayerRotations | None,
        gatherer: Gatherer,
        tee: Tee,
        whole: list[BatchEntry] | None = None,
    ) -> None:
        self.entries = entries
        self.whole = entries if whole is None else whole
        self.beside: Beside | None = None
        self._angles = angles
        self._gatherer = gatherer
        self._tee = tee

    def __call__(self, layer: int, attention: Attention, x: Tensor) -> Tensor:
        q, k, v = attention.project(x)
        self._tee.layer(layer, k, v)
        q = self._place(layer, attention, q, k, v)
        out = self._attention(layer, attention, q)
        if self.beside is not None:
            self.beside.attend(layer, attention.scale, q, out)
        self._gatherer.computed(layer)
        return out.flatten(1)

    def _place(self, layer: int, attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Rotate queries and keys, bring in the layer's cached rows, and put the new ones into their contexts. Returns the rotated
        queries."""
        q, k = attention.rotate_both(q, k, self._angles)
        self._gatherer.layer(layer)
        self._append(layer, k, v)
        return q

    def go_through(self, decoder: Decoder, hidden: Hidden) -> bool:
        """Take a pass that has begun through all layers in one call, and save its rows, if compiled kernels can do so and no layer
        waits for rows: in a step that decodes alone. Returns whether that is done."""
        return False

    def _append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Copy the step's new rows [rows, kv_heads, head_dim] to their contexts."""
        for entry in self.entries:
            if entry.failed is None:
                entry.context.write(layer, entry.start, k[entry.where], v[entry.where])

    def _attention(self, layer: int, attention: Attention, q: Tensor) -> Tensor:
        """Attend with all rows of the step to their contexts on the device: [rows, heads, head_dim]."""
        out = torch.empty_like(q)
        for entry in self.whole:
            if entry.failed is not None:
                out[entry.where] = 0  # void, but it must not become NaN: the forward goes on for the others
                continue
            keys, values = entry.context.read(layer, entry.context.pages(layer).first, entry.stop)
            out[entry.where] = self._attended(entry, attention, q[entry.where], keys, values)
        return out

    def _attended(self, entry: BatchEntry, attention: Attention, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend with one entry's new rows to all rows of its context that one layer holds."""
        if not 1 < len(q) <= DECODED or q.device.type != "cpu":
            return attention.attend(q, keys, values)
        # Query by query: what each is rounded to does not depend on the others.
        first = len(keys) - len(q) + 1
        each = [attention.attend(q[at : at + 1], keys[: first + at], values[: first + at]) for at in range(len(q))]
        return torch.cat(each)


MOST_AT_ONCE = 64  # rows of a step that is one call: with more of them, calls for each layer do not count
PROBE_ROWS, PROBE_LAYERS, PROBE_ROUNDS = 1024, 8, 2
GRAPH_ROUNDS = 5
PROBE_QUERIES = (1, 2, 4, 8, 16, 32)
MIN_PROBE_ROWS = 16


@dataclass(frozen=True, slots=True)
class RelayCosts:
    """Predict seconds of attention in one layer.

    `rows`: seconds for each row read, by the number of queries that read it, ascending from 1. `call`: seconds for one more
    segment, `merged`: for each query that reads that segment.
    """

    rows: tuple[tuple[int, float], ...]
    call: float
    merged: float

    @classmethod
    def measured(cls, shape: KVShape, heads: int) -> RelayCosts:
        """Measure this device for a model's shape, in about a tenth of a second. The layers take turns, so that rows come from
        memory or from the processor's caches as they will later."""
        layers = min(shape.layers, PROBE_LAYERS)
        size = (layers, 2, shape.kv_heads, PROBE_ROWS, shape.head_dim)
        data = Pages.of(torch.ones(size, dtype=shape.dtype, device=shape.device))
        # Steps that decode alone are graphs where Triton's kernels run.
        recorded = possible(shape.device, shape.dtype, shape.head_dim, heads, shape.kv_heads, 0.0)
        q = torch.ones((PROBE_QUERIES[-1], heads, shape.head_dim), dtype=shape.dtype, device=shape.device)

        def seconds(*reads: Read) -> float:
            prepared = Reads(reads)
            out = torch.zeros(q.shape, dtype=torch.float32, device=shape.device)
            lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=shape.device)
            return _fastest(shape.device, layers, lambda layer: prepared.attend(layer, q, 1.0, out, lse), recorded)

        rows = []
        for number in PROBE_QUERIES:
            few, many = (seconds(Read(data, 0, stop, range(number))) for stop in (MIN_PROBE_ROWS, PROBE_ROWS))
            rows.append((number, max(0.0, many - few) / (PROBE_ROWS - MIN_PROBE_ROWS)))
        added = []
        for number in (2, PROBE_QUERIES[-1]):
            own = [Read(data, 0, MIN_PROBE_ROWS, (i,)) for i in range(number)]
            added.append(max(0.0, seconds(*own, Read(data, 0, MIN_PROBE_ROWS, range(number))) - seconds(*own)))
        merged = max(0.0, (added[1] - added[0]) / (PROBE_QUERIES[-1] - 2))
        return cls(tuple(rows), max(added[0] - 2 * merged, min(added)), merged)

    def reading(self, queries: float) -> float:
        """Predict the seconds for a row that `queries` queries read at once."""
        (low, a), *rest = self.rows
        for high, b in rest:
            if queries <= high or high == self.rows[-1][0]:
                return max(0.0, a + (b - a) * (queries - low) / (high - low))
            low, a = high, b
        return a

    def gain(self, rows: int, jobs: int, queries: int) -> float:
        """Predict the seconds saved per layer by reading `rows` rows once for `jobs` jobs with `queries` queries in all."""
        apart = jobs * self.reading(queries / jobs)
        return rows * (apart - self.reading(queries)) - self.call - queries * self.merged


def _fastest(device: torch.device, layers: int, call: Callable[[int], object], recorded: bool) -> float:
    """Measure the seconds of a layer's call, the fastest. `recorded`: in a CUDA graph, where launches cost next to nothing."""
    if recorded:

        def all_layers() -> None:
            for layer in range(layers):
                call(layer)

        all_layers()  # builds what kernels are needed
        # As steps are recorded: torch's generator of random numbers takes no recordings of both kinds.
        with contextlib.suppress(NotRecorded), torch.inference_mode():
            graph, _ = Recorder(device).record(all_layers)
            return min(_seconds(device, graph.replay) for _ in range(GRAPH_ROUNDS)) / layers
    return min(_seconds(device, partial(call, layer % layers)) for layer in range(layers * PROBE_ROUNDS))


def _seconds(device: torch.device, call: Callable[[], object]) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


@dataclass(slots=True)
class RelayGroup:
    """Hold entries that read rows [start, stop) together, from the context of the first entry whose rows have come.
    `queries`: the rows of the batch that read."""

    entries: list[BatchEntry]
    start: int
    stop: int
    queries: list[int]


def groups_of(shares: Sequence[Share], entries: Sequence[BatchEntry], costs: RelayCosts | None) -> list[RelayGroup]:
    """Choose the shares that are faster to read together; without costs, all shares. Where an outer share is not chosen, the
    shares within read its rows. Shares end with a whole block, so that what attention is rounded to does not depend on them."""
    by_job = {entry.job: entry for entry in entries}
    own_from: dict[int, int] = {}
    found: list[RelayGroup] = []
    for share in shares:
        members = [by_job[job] for job in share.jobs]
        start, stop = own_from.get(share.jobs[0], 0), share.stop // BLOCK_ROWS * BLOCK_ROWS
        queries = sum(entry.stop - entry.start for entry in members)
        if stop <= start or (costs is not None and costs.gain(stop - start, len(members), queries) <= 0):
            continue
        own_from.update(dict.fromkeys(share.jobs, stop))
        found.append(RelayGroup(members, start, stop, sorted(row for entry in members for row in _rows(entry))))
    for entry in entries:
        entry.own_from = own_from.get(entry.job, 0)
    return found


def _rows(entry: BatchEntry) -> range:
    """List the entry's rows of the batch."""
    return range(entry.where.start, entry.where.stop)


def _read(
    entry: BatchEntry, layer: int, start: int, stop: int, queries: Sequence[int], causal: bool = False, window: int = 0
) -> Read:
    """Make a read of rows [start, stop) of an entry's context, in a layer and all that hold the same rows."""
    pages = entry.context.pages(layer)
    assert pages.first <= start, f"rows from {start} on are not held in layer {layer}"
    return Read(pages, start, stop, queries, causal, window)


def depth_of(groups: Sequence[RelayGroup]) -> int:
    """Compute the deepest nesting: the most groups that one entry is in."""
    depth: dict[int, int] = {}
    for group in groups:
        for entry in group.entries:
            depth[entry.job] = depth.get(entry.job, 0) + 1
    return max(depth.values(), default=0)


class Results:
    """Outputs and log-sum-exps of a step's queries, in the same memory for each layer."""

    def __init__(self) -> None:
        self._found: tuple[Tensor, Tensor] | None = None

    def cleared(self, attention: Attention, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a layer's segments are merged into: for `q` [rows, heads, head_dim] float32 of its shape, and [rows, heads]."""
        if self._found is None:
            out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
            self._found = out, torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        out, lse = self._found
        if attention.sinks is None:
            lse.fill_(-torch.inf)
        else:  # a row of zeros
            out.zero_()
            lse.copy_(attention.sinks)
        return out, lse


class RelayAttend(CachedAttend):
    """Attend with one call for each layer: shared rows are read once, and own rows by each entry. An `Attend` for one step."""

    def __init__(
        self,
        entries: list[BatchEntry],
        angles: LayerRotations | None,
        gatherer: Gatherer,
        tee: Tee,
        groups: list[RelayGroup],
        whole: list[BatchEntry] | None = None,
    ) -> None:
        super().__init__(entries, angles, gatherer, tee, whole)
        self._groups = groups
        self._failed: list[int] | None = None  # jobs that `_reads` were made without
        self._shape = entries[0].context.shape
        self._reads: dict[tuple[bool, int], Reads | None] = {}  # by group of layers and window
        self._results = Results()
        self._appends: dict[bool, Appends | None] = {}  # by group of layers
        self._device_rows: dict[bool, DeviceRows] = {}  # by group of layers

    def go_through(self, decoder: Decoder, hidden: Hidden) -> bool:
        if not decoder.whole or len(hidden.x) > MOST_AT_ONCE or self.beside is not None:
            return False
        if self._gatherer.gathering or self._tee.prefilling:
            return False
        own = []
        for layer, of_layer in enumerate(decoder.layers):
            appends, reads = self._appends_of(layer), self._reads_of(layer, of_layer.attention)
            if appends is None or reads is None or reads.table is None:
                return False
            rotation = None if self._angles is None else self._angles.at(layer)
            own.append(LayerRows(appends, reads, self._shape.place(layer)[1], rotation))
        qkv = decoder.go_through(hidden, own)
        self._tee.layers(qkv[:, :, decoder.spec.heads :].view(len(qkv), len(hidden.x), 2, decoder.spec.kv_heads, -1))
        return True

    def _place(self, layer: int, attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.device.type == "cuda":
            self._gatherer.layer(layer)
            recent, number = self._shape.place(layer)
            if recent not in self._device_rows:
                new = [_read(entry, layer, entry.start, entry.stop, ()) for entry in self.entries]
                self._device_rows[recent] = DeviceRows([(read.pages, read.start, read.stop) for read in new])
            rotation = None if self._angles is None else self._angles.at(layer)
            placed = self._device_rows[recent].place(number, q, k, v, rotation)
            if placed is not None:
                return placed
        return super()._place(layer, attention, q, k, v)

    def _appends_of(self, layer: int) -> Appends | None:
        recent = self._shape.place(layer)[0]
        if recent not in self._appends:
            new = [_read(entry, layer, entry.start, entry.stop, _rows(entry)) for entry in self.entries]
            self._appends[recent] = Appends(new) if Appends.possible(new) else None
        return self._appends[recent]

    def _reads_of(self, layer: int, attention: Attention) -> Reads | None:
        """Prepare the reads of the entries that have not failed. Entries fail while layers are gathered, which is rare."""
        failed = [entry.job for entry in self.whole if entry.failed is not None]
        if failed != self._failed:
            self._failed, self._reads = failed, {}
        which = self._shape.place(layer)[0], attention.window
        if which not in self._reads:
            reads = self.wanted(layer, attention)
            self._reads[which] = Reads(reads, cap=attention.cap) if reads else None
        return self._reads[which]

    def _append(self, layer: int, k: Tensor, v: Tensor) -> None:
        appends = self._appends_of(layer)
        if appends is None:
            super()._append(layer, k, v)
        else:  # failed entries too: their rows do not count
            appends.write(self._shape.place(layer)[1], k, v)

    def _attention(self, layer: int, attention: Attention, q: Tensor) -> Tensor:
        out, lse = self._results.cleared(attention, q)
        reads = self._reads_of(layer, attention)
        if reads is not None:
            reads.attend(self._shape.place(layer)[1], q, attention.scale, out, lse)
        return out.to(q.dtype)

    def wanted(self, layer: int, attention: Attention) -> list[Read]:
        """List the reads, in such a layer, of entries that have not failed: the groups' rows, in order, and each entry's own rows.

        A window that an entry's context does not outgrow changes nothing. Other entries read what their windows show them by
        themselves, since each sees another part of shared rows, and soon none.
        """
        window = attention.window
        reads, found = [], [entry for entry in self.whole if entry.failed is None]
        inside = {entry.job for entry in found if not window or entry.stop <= window}
        for group in sorted(self._groups, key=lambda group: group.start):
            members = [entry for entry in group.entries if entry.job in inside]
            if len(members) == len(group.entries):
                reads.append(_read(members[0], layer, group.start, group.stop, group.queries))
            elif members:
                queries = sorted(row for entry in members for row in _rows(entry))
                reads.append(_read(members[0], layer, group.start, group.stop, queries))
        for entry in found:
            if entry.job in inside:
                several = entry.stop - entry.start > 1
                reads.append(_read(entry, layer, entry.own_from, entry.stop, _rows(entry), several))
            else:
                start = max(0, entry.start + 1 - window) // STRIDE * STRIDE
                reads.append(_read(entry, layer, start, entry.stop, _rows(entry), True, window))
        return reads
