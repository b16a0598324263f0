"""What happens on connections before and between requests: delays, time limits, how many there may be."""

from __future__ import annotations

import json
import resource
import socket
import threading
import time
from contextlib import ExitStack, closing, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from afterglow.errors import ConfigError
from afterglow.server.lifecycle import connections
from afterglow.server.lifecycle.connections import connection_limit
from afterglow.server.server_config import ServerConfig
from tests import doors
from tests.server.conftest import Running, running
from tests.server.process import half_open
from tests.waiting import wait_for

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def connect(server: Running, timeout: float = 20) -> socket.socket:
    where = urlsplit(server.url)
    assert where.hostname is not None
    return socket.create_connection((where.hostname, where.port or 0), timeout=timeout)


def test_small_writes_do_not_wait_for_the_client(server: Running) -> None:
    """Each accepted connection has TCP_NODELAY set."""
    with connect(server):
        wait_for(lambda: doors.connections_of(server.service))
        for connection in list(doors.connections_of(server.service)):
            sock = connection.transport.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_kept_alive_stream_arrives_token_by_token(model_dir: Path) -> None:
    """Lines of a stream on a connection that had a request before come one by one, not in a few bursts."""
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 8, "ignore_eos": True}
    with running(model_dir, step_seconds=0.004) as server, connect(server) as client:
        reads_of(client, body)  # a new connection's first segments are acknowledged at once
        # 8 tokens in 32 ms: with Nagle's algorithm two or three bursts, since the client takes 40 ms to acknowledge
        # the first. A busy machine may join lines too, though not for ever.
        wait_for(lambda: reads_of(client, body) >= 7)


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


def test_a_body_that_drips_ends(model_dir: Path) -> None:
    """Each byte in time, and the whole never: also after the server has refused the request."""
    with (
        running(model_dir, ServerConfig(port=0, grace=0.5, body_timeout=0.5, header_timeout=0.5)) as server,
        ExitStack() as stack,
    ):
        heads = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9999\r\n\r\n",
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\nContent-Length: 9999\r\n\r\n",
            b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-Long: ",
        )
        port = int(server.url.rpartition(":")[2])
        drips = [half_open(port, stack, 1, head)[0] for head in heads]
        left, said = dict.fromkeys(drips), dict.fromkeys(drips, b"")
        deadline = time.monotonic() + 20
        while left:
            assert time.monotonic() < deadline, [heads[drips.index(sock)] for sock in left]
            for sock in list(left):
                with suppress(OSError):  # closed; what the server said before is still there to be read
                    sock.sendall(b"x")
                sock.setblocking(False)
                try:
                    said[sock] += (piece := sock.recv(4096))
                    if not piece:
                        del left[sock]
                except BlockingIOError:
                    pass
                except OSError:
                    del left[sock]
                sock.setblocking(True)
            time.sleep(0.05)
        assert said[drips[0]].startswith(b"HTTP/1.1 408")
        assert b'"code":"request_timeout"' in said[drips[0]]
        assert said[drips[1]].startswith(b"HTTP/1.1 415")
        assert not server.engine.requests


def test_long_replies_and_idle_connections_are_not_hurried(model_dir: Path) -> None:
    """The limits are for requests: a stream goes on, and the connection may be used again."""
    config = ServerConfig(port=0, grace=0.5, body_timeout=0.8, header_timeout=0.8)  # a busy client may be late
    with running(model_dir, config, step_seconds=0.1) as server, server.http() as http:
        for _ in range(2):
            body = {**HI, "stream": True, "max_tokens": 12, "ignore_eos": True}
            with http.stream("POST", CHAT, json=body) as answer:
                port = answer.extensions["network_stream"].get_extra_info("client_addr")
                lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
            assert lines[-1] == "data: [DONE]"
            time.sleep(1)
        with http.stream("GET", "/health") as answer:
            assert answer.extensions["network_stream"].get_extra_info("client_addr") == port


