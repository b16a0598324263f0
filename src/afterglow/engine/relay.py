"""RelayAttention: what several jobs of a step have in common is read once for all of them.

Exact attention over a shared segment with all their queries stacked, over each job's own rows apart, merged by their
log-sum-exp (RelayAttention §3.3, algorithm 1; spec R1-R8). Which shares are worth it is decided from what attention takes
on this machine: the paper's count of memory reads (§3.4) with measured constants, so that it never pays for what it does
not gain.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from afterglow.engine.attend import CachedAttend
from afterglow.engine.context import KVShape
from afterglow.engine.gather import Gatherer, Part
from afterglow.engine.tee import Tee
from afterglow.kernels.decode import Appends, Read, Reads
from afterglow.kernels.rope import Rotation
from afterglow.model.decoder import Attention
from afterglow.plan.step import Share

PROBE_ROWS, PROBE_LAYERS, PROBE_ROUNDS = 1024, 8, 2
PROBE_QUERIES = (1, 2, 4, 8, 16, 32)
FEW_ROWS = 16


@dataclass(frozen=True, slots=True)
class RelayCosts:
    """Seconds of attention in one layer: `rows`, for each row read, by how many queries read it (growing numbers, from 1
    on); `call` for one more segment to read, and `merged` for each query that reads it."""

    rows: tuple[tuple[int, float], ...]
    call: float
    merged: float

    @classmethod
    def measured(cls, shape: KVShape, heads: int) -> RelayCosts:
        """Of this device, for a model's shape: about a tenth of a second. The layers take turns, so that those of a large
        model come from memory, and those of a small one from where they will be."""
        layers = min(shape.layers, PROBE_LAYERS)
        size = (layers, 2, shape.kv_heads, PROBE_ROWS, shape.head_dim)
        data = torch.ones(size, dtype=shape.dtype, device=shape.device)
        q = torch.ones((PROBE_QUERIES[-1], heads, shape.head_dim), dtype=shape.dtype, device=shape.device)

        def seconds(*reads: Read) -> float:
            prepared = Reads(reads)
            out = torch.zeros(q.shape, dtype=torch.float32, device=shape.device)
            lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=shape.device)
            return _fastest(shape.device, layers, lambda layer: prepared.attend(layer, q, 1.0, out, lse))

        rows = []
        for number in PROBE_QUERIES:
            few, many = (seconds(Read(data, 0, stop, range(number))) for stop in (FEW_ROWS, PROBE_ROWS))
            rows.append((number, max(0.0, many - few) / (PROBE_ROWS - FEW_ROWS)))
        added = []
        for number in (2, PROBE_QUERIES[-1]):
            own = [Read(data, 0, FEW_ROWS, (i,)) for i in range(number)]
            added.append(max(0.0, seconds(*own, Read(data, 0, FEW_ROWS, range(number))) - seconds(*own)))
        merged = max(0.0, (added[1] - added[0]) / (PROBE_QUERIES[-1] - 2))
        return cls(tuple(rows), max(added[0] - 2 * merged, min(added)), merged)

    def reading(self, queries: float) -> float:
        """Seconds for a row that so many queries read at once."""
        (low, a), *rest = self.rows
        for high, b in rest:
            if queries <= high or high == self.rows[-1][0]:
                return max(0.0, a + (b - a) * (queries - low) / (high - low))
            low, a = high, b
        return a

    def gain(self, rows: int, jobs: int, queries: int) -> float:
        """Seconds saved per layer by reading `rows` rows once for `jobs` jobs with so many queries in all."""
        apart = jobs * self.reading(queries / jobs)
        return rows * (apart - self.reading(queries)) - self.call - queries * self.merged


def _fastest(device: torch.device, layers: int, call: Callable[[int], object]) -> float:
    best = float("inf")
    for layer in range(layers * PROBE_ROUNDS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        call(layer % layers)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best


@dataclass(slots=True)
class Group:
    """Rows [start, stop) that some of the step's parts read together: those of the first part whose rows have come.
    `queries`: the rows of the batch that ask."""

    parts: list[Part]
    start: int
    stop: int
    queries: list[int]


def groups_of(shares: Sequence[Share], parts: Sequence[Part], costs: RelayCosts | None) -> list[Group]:
    """The shares that are worth it (all of them, without costs). What an outer share that is not worth it would have read
    is read by those within."""
    by_job = {part.job: part for part in parts}
    own_from: dict[int, int] = {}
    found: list[Group] = []
    for share in shares:
        members = [by_job[job] for job in share.jobs]
        start = own_from.get(share.jobs[0], 0)
        queries = sum(part.stop - part.start for part in members)
        if costs is not None and costs.gain(share.stop - start, len(members), queries) <= 0:
            continue
        own_from.update(dict.fromkeys(share.jobs, share.stop))
        found.append(Group(members, start, share.stop, sorted(row for part in members for row in _rows(part))))
    for part in parts:
        part.own_from = own_from.get(part.job, 0)
    return found


def _rows(part: Part) -> range:
    """The part's rows of the batch."""
    return range(part.where.start, part.where.stop)


def depth_of(groups: Sequence[Group]) -> int:
    """How many groups the part that is in the most of them is in."""
    depth: dict[int, int] = {}
    for group in groups:
        for part in group.parts:
            depth[part.job] = depth.get(part.job, 0) + 1
    return max(depth.values(), default=0)


class RelayAttend(CachedAttend):
    """`Attend` for one step: what parts share is read once for all of them, and what each reads by itself, in one go."""

    def __init__(
        self,
        parts: list[Part],
        angles: Rotation | None,
        gatherer: Gatherer,
        tee: Tee,
        groups: list[Group],
        whole: list[Part] | None = None,
    ) -> None:
        super().__init__(parts, angles, gatherer, tee, whole)
        self._groups = groups
        self._failed: list[int] | None = None  # parts that `_reads` was made without
        self._reads: Reads | None = None
        self._found: tuple[Tensor, Tensor] | None = None  # what attention finds: each layer's in the same place
        new = [Read(part.context.data, part.start, part.stop, _rows(part)) for part in parts]
        self._appends = Appends(new) if Appends.possible(new) else None

    def _append(self, layer: int, k: Tensor, v: Tensor) -> None:
        if self._appends is None:
            super()._append(layer, k, v)
        else:  # also of parts that have failed: their rows do not count
            self._appends.write(layer, k, v)

    def _attention(self, layer: int, attention: Attention, q: Tensor) -> Tensor:
        # Parts fail while layers are gathered, hardly ever.
        failed = [part.job for part in self.whole if part.failed is not None]
        if failed != self._failed:
            self._failed, self._reads = failed, self._prepared()
        if self._found is None:
            out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
            self._found = out, torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        out, lse = self._found
        lse.fill_(-torch.inf)
        if self._reads is not None:
            self._reads.attend(layer, q, attention.scale, out, lse)
        return out.to(q.dtype)

    def _prepared(self) -> Reads | None:
        """What is read by parts that have not failed: groups' rows, the largest first, and each one's own."""
        reads = []
        for group in sorted(self._groups, key=lambda group: group.start - group.stop):
            whole = next((part for part in group.parts if part.failed is None), None)
            if whole is not None:
                reads.append(Read(whole.context.data, group.start, group.stop, group.queries))
        reads += [
            Read(part.context.data, part.own_from, part.stop, _rows(part), part.stop - part.start > 1)
            for part in self.whole
            if part.failed is None
        ]
        return Reads(reads) if reads else None
