"""`/v1/models`, `/health`, `/version` and `/metrics`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from afterglow.server.access.request_record import RequestRecord
from afterglow.server.error_responses import engine_dead, error_response
from afterglow.server.json import json_response
from afterglow.server.metrics.collector import CONTENT_TYPE
from afterglow.server.state import State
from afterglow.version import __version__


async def models(http: HttpRequest) -> Response:
    """List the models."""
    state: State = http.app.state.afterglow
    names = dict.fromkeys((*state.models.names, *state.embeddings.names))
    return json_response({"object": "list", "data": [_card(state, name) for name in names]})


async def model(http: HttpRequest) -> Response:
    """Describe a model."""
    state: State = http.app.state.afterglow
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
    state: State = http.app.state.afterglow
    if not state.engine.healthy:
        return error_response(engine_dead())
    return json_response({"status": "draining" if state.bridge.draining else "ok"})


async def version(http: HttpRequest) -> Response:
    """Report Afterglow's version."""
    return json_response({"version": __version__})


async def metrics(http: HttpRequest) -> Response:
    """Report Prometheus metrics, of all tenants together."""
    state: State = http.app.state.afterglow
    record: RequestRecord = http.scope["afterglow.record"]
    record.caller.check_metrics()
    return Response(state.metrics.text(), media_type=CONTENT_TYPE)
