"""`afterglow serve` in a process of its own."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.ports import own_port


@dataclass
class Process:
    """A server in a process of its own."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    secure: bool

    @property
    def url(self) -> str:
        return f"http{'s' if self.secure else ''}://127.0.0.1:{self.port}"

    @property
    def files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


@contextmanager
def serving(
    folder: Path,
    *options: str,
    files: int | None = None,
    certificate: Path | None = None,
    model: str = "afterglow-small",
) -> Iterator[Process]:
    """Start `afterglow serve` with `options`, and at most so many open files; `certificate` is the one to trust."""
    port = own_port()
    log = folder / "log"
    limited = f"ulimit -n {files}; " if files is not None else ""
    command = [
        sys.executable,
        "-m",
        "afterglow.cli",
        "serve",
        model,
        "--port",
        str(port),
        "--cache-dir",
        str(folder / "cache"),
    ]
    with open(log, "wb") as out:
        process = subprocess.Popen(
            ["bash", "-c", f'{limited}exec "$@"', "-", *command, "--threads", "1", *options],
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    server = Process(process, port, log, certificate is not None)
    verify = True if certificate is None else ssl.create_default_context(cafile=certificate)
    try:
        deadline = time.monotonic() + 90
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{server.url}/health", timeout=5, verify=verify).status_code == 200:
                    break
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, "it does not start"
            time.sleep(0.1)
        yield server
    finally:
        process.terminate()
        process.wait(30)


def half_open(port: int, sockets: ExitStack, number: int, said: bytes) -> list[socket.socket]:
    """Connections that say this much and no more."""
    made = []
    for _ in range(number):
        sock = sockets.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
        with contextlib.suppress(OSError):  # it may have been closed already
            sock.sendall(said)
        made.append(sock)
    return made
