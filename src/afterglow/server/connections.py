"""Connections: how many may be open, and how long a client may take to say what it wants.

Clients that connect and say nothing, or a byte a second, cost nothing but a place, and lose it after a while. Beyond
the limit a few connections more are taken in, only to be answered with 503 (and `/health` with the truth) and closed;
beyond those the oldest of them goes. Replies have no time limit, only clients that do not read them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http
import logging
import resource
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from afterglow.errors import ConfigError, RequestError
from afterglow.server.errors import body_of, error_response, shutting_down
from afterglow.server.guard import OPEN_PATHS
from afterglow.server.metrics import Metrics
from afterglow.server.settings import ServerConfig
from afterglow.server.wire import to_json

log = logging.getLogger("afterglow.server")

MOST = 1000  # connections, where files are no matter
RESERVED_FILES = 128  # descriptors for the cache, its database, threads and the process itself
SURPLUS = 16  # connections beyond the limit, that are answered with 503
SURPLUS_S = 3.0  # how long such a connection may live
BODY_RATE = 16 * 1024  # bytes that earn another second for the rest of a body
UNREAD_S = 120.0  # a client that reads nothing of its reply for so long is gone
CLOSING_S = 5.0  # for the last bytes of a connection to be taken
LOOK_S = 0.5  # between two looks at the clock
AT_ONCE = 16  # connections that are taken in before others get their turn
PAUSE_S = 0.2  # without a descriptor
LOG_EVERY_S = 60.0


def connection_limit(asked: int | None) -> int:
    """How many connections may be open: as asked, or what the limit on files leaves. Errors: ConfigError."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    room = MOST if files == resource.RLIM_INFINITY else files - RESERVED_FILES - SURPLUS
    if asked is None:
        return min(MOST, max(room, 8))
    if files != resource.RLIM_INFINITY and asked > room:
        raise ConfigError(
            f"--max-connections {asked} needs {asked + RESERVED_FILES + SURPLUS} open files, and the limit is {files}; "
            f"raise it (ulimit -n), or allow at most {max(room, 1)}"
        )
    return asked


class Connection(H11Protocol):
    """One client's connection. `check` ends it when the client takes too long."""

    def __init__(
        self, door: Door, surplus: bool, config: uvicorn.Config, state: Any, app_state: dict[str, Any]
    ) -> None:
        super().__init__(config, state, app_state)
        self._door = door
        self._ends = time.monotonic() + SURPLUS_S if surplus else None
        if surplus:
            self.app = _Full(self.app, door.limit)
        self._phase: tuple[Any, ...] = ()
        self._since = 0.0
        self._received = 0  # bytes since then
        self.left: Callable[[], None] = lambda: None

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.left()
        super().connection_lost(exc)

    def check(self, now: float) -> None:
        """Look at the clock: what the client is waited for, and since when."""
        if self._ends is not None and now > self._ends:
            self.transport.abort()
            return
        phase, seconds = self._waits_for()
        if phase != self._phase:
            self._phase, self._since, self._received = phase, now, 0
        elif seconds is not None and now - self._since > seconds:
            self._too_late()

    def _waits_for(self) -> tuple[tuple[Any, ...], float | None]:
        """What the client has to do next, and in how many seconds; None for no limit."""
        if self.transport.is_closing():
            return ("close",), CLOSING_S
        if unread := self.transport.get_write_buffer_size():
            return ("read", unread), UNREAD_S
        state = self.conn.their_state
        if state is h11.IDLE and self.timeout_keep_alive_task is None:  # else uvicorn counts: the connection is idle
            return ("headers", self.cycle), self._door.header_timeout
        if state is h11.SEND_BODY and not self.flow.read_paused:
            return ("body", self.cycle), self._door.body_timeout + self._received / BODY_RATE
        return ("reply",), None

    def _too_late(self) -> None:
        what = self._phase[0]
        if what in ("close", "read"):
            self.transport.abort()
            return
        self._door.timed_out()
        if what == "body":
            self._refuse(
                RequestError(
                    f"the body of the request did not arrive in time (--body-timeout {self._door.body_timeout:g})",
                    status=408,
                    code="request_timeout",
                )
            )
        else:
            self.transport.close()

    def _refuse(self, error: RequestError) -> None:
        """End a connection, with an answer where there was none yet."""
        if self.cycle is None or not self.cycle.response_started:
            body = to_json(body_of(error))
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            reason = http.HTTPStatus(error.status).phrase.encode()
            with contextlib.suppress(h11.LocalProtocolError):  # an answer is not possible any more
                for event in (
                    h11.Response(status_code=error.status, headers=headers, reason=reason),
                    h11.Data(data=body),
                    h11.EndOfMessage(),
                ):
                    self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this for what is not HTTP."""
        self._refuse(RequestError("this is not a valid HTTP request", status=400, code="invalid_request"))

    def shutdown(self) -> None:
        """The server ends: requests that have arrived go on, others do not."""
        if self.cycle is not None and self.conn.their_state is h11.SEND_BODY and not self.cycle.response_started:
            self._refuse(shutting_down())
        else:
            super().shutdown()


class _Full:
    """What surplus connections see instead of the application: that there are too many."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        if scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, closing)
            return
        while (await receive()).get("more_body"):  # or the client might not get to read the answer
            pass
        error = RequestError(
            f"the server has {self._limit} open connections, as many as it takes (--max-connections)",
            status=503,
            code="too_many_connections",
        )
        await error_response(error)(scope, receive, closing)


