"""`/v1/models`, `/health`, `/version`, `/metrics`, `/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from afterglow.errors import RequestError, engine_dead
from afterglow.server.bodies.reader import read_body
from afterglow.server.bodies.text_bodies import DetokenizeBody, TokenizeBody
from afterglow.server.json_responses import error_response, json_response
from afterglow.server.metrics.collector import CONTENT_TYPE
from afterglow.server.replies.make_requests import work_of
from afterglow.server.state import State, state_and_record
from afterglow.text.messages import texts_in
from afterglow.version import __version__


async def models(http: HttpRequest) -> Response:
    """List the models."""
    state, _ = state_and_record(http)
    names = dict.fromkeys((*state.models.names, *state.embeddings.names))
    return json_response({"object": "list", "data": [_card(state, name) for name in names]})


async def model(http: HttpRequest) -> Response:
    """Describe a model."""
    state, _ = state_and_record(http)
    name = http.path_params["model"]
    return json_response(_card(state, name if name in state.embeddings.names else state.models.check(name)))


def _card(state: State, name: str) -> dict[str, Any]:
    own = name in state.models.names
    beside = state.embeddings.names.get(name)
    longest = state.engine.max_model_len if own or beside is None else beside.embedder.max_tokens
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "afterglow",
        "root": state.engine.model_name if own else name,
        "max_model_len": longest,
    }


async def health(http: HttpRequest) -> Response:
    """Report whether the engine runs, and whether the server is shutting down."""
    state, _ = state_and_record(http)
    if not state.engine.healthy:
        return error_response(engine_dead())
    return json_response({"status": "draining" if state.bridge.draining else "ok"})


async def version(http: HttpRequest) -> Response:
    """Report Afterglow's version."""
    return json_response({"version": __version__})


async def metrics(http: HttpRequest) -> Response:
    """Report Prometheus metrics, of all tenants together."""
    state, record = state_and_record(http)
    record.caller.check_metrics()
    return Response(state.metrics.text(), media_type=CONTENT_TYPE)


async def tokenize(http: HttpRequest) -> Response:
    """Turn a text, or a conversation, into token ids."""
    state, _ = state_and_record(http)
    body = await read_body(http, TokenizeBody)
    state.models.check(body.model, generate=False)

    def work() -> list[int]:
        if body.prompt is not None:
            return state.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
        return state.tokenizer.encode_chat(
            body.messages,
            tools=body.tool_use.tools,
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=bool(body.continue_final_message),
            variables=body.chat_template_kwargs,
        ).ids

    size = body.size
    if body.messages is not None:
        size = work_of(state.tokenizer, size, texts_in(body.messages), body.tool_use.tools)
    ids = await state.text_threads.run(size, work)
    answer = {"count": len(ids), "max_model_len": state.engine.max_model_len, "tokens": ids}
    return await state.text_threads.respond(len(ids), lambda: answer)


async def detokenize(http: HttpRequest) -> Response:
    """Turn token ids into text."""
    state, _ = state_and_record(http)
    body = await read_body(http, DetokenizeBody)
    state.models.check(body.model, generate=False)
    if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < state.engine.vocab_size:
        raise RequestError(f"tokens must be between 0 and {state.engine.vocab_size - 1}", param="tokens")
    text = await state.text_threads.run(len(body.tokens), lambda: state.tokenizer.decode(body.tokens, False))
    return await state.text_threads.respond(len(text), lambda: {"prompt": text})
