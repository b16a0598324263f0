"""`/v1/embeddings`: texts, or their tokens, to vectors. `/v1/rerank` sorts documents by similarity to a query; its bodies are as
Cohere's and Jina's clients send them.
"""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from afterglow.errors import RequestError, shutting_down
from afterglow.request import CachedTokens, ContextWindow
from afterglow.server.bodies.limits import wrong
from afterglow.server.bodies.reader import read_body
from afterglow.server.bodies.text_bodies import EmbeddingBody, RerankBody
from afterglow.server.replies.pending_replies import while_connected
from afterglow.server.state import State, state_and_record
from afterglow.server.tenants import RequestRecord

if TYPE_CHECKING:
    from torch import Tensor

    from afterglow.memo.sequence_embedder import EmbedResult
    from afterglow.memo.texts import TextEmbedder


async def embeddings(http: HttpRequest) -> Response:
    """Embed texts."""
    state, _ = state_and_record(http)
    body = await read_body(http, EmbeddingBody)
    model = state.embeddings.find(body.model)
    form = "float" if body.encoding_format is None else body.encoding_format
    if form not in ("float", "base64"):
        raise wrong("encoding_format", "must be 'float' or 'base64'", form)
    most = model.embedder.dimensions
    size = most if body.dimensions is None else body.dimensions
    if not 1 <= size <= most:
        raise wrong("dimensions", f"must be between 1 and {most}, the size of this model's embeddings", size)
    cut = truncation(body.truncate_prompt_tokens, model)
    sequences = await read_sequences(state, model, body.input, "input", cut)
    result = await embed(http, state, model, sequences)

    def make() -> object:
        vectors = shorten(result.vectors, size)
        data = [
            {"object": "embedding", "index": index, "embedding": vector}
            for index, vector in enumerate(_base64(vectors) if form == "base64" else _floats(vectors))
        ]
        return {"object": "list", "data": data, "model": body.model or model.name, "usage": usage(result)}

    return await state.text_threads.respond(result.vectors.numel(), make)


async def embed(
    http: HttpRequest, state: State, model: TextEmbedder, sequences: Sequence[Sequence[int]]
) -> EmbedResult:
    """Embed sequences on the worker, and count them. Ends when the client disconnects. Raises: RequestError,
    ClientGone."""
    if state.bridge.draining:
        raise shutting_down()
    assert state.embeddings.worker is not None, "there is a model"
    record: RequestRecord = http.scope["afterglow.record"]
    result = await while_connected(state.embeddings.worker.embed(model, sequences), http)
    state.tenants.count(record.caller, result.tokens, 0, CachedTokens())
    state.embeddings.metrics.answered(model.name, result, time.perf_counter() - record.began)
    record.note = f"texts={len(result.hits)} tokens={result.tokens} memo_hits={result.memo_hits}"
    return result


async def read_sequences(
    state: State, model: TextEmbedder, inputs: Sequence[str | list[int]], param: str, cut: int | None
) -> list[list[int]]:
    """Tokenise the texts among `inputs`, in the model's template; take ids as they are. Raises: RequestError, which
    names the first input that is empty or too long."""

    def name(index: int) -> str:
        return param if len(inputs) == 1 else f"{param}[{index}]"

    for index, item in enumerate(inputs):
        if not item:
            what = "string" if isinstance(item, str) else "list of token ids"
            raise RequestError(
                f"{name(index)} is an empty {what}: there is nothing to embed; leave it out", param=param
            )
        if isinstance(item, str) and cut is None:
            model.tokenizer.check_length(item, ContextWindow(model.embedder.max_tokens), param)

    def work() -> list[list[int]]:
        found = []
        for index, item in enumerate(inputs):
            ids = model.tokens(item, cut) if isinstance(item, str) else item[:cut]
            model.embedder.check(ids, name(index), param)
            found.append(ids)
        return found

    return await state.text_threads.run(sum(map(len, inputs)), work)


def truncation(wanted: int | None, model: TextEmbedder) -> int | None:
    """Return the length in tokens at which texts are cut off; -1 asks for the model's own limit. Raises:
    RequestError."""
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


def shorten(vectors: Tensor, dimensions: int) -> Tensor:
    """Keep the first `dimensions` of each vector, and scale it to unit length again."""
    if dimensions == vectors.shape[1]:
        return vectors
    first = vectors[:, :dimensions]
    unit: Tensor = first / first.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    return unit


def usage(result: EmbedResult) -> dict[str, int]:
    """Describe the tokens of an embedding request."""
    return {"prompt_tokens": result.tokens, "total_tokens": result.tokens, "memo_hits": result.memo_hits}


def _floats(vectors: Tensor) -> list[list[float]]:
    # Eight decimals of a unit vector are what float32 holds; the digits of a double are twice as many bytes.
    return [[round(value, 8) for value in vector] for vector in vectors.tolist()]


def _base64(vectors: Tensor) -> list[str]:
    """Encode vectors as little-endian float32, as OpenAI's clients read them."""
    return [base64.b64encode(row.tobytes()).decode() for row in vectors.numpy().astype("<f4")]


async def rerank(http: HttpRequest) -> Response:
    """Rank documents, the best first. `relevance_score` is the cosine of query and document, -1 to 1."""
    state, _ = state_and_record(http)
    body = await read_body(http, RerankBody)
    model = state.embeddings.find(body.model)
    texts: list[str] = body.documents
    cut = truncation(body.truncate_prompt_tokens, model)
    sequences = await read_sequences(state, model, [body.query], "query", cut)
    if body.max_tokens_per_doc is not None:
        cut = min(body.max_tokens_per_doc, cut or model.embedder.max_tokens)
    sequences += await read_sequences(state, model, texts, "documents", cut)
    result = await embed(http, state, model, sequences)
    scores = (result.vectors[1:] @ result.vectors[0]).tolist()
    order = sorted(range(len(texts)), key=lambda index: (-scores[index], index))[: body.top_n]
    found: list[dict[str, Any]] = []
    for index in order:
        found.append({"index": index, "relevance_score": round(scores[index], 8)})
        if body.return_documents:
            found[-1]["document"] = {"text": texts[index]}
    answer = {
        "id": f"rerank-{uuid.uuid4().hex}",
        "model": body.model or model.name,
        "results": found,
        "usage": usage(result),
    }
    size = len(found) + (sum(map(len, texts)) if body.return_documents else 0)
    return await state.text_threads.respond(size, lambda: answer)
