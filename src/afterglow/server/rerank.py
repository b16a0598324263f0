"""`/v1/rerank`: documents by how near their meaning is to a query's. Bodies as Cohere and Jina have them."""

from __future__ import annotations

import uuid
from typing import Any

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from afterglow.errors import RequestError
from afterglow.server.embeddings import MAX_INPUTS, embed, read_sequences, truncation, usage
from afterglow.server.schema import Int, read_body
from afterglow.server.state import State
from afterglow.server.wire import json_response
from afterglow.text.chat import shown


class RerankBody(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    query: Any = None
    documents: Any = None
    top_n: Int | None = None
    return_documents: bool | None = None
    truncate_prompt_tokens: Int | None = None


async def rerank(http: HttpRequest) -> Response:
    """The best first; `relevance_score` is the cosine of query and document, -1 to 1."""
    state: State = http.app.state.afterglow
    body = await read_body(http, RerankBody)
    model = state.embeddings.find(body.model)
    if not isinstance(body.query, str) or not body.query:
        raise RequestError(f"query must be a non-empty string, got {shown(body.query)}", param="query")
    texts = _documents(body.documents)
    if body.top_n is not None and body.top_n < 1:
        raise RequestError(f"top_n must be 1 or more, got {body.top_n}", param="top_n")
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
    return json_response(
        {
            "id": f"rerank-{uuid.uuid4().hex}",
            "model": body.model or model.name,
            "results": found,
            "usage": usage(result),
        }
    )


def _documents(given: Any) -> list[str]:
    """Strings, or objects with a `text`. Errors: RequestError."""
    if not isinstance(given, list) or not given:
        got = "an empty one" if given == [] else shown(given)
        raise RequestError(f"documents must be a list of at least one text, got {got}", param="documents")
    if len(given) > MAX_INPUTS - 1:
        raise RequestError(
            f"at most {MAX_INPUTS - 1} documents can be ranked at once, got {len(given)}; send them in parts",
            param="documents",
        )
    texts = []
    for index, item in enumerate(given):
        text = item.get("text") if isinstance(item, dict) else item
        if not isinstance(text, str):
            raise RequestError(
                f"documents[{index}] must be a string, or an object with a text, got {shown(item)}", param="documents"
            )
        texts.append(text)
    return texts
