"""Errors in OpenAI's form: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from afterglow.errors import RequestError
from afterglow.server.json import json_response

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


CLIENT_GONE = 499  # for the access log and the metrics only


class ClientGone(Exception):
    """The client has disconnected: no answer is possible."""


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Describe an error as JSON."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def body_of(error: RequestError) -> dict[str, Any]:
    """Describe a RequestError as JSON."""
    return error_body(str(error), error.status, error.param, error.code)


def error_response(error: RequestError) -> Response:
    """Answer with an error."""
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
    if error.status in (429, 503):
        headers = {"Retry-After": "1"}
    return json_response(body_of(error), error.status, headers)


def shutting_down() -> RequestError:
    """Make the error for requests that come while the server ends."""
    return RequestError("the server is shutting down", status=503, code="unavailable")


def engine_dead() -> RequestError:
    """Make the error for requests after the engine has failed."""
    return RequestError(
        "the engine has stopped because of an internal error; the server must be restarted",
        status=503,
        code="engine_dead",
    )
