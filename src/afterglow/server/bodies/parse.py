"""Parses and checks request bodies; also the program of the process that does so for large ones.

Parsing JSON holds the interpreter's lock from the first byte to the last, on any thread. So another process parses
bodies that take more than some milliseconds. Imports no torch.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import sys
from typing import IO, NoReturn, TypeVar

from pydantic import ValidationError

from afterglow.errors import RequestError
from afterglow.memory.free import trim
from afterglow.server.bodies.json_body import JsonBody
from afterglow.server.bodies.limits import check_shape
from afterglow.text.chat_template import shown

B = TypeVar("B", bound=JsonBody)
HEADER = 16  # bytes before each message: the lengths of its two parts


def parse(data: bytes | bytearray, kind: type[B]) -> B:
    """Parse and check the JSON of a request as a `kind`. Raises: RequestError."""
    check_shape(data, kind.most_values)
    try:
        value = json.loads(data.decode("utf-8-sig"), parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise _invalid(str(error)) from None
    except UnicodeDecodeError as error:
        raise _invalid(f"byte {error.start} is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        known = isinstance(error, _NoConstant)
        raise _invalid(str(error) if known else "it has a number of thousands of digits") from None
    if not isinstance(value, dict):
        raise RequestError(f"the request body must be a JSON object, got {shown(value)}")
    for name, unused in kind.refused().items():
        wanted = value.get(name)
        if wanted is not None and wanted not in unused:
            raise RequestError(f"{name} is not supported; leave it out", param=name, code="unsupported_parameter")
    try:
        body = kind.model_validate(value)
    except ValidationError as error:
        raise _as_request_error(error) from None
    body.check()
    return body


class _NoConstant(ValueError):
    pass


def _no_constant(name: str) -> NoReturn:
    raise _NoConstant(f"{name} is no JSON value; send a number, or null")


def _invalid(reason: str) -> RequestError:
    return RequestError(f"the request body is not valid JSON: {reason}", code="invalid_json")


_MESSAGES = {  # in place of pydantic's, which speak of Python
    "list_type": "input should be a valid array",
    "dict_type": "input should be a valid object",
    "model_type": "input should be a valid object",
    "greater_than_equal": "input should be a 64-bit integer",
    "less_than": "input should be a 64-bit integer",
}


def _as_request_error(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False)[0]
    # In a union the location continues with the names of the alternatives; clients know the field only.
    param = str(first["loc"][0]) if first["loc"] else None
    if first["type"] == "missing":
        return RequestError(f"{param} is required", param=param)
    message = _MESSAGES.get(first["type"]) or first["msg"][:1].lower() + first["msg"][1:]
    got = "" if first["type"] == "too_large" else f", got {shown(first.get('input'))}"
    return RequestError(f"{param}: {message}{got}", param=param)


# ------------------------------------------------------------------------------------------------ the process


def send(stream: IO[bytes], first: bytes, second: bytes | bytearray = b"") -> None:
    """Write a message of two parts."""
    stream.write(len(first).to_bytes(8, "little") + len(second).to_bytes(8, "little") + first)
    stream.write(second)
    stream.flush()


def receive(stream: IO[bytes]) -> tuple[bytes, bytes]:
    """Read a message of two parts. Raises: EOFError, if the other side has ended."""
    header = _exactly(stream, HEADER)
    return (
        _exactly(stream, int.from_bytes(header[:8], "little")),
        _exactly(stream, int.from_bytes(header[8:], "little")),
    )


def _exactly(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data


def serve() -> None:
    """Answer messages on stdin until its end: the name of a kind and a body. The answer is a pickled (body, None), or
    (None, the arguments of a RequestError)."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # printed text must not be read as an answer
    while True:
        try:
            name, data = receive(requests)
        except EOFError:
            return
        answer = _answer(name.decode(), data)
        del data
        try:
            send(answers, answer)
        except BrokenPipeError:
            return
        del answer
        trim()


def _answer(name: str, data: bytes) -> bytes:
    module, _, kind = name.partition(":")
    try:
        return pickle.dumps((parse(data, getattr(importlib.import_module(module), kind)), None), 5)
    except RequestError as error:
        return pickle.dumps((None, (str(error), error.status, error.param, error.code)), 5)


def command() -> list[str]:
    """Return the command line that runs `serve` in a process with this process's module path."""
    program = f"import sys; sys.path[:] = {sys.path!r}; from afterglow.server.bodies.parse import serve; serve()"
    return [sys.executable, "-c", program]
