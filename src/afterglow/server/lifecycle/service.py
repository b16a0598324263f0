"""Runs the server: socket, signals, log, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from afterglow.errors import ConfigError, shutting_down
from afterglow.server.app import create_app
from afterglow.server.blocking import PROMPTS
from afterglow.server.lifecycle.address import announce, certificate_of, server_context
from afterglow.server.lifecycle.connections import Connection, Listener
from afterglow.server.server_config import ServerConfig, read_prompt
from afterglow.server.state import State
from afterglow.text import Tokenizer
from afterglow.version import __version__

if TYPE_CHECKING:
    from afterglow.memo.texts import TextEmbedder
    from afterglow.server.bridge import EngineLike

log = logging.getLogger("afterglow.server")

EXIT_IMPATIENT = 130  # after the second signal; the files on disk stay valid
SAME_SIGNAL_SECONDS = 0.5  # `timeout`, for one, sends a signal to the process and again to its group
IDLE_SECONDS = 75  # a connection is kept after a reply: longer than clients keep theirs, else both act at once and a request is lost
LAST_WORDS_SECONDS = 2.0  # for sending the errors of aborted requests


def listen(config: ServerConfig) -> socket.socket:
    """Bind a socket before the model is loaded: an occupied port is reported at once. Raises: ConfigError."""
    where = f"port {config.port} of {config.host}"
    try:
        family, kind, protocol, *_ = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        # The protocol has to be named: asyncio sets TCP_NODELAY only on sockets that say they are TCP, and without it each
        # small write of a kept-alive connection waits 40 ms for the client's acknowledgement.
        sock = socket.socket(family, kind, protocol or socket.IPPROTO_TCP)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {where}: {error}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Bound, but not listening yet: while the model loads, clients shall be refused and not left hanging.
        sock.bind((config.host, config.port))
    except (OSError, OverflowError) as error:
        sock.close()
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise _in_use(config) from None
        raise ConfigError(f"cannot listen on {where}: {error}") from None
    return sock


def _in_use(config: ServerConfig) -> ConfigError:
    return ConfigError(f"port {config.port} of {config.host} is in use; stop the other server or choose another --port")


def address(sock: socket.socket, scheme: str = "http") -> str:
    """Return the URL of a socket."""
    host, port = sock.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def set_up_logging(level: str) -> None:
    """Log to stderr, one line each; uvicorn only logs errors."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"))
    root = logging.getLogger("afterglow")
    root.handlers = [handler]
    root.setLevel(level.upper())
    root.propagate = False
    noise = logging.getLogger("uvicorn")
    noise.handlers = [handler]
    noise.setLevel(logging.ERROR)  # it warns of each client that sends no HTTP
    noise.propagate = False


