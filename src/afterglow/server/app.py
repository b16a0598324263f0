"""The application: routes, and what they have in common."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from afterglow import __version__
from afterglow.errors import RequestError
from afterglow.server.bodies import read_body
from afterglow.server.cache import (
    cache_stats,
    delete_prompt,
    delete_session,
    list_prompts,
    list_sessions,
    pin_session,
    put_prompt,
    reset_prefix_cache,
    unpin_session,
)
from afterglow.server.chat import chat_completions
from afterglow.server.completions import completions
from afterglow.server.dashboard import add_dashboard
from afterglow.server.defaults import Defaults
from afterglow.server.docs import add_docs
from afterglow.server.embeddings import Embeddings, embeddings
from afterglow.server.encoder_only import EncoderOnly
from afterglow.server.errors import engine_dead, error_response
from afterglow.server.guard import Guard
from afterglow.server.jobs import EngineLike, Jobs
from afterglow.server.metrics import CONTENT_TYPE
from afterglow.server.record import TraceRecorder
from afterglow.server.rerank import rerank
from afterglow.server.responses import create_response
from afterglow.server.schema import (
    DetokenizeBody,
    TokenizeBody,
)
from afterglow.server.settings import ServerConfig
from afterglow.server.state import Record, State
from afterglow.server.stored import delete_response, get_response, input_items
from afterglow.server.wire import json_response
from afterglow.text import Tokenizer

if TYPE_CHECKING:
    from afterglow.memo.texts import TextEmbedder


def create_app(
    engine: EngineLike,
    tokenizer: Tokenizer,
    config: ServerConfig | None = None,
    model_dir: Path | None = None,
    embedders: Sequence[TextEmbedder] = (),
) -> FastAPI:
    """The server around a started engine. `model_dir` is where sampling defaults are read from. `embedders`: what
    `/v1/embeddings` serves, the default first; the one that has the engine's model is known by the served name."""
    defaults = Defaults() if model_dir is None else Defaults.read(model_dir)
    state = State(engine, tokenizer, config or ServerConfig(), defaults)
    state.generates = not isinstance(engine, EncoderOnly)
    state.embeddings = Embeddings(state, embedders)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        recorder = TraceRecorder(state.config.record_trace) if state.config.record_trace is not None else None
        state.jobs = Jobs(engine, recorder)
        worker = state.embeddings.worker
        if worker is not None:
            worker.start()
        sweeping = asyncio.create_task(state.sweep())
        yield
        sweeping.cancel()
        if worker is not None:
            await asyncio.to_thread(worker.close)
        state.close()
        await state.jobs.aclose()
        if recorder is not None:
            await asyncio.to_thread(recorder.close)

    app = FastAPI(title="Afterglow", version=__version__, lifespan=lifespan, redirect_slashes=False, openapi_url=None)
    app.state.afterglow = state
    app.add_middleware(Guard, state=state)
    app.add_exception_handler(RequestError, _request_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_api_route("/v1/chat/completions", chat_completions, methods=["POST"])
    app.add_api_route("/v1/completions", completions, methods=["POST"])
    app.add_api_route("/v1/responses", create_response, methods=["POST"])
    app.add_api_route("/v1/embeddings", embeddings, methods=["POST"])
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):  # Jina's, and Cohere's clients
        app.add_api_route(path, rerank, methods=["POST"])
    for path, route, method in _ROUTES:
        app.add_api_route(path, route, methods=[method])
    app.add_api_route("/tokenize", tokenize, methods=["POST"])
    app.add_api_route("/detokenize", detokenize, methods=["POST"])
    add_docs(app, state.config)
    add_dashboard(app, state)
    return app


def _state(request: Request) -> State:
    state: State = request.app.state.afterglow
    return state


async def models(request: Request) -> Response:
    state = _state(request)
    names = dict.fromkeys((*state.names, *state.embeddings.names))
    return json_response({"object": "list", "data": [_card(state, name) for name in names]})


async def model(request: Request) -> Response:
    state = _state(request)
    name = request.path_params["model"]
    return json_response(_card(state, name if name in state.embeddings.names else state.check_model(name)))


def _card(state: State, name: str) -> dict[str, Any]:
    own = name in state.names
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


async def health(request: Request) -> Response:
    state = _state(request)
    if not state.engine.healthy:
        return error_response(engine_dead())
    return json_response({"status": "draining" if state.jobs.draining else "ok"})


async def version(request: Request) -> Response:
    return json_response({"version": __version__})


async def metrics(request: Request) -> Response:
    """Numbers of all tenants together."""
    record: Record = request.scope["afterglow.record"]
    record.caller.check_metrics()
    return Response(_state(request).metrics.text(), media_type=CONTENT_TYPE)


async def tokenize(request: Request) -> Response:
    state = _state(request)
    body = await read_body(request, TokenizeBody)
    state.check_model(body.model, generate=False)

    def work() -> list[int]:
        if body.prompt is not None:
            return state.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
        return state.tokenizer.encode_chat(
            body.messages, add_generation_prompt=body.add_generation_prompt, variables=body.chat_template_kwargs
        ).ids

    ids = await state.tokenise(body.size, work)
    answer = {"count": len(ids), "max_model_len": state.engine.max_model_len, "tokens": ids}
    return await state.respond(len(ids), lambda: answer)


async def detokenize(request: Request) -> Response:
    state = _state(request)
    body = await read_body(request, DetokenizeBody)
    state.check_model(body.model, generate=False)
    if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < state.engine.vocab_size:
        raise RequestError(f"tokens must be between 0 and {state.engine.vocab_size - 1}", param="tokens")
    text = await state.tokenise(len(body.tokens), lambda: state.tokenizer.decode(body.tokens, False))
    return await state.respond(len(text), lambda: {"prompt": text})


_ROUTES: tuple[tuple[str, Callable[[Request], Awaitable[Response]], str], ...] = (
    ("/v1/responses/{response}", get_response, "GET"),
    ("/v1/responses/{response}", delete_response, "DELETE"),
    ("/v1/responses/{response}/input_items", input_items, "GET"),
    ("/v1/cache/sessions", list_sessions, "GET"),
    ("/v1/cache/sessions/{name:path}", delete_session, "DELETE"),
    ("/v1/cache/sessions/{name:path}/pin", pin_session, "POST"),
    ("/v1/cache/sessions/{name:path}/unpin", unpin_session, "POST"),
    ("/v1/cache/prompts", list_prompts, "GET"),
    ("/v1/cache/prompts/{name:path}", put_prompt, "PUT"),
    ("/v1/cache/prompts/{name:path}", delete_prompt, "DELETE"),
    ("/v1/cache/stats", cache_stats, "GET"),
    ("/v1/models", models, "GET"),
    ("/v1/models/{model:path}", model, "GET"),
    ("/health", health, "GET"),
    ("/version", version, "GET"),
    ("/metrics", metrics, "GET"),
    ("/reset_prefix_cache", reset_prefix_cache, "POST"),
)


async def _request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = {
        404: f"there is no {request.url.path} here",
        405: f"{request.url.path} does not answer {request.method}",
    }.get(error.status_code, str(error.detail))
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    response = error_response(RequestError(message, status=error.status_code, code=code))
    if error.status_code == 405:
        response.headers["Allow"] = ", ".join(sorted(_methods(request)))
    return response


def _methods(request: Request) -> set[str]:
    """What a path answers: each method has a route of its own."""
    found = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    return {method for route in found for method in route.methods or ()}