class _Guest:
    """A connection from its first packet on."""

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.task: asyncio.Task[None] | None = None

    def end(self) -> None:
        if self.connection is not None:
            self.connection.transport.abort()
        elif self.task is not None:
            self.task.cancel()


class Door:
    """Takes in the connections of one listening socket. `make` gives the protocol of one."""

    def __init__(self, sock: socket.socket, config: ServerConfig, tls: ssl.SSLContext | None, metrics: Metrics) -> None:
        self.limit = connection_limit(config.max_connections)
        self.header_timeout = config.header_timeout
        self.body_timeout = config.body_timeout
        self._metrics = metrics
        self._sock = sock
        self._tls = tls
        self._guests: set[_Guest] = set()
        self._surplus: dict[_Guest, None] = {}  # the oldest first
        self._said: dict[str, float] = {}
        self._open = False

    def open(self, make: Callable[[bool], Connection], backlog: int) -> None:
        """Begin to listen. Errors: OSError, if another process does so already."""
        self._loop = asyncio.get_running_loop()
        self._make = make
        self._sock.listen(backlog)
        self._sock.setblocking(False)
        self._open = True
        self._listen()
        self._look()

    def close(self) -> None:
        """Take in no more; those that are inside stay."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._sock)
            for guest in list(self._guests):
                if guest.connection is None:
                    guest.end()

    def end(self) -> None:
        """Nobody is left to be looked after."""
        self._clock.cancel()

    def timed_out(self) -> None:
        self._metrics.late_connections.inc()

    def _listen(self) -> None:
        if self._open:
            self._loop.add_reader(self._sock, self._ready)

    def _ready(self) -> None:
        for _ in range(AT_ONCE):
            try:
                sock, _address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise
                # The socket stays readable: without a pause the loop would do nothing but fail at this.
                self._loop.remove_reader(self._sock)
                self._loop.call_later(PAUSE_S, self._listen)
                self._say("no file descriptor is left for another connection; raise the limit (ulimit -n)")
                return
            self._take_in(sock)

    def _take_in(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        guest = _Guest()
        surplus = len(self._guests) - len(self._surplus) >= self.limit
        self._guests.add(guest)
        guest.task = self._loop.create_task(self._admit(guest, sock, surplus))
        guest.task.add_done_callback(lambda task: self._admitted(task, guest, sock))
        if surplus:
            self._metrics.refused_connections.inc()
            self._say(f"{self.limit} connections are open, as many as --max-connections allows; others get 503")
            self._surplus[guest] = None
            if len(self._surplus) > SURPLUS:
                oldest = next(iter(self._surplus))
                del self._surplus[oldest]
                self._guests.discard(oldest)
                oldest.end()

    async def _admit(self, guest: _Guest, sock: socket.socket, surplus: bool) -> None:
        tls = (
            {}
            if self._tls is None
            else {"ssl_handshake_timeout": self.header_timeout, "ssl_shutdown_timeout": CLOSING_S}
        )

        def made() -> Connection:
            connection = self._make(surplus)
            connection.left = lambda: self._left(guest)
            return connection

        _, guest.connection = await self._loop.connect_accepted_socket(made, sock, ssl=self._tls, **tls)

    def _admitted(self, task: asyncio.Task[None], guest: _Guest, sock: socket.socket) -> None:
        if task.cancelled() or task.exception() is not None:  # no TLS, or none in time
            sock.close()
            self._left(guest)

    def _left(self, guest: _Guest) -> None:
        self._guests.discard(guest)
        self._surplus.pop(guest, None)

    def _look(self) -> None:
        pause = min(LOOK_S, self.header_timeout / 4, self.body_timeout / 4)
        self._clock = self._loop.call_later(pause, self._look)
        now = time.monotonic()
        for guest in list(self._guests):
            if guest.connection is not None:
                guest.connection.check(now)

    def _say(self, what: str) -> None:
        """A line in the log, the same one once a minute at most."""
        now = time.monotonic()
        kind = what.lstrip("0123456789")
        if now - self._said.get(kind, -LOG_EVERY_S) >= LOG_EVERY_S:
            self._said[kind] = now
            log.warning("%s", what)
