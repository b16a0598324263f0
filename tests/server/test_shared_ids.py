"""Two servers with caches of their own over one store: the ids that a client knows are known on both."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
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

pytest.importorskip("obstore")
BUNDLED = Path(__file__).parents[2] / "src/afterglow/assets/model"
pytestmark = pytest.mark.skipif(not (BUNDLED / "config.json").is_file(), reason="no bundled model here")

LONG = "Tell me of the mill, the river, the kite and the red boat, and of all that lies between the hill and the sea. "


@dataclass
class Replica:
    """One of the servers, and a client of it."""

    engine: Engine
    service: Service
    client: httpx.Client

    def call(self, method: str, path: str, body: Any = None, key: str = "one", status: int = 200) -> Any:
        headers = {"Authorization": f"Bearer {key}"}
        reply = self.client.request(method, path, json=body, headers=headers)
        assert reply.status_code == status, reply.text
        return reply.json()

    def respond(self, said: str, previous: str | None = None, status: int = 200, **more: Any) -> Any:
        key = more.pop("key", "one")
        body = {"input": said, "temperature": 0, "max_output_tokens": 12, **more}
        if previous is not None:
            body["previous_response_id"] = previous
        return self.call("POST", "/v1/responses", body, key, status)

    def published(self) -> None:
        """Wait until all that was computed is in the shared store."""
        self.engine.settle()
        shared = self.engine.parts.store.shared
        assert shared is not None
        assert shared.rest(20)


@contextmanager
def replica(folder: Path, **more: Any) -> Iterator[Replica]:
    cache = CacheConfig(
        device_cache=64 << 20,
        host_cache=64 << 20,
        disk_cache=64 << 20,
        cache_dir=folder,
        shared=f"file://{folder.parent / 'store'}",
        **more,
    )
    engine = Engine.load(BUNDLED, EngineConfig(threads=1, cache=cache, max_model_len=512))
    engine.start()
    config = ServerConfig(port=0, grace=0.5, api_key=("one", "two"), admin_key="admin")
    service = Service(engine, Tokenizer(BUNDLED), config, BUNDLED)
    thread = threading.Thread(target=service.run, kwargs={"signals": False})
    thread.start()
    wait_for(lambda: service.started)
    try:
        with httpx.Client(base_url=service.address, timeout=30) as client:
            yield Replica(engine, service, client)
    finally:
        service.stop()
        thread.join(20)
        engine.close()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Replica]]:
    folder = tmp_path_factory.mktemp("replicas")
    with ExitStack() as stack:
        yield [stack.enter_context(replica(folder / name)) for name in "ab"]


def test_a_conversation_goes_on_by_its_id_on_the_other_server(two: list[Replica]) -> None:
    """Replies are equal to those of one server that computes all."""
    previous, found = None, []
    for turn in range(4):
        at = two[turn % 2]
        reply = at.respond(f"{turn}: {LONG}", previous)
        at.published()
        found.append(reply["output"][0]["content"][0]["text"])
        if turn:
            assert reply["usage"]["cached_tokens_details"]["shared"] > 0
        previous = reply["id"]
    other, previous = two[0], None
    for turn, text in enumerate(found):
        reply = other.respond(f"{turn}: {LONG}", previous, cache_salt="apart")
        assert reply["output"][0]["content"][0]["text"] == text
        previous = reply["id"]


def test_a_response_is_read_and_deleted_on_the_other_server(two: list[Replica]) -> None:
    a, b = two
    first = a.respond("Hello!")["id"]
    then = a.respond("And then?", first)["id"]
    assert b.call("GET", f"/v1/responses/{then}")["previous_response_id"] == first
    assert len(b.call("GET", f"/v1/responses/{then}/input_items")["data"]) == 3
    b.call("DELETE", f"/v1/responses/{then}")
    for each in two:
        each.call("GET", f"/v1/responses/{then}", status=404)
        each.respond("Go on", then, status=400)
    assert b.respond("Go on", first)["status"]


def test_another_tenant_knows_no_id(two: list[Replica]) -> None:
    a, b = two
    first = a.respond("Hello!")["id"]
    b.call("GET", f"/v1/responses/{first}", key="two", status=404)
    b.call("DELETE", f"/v1/responses/{first}", key="two", status=404)
    b.respond("And then?", first, key="two", status=400)
    assert b.respond("And then?", first)["status"]
