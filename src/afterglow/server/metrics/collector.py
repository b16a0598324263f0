"""Prometheus metrics, under the names of `metric_names.py`.

The engine's numbers are read at each request for metrics, from a snapshot that never waits.

The embedding endpoints have metrics of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from afterglow.server.json_responses import CLIENT_GONE
from afterglow.server.metrics.metric_names import ROWS, number_at
from afterglow.text import Tokenizer

if TYPE_CHECKING:
    from afterglow.memo.sequence_embedder import EmbedResult
    from afterglow.memo.texts import MemoUse


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_LATENCY = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
_GAP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
_TIME = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
VLLM = "vllm:"  # families of this name carry vLLM's label `engine` as well; its value is always `ENGINE`
ENGINE = "0"
PROBLEMS = ("refused", "busy", "failed", "gone")


class HasStats(Protocol):
    @property
    def healthy(self) -> bool: ...
    def stats(self) -> Any: ...


class Metrics:
    """The registry of one server, and the numbers that only the HTTP side knows."""

    def __init__(self, engine: HasStats, text: Tokenizer, model_name: str, max_model_len: int = 2**20) -> None:
        self.registry = CollectorRegistry()
        self._model = model_name
        self.registry.register(_EngineCollector(engine, text, model_name))
        self.ttft = self._histogram("vllm:time_to_first_token_seconds", "Time to first token.", _TTFT)
        self.latency = self._histogram("vllm:e2e_request_latency_seconds", "Time of whole requests.", _LATENCY)
        self.inter_token = self._histogram("vllm:inter_token_latency_seconds", "Time between tokens.", _GAP)
        lengths = _ones_twos_fives(max_model_len)
        self._queue = self._histogram("vllm:request_queue_time_seconds", "Time until a request's first step.", _TIME)
        self._prefill = self._histogram(
            "vllm:request_prefill_time_seconds", "Time from a request's first step to its first token.", _TIME
        )
        self._decode = self._histogram(
            "vllm:request_decode_time_seconds", "Time from a request's first token to its last.", _TIME
        )
        self._per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time of a request's tokens after the first.", _PER_TOKEN
        )
        self._prompt = self._histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", lengths)
        self._generated = self._histogram("vllm:request_generation_tokens", "Generated tokens of a request.", lengths)
        self.most_generated = self._histogram(
            "vllm:request_max_num_generation_tokens", "Generated tokens of the longest of a request's replies.", lengths
        )
        ProcessCollector(registry=self.registry)
        self.problems = dict.fromkeys(PROBLEMS, 0)  # responses, by what went wrong
        self._responses = Counter(
            "afterglow:http_responses", "HTTP responses by status.", ("status",), registry=self.registry
        )
        self.refused_connections = Counter(
            "afterglow:connections_refused", "Connections beyond --max-connections.", registry=self.registry
        )
        self.late_connections = Counter(
            "afterglow:connections_timed_out",
            "Connections that took too long to send a request.",
            registry=self.registry,
        )

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        labels = _labels(name, self._model)
        family = Histogram(name, help, tuple(labels), buckets=buckets, registry=self.registry)
        return family.labels(**labels)

    def finished(self, *, prompt: int, generated: int, queue: float, prefill: float, decode: float) -> None:
        """Count a finished reply: its tokens, and the seconds of its phases."""
        self._prompt.observe(prompt)
        self._generated.observe(generated)
        self._queue.observe(queue)
        self._prefill.observe(prefill)
        self._decode.observe(decode)
        if generated > 1:
            self._per_token.observe(decode / (generated - 1))

    def response(self, status: int) -> None:
        """Count a response by its status."""
        self._responses.labels(str(status)).inc()
        if status >= 400:
            self.problems[_problem(status)] += 1

    def text(self) -> bytes:
        """Write all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


def _problem(status: int) -> str:
    if status in (429, 503):
        return "busy"
    return "gone" if status == CLIENT_GONE else "failed" if status >= 500 else "refused"


def _labels(name: str, model: str) -> dict[str, str]:
    return {"model_name": model, **({"engine": ENGINE} if name.startswith(VLLM) else {})}


