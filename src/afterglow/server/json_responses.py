"""Writes JSON that every client can read, whatever text is in it.

Errors are in OpenAI's form: {"error": {"message", "type", "param", "code"}}; in Anthropic's on the paths of its API.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Scope

from afterglow.errors import RequestError


def to_json(value: object) -> bytes:
    """Write a value as UTF-8."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    if not text.isascii():
        # Legal in JSON, but many clients split an event stream at every line end of Unicode.
        for char in "\x85\u2028\u2029":
            text = text.replace(char, f"\\u{ord(char):04x}")
    return text.encode("utf-8", "replace")  # lone surrogates cannot be encoded


def write_json(value: object) -> bytes:
    """Write a large value piece by piece, so that other threads can run meanwhile."""
    return b"".join(_pieces(value, DEPTH))


def _pieces(value: object, depth: int) -> Iterator[bytes]:
    if depth and isinstance(value, dict) and value:
        for number, (key, member) in enumerate(value.items()):
            yield (b"," if number else b"{") + to_json(key) + b":"
            yield from _pieces(member, depth - 1)
        yield b"}"
    elif depth and isinstance(value, list) and value:
        step = 1 if isinstance(value[0], dict | list) else AT_ONCE
        for start in range(0, len(value), step):
            yield b"," if start else b"["
            if step == 1:
                yield from _pieces(value[start], depth - 1)
            else:
                yield to_json(value[start : start + step])[1:-1]
        yield b"]"
    else:
        yield to_json(value)


DEPTH = 6  # levels of arrays and objects that are written in pieces: down to single tokens of replies
AT_ONCE = 1000  # numbers or strings of an array that are written at once


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Answer with a value."""
    return Response(to_json(value), status, headers, "application/json")


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES = {**_TYPES, 413: "request_too_large", 503: "overloaded_error"}
ANTHROPIC_PATH = "/v1/messages"


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


def anthropic_error(error: RequestError, request_id: str) -> dict[str, Any]:
    """Describe a RequestError as JSON in Anthropic's form, which has no field for the parameter: messages name it."""
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = str(error)
    if error.code == "context_length_exceeded" and not message.startswith(TOO_LONG):
        message = f"{TOO_LONG}: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


TOO_LONG = "prompt is too long"  # by which agents know that they have to shorten the conversation


def for_anthropic(scope: Scope) -> bool:
    """Check whether a request is for Anthropic's API."""
    path: str = scope["path"]
    return path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")


def error_response(error: RequestError, scope: Scope | None = None) -> Response:
    """Answer with an error. `scope`: of the request; its path decides on the form."""
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
    if error.status in (429, 503):
        headers = {"Retry-After": "1"}
    if scope is not None and for_anthropic(scope):
        return json_response(anthropic_error(error, scope["afterglow.record"].request_id), error.status, headers)
    return json_response(body_of(error), error.status, headers)


def unavailable(message: str) -> RequestError:
    """Make an error that a later try may not meet."""
    return RequestError(message, status=503, code="unavailable")
