"""Web pages: foreign ones get nothing, configured ones are served; and the same over TLS."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import httpx
import pytest

from afterglow.server.server_config import ServerConfig
from tests.server.conftest import Running, running

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}

ASKED = [
    ("GET", "/v1/cache/sessions"),
    ("GET", "/metrics"),
    ("GET", "/dashboard/data"),
    ("GET", "/openapi.json"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/v1/cache/sessions/x/pin"),
    ("DELETE", "/v1/cache/sessions/x"),
    ("PUT", "/v1/cache/prompts/x"),
    ("POST", "/v1/chat/completions"),
]


def ask(server: Running, method: str, path: str, **headers: str) -> httpx.Response:
    body = {"text": "hi"} if method == "PUT" else CHAT if path.endswith("completions") else None
    return server.http().request(method, path, json=body, headers=headers)


@pytest.mark.parametrize(("method", "path"), ASKED)
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", ""]
)
def test_a_page_that_lends_its_name_to_the_server_gets_nothing(
    server: Running, method: str, path: str, host: str
) -> None:
    """DNS rebinding: for the browser the server is then the page's own."""
    before = len(server.engine.requests), len(server.engine.resets)
    answer = ask(server, method, path, Host=host, Origin=f"http://{host}")
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "host_not_allowed"
    assert "--allowed-host" in answer.json()["error"]["message"]
    assert (len(server.engine.requests), len(server.engine.resets)) == before


@pytest.mark.parametrize(("method", "path"), ASKED)
@pytest.mark.parametrize(
    "origin", ["http://evil.example", "https://127.0.0.1", "http://localhost:3000", "null", "file://"]
)
def test_a_foreign_page_gets_nothing(server: Running, method: str, path: str, origin: str) -> None:
    before = len(server.engine.requests), len(server.engine.resets)
    answer = ask(server, method, path, Origin=origin)
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "origin_not_allowed"
    assert "access-control-allow-origin" not in answer.headers
    assert (len(server.engine.requests), len(server.engine.resets)) == before


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""]
)
@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/chat/completions"), ("POST", "/v1/responses"), ("PUT", "/v1/cache/prompts/x")])  # fmt: skip
def test_a_body_that_a_page_may_send_unasked_is_refused(server: Running, method: str, path: str, kind: str) -> None:
    before = len(server.engine.requests)
    answer = server.http().request(method, path, content=json.dumps(CHAT), headers={"Content-Type": kind})
    assert answer.status_code == 415
    assert answer.json()["error"]["code"] == "unsupported_media_type"
    assert "application/json" in answer.json()["error"]["message"]
    assert len(server.engine.requests) == before


def test_own_pages_and_plain_clients_are_served(server: Running) -> None:
    where = server.url.removeprefix("http://")
    port = where.rpartition(":")[2]
    for host in (where, f"localhost:{port}", f"LOCALHOST:{port}", f"[::1]:{port}", "10.1.2.3", "localhost.", "[::1]"):
        for path in ("/dashboard", "/dashboard/data", "/v1/models", "/health"):
            assert ask(server, "GET", path, Host=host).status_code == 200, (host, path)
        assert ask(server, "GET", "/dashboard/data", Host=host, Origin=f"http://{host}").status_code == 200, host
        assert ask(server, "POST", "/reset_prefix_cache", Host=host, Origin=f"http://{host}").status_code == 200, host
    assert (
        ask(server, "GET", "/v1/models", Host="localhost", Origin="https://localhost").status_code == 200
    )  # a proxy adds TLS
    with socket.create_connection(("127.0.0.1", int(port)), timeout=20) as old:  # no browser is that old
        old.sendall(b"GET /v1/models HTTP/1.0\r\n\r\n")
        assert old.recv(4096).startswith(b"HTTP/1.1 200")


PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


@pytest.mark.parametrize("keys", [(), ("secret",)])
def test_pages_that_were_named_are_served(model_dir: Path, keys: tuple[str, ...]) -> None:
    """Their browser asks first, and never sends the key with that."""
    page = "https://app.example.com"
    config = ServerConfig(port=0, grace=0.5, api_key=keys, allowed_host=("box.lan",), cors_origin=(page, "null"))
    key = {"Authorization": "Bearer secret"} if keys else {}
    with running(model_dir, config) as server:
        asked = ask(server, "OPTIONS", "/v1/chat/completions", Origin=page, **PREFLIGHT)
        assert asked.status_code == 204
        assert asked.headers["access-control-allow-origin"] == page
        assert "POST" in asked.headers["access-control-allow-methods"]
        assert "authorization" in asked.headers["access-control-allow-headers"]
        answer = ask(server, "POST", "/v1/chat/completions", Origin=page, Host="box.lan:8000", **key)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == page
        assert answer.headers["vary"] == "Origin"
        wrong = ask(server, "POST", "/v1/chat/completions", Origin=page, Authorization="Bearer wrong")
        assert wrong.headers["access-control-allow-origin"] == page  # otherwise the page could not read the error
        assert wrong.status_code == (401 if keys else 200)
        assert ask(server, "GET", "/v1/models", Origin="null", **key).headers["access-control-allow-origin"] == "null"
        foreign = ask(server, "OPTIONS", "/v1/chat/completions", Origin="https://evil.example", **PREFLIGHT)
        assert foreign.status_code == 403
        assert "access-control-allow-origin" not in foreign.headers
        assert ask(server, "GET", "/v1/models", Origin="https://evil.example", **key).status_code == (
            200 if keys else 403
        )


def test_keys_keep_pages_out_under_any_name(model_dir: Path) -> None:
    with running(model_dir, ServerConfig(port=0, grace=0.5, api_key=("secret",))) as server:
        assert ask(server, "GET", "/v1/models", Host="llm.example.com").status_code == 401
        assert (
            ask(server, "GET", "/v1/models", Host="llm.example.com", Authorization="Bearer secret").status_code == 200
        )


def test_a_star_allows_all(model_dir: Path) -> None:
    with running(model_dir, ServerConfig(port=0, grace=0.5, allowed_host=("*",), cors_origin=("*",))) as server:
        answer = ask(server, "GET", "/v1/models", Host="llm.example.com", Origin="https://any.example")
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://any.example"
