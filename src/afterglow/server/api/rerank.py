"""`/v1/rerank`: sorts documents by similarity to a query. Bodies are as Cohere's and Jina's clients send them."""

from __future__ import annotations

import uuid
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from afterglow.server.api.embeddings import embed, read_sequences, truncation, usage
from afterglow.server.bodies.reader import read_body
from afterglow.server.bodies.text_bodies import RerankBody
from afterglow.server.state import State


async def rerank(http: HttpRequest) -> Response:
    """Rank documents, the best first. `relevance_score` is the cosine of query and document, -1 to 1."""
    state: State = http.app.state.afterglow
    body = await read_body(http, RerankBody)
    model = state.embeddings.find(body.model)
    texts: list[str] = body.documents
    cut = truncation(body.truncate_prompt_tokens, model)
    sequences = await read_sequences(state, model, [body.query], "query", cut)
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
