"""Tenants on a real engine: quota, pins, prompts, priority and resets are a key's, whatever salts its clients send."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from afterglow.config import CacheConfig, EngineConfig
from afterglow.engine.engine import Engine
from afterglow.server.lifecycle.service import Service
from afterglow.server.server_config import ServerConfig
from afterglow.text import Tokenizer
from tests.waiting import wait_for

BUNDLED = Path(__file__).parents[2] / "src/afterglow/assets/model"
pytestmark = pytest.mark.skipif(not (BUNDLED / "config.json").is_file(), reason="no bundled model here")
MIB = 2**20
LONG = "The kite is red and the mill is old. " * 20


class Serving:
    def __init__(self, engine: Engine, address: str) -> None:
        self.engine = engine
        self.address = address

    def call(self, key: str, method: str, path: str, **more: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.request(method, f"{self.address}{path}", headers=headers, timeout=30, **more)

    def ask(self, key: str, text: str = LONG, salt: str | None = None, **more: Any) -> httpx.Response:
        body = {"prompt": text, "max_tokens": 1, "temperature": 0, **({"cache_salt": salt} if salt else {}), **more}
        answer = self.call(key, "POST", "/v1/completions", json=body)
        self.engine.settle()
        return answer

    def cached(self, key: str, text: str = LONG, salt: str | None = None) -> int:
        usage = self.ask(key, text, salt).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    def stored(self) -> int:
        return sum(extent.file_bytes for extent in self.engine.parts.scheduler.cache.index.extents.values())


@contextmanager
def serving(folder: Path, keys: tuple[str, ...] = ("one", "two"), **more: Any) -> Iterator[Serving]:
    server = {name: more.pop(name) for name in ("admin_key", "urgent_key") if name in more}
    sizes = {"device_cache": 64 * MIB, "host_cache": 64 * MIB, "disk_cache": 64 * MIB, "warm_start": False}
    cache = CacheConfig(cache_dir=folder, source="load", **{**sizes, **more})
    engine = Engine.load(BUNDLED, EngineConfig(threads=1, cache=cache))
    engine.start()
    config = ServerConfig(port=0, grace=0.5, api_key=keys, **server)
    service = Service(engine, Tokenizer(BUNDLED), config, BUNDLED)
    thread = threading.Thread(target=service.run, kwargs={"signals": False})
    thread.start()
    wait_for(lambda: service.started)
    try:
        yield Serving(engine, service.address)
    finally:
        service.stop()
        thread.join(20)
        engine.close()


def test_a_quota_is_a_keys_whatever_salts_it_sends(tmp_path: Path) -> None:
    with serving(tmp_path, tenant_quota=3 * MIB) as server:
        server.ask("two")
        for number in range(8):
            server.ask("one", salt=f"salt {number}")
        theirs = server.stored()
        server.call("one", "POST", "/reset_prefix_cache")
        server.engine.settle()
        own = server.stored()
        assert theirs - own <= 3 * MIB
        assert own > 0
        assert server.cached("two") > 0


@pytest.mark.parametrize("restart", [False, True])
def test_a_reset_reaches_all_that_a_key_has_stored(tmp_path: Path, restart: bool) -> None:
    def fill(server: Serving) -> None:
        for key in ("one", "two"):
            for salt in (None, "same"):
                server.ask(key, salt=salt, session_id="talk")
            body = {"text": "You are a kite."}
            assert server.call(key, "PUT", "/v1/cache/prompts/mine", json=body).status_code == 200

    def check(server: Serving) -> None:
        answer = server.call("one", "POST", "/reset_prefix_cache")
        assert answer.json() == {"status": "ok", "cleared": "own"}
        server.engine.settle()
        for salt in ({}, {"cache_salt": "same"}):
            assert server.call("one", "GET", "/v1/cache/sessions", params=salt).json()["data"] == []
            assert len(server.call("two", "GET", "/v1/cache/sessions", params=salt).json()["data"]) == 1
        assert server.call("one", "GET", "/v1/cache/prompts").json()["data"] == []
        assert len(server.call("two", "GET", "/v1/cache/prompts").json()["data"]) == 1
        for salt in (None, "same"):
            assert server.cached("one", salt=salt) == 0
            assert server.cached("two", salt=salt) > 0

    with serving(tmp_path) as server:
        fill(server)
        if not restart:
            check(server)
    if restart:
        with serving(tmp_path) as server:
            check(server)


def test_two_keys_with_equal_salts_see_nothing_of_each_other(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        server.ask("one", salt="same", session_id="talk")
        assert server.cached("two", salt="same") == 0
        assert server.call("two", "GET", "/v1/cache/sessions?cache_salt=same").json()["data"] == []
        assert server.call("two", "POST", "/v1/cache/sessions/talk/pin?cache_salt=same").status_code == 404
        stats = server.call("two", "GET", "/v1/cache/stats?cache_salt=same").json()
        assert (stats["sessions"]["count"], stats["since_start"]["requests"]) == (0, 1)


def test_a_key_pins_no_more_than_its_part(tmp_path: Path) -> None:
    with serving(tmp_path, tenant_pins=3 / 64) as server:
        pinned = []
        for number in range(6):
            for key in ("one", "two"):
                server.ask(key, f"{number} {LONG}", salt=f"s{number}", session_id="talk")
        for number in range(6):
            answer = server.call("one", "POST", f"/v1/cache/sessions/talk/pin?cache_salt=s{number}")
            pinned.append(answer.status_code)
        assert 200 in pinned
        assert pinned[-1] == 409
        answer = server.call("one", "PUT", "/v1/cache/prompts/p", json={"text": LONG * 3})
        assert (answer.status_code, "--tenant-pins" in answer.text) == (400, True)
        assert server.call("two", "POST", "/v1/cache/sessions/talk/pin?cache_salt=s0").status_code == 200
        assert server.call("one", "POST", "/v1/cache/sessions/talk/unpin?cache_salt=s0").status_code == 200
        assert server.call("one", "POST", "/v1/cache/sessions/talk/pin?cache_salt=s5").status_code == 200


def test_prompts_are_counted_by_key(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        for number in range(17):
            path = f"/v1/cache/prompts/p{number}?cache_salt=s{number}"
            answer = server.call("one", "PUT", path, json={"text": f"You are number {number}."})
            assert answer.status_code == (200 if number < 16 else 400)
        assert server.call("two", "PUT", "/v1/cache/prompts/p", json={"text": "You are mine."}).status_code == 200


def test_only_keys_that_may_go_before_others(tmp_path: Path) -> None:
    with serving(tmp_path, ("one", "two"), urgent_key=("two",), admin_key="boss") as server:
        assert server.ask("one", "a", priority=100).status_code == 200
        refused = server.ask("one", "a", priority=-1)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "priority_not_allowed")
        for key in ("two", "boss"):
            assert server.ask(key, "a", priority=-100).status_code == 200
        assert server.ask("two", "a", priority=-101).status_code == 400
