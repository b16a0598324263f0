"""Ports of this machine for servers that tests start."""

from __future__ import annotations

import contextlib
import socket

_kept: list[socket.socket] = []


def own_port(bus: bool = False) -> int:
    """Return a port that belongs to this process until it ends: bound, so that Linux gives it to no other socket that asks for any, but not
    listened at, so that a server that names it may have it, again and again; until then connections are refused. `bus`: the port
    10,000 above, where the nodes of a Redis cluster talk, is this process's as well.
    """
    for _ in range(100):
        with contextlib.ExitStack() as bound, contextlib.suppress(OSError, OverflowError):
            first = bound.enter_context(_bound(0))
            port = int(first.getsockname()[1])
            others = [bound.enter_context(_bound(port + 10_000))] if bus else []
            bound.pop_all()
            _kept.extend([first, *others])
            return port
    raise OSError("no two free ports 10,000 apart")


def _bound(port: int) -> socket.socket:
    kept = socket.socket()
    try:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", port))
    except BaseException:
        kept.close()
        raise
    return kept
