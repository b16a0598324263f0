"""How long identification takes, next to the rest of a layer: OPT-6.7B's shape, all in memory, nothing to load.

With loads to wait for its share of the time to first token is smaller.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from afterglow.bench.report import interleaved, spread
from afterglow.importance.select import SelectionRules, all_sums, fall_back, judge, probe_sums, probes_of
from afterglow.kernels.attention import attend, merge

HEADS, HEAD_DIM, FFN = 32, 128, 16384
HIDDEN = HEADS * HEAD_DIM
QUERY = 64  # new tokens


def measure(rows: int, repeats: int) -> dict[str, Any]:
    """Measure the milliseconds of one layer's parts with a prefix of `rows`; a quarter of the rows is attended to."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(FFN, HIDDEN, generator=generator)
    x = torch.randn(QUERY, HIDDEN, generator=generator)
    keys = torch.randn(rows, HEADS, HEAD_DIM, generator=generator)
    probe_keys = keys[:, :3].contiguous()  # a sidecar
    q, own = (torch.randn(QUERY, HEADS, HEAD_DIM, generator=generator) for _ in range(2))
    scale, rules, probes = HEAD_DIM**-0.5, SelectionRules(force="pass"), probes_of(HEADS, HEADS)
    k = rules.keep(rows)
    assert k is not None
    kept = keys[:k].clone()
    voted = probe_sums(probes, q, probe_keys, own, scale=scale)
    verdict = judge(voted, k, rules)

    def identify() -> None:
        judge(probe_sums(probes, q, probe_keys, own, scale=scale), k, rules)

    def all_heads() -> None:
        fall_back(all_sums(probes, voted, q, keys, own, scale=scale), k, rules, verdict)

    def gather() -> None:
        assert verdict.selection is not None
        keys[verdict.selection.rows]

    def rest() -> Tensor:
        for _ in range(4):  # queries, keys, values, out
            x @ weights[:HIDDEN].T
        out = merge((attend(q, kept, kept, scale=scale, causal=False), attend(q, own, own, scale=scale, causal=True)))
        inner = x @ weights.T
        return out[0].flatten(1) + inner @ weights

    parts: dict[str, Callable[[], object]] = {
        "identify": identify,
        "all_heads": all_heads,
        "gather_keys": gather,
        "rest": rest,
    }
    found = interleaved({name: lambda part=part: _timed(part) for name, part in parts.items()}, repeats)  # type: ignore[misc]
    times = {name: statistics.median(samples) for name, samples in found.items()}
    return {
        "rows": rows,
        "new_tokens": QUERY,
        "milliseconds": {name: round(1e3 * seconds, 2) for name, seconds in times.items()},
        "share_pass": round(times["identify"] / (times["identify"] + times["rest"]), 4),
        "share_fallback": round(
            (times["identify"] + times["all_heads"]) / (times["identify"] + times["all_heads"] + times["rest"]), 4
        ),
        "spread": round(spread(found["identify"]), 3),
    }


def _timed(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began
