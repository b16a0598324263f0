"""Reads request bodies without blocking the event loop: small ones here, large ones in another process.

There is one such process. It starts with the first large body, and ends after a time without any, which frees its
memory. A process that dies is started again. The bytes of bodies that wait for it are bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from afterglow.errors import RequestError
from afterglow.memory.free import trim
from afterglow.server.bodies.json_body import JsonBody
from afterglow.server.bodies.limits import count_values
from afterglow.server.bodies.parse import command, parse, receive, send
from afterglow.server.error_responses import ClientGone, shutting_down

log = logging.getLogger("afterglow.server")
B = TypeVar("B", bound=JsonBody)

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
    bodies: BodyReader = request.app.state.afterglow.bodies
    return await bodies.read(request, kind)