def test_connections_beyond_the_limit_are_answered_and_closed(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--max-connections`: those inside go on, others get 503, and places that become free are given again."""
    monkeypatch.setattr(connections, "UNUSED_S", 0.0)
    with running(model_dir, ServerConfig(port=0, grace=0.5, max_connections=2), hold=True) as server:
        with server.http() as client:
            assert client.get("/v1/models").status_code == 200
            before = set(doors.connections_of(server.service))
            taken = [connect(server), connect(server)]  # the second one in the place of the idle one
            wait_for(lambda: len(doors.connections_of(server.service) - before) == 2)
        with server.http() as other:
            refused = other.post(CHAT, json=HI)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "too_many_connections"
            assert refused.headers["retry-after"] == "1"
            assert other.get("/health").status_code == 200
        taken[0].close()
        with server.http() as other:
            wait_for(lambda: other.get("/v1/models").status_code == 200)
            assert "afterglow:connections_refused_total" in other.get("/metrics").text
        taken[1].sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert taken[1].recv(1000).startswith(b"HTTP/1.1 200")
        taken[1].close()


def test_a_connection_in_use_does_not_give_way(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is idle between two requests, too."""
    monkeypatch.setattr(connections, "UNUSED_S", 60.0)
    with running(model_dir, ServerConfig(port=0, grace=0.5, max_connections=1)) as server, server.http() as client:
        for _ in range(5):
            assert client.get("/v1/models").status_code == 200
            with server.http() as other:
                assert other.get("/v1/models").status_code == 503


def test_an_idle_connection_gives_way_to_a_new_one(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "UNUSED_S", 0.0)
    with running(model_dir, ServerConfig(port=0, grace=0.5, max_connections=2)) as server:
        clients = [server.http() for _ in range(4)]
        for client in (*clients, *clients):
            assert client.get("/v1/models").status_code == 200
        assert "afterglow:connections_refused_total 0.0" in clients[0].get("/metrics").text
        for client in clients:
            client.close()


def test_a_request_on_its_way_keeps_its_connection(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has arrived, and the server has not read it yet when a new connection asks for the place."""
    monkeypatch.setattr(connections, "UNUSED_S", 0.0)
    config = ServerConfig(port=0, grace=0.5, max_connections=1)
    with running(model_dir, config) as server, ExitStack() as stack:
        where = urlsplit(server.url).netloc
        old, new = (stack.enter_context(closing(HTTPConnection(where, timeout=20))) for _ in range(2))
        for client in (old, new):
            client.auto_open = 0  # no second connection
        old.connect()
        assert ask(old) == 200
        wait_for(lambda: all(connection.idle for connection in doors.connections_of(server.service)))
        held, go_on = threading.Event(), threading.Event()
        doors.loop_of(server.service).call_soon_threadsafe(lambda: (held.set(), go_on.wait(20)))
        assert held.wait(20)
        new.connect()
        old.request("GET", "/v1/models")  # both are with the kernel now
        go_on.set()
        assert status_of(old) == 200
        assert ask(new) == 503


def ask(client: HTTPConnection) -> int:
    """Send a request; the status of its answer, read to the end."""
    client.request("GET", "/v1/models")
    return status_of(client)


def status_of(client: HTTPConnection) -> int:
    answer = client.getresponse()
    answer.read()
    return answer.status


@pytest.mark.long
def test_a_connection_is_kept_longer_than_clients_keep_theirs(model_dir: Path) -> None:
    """Of httpx, 5 s: where a server keeps connections as long, requests are lost now and then."""
    with (
        running(model_dir, ServerConfig(port=0, grace=0.5)) as server,
        closing(HTTPConnection(urlsplit(server.url).netloc, timeout=20)) as client,
    ):
        client.connect()
        client.auto_open = 0  # no second connection
        for wait in (6, 0):
            client.request("GET", "/health")
            assert client.getresponse().read()
            time.sleep(wait)


def test_the_limit_leaves_files_to_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for files, found in ((256, 112), (1024, 880), (1 << 20, 1000), (resource.RLIM_INFINITY, 1000), (64, 8)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, files))
        assert connection_limit(None) == found
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    assert connection_limit(112) == 112
    with pytest.raises(
        ConfigError, match=r"--max-connections 113 needs 257 open files, and the limit is 256; .* at most 112"
    ):
        connection_limit(113)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"max_connections": 0}, "--max-connections must be at least 1, got 0"),
        ({"header_timeout": 0}, "--header-timeout must be above 0"),
        ({"body_timeout": float("nan")}, "--body-timeout must be above 0 .* got nan"),
        ({"allowed_host": ("box.lan:8000",)}, "--allowed-host must be a name alone.* got 'box.lan:8000'"),
        ({"allowed_host": ("",)}, "--allowed-host cannot be empty"),
        ({"cors_origin": ("app.example.com",)}, "--cors-origin must look like https://app.example.com, .* got 'app"),
        ({"cors_origin": ("https://app.example.com/",)}, "without a path, got 'https://app.example.com/'"),
    ],
)
def test_wrong_settings_are_told(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ServerConfig(**wrong)
