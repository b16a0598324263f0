"""Limits of connections: how many may be open, and how long a client may take to send its request.

A client that connects and sends nothing, or a byte a second, costs only a place, and loses it after a while. Beyond the
limit an idle connection gives way to a new one. Without an idle one a few more connections are accepted, answered with 503
(`/health` truly) and closed; beyond those the oldest one is closed. Replies have no time limit, but a client must read them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http
import logging
import operator
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

from afterglow.errors import ConfigError, RequestError, shutting_down
from afterglow.server.json_responses import body_of, error_response, to_json
from afterglow.server.metrics.collector import Metrics
from afterglow.server.middleware import OPEN_PATHS
from afterglow.server.server_config import ServerConfig

log = logging.getLogger("afterglow.server")

MOST = 1000  # connections, where the limit on files allows them
RESERVED_FILES = 128  # descriptors for the cache, its database, threads and the process itself
SURPLUS = 16  # connections beyond the limit, that are answered with 503
UNUSED_S = 1.0  # idle for so long, a connection may give way: a client in the middle of its work has sent by then
SURPLUS_S = 3.0  # how long such a connection may live
BODY_RATE = 16 * 1024  # bytes that earn another second for the rest of a body
UNREAD_S = 120.0  # a client that reads no byte of its reply for so long has gone
CLOSING_S = 5.0  # for the last bytes of a connection to be taken
LOOK_S = 0.5  # between two looks at the clock
AT_ONCE = 16  # connections that are accepted before other work gets its turn
PAUSE_S = 0.2  # without a descriptor
LOG_EVERY_S = 60.0


def connection_limit(asked: int | None) -> int:
    """Return how many connections may be open: the configured number, or as many as open files allow. Raises:
    ConfigError."""
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
    """The HTTP connection of one client. `check` ends it when the client takes too long."""

    def __init__(
        self, listener: Listener, surplus: bool, config: uvicorn.Config, state: Any, app_state: dict[str, Any]
    ) -> None:
        super().__init__(config, state, app_state)
        self._listener = listener
        self._ends = time.monotonic() + SURPLUS_S if surplus else None
        if surplus:
            self.app = _FullServer(self.app, listener.limit)
        self._phase: tuple[Any, ...] = ()
        self._since = 0.0
        self._received = 0  # bytes since then
        self._idle_since = 0.0
        self.left: Callable[[], None] = lambda: None

    @property
    def idle(self) -> bool:
        """Tell whether the last reply has been sent and no other request has begun."""
        return self.timeout_keep_alive_task is not None

    @property
    def idle_s(self) -> float:
        """For how many seconds the connection has been idle, with nothing left to send; 0 while it is in use."""
        if not self.idle or self.transport.is_closing() or self.transport.get_write_buffer_size():
            return 0.0
        return time.monotonic() - self._idle_since

    def has_request(self) -> bool:
        """Tell whether bytes have arrived that the event loop has not read yet; the client's end is none."""
        try:
            with self.transport.get_extra_info("socket").dup() as sock:
                return bool(sock.recv(1, socket.MSG_PEEK))
        except (BlockingIOError, ConnectionError):
            return False
        except OSError:  # no descriptor is left
            return True

    def on_response_complete(self) -> None:
        self._idle_since = time.monotonic()
        super().on_response_complete()

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.left()
        super().connection_lost(exc)

    def check(self, now: float) -> None:
        """Close the connection if the client has been waited for too long."""
        if self._ends is not None and now > self._ends:
            self.transport.abort()
            return
        phase, seconds = self._waits_for()
        if phase != self._phase:
            self._phase, self._since, self._received = phase, now, 0
        elif seconds is not None and now - self._since > seconds:
            self._too_late()

    def _waits_for(self) -> tuple[tuple[Any, ...], float | None]:
        """Return the client's next duty, and its time limit in seconds (None: no limit)."""
        if self.transport.is_closing():
            return ("close",), CLOSING_S
        if unread := self.transport.get_write_buffer_size():
            return ("read", unread), UNREAD_S
        state = self.conn.their_state
        if state is h11.IDLE and not self.idle:  # uvicorn counts how long a connection is idle
            return ("headers", self.cycle), self._listener.header_timeout
        if state is h11.SEND_BODY and not self.flow.read_paused:
            return ("body", self.cycle), self._listener.body_timeout + self._received / BODY_RATE
        return ("reply",), None

    def _too_late(self) -> None:
        what = self._phase[0]
        if what in ("close", "read"):
            self.transport.abort()
            return
        self._listener.timed_out()
        if what == "body":
            self._refuse(
                RequestError(
                    f"the body of the request did not arrive in time (--body-timeout {self._listener.body_timeout:g})",
                    status=408,
                    code="request_timeout",
                )
            )
        else:
            self.transport.close()

    def _refuse(self, error: RequestError) -> None:
        """End the connection, with an error if no answer has begun."""
        if self.cycle is None or not self.cycle.response_started:
            body = to_json(body_of(error))
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            reason = http.HTTPStatus(error.status).phrase.encode()
            with contextlib.suppress(h11.LocalProtocolError):  # the connection takes no answer any more
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
        """Answer bytes that are not HTTP; uvicorn calls this."""
        self._refuse(RequestError("this is not a valid HTTP request", status=400, code="invalid_request"))

    def shutdown(self) -> None:
        """End the connection when the server ends: requests that have arrived whole go on."""
        if self.cycle is not None and self.conn.their_state is h11.SEND_BODY and not self.cycle.response_started:
            self._refuse(shutting_down())
        else:
            super().shutdown()


