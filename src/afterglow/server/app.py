"""The application: routes, middleware and error handlers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from afterglow.errors import RequestError
from afterglow.library.sampling_defaults import SamplingDefaults
from afterglow.server.api.anthropic_messages import count_tokens, create_message
from afterglow.server.api.cache import (
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
from afterglow.server.api.completions import chat_completions, completions
from afterglow.server.api.dashboard import add_dashboard, dashboard_data
from afterglow.server.api.embeddings import embeddings, rerank
from afterglow.server.api.models import detokenize, health, metrics, model, models, tokenize, version
from afterglow.server.api.openapi import docs, openapi
from afterglow.server.api.responses import create_response, delete_response, get_response, input_items
from afterglow.server.bridge import EngineLike
from afterglow.server.json_responses import error_response
from afterglow.server.middleware import Middleware
from afterglow.server.server_config import ServerConfig
from afterglow.server.state import State
from afterglow.text import Tokenizer

if TYPE_CHECKING:
    from afterglow.memo.texts import TextEmbedder


def create_app(
    engine: EngineLike,
    tokenizer: Tokenizer,
    config: ServerConfig | None = None,
    model_dir: Path | None = None,
    embedders: Sequence[TextEmbedder] = (),
) -> Starlette:
    """Build the server around a started engine.

    `model_dir` holds the sampling defaults of the model's author. `embedders`: the models of `/v1/embeddings`, the
    default first; the engine's own model, if it is among them, answers to the served names.
    """
    defaults = SamplingDefaults() if model_dir is None else SamplingDefaults.read(model_dir)
    state = State(engine, tokenizer, config or ServerConfig(), defaults, embedders)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with state.running():
            yield

    app = Starlette(routes=[_only(*each) for each in _ROUTES], lifespan=lifespan)
    app.router.redirect_slashes = False
    app.state.afterglow = state
    app.add_middleware(Middleware, state=state)
    app.add_exception_handler(RequestError, _request_error)
    app.add_exception_handler(HTTPException, _http_error)
    add_dashboard(app, state)
    return app


Endpoint = Callable[[Request], Awaitable[Response]]
_ROUTES: tuple[tuple[str, Endpoint, str], ...] = (
    ("/v1/chat/completions", chat_completions, "POST"),
    ("/v1/completions", completions, "POST"),
    ("/v1/responses", create_response, "POST"),
    ("/v1/messages", create_message, "POST"),
    ("/v1/messages/count_tokens", count_tokens, "POST"),
    ("/v1/embeddings", embeddings, "POST"),
    ("/v1/rerank", rerank, "POST"),
    ("/rerank", rerank, "POST"),  # Jina's clients
    ("/v2/rerank", rerank, "POST"),  # Cohere's clients
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
    ("/tokenize", tokenize, "POST"),
    ("/detokenize", detokenize, "POST"),
    ("/v1/models", models, "GET"),
    ("/v1/models/{model:path}", model, "GET"),
    ("/health", health, "GET"),
    ("/version", version, "GET"),
    ("/metrics", metrics, "GET"),
    ("/reset_prefix_cache", reset_prefix_cache, "POST"),
    ("/dashboard/data", dashboard_data, "GET"),
    ("/openapi.json", openapi, "GET"),
    ("/docs", docs, "GET"),
)


def _only(path: str, endpoint: Endpoint, method: str) -> Route:
    """Make a route that answers one method: Starlette's own would answer HEAD wherever it answers GET."""
    route = Route(path, endpoint, methods=[method])
    route.methods = {method}
    return route


async def _request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error, request.scope)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = {
        404: f"there is no {request.url.path} here",
        405: f"{request.url.path} does not answer {request.method}",
    }.get(error.status_code, str(error.detail))
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    response = error_response(RequestError(message, status=error.status_code, code=code), request.scope)
    if error.status_code == 405:
        response.headers["Allow"] = ", ".join(sorted(_methods(request)))
    return response


def _methods(request: Request) -> set[str]:
    """List the methods that a path answers: each has a route of its own."""
    found = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    return {method for route in found for method in route.methods}