def _ones_twos_fives(most: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, 50, ... up to `most`: vLLM's buckets of lengths."""
    steps = (m * 10**e for e in range(len(str(most))) for m in (1, 2, 5))
    return tuple(float(step) for step in steps if step <= most)


def flatten(stats: Any) -> dict[str, float]:
    """List the numbers of nested statistics by their paths, for example `plan.counters.loads`. Numbers that are not
    known yet are left out."""
    table: dict[str, float] = {}

    def add(value: Mapping[str, Any], prefix: str) -> None:
        for name, number in value.items():
            if isinstance(number, Mapping):
                add(number, f"{prefix}{name}.")
            elif isinstance(number, int | float):
                table[prefix + name] = number

    add(asdict(stats), "")
    return table


class _EngineCollector(Collector):
    def __init__(self, engine: HasStats, text: Tokenizer, model_name: str) -> None:
        self._engine = engine
        self._text = text
        self._model = model_name

    def describe(self) -> list[Metric]:
        return []  # otherwise registering would ask the engine

    def collect(self) -> Iterator[Metric]:
        snapshot = self._engine.stats()
        stats = flatten(snapshot)
        families: dict[str, Metric] = {}
        for row in ROWS:
            if (value := number_at(stats, row.path)) is not None:
                self._add(families, row.name, row.kind, row.help, row.labels, value)
        failures = [("store_errors", "Failed calls of the store, by kind.", snapshot.store.errors)]
        if snapshot.shared is not None:
            failures.append(("shared_errors", "Failed calls of the shared store, by kind.", snapshot.shared.failures))
        for name, text, found in failures:
            for kind, number in found.items():
                self._add(families, f"afterglow:{name}", "counter", text, (("kind", kind),), number)
        device = snapshot.tiers.device
        usage = device.used / device.capacity if device.capacity else 0.0
        self._add(families, "vllm:kv_cache_usage_perc", "gauge", "Used part of device KV, 0 to 1.", (), usage)
        for name, value in (("spliced", self._text.spliced), ("retokenised", self._text.retokenised)):
            self._add(families, "afterglow:replies", "counter", "Own replies that came back as text, by how "
                      "they became tokens.", (("how", name),), value)  # fmt: skip
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
        own = _labels(name, self._model)
        make = GaugeMetricFamily if kind == "gauge" else CounterMetricFamily
        family = families.setdefault(name, make(name, help, labels=[*own, *(key for key, _ in labels)]))
        family.add_metric([*own.values(), *(v for _, v in labels)], float(value))  # type: ignore[attr-defined]


_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class EmbeddingMetrics:
    """Counters and times of embedding requests and of their forward passes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, help: str) -> Counter:
            return Counter(f"afterglow:embedding_{name}", help, ("model_name",), registry=registry)

        def gauge(name: str, help: str) -> Gauge:
            return Gauge(f"afterglow:embedding_{name}", help, ("model_name",), registry=registry)

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"afterglow:embedding_{name}", help, ("model_name",), buckets=buckets, registry=registry)

        self._requests = counter("requests", "Requests to embed or to rerank that were answered.")
        self._texts = counter("texts", "Texts embedded.")
        self._tokens = counter("tokens", "Tokens of embedded texts.")
        self._hits = counter("memo_hits", "Texts whose attention maps came from the memo.")
        self._forward = counter("forward_seconds", "Time spent on forward passes of embeddings.")
        self._latency = histogram("latency_seconds", "Time of whole embedding requests.", _SECONDS)
        self._batch = histogram("batch_size", "Texts of one forward pass.", _SIZES)
        self._damaged = gauge("memo_damaged", "Attention maps that were found damaged, and not used.")
        self._used = gauge(
            "memo_used", "1 if attention maps are used, 0 if they are there and are left alone (--memo-mode)."
        )
        self._speedup = gauge(
            "memo_expected_speedup",
            "How many times as fast embedding was found to be with attention maps, where that was measured.",
        )

    def watch(self, name: str, memo: MemoUse) -> None:
        """Show whether a model's memo is used, and what the memo counts itself."""
        self._damaged.labels(name).set_function(lambda: memo.damaged)
        self._used.labels(name).set(memo.used)
        if memo.gain is not None:
            self._speedup.labels(name).set(memo.gain.speedup)

    def passed(self, name: str, sequences: int, tokens: int, seconds: float) -> None:
        """Count a forward pass."""
        self._batch.labels(name).observe(sequences)
        self._forward.labels(name).inc(seconds)

    def answered(self, name: str, result: EmbedResult, seconds: float) -> None:
        """Count a request that was answered."""
        self._requests.labels(name).inc()
        self._texts.labels(name).inc(len(result.hits))
        self._tokens.labels(name).inc(result.tokens)
        self._hits.labels(name).inc(result.memo_hits)
        self._latency.labels(name).observe(seconds)
