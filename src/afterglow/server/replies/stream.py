"""Responses that end with their client: server-sent events, and waiting for a result while the client is connected."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from afterglow.errors import RequestError
from afterglow.server.error_responses import ClientGone, body_of, error_body
from afterglow.server.json import to_json

log = logging.getLogger("afterglow.server")
T = TypeVar("T")

PING = b": ping\n\n"  # a comment: clients skip it, and proxies see that the connection is alive
PING_SECONDS = 5.0


def event(value: object) -> bytes:
    """Write a server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends the events of a generator. When the client disconnects, closes the generator and calls `close`. Sends `ping`, by
    default a comment, after each `PING_SECONDS` without an event.

    Starlette's own streaming leaves a generator that is cancelled between two chunks to the garbage collector. Here
    requests depend on it, which must end at once.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], None], ping: bytes = PING) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close  # a generator that was never begun runs no code when it is closed
        self._alive = ping
        self._sending = False
        self._sent = 0.0  # by the loop's clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(self._send_all(send), Request(scope, receive))
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            self._sent = asyncio.get_running_loop().time()
            pings = asyncio.create_task(self._ping(send))
            try:
                async for chunk in events:
                    await self._send_part(send, chunk)
            except RequestError as error:  # too late for a status
                await self._send_part(send, event(body_of(error)))
            except Exception:
                log.exception("a stream failed")
                await self._send_part(send, event(error_body("internal error", 500)))
            finally:
                pings.cancel()
                await asyncio.gather(pings, return_exceptions=True)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_part(self, send: Send, chunk: bytes) -> None:
        self._sending = True  # sending may take long: a client that reads slowly needs no comments
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        self._sending = False
        self._sent = asyncio.get_running_loop().time()

    async def _ping(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            due = (clock() if self._sending else self._sent) + PING_SECONDS
            if clock() >= due:
                await send({"type": "http.response.body", "body": self._alive, "more_body": True})
                self._sent = clock()
            else:
                await asyncio.sleep(due - clock())


async def while_connected(work: Coroutine[Any, Any, T], request: Request) -> T:
    """Return the result of `work`, which is cancelled if the client disconnects first. Raises: ClientGone, and the
    errors of `work`."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for future in (task, gone):
            future.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
