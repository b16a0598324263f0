"""Prometheus metrics: vLLM's names where the meaning is the same, `afterglow:` for the rest.

The engine's own numbers are read when they are asked for, from a snapshot that never waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Literal, NamedTuple, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
_LATENCY = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
_GAP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)


class Row(NamedTuple):
    """How a field of the engine's statistics is published."""

    field: str
    name: str
    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[tuple[str, str], ...] = ()


def _by(label: str, value: str) -> tuple[tuple[str, str], ...]:
    return ((label, value),)


ROWS = (
    Row("running", "vllm:num_requests_running", "gauge", "Requests in the running batch."),
    Row("waiting", "vllm:num_requests_waiting", "gauge", "Requests waiting to be scheduled."),
    Row("prompt_tokens", "vllm:prompt_tokens", "counter", "Prompt tokens, cached ones included."),
    Row("generation_tokens", "vllm:generation_tokens", "counter", "Generated tokens."),
    Row("prompt_tokens", "vllm:prefix_cache_queries", "counter", "Prompt tokens looked up in the cache."),
    Row("prefilled_tokens", "afterglow:prefilled_tokens", "counter", "Prompt tokens that were computed."),
    Row("extents", "afterglow:extents", "gauge", "Stored extents."),
    Row("steps", "afterglow:steps", "counter", "Steps of the engine."),
    Row("plan_seconds", "afterglow:plan_seconds", "counter", "Time spent on planning and bookkeeping."),
    Row("forward_seconds", "afterglow:forward_seconds", "counter", "Time spent on forward passes."),
    Row("load_bytes", "vllm:kv_offload_load_bytes", "counter", "Bytes of KV read from disk."),
    Row("load_seconds", "vllm:kv_offload_load_time", "counter", "Seconds spent on reading KV."),
    Row("store_bytes", "vllm:kv_offload_store_bytes", "counter", "Bytes of KV written to disk."),
    Row("store_seconds", "vllm:kv_offload_store_time", "counter", "Seconds spent on writing KV."),
    Row("damaged_extents", "afterglow:damaged_extents", "counter", "Extents dropped for damage."),
    Row("load_failures", "afterglow:load_failures", "counter", "Failed reads of KV: rows were recomputed."),
    Row("store_failures", "afterglow:store_failures", "counter", "Failed writes of KV: rows are forgotten."),
    Row("unsaved_rows", "afterglow:unsaved_rows", "counter", "New rows for which no host memory was free."),
    Row("preemptions", "vllm:num_preemptions", "counter", "Running requests put back into the queue."),
    *(
        Row(f"cached_tokens_{tier}", "vllm:prompt_tokens_cached_by_source", "counter",
            "Prompt tokens that were not computed, by the tier they were in.", _by("source", tier))
        for tier in ("device", "host", "disk")
    ),
    *(
        Row(f"requests_{reason}", "vllm:request_success", "counter", "Finished requests.",
            _by("finished_reason", reason))
        for reason in ("stop", "length")
    ),
    *(
        Row(f"requests_{reason}", "afterglow:requests_unfinished", "counter", "Requests that ended early.",
            _by("reason", reason))
        for reason in ("cancelled", "error")
    ),
    *(
        Row(f"{tier}_{what}_bytes", f"afterglow:tier_{what}_bytes", "gauge",
            f"Bytes of KV a tier {'holds' if what == 'used' else 'may hold'}.", _by("tier", tier))
        for what in ("used", "capacity")
        for tier in ("device", "host", "disk")
    ),
    *(
        Row(f"{tier}_evictions", "afterglow:evictions", "counter", "Evictions.", _by("tier", tier))
        for tier in ("device", "host", "disk")
    ),
)  # fmt: skip


class HasStats(Protocol):
    @property
    def healthy(self) -> bool: ...
    def stats(self) -> Any: ...


class HasReplies(Protocol):
    spliced: int
    retokenised: int


class Metrics:
    """The registry of one server, and the few numbers that only HTTP knows."""

    def __init__(self, engine: HasStats, text: HasReplies, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model_name
        self.registry.register(_EngineCollector(engine, text, model_name))
        self.ttft = self._histogram("vllm:time_to_first_token_seconds", "Time to first token.", _TTFT)
        self.latency = self._histogram("vllm:e2e_request_latency_seconds", "Time of whole requests.", _LATENCY)
        self.inter_token = self._histogram("vllm:inter_token_latency_seconds", "Time between tokens.", _GAP)
        self._responses = Counter(
            "afterglow:http_responses", "HTTP responses by status.", ("status",), registry=self.registry
        )

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(name, help, ("model_name",), buckets=buckets, registry=self.registry)
        return family.labels(self._model)

    def response(self, status: int) -> None:
        self._responses.labels(str(status)).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    def __init__(self, engine: HasStats, text: HasReplies, model_name: str) -> None:
        self._engine = engine
        self._text = text
        self._model = model_name

    def describe(self) -> list[Metric]:
        return []  # or registering would ask the engine

    def collect(self) -> Iterator[Metric]:
        stats = asdict(self._engine.stats())
        families: dict[str, Metric] = {}
        for row in ROWS:
            if row.field in stats:
                self._add(families, row.name, row.kind, row.help, row.labels, stats[row.field])
        for name in stats.keys() - {row.field for row in ROWS}:
            # A number that was added to the engine and not to the table is better shown plainly than not at
            # all.
            self._add(families, f"afterglow:{name}", "gauge", f"Engine statistic {name}.", (), stats[name])
        hits = sum(stats.get(f"cached_tokens_{tier}", 0) for tier in ("device", "host", "disk"))
        self._add(families, "vllm:prefix_cache_hits", "counter", "Prompt tokens found in the cache.", (), hits)
        capacity = stats.get("device_capacity_bytes", 0)
        usage = stats.get("device_used_bytes", 0) / capacity if capacity else 0.0
        self._add(families, "vllm:kv_cache_usage_perc", "gauge", "Used part of device KV, 0 to 1.", (), usage)
        for name, value in (("spliced", self._text.spliced), ("retokenised", self._text.retokenised)):
            self._add(families, "afterglow:replies", "counter", "Own replies that came back as text, by how "
                      "they became tokens.", _by("how", name), value)  # fmt: skip
        self._add(families, "afterglow:healthy", "gauge", "1 while the engine runs.", (), self._engine.healthy)
        yield from families.values()

    def _add(
        self,
        families: dict[str, Metric],
        name: str,
        kind: str,
        help: str,
        labels: tuple[tuple[str, str], ...],
        value: float,
    ) -> None:
        keys = ["model_name", *(key for key, _ in labels)]
        make = GaugeMetricFamily if kind == "gauge" else CounterMetricFamily
        family = families.setdefault(name, make(name, help, labels=keys))
        family.add_metric([self._model, *(v for _, v in labels)], float(value))  # type: ignore[attr-defined]
