"""A store on a bad day: a server (`store_servers`), behind a proxy that answers 500, stalls, is late, and flips bits on the way in and out, and a bad line."""

from __future__ import annotations

import contextlib
import http.client
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.engine.store_servers import store_server
from tests.faults.bad_line import BadLine, bad_line

BUCKET = "afterglow-chaos"
LATE_S = 0.02  # at most, of any answer
STALL_S = 6.0  # longer than any deadline of a read
# Of so many calls one goes wrong. Three failures in a row and the store is left alone for a while, so most calls have to go well.
STORE_FAULTS = {"500": 40, "stalled": 250, "flipped in the store": 12, "flipped on the way": 12}


class BadStore:
    """`faults` counts what went wrong, by kind; `calls` all calls. `line`: that all of them come by."""

    line: BadLine

    def __init__(self, host: str, port: int, seed: int) -> None:
        self.host, self.port = host, port
        self.faults: Counter[str] = Counter()
        self.calls = 0
        self._rng = random.Random(seed)
        self._lock = threading.Lock()

    def late(self) -> float:
        """Count a call; return by how many seconds its answer is late."""
        with self._lock:
            self.calls += 1
            return self._rng.uniform(0, LATE_S)

    def goes_wrong(self, kind: str) -> bool:
        """Draw whether a call goes wrong."""
        with self._lock:
            wrong = self._rng.randrange(STORE_FAULTS[kind]) == 0
            self.faults[kind] += wrong
            return wrong

    def flipped(self, data: bytes) -> bytes:
        """Flip one bit."""
        with self._lock:
            at = self._rng.randrange(8 * len(data))
        return data[: at // 8] + bytes([data[at // 8] ^ 1 << at % 8]) + data[at // 8 + 1 :]


@contextlib.contextmanager
def bad_store(scheme: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[BadStore]:
    """Run such a server, with a bucket; the environment of new processes leads to it."""
    with store_server(scheme) as server:
        server.make(BUCKET)
        store = BadStore("127.0.0.1", server.entry, seed)
        proxy = ThreadingHTTPServer(("127.0.0.1", 0), _handler(store))
        proxy.daemon_threads = True
        proxy.handle_error = lambda *_: None  # type: ignore[method-assign]  # a killed server resets its connections
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        try:
            with bad_line(proxy.server_address[1], seed) as store.line:
                for name, value in server.environment_by(store.line.port).items():
                    monkeypatch.setenv(name, value)
                yield store
        finally:
            proxy.shutdown()
            proxy.server_close()


def _handler(store: BadStore) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            body = self.rfile.read(length)
            if len(body) < length:  # the line broke off: no store keeps half an object
                self.close_connection = True
                return
            time.sleep(store.late())
            if store.goes_wrong("500"):
                self.say(500, {}, b"")
                return
            if store.goes_wrong("stalled"):
                time.sleep(STALL_S)
                self.close_connection = True
                return
            extent = ".safetensors" in self.path
            if extent and self.command == "PUT" and store.goes_wrong("flipped in the store"):
                body = store.flipped(body)
            behind = http.client.HTTPConnection(store.host, store.port, timeout=60)
            try:
                behind.request(self.command, self.path, body, dict(self.headers))
                found = behind.getresponse()
                data = found.read()
            finally:
                behind.close()
            if extent and self.command == "GET" and found.status < 300 and store.goes_wrong("flipped on the way"):
                data = store.flipped(data)
            self.say(found.status, dict(found.getheaders()), data)

        def say(self, status: int, headers: dict[str, str], data: bytes) -> None:
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                    self.send_header(name, value)
            length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(data))
            self.send_header("Content-Length", length)
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

        def log_message(self, *_: object) -> None:
            pass

    return Handler