class _FullServer:
    """The application of surplus connections: answers that there are too many."""

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
        while (await receive()).get("more_body"):  # otherwise the client might not read the answer
            pass
        error = RequestError(
            f"the server has {self._limit} open connections, as many as it takes (--max-connections)",
            status=503,
            code="too_many_connections",
        )
        await error_response(error)(scope, receive, closing)


class _Client:
    """A connection from its first packet on."""

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.task: asyncio.Task[None] | None = None

    def end(self) -> None:
        if self.connection is not None:
            self.connection.transport.abort()
        elif self.task is not None:
            self.task.cancel()


class Listener:
    """Accepts the connections of one listening socket."""

    def __init__(self, sock: socket.socket, config: ServerConfig, tls: ssl.SSLContext | None, metrics: Metrics) -> None:
        self.limit = connection_limit(config.max_connections)
        self.header_timeout = config.header_timeout
        self.body_timeout = config.body_timeout
        self._metrics = metrics
        self._sock = sock
        self._tls = tls
        self._clients: dict[_Client, None] = {}  # the oldest first
        self._surplus: dict[_Client, None] = {}  # the oldest first
        self._warned: dict[str, float] = {}
        self._open = False

    def open(self, make: Callable[[bool], Connection], backlog: int) -> None:
        """Begin to listen; `make` makes the protocol of a connection. Raises: OSError, if another process listens
        there."""
        self._loop = asyncio.get_running_loop()
        self._make = make
        self._sock.listen(backlog)
        self._sock.setblocking(False)
        self._open = True
        self._listen()
        self._look()

    def close(self) -> None:
        """Accept no more connections; open ones stay."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._sock)
            for client in list(self._clients):
                if client.connection is None:
                    client.end()

    def end(self) -> None:
        """Stop checking connections: all have ended."""
        self._clock.cancel()

    def timed_out(self) -> None:
        """Count a connection that took too long."""
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
                # The socket stays readable: without a pause the loop would fail here again and again.
                self._loop.remove_reader(self._sock)
                self._loop.call_later(PAUSE_S, self._listen)
                self._warn("no file descriptor is left for another connection; raise the limit (ulimit -n)")
                return
            self._take_in(sock)

    def _take_in(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        client = _Client()
        surplus = len(self._clients) - len(self._surplus) >= self.limit and not self._make_room()
        self._clients[client] = None
        client.task = self._loop.create_task(self._admit(client, sock, surplus))
        client.task.add_done_callback(lambda task: self._admitted(task, client, sock))
        if surplus:
            self._metrics.refused_connections.inc()
            self._warn(f"{self.limit} connections are open, as many as --max-connections allows; others get 503")
            self._surplus[client] = None
            if len(self._surplus) > SURPLUS:
                oldest = next(iter(self._surplus))
                del self._surplus[oldest]
                self._clients.pop(oldest, None)
                oldest.end()

    def _make_room(self) -> bool:
        """Close the connection that has been idle longest. Returns whether there was one."""
        unused = [
            (connection.idle_s, client, connection)
            for client in self._clients
            if client not in self._surplus and (connection := client.connection) and connection.idle_s > UNUSED_S
        ]
        for _, client, connection in sorted(unused, key=operator.itemgetter(0), reverse=True):
            if not connection.has_request():
                connection.transport.close()
                self._left(client)
                return True
        return False

    async def _admit(self, client: _Client, sock: socket.socket, surplus: bool) -> None:
        tls = (
            {}
            if self._tls is None
            else {"ssl_handshake_timeout": self.header_timeout, "ssl_shutdown_timeout": CLOSING_S}
        )

        def made() -> Connection:
            connection = self._make(surplus)
            connection.left = lambda: self._left(client)
            return connection

        _, client.connection = await self._loop.connect_accepted_socket(made, sock, ssl=self._tls, **tls)

    def _admitted(self, task: asyncio.Task[None], client: _Client, sock: socket.socket) -> None:
        if task.cancelled() or task.exception() is not None:  # no TLS, or none in time
            sock.close()
            self._left(client)

    def _left(self, client: _Client) -> None:
        self._clients.pop(client, None)
        self._surplus.pop(client, None)

    def _look(self) -> None:
        pause = min(LOOK_S, self.header_timeout / 4, self.body_timeout / 4)
        self._clock = self._loop.call_later(pause, self._look)
        now = time.monotonic()
        for client in list(self._clients):
            if client.connection is not None:
                client.connection.check(now)

    def _warn(self, what: str) -> None:
        """Log a warning, the same one once a minute at most."""
        now = time.monotonic()
        kind = what.lstrip("0123456789")
        if now - self._warned.get(kind, -LOG_EVERY_S) >= LOG_EVERY_S:
            self._warned[kind] = now
            log.warning("%s", what)
