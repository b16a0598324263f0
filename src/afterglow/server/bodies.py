"""Reading request bodies without holding up the event loop: small ones here, large ones in a process of their own.

There is one such process. It starts with the first large body, and ends when there was none for a while, with all the
memory that it has used; one that dies is started again. Bodies that wait for it are bounded in bytes.
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
from afterglow.server.errors import shutting_down
from afterglow.server.limits import count_values
from afterglow.server.memory import trim
from afterglow.server.parse import command, parse, receive, send
from afterglow.server.schema import JsonBody
from afterglow.server.stream import ClientGone

log = logging.getLogger("afterglow.server")
B = TypeVar("B", bound=JsonBody)

LARGE = 1024**2  # bytes of a body that is not read on the event loop,
MANY = 16 * 1024  # nor is a smaller one that may have so many values
AT_ONCE = 8  # of the largest bodies may be held at once, in bytes
IDLE_SECONDS = 30.0  # after which the process ends
TRIM_SECONDS = 1.0  # from a large request's end to giving its memory back


class Bodies:
    """Bodies on their way in. Lives on the event loop; `_ask` runs in a thread of its own."""

    def __init__(self, max_body: int) -> None:
        self.restarts = 0  # of the process, because it had died
        self._room = AT_ONCE * max_body
        self._thread = ThreadPoolExecutor(1, "afterglow-parse")  # one request after the other
        self._lock = threading.Lock()  # of `_process`, that `close` may end under a request
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = False
        self._idle: asyncio.TimerHandle | None = None
        self._trim: asyncio.TimerHandle | None = None

    async def read(self, request: Request, kind: type[B]) -> B:
        """The request's JSON as a `kind`. Errors: RequestError, ClientGone."""
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
        """A large request has ended: give its memory back, unless the next one comes at once."""
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
        """The process is in use: it does not end yet."""
        if self._idle is not None:
            self._idle.cancel()

    def _ask(self, name: bytes, data: bytearray) -> Any:
        """Errors: RequestError, if the process dies twice over this body."""
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
                # A session of its own: Ctrl-C is the server's business. It ends when its input does.
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
    """The request's JSON as a `kind`. Errors: RequestError, ClientGone."""
    bodies: Bodies = request.app.state.afterglow.bodies
    return await bodies.read(request, kind)
