"""Responses that end with their client: server-sent events, and waiting for a result while the client
stays."""

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
from afterglow.server.errors import body_of, error_body
from afterglow.server.wire import to_json

log = logging.getLogger("afterglow.server")
T = TypeVar("T")

PING = b": ping\n\n"  # a comment: clients skip it, and what lies between sees that the connection lives
PING_SECONDS = 5.0
CLIENT_GONE = 499  # no client sees it; the access log and the metrics do


class ClientGone(Exception):
    """The client has hung up; there is nobody to answer."""


def event(value: object) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Server-sent events from a generator. As soon as the client hangs up it is closed, and `close` called. While nothing
    is sent, a comment goes out every `PING_SECONDS`.

    Starlette's own streaming leaves a generator to the garbage collector when it is cancelled between two
    chunks; here it holds jobs that must end at once.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], None]) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close  # a generator that was never begun does nothing when it is closed
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
        self._sending = True  # it may take long: a client that reads slowly needs no comments
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        self._sending = False
        self._sent = asyncio.get_running_loop().time()

    async def _ping(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            due = (clock() if self._sending else self._sent) + PING_SECONDS
            if clock() >= due:
                await send({"type": "http.response.body", "body": PING, "more_body": True})
                self._sent = clock()
            else:
                await asyncio.sleep(due - clock())


async def while_connected(work: Coroutine[Any, Any, T], request: Request) -> T:
    """The result of `work`, which is cancelled if the client hangs up first. Errors: ClientGone."""
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
