"""A server in a process of its own for requests that are meant to hurt, and an onlooker who feels what others feel.

`python -m tests.server.hostile MODEL ENCODER` serves both with a fake engine until its input ends.
"""

from __future__ import annotations

import contextlib
import gc
import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[2]

Threads = dict[str, tuple[float, float]]  # by the number of each thread: seconds on a core, and waiting for one


@dataclass
class Answer:
    status: int
    data: bytes
    slowest: float = 0.0  # seconds that the server kept /health waiting meanwhile

    @property
    def error(self) -> dict[str, str | None]:
        found: dict[str, str | None] = json.loads(self.data)["error"]
        return found


@dataclass
class Hostile:
    url: str
    pid: int
    loop: int  # the thread of the event loop
    _local: threading.local = field(default_factory=threading.local)

    def ask(self, method: str, path: str, data: bytes = b"", kind: str = "application/json") -> Answer:
        """Over this thread's own connection, which is kept."""
        for attempt in range(2):
            connection = self._connection()
            try:
                connection.request(method, path, data, {"Content-Type": kind} if data else {})
                answer = connection.getresponse()
                return Answer(answer.status, answer.read())
            except (ConnectionError, http.client.HTTPException):  # closed after a refusal
                self.hang_up()
                if attempt:
                    raise
        raise AssertionError

    def hang_up(self) -> None:
        if (connection := getattr(self._local, "connection", None)) is not None:
            connection.close()
            del self._local.connection

    def watched(self, path: str, data: bytes, method: str = "POST") -> Answer:
        """With an onlooker."""
        with self.onlooker() as slowest:
            answer = self.ask(method, path, data)
        answer.slowest = max(slowest, default=0.0)
        return answer

    @contextmanager
    def onlooker(self) -> Iterator[list[float]]:
        """A client that asks for /health all the time, over a kept connection: how long the server kept it waiting.

        A busy machine keeps its clients waiting, and that is no fault of the server: the time that threads of the server,
        of its processes, or the client waited for a core is not counted.
        """
        seconds: list[float] = []
        begun, done = threading.Event(), threading.Event()

        def look() -> None:
            with contextlib.closing(self._new()) as connection:
                while not done.is_set():
                    before = self._threads()
                    began = time.perf_counter()
                    connection.request("GET", "/health")
                    assert connection.getresponse().read()
                    took = time.perf_counter() - began
                    seconds.append(_kept_waiting(took, before, self._threads(), str(self.loop)))
                    begun.set()
                    time.sleep(0.002)

        thread = threading.Thread(target=look)
        thread.start()
        try:
            assert begun.wait(60)
            del seconds[:]
            yield seconds
        finally:
            done.set()
            thread.join()

    def memory(self) -> int:
        """Resident bytes of the server and its processes."""
        return sum(map(_resident, [self.pid, *self.children()]))

    def children(self) -> list[int]:
        return _children(self.pid)

    def _threads(self) -> Threads:
        """The client's thread, and those of the server and its processes."""
        found = {"client": _scheduled(Path("/proc/thread-self"))}
        for pid in (self.pid, *self.children()):
            with contextlib.suppress(OSError):
                found |= {task.name: _scheduled(task) for task in Path(f"/proc/{pid}/task").iterdir()}
        return found

    def raw(self) -> socket.socket:
        parts = urlsplit(self.url)
        return socket.create_connection((str(parts.hostname), int(parts.port or 0)), timeout=20)

    def _connection(self) -> http.client.HTTPConnection:
        if getattr(self._local, "connection", None) is None:
            self._local.connection = self._new()
        found: http.client.HTTPConnection = self._local.connection
        return found

    def _new(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        return http.client.HTTPConnection(parts.hostname, parts.port, timeout=120)


def _scheduled(task: Path) -> tuple[float, float]:
    """How long a thread was on a core, and how long it waited for one. A thread that has ended is as one that did nothing."""
    with contextlib.suppress(OSError):
        ran, waited, _ = (task / "schedstat").read_text().split()
        return int(ran) / 1e9, int(waited) / 1e9
    return 0.0, 0.0


def _kept_waiting(took: float, before: Threads, after: Threads, loop: str) -> float:
    """Return the time that an answer took, without the time in which threads waited for a core; at least the event loop's own work."""
    if loop not in after:  # a system that does not tell
        return took
    began = {name: before.get(name, (0.0, 0.0)) for name in after}
    waited = sum(max(0.0, after[name][1] - began[name][1]) for name in after)
    return max(took - waited, min(took, after[loop][0] - began[loop][0]))


def _resident(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return 0


def _children(pid: int) -> list[int]:
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(child) for child in path.read_text().split()]
    return found


@contextmanager
def serving(model_dir: Path, encoder: Path) -> Iterator[Hostile]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.server.hostile", str(model_dir), str(encoder)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        url, _, loop = process.stdout.readline().strip().partition(" ")
        assert url.startswith("http://"), "the server did not start"
        server = Hostile(url, process.pid, int(loop))
        yield server
        server.hang_up()
    finally:
        process.stdin.close()
        try:
            process.wait(20)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def main(model_dir: Path, encoder: Path) -> None:
    from afterglow.memo.texts import text_embedder
    from afterglow.model.loader import load_encoder
    from afterglow.server.lifecycle.service import set_up_logging
    from afterglow.text import Tokenizer
    from tests.server.conftest import running

    set_up_logging("warning")
    embedder = text_embedder(load_encoder(encoder), encoder, Tokenizer(encoder), "tiny")
    gc.collect()
    gc.freeze()  # as a server that is started from the command line does
    with running(model_dir, embedders=[embedder]) as server:
        print(server.url, server.thread.native_id, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
