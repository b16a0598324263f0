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
from afterglow.kernels.attention import attend, merge
from afterglow.kernels.rope import Rotation
from afterglow.model.decoder import Attention
from afterglow.plan.step import Share

PROBE_ROWS, PROBE_QUERIES, PROBE_ROUNDS = 1024, 16, 5


@dataclass(frozen=True, slots=True)
class RelayCosts:
    """Seconds of attention in one layer: `call` for each call, `row` for each row read, `product` for each row and query;
    `merge` for each merge of two parts, and `merged` for each query of it."""

    call: float
    row: float
    product: float
    merge: float
    merged: float

    @classmethod
    def measured(cls, shape: KVShape, heads: int) -> RelayCosts:
        """Of this device, for a model's shape. A few milliseconds."""
        keys, values = torch.zeros(
            (2, shape.kv_heads, PROBE_ROWS, shape.head_dim), dtype=shape.dtype, device=shape.device
        ).transpose(1, 2)
        few = torch.zeros((1, heads, shape.head_dim), dtype=shape.dtype, device=shape.device)
        many = few.expand(PROBE_QUERIES, -1, -1).contiguous()

        def seconds(q: Tensor, rows: int) -> float:
            return _fastest(shape.device, lambda: attend(q, keys[:rows], values[:rows], scale=1.0, causal=False))

        call, one, all_ = seconds(few, 16), seconds(few, PROBE_ROWS), seconds(many, PROBE_ROWS)
        product = max(0.0, (all_ - one) / (PROBE_ROWS * (PROBE_QUERIES - 1)))
        row = max(0.0, (one - call) / PROBE_ROWS - product)
        part = attend(few, keys[:16], values[:16], scale=1.0, causal=False)
        parts = attend(many, keys[:16], values[:16], scale=1.0, causal=False)
        first = _fastest(shape.device, lambda: merge((part, part)))
        merged = max(0.0, (_fastest(shape.device, lambda: merge((parts, parts))) - first) / (PROBE_QUERIES - 1))
        return cls(call, row, product, first + 2 * call, merged)

    def gain(self, rows: int, jobs: int, queries: int) -> float:
        """Seconds saved per layer by reading `rows` rows once for `jobs` jobs with so many queries in all. The products
        are the same either way (spec R5; under grouped heads a row is read once for its heads in both)."""
        return rows * self.row * (jobs - 1) - self.call - self.merge - queries * self.merged


def _fastest(device: torch.device, call: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(PROBE_ROUNDS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best


@dataclass(slots=True)
class Group:
    """Rows [start, stop) that some of the step's parts read together: those of the first part whose rows have come.
    `where`: the rows of the batch that ask."""

    parts: list[Part]
    start: int
    stop: int
    where: slice | Tensor


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
        found.append(Group(members, start, share.stop, _rows_of(members)))
    for part in parts:
        part.own_from = own_from.get(part.job, 0)
    return found


def _rows_of(parts: Sequence[Part]) -> slice | Tensor:
    """The rows of the batch that belong to parts, as a slice where they lie side by side."""
    parts = sorted(parts, key=lambda part: part.where.start)
    if all(a.where.stop == b.where.start for a, b in zip(parts, parts[1:], strict=False)):
        return slice(parts[0].where.start, parts[-1].where.stop)
    device = parts[0].context.shape.device
    return torch.cat([torch.arange(part.where.start, part.where.stop, device=device) for part in parts])


def depth_of(groups: Sequence[Group]) -> int:
    """How many groups the part that is in the most of them is in."""
    depth: dict[int, int] = {}
    for group in groups:
        for part in group.parts:
            depth[part.job] = depth.get(part.job, 0) + 1
    return max(depth.values(), default=0)


class RelayAttend(CachedAttend):
    """`Attend` for one step in which parts share rows."""

    def __init__(
        self, parts: list[Part], angles: Rotation | None, gatherer: Gatherer, tee: Tee, groups: list[Group]
    ) -> None:
        super().__init__(parts, angles, gatherer, tee)
        self._groups = groups

    def _attention(self, layer: int, attention: Attention, q: Tensor) -> Tensor:
        out = torch.zeros_like(q)
        lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
        for part in self.parts:
            if part.failed is None:
                keys, values = part.context.keys(layer), part.context.values(layer)
                own = slice(part.own_from, part.stop)
                out[part.where], lse[part.where] = attend(
                    q[part.where], keys[own], values[own], scale=attention.scale, causal=True
                )
        for group in self._groups:
            whole = next((part for part in group.parts if part.failed is None), None)
            if whole is None:
                continue
            rows = slice(group.start, group.stop)
            keys, values = whole.context.keys(layer)[rows], whole.context.values(layer)[rows]
            shared = attend(q[group.where], keys, values, scale=attention.scale, causal=False)
            out[group.where], lse[group.where] = merge(((out[group.where], lse[group.where]), shared))
        return out
