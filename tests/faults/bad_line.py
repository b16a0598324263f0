"""A bad line: TCP connections to a server that are late, stand still, break off, or carry nothing for a while."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator

LATE_S = 0.01  # at most, of any packet
# Of so many packets one meets a fault. TCP sends lost ones again, so that loss is lateness (200 ms at least on Linux), or, where all are
# lost from then on, a connection on which nothing comes any more.
LINE_FAULTS = {"sent again": 100, "reset": 400, "dead": 800}
AGAIN_S = (0.2, 0.8)
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with RST


class BadLine:
    """The line to `port` of this machine. `port`: where it begins. `faults` counts what connections met, by kind."""

    def __init__(self, port: int, seed: int) -> None:
        self.faults: Counter[str] = Counter()
        self._to = port
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._cut_until = 0.0
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, seconds: float) -> None:
        """Carry nothing for so long; connections stay as they are."""
        with self._lock:
            self._cut_until = time.monotonic() + seconds
            self.faults["cut"] += 1

    def close(self) -> None:
        """End all connections."""
        self._listener.close()
        with self._lock:
            for each in self._open:
                _end(each)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        self._wait()
        try:
            far = socket.create_connection(("127.0.0.1", self._to))
        except OSError:  # nothing listens there
            _reset(near)
            return
        dead = threading.Event()
        with self._lock:
            self._open |= {near, far}
        ways = [
            threading.Thread(target=self._carry, args=way, daemon=True)
            for way in ((near, far, dead), (far, near, dead))
        ]
        for way in ways:
            way.start()
        for way in ways:
            way.join()
        with self._lock:
            self._open -= {near, far}
        near.close()
        far.close()

    def _carry(self, source: socket.socket, sink: socket.socket, dead: threading.Event) -> None:
        """Carry what comes from one side until that ends, or the line fails; then end both."""
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                fault, late = self._draw()
                time.sleep(late)
                self._wait()
                if fault == "reset":
                    for each in (source, sink):
                        each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    break
                if fault == "dead":
                    dead.set()
                if not dead.is_set():
                    sink.sendall(data)
        _end(source)
        _end(sink)

    def _draw(self) -> tuple[str | None, float]:
        """Draw the fault that a packet meets, and by how many seconds it is late."""
        with self._lock:
            fault = next((kind for kind, of in LINE_FAULTS.items() if self._rng.randrange(of) == 0), None)
            if fault is not None:
                self.faults[fault] += 1
            return fault, self._rng.uniform(*AGAIN_S) if fault == "sent again" else self._rng.uniform(0, LATE_S)

    def _wait(self) -> None:
        while (left := self._cut_until - time.monotonic()) > 0:
            time.sleep(left)


@contextlib.contextmanager
def bad_line(port: int, seed: int) -> Iterator[BadLine]:
    """Lay such a line to a port of this machine."""
    line = BadLine(port, seed)
    try:
        yield line
    finally:
        line.close()


def _end(end: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended
        end.shutdown(socket.SHUT_RDWR)


def _reset(end: socket.socket) -> None:
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    end.close()
