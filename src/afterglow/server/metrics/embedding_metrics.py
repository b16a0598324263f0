"""Prometheus metrics of the embedding endpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

if TYPE_CHECKING:
    from afterglow.memo.sequence_embedder import EmbedResult
    from afterglow.memo.texts import MemoUse

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class EmbeddingMetrics:
    """Counters and times of embedding requests and of their forward passes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, help: str) -> Counter:
            return Counter(f"afterglow:embedding_{name}", help, ("model_name",), registry=registry)

        self._requests = counter("requests", "Requests to embed or to rerank that were answered.")
        self._texts = counter("texts", "Texts embedded.")
        self._tokens = counter("tokens", "Tokens of embedded texts.")
        self._hits = counter("memo_hits", "Texts whose attention maps came from the memo.")
        self._forward = counter("forward_seconds", "Time spent on forward passes of embeddings.")
        self._latency = Histogram(
            "afterglow:embedding_latency_seconds",
            "Time of whole embedding requests.",
            ("model_name",),
            buckets=_SECONDS,
            registry=registry,
        )
        self._batch = Histogram(
            "afterglow:embedding_batch_size",
            "Texts of one forward pass.",
            ("model_name",),
            buckets=_SIZES,
            registry=registry,
        )

        self._damaged = Gauge(
            "afterglow:embedding_memo_damaged",
            "Attention maps that were found damaged, and not used.",
            ("model_name",),
            registry=registry,
        )
        self._used = Gauge(
            "afterglow:embedding_memo_used",
            "1 if attention maps are used, 0 if they are there and are left alone (--memo-mode).",
            ("model_name",),
            registry=registry,
        )
        self._speedup = Gauge(
            "afterglow:embedding_memo_expected_speedup",
            "How many times as fast embedding was found to be with attention maps, where that was measured.",
            ("model_name",),
            registry=registry,
        )

    def watch(self, name: str, memo: MemoUse) -> None:
        """Show whether a model's memo is used, and what the memo counts itself."""
        self._damaged.labels(name).set_function(lambda: memo.database.stats["damaged"])
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
