"""The last ten minutes of the engine's numbers and of requests, for the dashboard."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from afterglow.server.metrics.collector import PROBLEMS, flatten
from afterglow.server.metrics.metric_names import MISSES, TIERS, number_at

RECENT_S = 600.0
SAMPLES = 600  # of `RECENT_S`, one a second
REQUESTS = 2000  # the latest ones whose time to the first token is kept

OF_THE_SERVER = ("process_memory_bytes", *(f"http_{problem}" for problem in PROBLEMS))  # unknown to the engine
# The numbers that the page draws: the page's name -> the path in the engine's statistics.
LEVELS = {
    "running": "plan.running",
    "waiting": "plan.waiting + plan.loading",
    "plan_loading": "plan.loading",
    **{f"{tier}_used_bytes": f"tiers.{tier}.used" for tier in TIERS},
    "plan_sessions": "plan.sessions",
    "plan_prefetch_window": "plan.prefetch_window",
    "plan_eviction_window": "plan.eviction_window",
    "plan_read_rate": "plan.read_rate",
    "plan_prefill_rate": "plan.prefill_rate",
}
TOTALS = {  # since the start; the page takes differences
    "prompt_tokens": "engine.prompt_tokens",
    "generation_tokens": "engine.generation_tokens",
    "requests_error": "engine.finished.error",
    **{f"cached_tokens_{tier}": f"engine.cached_tokens.{tier}" for tier in TIERS},
    "cached_tokens_disk": "engine.cached_tokens.disk + engine.cached_tokens.shared",  # which come by way of the disk
    **{
        f"plan_{name}": f"plan.counters.{name}"
        for name in (
            *(f"missed_{why}" for why in MISSES),
            "recomputed",
            "prefetches",
            *(f"prefetches_{how}" for how in ("useful", "late", "wasted")),
            "thrashed",
        )
    },
    **{f"{tier}_evictions": f"plan.counters.evicted_{tier}" for tier in TIERS},
    "load_bytes": "store.disk_read_bytes",
    "load_seconds": "store.disk_read_seconds",
    "store_bytes": "store.disk_write_bytes",
    "store_seconds": "store.disk_write_seconds",
    "store_host_save_bytes": "store.host_save_bytes",
    "store_host_save_seconds": "store.host_save_seconds",
}
PATHS = {**LEVELS, **TOTALS}
FIELDS = (*OF_THE_SERVER, *PATHS)

# (name, from this share of the prompt on) of requests, by how much of their prompt was cached.
# "none": a template's first tokens are nearly always cached, which is no reuse worth the name.
SHARES = (("none", 0.0), ("some", 0.1), ("half", 0.5), ("most", 0.9))
WITHOUT, WITH = ("none",), ("half", "most")  # compared at like lengths: a long prompt takes longer in any case
SHORTEST = 64  # tokens; prompts up to twice as long are alike


class Sample(NamedTuple):
    time: float  # seconds since 1970
    values: tuple[float | None, ...]  # of FIELDS; None: not known (yet)


class Answered(NamedTuple):
    """A request that has had its first token."""

    sample: int  # the number of the next sample after it
    time: float
    ttft: float
    prompt: int  # tokens, `cached` ones included
    cached: int
    per_token: float | None = None  # mean seconds of its tokens after the first

    @property
    def length(self) -> int:
        """Return the length class of the prompt: the power of two that holds it."""
        return max(SHORTEST, 1 << (self.prompt - 1).bit_length())

    @property
    def share(self) -> str:
        """Return the class of the cached share of the prompt."""
        part = self.cached / self.prompt if self.prompt else 0.0
        return next(name for name, least in reversed(SHARES) if part >= least)


class History:
    """The latest samples and requests. Bounded; lives on the event loop."""

    def __init__(self, samples: int = SAMPLES, requests: int = REQUESTS) -> None:
        self.next = 0  # the number that the next sample gets
        self._samples: deque[Sample] = deque(maxlen=samples)
        self._requests: deque[Answered] = deque(maxlen=requests)

    def sample(self, stats: Any, now: float, server: Mapping[str, float | None] | None = None) -> None:
        """Add a sample. `server`: numbers that the engine does not know."""
        table = flatten(stats)
        found = {**{name: number_at(table, path) for name, path in PATHS.items()}, **(server or {})}
        self._samples.append(Sample(now, tuple(found.get(name) for name in FIELDS)))
        self.next += 1

    def answered(self, now: float, ttft: float, prompt: int, cached: int, per_token: float | None = None) -> None:
        self._requests.append(Answered(self.next, now, ttft, prompt, cached, per_token))

    def after(self, number: int) -> dict[str, Any]:
        """Return the samples after a given one, column by column."""
        skip = max(0, number + 1 - (self.next - len(self._samples)))
        found = list(islice(self._samples, skip, None))
        columns: Sequence[Sequence[float | None]] = list(zip(*(s.values for s in found), strict=True))
        # Requests since the last sample come with the next one: a page gets each request once.
        news = [r for r in self._requests if number < r.sample < self.next]
        return {
            "last": self.next - 1,
            "time": [round(s.time, 2) for s in found],
            "values": {name: columns[i] if columns else () for i, name in enumerate(FIELDS)},
            "requests": [(round(r.time, 2), round(r.ttft, 5), r.prompt, r.cached, r.share) for r in news],
        }

    def _recent(self, now: float) -> list[Answered]:
        return [r for r in self._requests if r.time > now - RECENT_S]

    def ttft(self, now: float) -> dict[str, Any]:
        """Compare times to the first token with and without reuse, in the last ten minutes, at like lengths of the prompt.
        `sooner`: how many times as fast reuse was, over the lengths that have both kinds of requests."""
        recent = self._recent(now)
        lengths, weights, logs = [], 0, 0.0
        for length in sorted({r.length for r in recent}):
            groups = [
                [r.ttft for r in recent if r.length == length and r.share in shares] for shares in (WITHOUT, WITH)
            ]
            without, reused = (
                {"requests": len(g), "median": _quantile(g, 0.5), "p95": _quantile(g, 0.95)} for g in groups
            )
            lengths.append({"tokens": length, "without": without, "with": reused})
            slow, fast = without["median"], reused["median"]
            if slow is not None and fast:
                weight = min(map(len, groups))
                weights += weight
                logs += weight * math.log(slow / fast)
        return {"lengths": lengths, "sooner": math.exp(logs / weights) if weights else None}

    def per_token(self, now: float) -> dict[str, Any]:
        """Return the seconds between tokens, over the replies of the last ten minutes."""
        times = [r.per_token for r in self._recent(now) if r.per_token is not None]
        return {"requests": len(times), "median": _quantile(times, 0.5), "p95": _quantile(times, 0.95)}


def _quantile(values: Sequence[float], part: float) -> float | None:
    """Return the smallest value that at least this part of the values do not exceed."""
    ordered = sorted(values)
    return ordered[math.ceil(part * len(ordered)) - 1] if ordered else None