class _Server(uvicorn.Server):
    """A uvicorn server with our own listener and signal handling: uvicorn's would raise the signal again at the end
    (exit code 143)."""

    def __init__(self, config: uvicorn.Config, listener: Listener) -> None:
        super().__init__(config)
        self._listener = listener

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            raise RuntimeError("the server did not start")

        def make(surplus: bool) -> Connection:
            return Connection(self._listener, surplus, self.config, self.server_state, self.lifespan.state)

        self._listener.open(make, self.config.backlog)
        self.servers = []
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._listener.close()
        try:
            await super().shutdown(sockets)
        finally:
            self._listener.end()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Service:
    """Runs one server on one socket. `run` blocks until `stop` or a signal, and returns when everything is closed."""

    def __init__(
        self,
        engine: EngineLike,
        tokenizer: Tokenizer,
        config: ServerConfig,
        model_dir: Path | None = None,
        sock: socket.socket | None = None,
        embedders: Sequence[TextEmbedder] = (),
        kill: Callable[[], None] | None = None,
    ) -> None:
        """`kill`: ends what has a process of its own, where the second signal ends this one."""
        self._config, self._kill = config, kill
        self.socket = sock or listen(config)
        tls = server_context(config)
        self.address = address(self.socket, "http" if tls is None else "https")
        path = config.system_prompt_file
        self._system_prompt = read_prompt(path) if path is not None else None
        app = create_app(engine, tokenizer, config, model_dir, embedders)
        self.state: State = app.state.afterglow
        if self.state.defaults.ignored:
            log.warning("generation_config.json asks for %s: not honoured", ", ".join(self.state.defaults.ignored))
        self._server = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="on",
                timeout_keep_alive=IDLE_SECONDS,
                timeout_graceful_shutdown=int(config.grace + LAST_WORDS_SECONDS) + 1,
                server_header=False,
                ws="none",
            ),
            Listener(self.socket, config, tls, self.state.metrics),
        )
        self._prompts: asyncio.Future[None] | None = None  # the computation of registered system prompts
        self._stopping: float | None = None  # since when

    @property
    def started(self) -> bool:
        return self._server.started

    def run(self, *, signals: bool = True) -> None:
        asyncio.run(self._main(signals))

    def stop(self) -> None:
        """Refuse new requests; those in flight have `grace` seconds. Can be called from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._begin_end)

    async def _main(self, signals: bool) -> None:
        self._loop = asyncio.get_running_loop()
        if signals:
            for number in (signal.SIGINT, signal.SIGTERM):
                # Not the loop's handlers: they end with the loop, and closing the engine takes longer.
                signal.signal(number, self.on_signal)
        await asyncio.to_thread(self.state.kept_replies.load)
        try:
            prepared = await self._compute_prompts()
        except BaseException:
            self.socket.close()
            raise
        if not prepared:
            self.socket.close()
            return
        if signals:  # the process is ours, and its objects of now stay: collecting them again takes 0.1 s now and then
            gc.collect()
            gc.freeze()
        announce(self.state.engine.conversations.folder, url=self.address, certificate=certificate_of(self._config))
        names = ", ".join(dict.fromkeys((*self.state.models.names, *self.state.embeddings.names)))
        log.info("Afterglow %s serves %s at %s/v1", __version__, names, self.address)
        try:
            await self._server.serve(sockets=[self.socket])
        except OSError as error:  # another process began to listen while the model was loading
            raise (_in_use(self._config) if error.errno == errno.EADDRINUSE else error) from None

    async def _compute_prompts(self) -> bool:
        """Compute the registered system prompts before the server accepts requests. Returns False if a signal came
        first: the computation then ends with the engine."""
        if not self.state.models.generates:
            if self._system_prompt is not None:
                raise ConfigError("--system-prompt-file is for models that chat, and this one only embeds")
            return True
        if self._server.should_exit:
            return False
        self._prompts = asyncio.ensure_future(PROMPTS(self.state.system_prompts.start, self._system_prompt))
        await asyncio.wait([self._prompts])
        if self._prompts.cancelled():
            return False
        self._prompts.result()
        return not self._server.should_exit

    def on_signal(self, *_: object) -> None:
        """Begin an orderly end at the first signal; end the process at once at the second one."""
        now = time.monotonic()
        if self._stopping is not None:
            if now - self._stopping < SAME_SIGNAL_SECONDS:
                return
            if self._kill is not None:
                self._kill()
            os._exit(EXIT_IMPATIENT)
        self._stopping = now
        log.info("shutting down; running requests have %g s (again: at once)", self._config.grace)
        self.stop()

    def _begin_end(self) -> None:
        if not self.started:
            self._server.should_exit = True
            if self._prompts is not None:
                self._prompts.cancel()
            return
        if self.state.bridge.draining:
            return
        self.state.bridge.draining = True
        # uvicorn stops accepting and waits for the connections; the requests' end lets their responses end
        # properly.
        self._loop.call_later(self._config.grace, lambda: self.state.bridge.abort(shutting_down()))
        self._server.should_exit = True
