"""Reads request bodies without blocking the event loop: small ones here, large ones in another process.

Parsing JSON holds the interpreter's lock from the first byte to the last, on any thread. So another process, whose program is here as
well, parses bodies that take more than some milliseconds. Imports no torch.

There is one such process. It starts with the first large body, and ends after a time without any, which frees its
memory. A process that dies is started again. The bytes of bodies that wait for it are bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import logging
import math
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, NoReturn, TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from afterglow.errors import RequestError, shutting_down
from afterglow.memory.free import trim
from afterglow.server.bodies.json_body import JsonBody
from afterglow.server.bodies.limits import check_shape, count_values, unsupported
from afterglow.server.json_responses import ClientGone
from afterglow.text.chat_template import shown

B = TypeVar("B", bound=JsonBody)
HEADER = 16  # bytes before each message: the lengths of its two parts


def parse(data: bytes | bytearray, kind: type[B]) -> B:
    """Parse and check the JSON of a request as a `kind`. Raises: RequestError."""
    check_shape(data, kind.most_values)
    try:
        value = json.loads(data.decode("utf-8-sig"), parse_constant=_no_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise _invalid(str(error)) from None
    except UnicodeDecodeError as error:
        raise _invalid(f"byte {error.start} is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        known = isinstance(error, _NoNumber)
        raise _invalid(str(error) if known else "it has a number of thousands of digits") from None
    if not isinstance(value, dict):
        raise RequestError(f"the request body must be a JSON object, got {shown(value)}")
    for name, unused in kind.refused().items():
        wanted = value.get(name)
        if wanted is not None and wanted not in unused:
            raise unsupported(name)
    try:
        body = kind.model_validate(value)
    except ValidationError as error:
        raise _as_request_error(error) from None
    body.check()
    return body


class _NoNumber(ValueError):
    pass


def _no_constant(name: str) -> NoReturn:
    raise _NoNumber(f"{name} is no JSON value; send a number, or null")


def _finite(text: str) -> float:
    """Read a number. One that is read as infinite could not be written into an answer."""
    value = float(text)
    if math.isinf(value):
        raise _NoNumber(f"{text[:80]} is beyond the largest number of 64 bits; send a smaller one, or null")
    return value


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
    program = f"import sys; sys.path[:] = {sys.path!r}; from afterglow.server.bodies.reader import serve; serve()"
    return [sys.executable, "-c", program]


log = logging.getLogger("afterglow.server")

LARGE = 1024**2  # bytes: larger bodies go to the process,
MANY = 16 * 1024  # as do smaller ones with more values than this
AT_ONCE = 8  # so many of the largest bodies fit the bytes that are held at once
IDLE_SECONDS = 30.0  # after which the process ends
TRIM_SECONDS = 1.0  # from a large request's end to giving its memory back


class BodyReader:
    """Reads bodies. Lives on the event loop; `_ask` runs on a thread of its own."""

    def __init__(self, max_body: int) -> None:
        self.restarts = 0  # of the process, after it had died
        self._room = AT_ONCE * max_body
        self._thread = ThreadPoolExecutor(1, "afterglow-parse")  # one request after the other
        self._lock = threading.Lock()  # of `_process`: `close` may end it under a request
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = False
        self._idle: asyncio.TimerHandle | None = None
        self._trim: asyncio.TimerHandle | None = None

    async def read(self, request: Request, kind: type[B]) -> B:
        """Read the request's JSON as a `kind`. Raises: RequestError, ClientGone."""
        data = bytearray()
        try:
            async for chunk in request.stream():
                if len(chunk) > self._room:
                    raise RequestError(
                        "the server is reading as many large request bodies as it can hold; try again later",
                        status=503,
                        code="too_many_bodies",
                    )
                self._room -= len(chunk)
                data += chunk
            if len(data) <= LARGE and count_values(data) <= MANY:
                return parse(data, kind)
            request.scope["afterglow.record"].large = True
            return await self._elsewhere(data, kind)
        except ClientDisconnect:
            raise ClientGone from None
        finally:
            self._room += len(data)

    def trim_soon(self) -> None:
        """Return a large request's memory to the system, unless the next large one comes at once."""
        if self._trim is not None:
            self._trim.cancel()
        loop = asyncio.get_running_loop()
        self._trim = loop.call_later(TRIM_SECONDS, lambda: loop.run_in_executor(None, trim))

    def close(self) -> None:
        """End the process. Requests that wait for it get an error."""
        self._closing = True
        for timer in (self._idle, self._trim):
            if timer is not None:
                timer.cancel()
        self._end()
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def _elsewhere(self, data: bytearray, kind: type[B]) -> B:
        self._stay()
        loop = asyncio.get_running_loop()
        name = f"{kind.__module__}:{kind.__qualname__}".encode()
        try:
            body, error = await loop.run_in_executor(self._thread, self._ask, name, data)
        finally:
            if not self._closing:
                self._stay()  # another body may have ended meanwhile
                self._idle = loop.call_later(IDLE_SECONDS, lambda: loop.run_in_executor(self._thread, self._end))
        if error is not None:
            message, status, param, code = error
            raise RequestError(message, status=status, param=param, code=code)
        assert isinstance(body, kind)
        return body

    def _stay(self) -> None:
        """Cancel the end of the process: it is in use."""
        if self._idle is not None:
            self._idle.cancel()

    def _ask(self, name: bytes, data: bytearray) -> Any:
        """Let the process parse a body. Raises: RequestError, if the process dies twice over it."""
        for _ in range(2):
            process = self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                send(process.stdin, name, data)
                answer, _ = receive(process.stdout)
            except (EOFError, OSError, ValueError):  # ValueError: its pipes are closed
                self._end()
                self.restarts += 1
                if not self._closing:
                    log.warning("the process that reads large bodies has died; it is started again")
                continue
            return pickle.loads(answer)
        raise RequestError("the process that reads large bodies has died twice; try again later", status=503)

    def _start(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._closing:
                raise shutting_down()
            if self._process is None:
                # In a session of its own, so that Ctrl-C reaches the server only. The process ends with its input.
                self._process = subprocess.Popen(
                    command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
                )
            return self._process

    def _end(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


async def read_body(request: Request, kind: type[B]) -> B:
    """Read the request's JSON as a `kind`. Raises: RequestError, ClientGone."""
    bodies: BodyReader = request.scope["afterglow.state"].bodies
    return await bodies.read(request, kind)
