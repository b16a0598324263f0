"""What happens on connections before and between requests: delays, time limits, how many there may be."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.server.conftest import Running, running

CHAT = "/v1/chat/completions"


def connect(server: Running, timeout: float = 20) -> socket.socket:
    where = urlsplit(server.url)
    assert where.hostname is not None
    return socket.create_connection((where.hostname, where.port or 0), timeout=timeout)


def test_small_writes_do_not_wait_for_the_client(server: Running) -> None:
    """Each accepted connection has TCP_NODELAY set."""
    with connect(server):
        deadline = time.monotonic() + 5
        while not (open_ := list(server.service._server.server_state.connections)):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        for connection in open_:
            sock = connection.transport.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_kept_alive_stream_arrives_token_by_token(model_dir: Path) -> None:
    """Lines of a stream on a connection that had a request before come one by one, not in a few bursts."""
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 8, "ignore_eos": True}
    with running(model_dir, step_seconds=0.004) as server, connect(server) as client:
        reads_of(client, body)  # a new connection's first segments are acknowledged at once
        # 8 tokens in 32 ms: with Nagle's algorithm two or three bursts, since the client takes 40 ms to acknowledge
        # the first. The best of several, since a busy machine may join lines now and then.
        found = [reads_of(client, body) for _ in range(8)]
    assert max(found) >= 7, found


def reads_of(client: socket.socket, body: dict[str, Any]) -> int:
    """Send a chat request on an open connection; in how many pieces its answer arrived."""
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    client.sendall(head.encode() + data)
    answer, reads = b"", 0
    while not answer.endswith(b"0\r\n\r\n"):
        piece = client.recv(1 << 16)
        assert piece
        answer += piece
        reads += 1
    assert answer.count(b"data: {") >= 8
    return reads
