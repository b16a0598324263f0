"""`/v1/embeddings`: texts, or their tokens, to vectors.

Imports torch only where there is a model: a server's mistakes are found before that takes its seconds.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from afterglow.errors import RequestError
from afterglow.request import CachedTokens
from afterglow.server.bodies import read_body
from afterglow.server.errors import shutting_down
from afterglow.server.schema import EmbeddingBody
from afterglow.server.state import Record, State
from afterglow.server.stream import while_connected
from afterglow.text.chat import shown

if TYPE_CHECKING:
    from torch import Tensor

    from afterglow.memo.encoder import EmbedResult
    from afterglow.memo.texts import MemoUse, TextEmbedder
    from afterglow.server.embedding_worker import EmbeddingWorker

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Embeddings:
    """The server's models that embed: the one it generates with, and the one beside it."""

    def __init__(self, state: State, models: Sequence[TextEmbedder]) -> None:
        """The first of `models` serves requests that name none. One of them may be the server's own, which answers to
        all of its names."""
        self.names: dict[str, TextEmbedder] = {}
        for model in models:
            self.names |= dict.fromkeys(state.names if model.name in state.names else (model.name,), model)
        self.default = models[0] if models else None
        self.metrics = EmbeddingMetrics(state.metrics.registry)
        self.worker: EmbeddingWorker | None = None
        if not models:
            return
        from afterglow.server.embedding_worker import EmbeddingWorker

        for model in models:
            if model.memo is not None:
                self.metrics.watch(model.name, model.memo)
        engine = state.engine
        self.worker = EmbeddingWorker(lambda: engine.stats().running > 0, engine.config.max_queue, self.metrics.passed)

    def find(self, name: str | None) -> TextEmbedder:
        """Errors: RequestError, status 404."""
        if self.default is None:
            raise RequestError(
                "this server has no model that embeds; start it with --embedding-model",
                status=404,
                code="no_embedding_model",
            )
        if name is None:
            return self.default
        if name not in self.names:
            raise RequestError(
                f"the model {shown(name)} does not exist; this server embeds with {', '.join(self.names)}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return self.names[name]


class EmbeddingMetrics:
    """What the embedding endpoints count."""

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
        """Show what became of a model's memo, and what it counts itself."""
        self._damaged.labels(name).set_function(lambda: memo.database.stats["damaged"])
        self._used.labels(name).set(memo.used)
        if memo.gain is not None:
            self._speedup.labels(name).set(memo.gain.speedup)

    def passed(self, name: str, sequences: int, tokens: int, seconds: float) -> None:
        """A forward pass has ended."""
        self._batch.labels(name).observe(sequences)
        self._forward.labels(name).inc(seconds)

    def answered(self, name: str, result: EmbedResult, seconds: float) -> None:
        self._requests.labels(name).inc()
        self._texts.labels(name).inc(len(result.hits))
        self._tokens.labels(name).inc(result.tokens)
        self._hits.labels(name).inc(result.memo_hits)
        self._latency.labels(name).observe(seconds)


async def embeddings(http: HttpRequest) -> Response:
    state: State = http.app.state.afterglow
    body = await read_body(http, EmbeddingBody)
    model = state.embeddings.find(body.model)
    form = "float" if body.encoding_format is None else body.encoding_format
    if form not in ("float", "base64"):
        raise RequestError(f"encoding_format must be 'float' or 'base64', got {shown(form)}", param="encoding_format")
    size = check_dimensions(body.dimensions, model)
    cut = truncation(body.truncate_prompt_tokens, model)
    sequences = await read_sequences(state, model, body.input, "input", cut)
    result = await embed(http, state, model, sequences)

    def make() -> object:
        vectors = shortened(result.vectors, size)
        data = [
            {"object": "embedding", "index": index, "embedding": vector}
            for index, vector in enumerate(_base64(vectors) if form == "base64" else _floats(vectors))
        ]
        return {"object": "list", "data": data, "model": body.model or model.name, "usage": usage(result)}

    return await state.respond(result.vectors.numel(), make)


async def embed(
    http: HttpRequest, state: State, model: TextEmbedder, sequences: Sequence[Sequence[int]]
) -> EmbedResult:
    """Through the worker, and into the accounts. Ends with the client's connection. Errors: RequestError."""
    if state.jobs.draining:
        raise shutting_down()
    assert state.embeddings.worker is not None, "there is a model"
    record: Record = http.scope["afterglow.record"]
    result = await while_connected(state.embeddings.worker.embed(model, sequences), http)
    state.tenants.count(record.caller, result.tokens, 0, CachedTokens())
    state.embeddings.metrics.answered(model.name, result, time.perf_counter() - record.began)
    record.note = f"texts={len(result.hits)} tokens={result.tokens} memo_hits={result.memo_hits}"
    return result


async def read_sequences(
    state: State, model: TextEmbedder, inputs: Sequence[str | list[int]], param: str, cut: int | None
) -> list[list[int]]:
    """Each text in its prompt as ids, ids as they are; none too long. Errors: RequestError naming which."""

    def name(index: int) -> str:
        return param if len(inputs) == 1 else f"{param}[{index}]"

    for index, item in enumerate(inputs):
        if not item:
            what = "string" if isinstance(item, str) else "list of token ids"
            raise RequestError(
                f"{name(index)} is an empty {what}: there is nothing to embed; leave it out", param=param
            )
        if isinstance(item, str) and cut is None:
            model.tokenizer.check_length(item, model.embedder.max_tokens, param)

    def work() -> list[list[int]]:
        found = []
        for index, item in enumerate(inputs):
            ids = model.tokens(item, cut) if isinstance(item, str) else item[:cut]
            model.embedder.check(ids, name(index), param)
            found.append(ids)
        return found

    return await state.tokenise(sum(map(len, inputs)), work)


def truncation(wanted: int | None, model: TextEmbedder) -> int | None:
    """Tokens at which texts are cut off; -1 asks for the model's own limit. Errors: RequestError."""
    most = model.embedder.max_tokens
    if wanted is None or 1 <= wanted <= most:
        return wanted
    if wanted == -1:
        return most
    raise RequestError(
        f"truncate_prompt_tokens must be between 1 and {most}, what this model embeds at once, or -1 for that; "
        f"got {wanted}",
        param="truncate_prompt_tokens",
    )


def check_dimensions(wanted: int | None, model: TextEmbedder) -> int:
    """Errors: RequestError."""
    most = model.embedder.dimensions
    if wanted is None:
        return most
    if not 1 <= wanted <= most:
        raise RequestError(
            f"dimensions must be between 1 and {most}, the size of this model's embeddings, got {wanted}",
            param="dimensions",
        )
    return wanted


def shortened(vectors: Tensor, dimensions: int) -> Tensor:
    """The first of the `dimensions`, of unit length again."""
    if dimensions == vectors.shape[1]:
        return vectors
    first = vectors[:, :dimensions]
    unit: Tensor = first / first.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    return unit


def usage(result: EmbedResult) -> dict[str, int]:
    return {"prompt_tokens": result.tokens, "total_tokens": result.tokens, "memo_hits": result.memo_hits}


def _floats(vectors: Tensor) -> list[list[float]]:
    # Eight decimals of a unit vector are what float32 holds; the digits of a double are twice as many bytes.
    return [[round(value, 8) for value in vector] for vector in vectors.tolist()]


def _base64(vectors: Tensor) -> list[str]:
    """Little-endian float32, as OpenAI's clients read it."""
    return [base64.b64encode(row.tobytes()).decode() for row in vectors.numpy().astype("<f4")]
