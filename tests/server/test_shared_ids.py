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
from afterglow.store.shared import records, remote, shared_store
from afterglow.store.shared.notices import Notices
from afterglow.text import Tokenizer
from tests.waiting import wait_for, wait_for_threads

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
        """Wait until all that was computed is in the shared store, and the names of conversations are, which threads of their own write."""
        wait_for_threads("afterglow-apart")
        self.engine.settle()
        shared = self.engine.parts.store.shared
        assert shared is not None
        assert shared.rest(20)

    def fetches(self) -> int:
        """Count the extents that were fetched from the shared store."""
        shared = self.engine.parts.store.shared
        assert shared is not None
        return shared.stats().fetches


@contextmanager
def replica(
    folder: Path, keys: tuple[str, ...] = ("one", "two"), admin: str | None = "admin", **more: Any
) -> Iterator[Replica]:
    cache = CacheConfig(
        device_cache=64 << 20,
        host_cache=64 << 20,
        disk_cache=64 << 20,
        cache_dir=folder,
        shared=f"file://{folder.parent / 'store'}",
        source="load",
        **more,
    )
    engine = Engine.load(BUNDLED, EngineConfig(threads=1, cache=cache, max_model_len=512))
    engine.start()
    config = ServerConfig(port=0, grace=0.5, api_key=keys, admin_key=admin)
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
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_store, "LOOKUP_S", 30.0)  # a busy machine is no reason for a miss
        patch.setattr(records, "CALL_S", 30.0)
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


def looks(replicas: list[Replica]) -> None:
    """Have each server look at what the others have told, as it does every two seconds."""
    for each in replicas:
        names = each.service.state.shared_names
        assert names is not None
        names.look()


def chat(at: Replica, said: str, session: str | None = None, **more: Any) -> Any:
    key = more.pop("key", "one")
    body = {"messages": [{"role": "user", "content": said}], "temperature": 0, "max_tokens": 4, **more}
    if session is not None:
        body["session_id"] = session
    reply = at.call("POST", "/v1/chat/completions", body, key)
    at.published()
    return reply["usage"]


def sessions(at: Replica, key: str = "one") -> dict[str, Any]:
    return {each["name"]: each for each in at.call("GET", "/v1/cache/sessions", key=key)["data"]}


def test_a_named_conversation_is_listed_pinned_and_deleted_on_the_other_server(two: list[Replica]) -> None:
    a, b = two
    chat(a, f"1 {LONG}", "mine")
    wait_for(lambda: "mine" in sessions(b))
    assert "mine" not in sessions(b, "two")
    listed = sessions(b)["mine"]
    assert listed["tokens"] > 40
    assert listed["cached_tokens"] == {"device": 0, "host": 0, "disk": 0}
    assert not listed["pinned"]
    b.call("POST", "/v1/cache/sessions/mine/pin")
    b.call("POST", "/v1/cache/sessions/mine/pin", key="two", status=404)
    looks(two)
    assert sessions(a)["mine"]["pinned"]
    assert sessions(b)["mine"]["pinned"]
    chat(b, f"1 {LONG}", "mine")
    looks(two)
    pinned = b.engine.sessions(salt_of(b, "one"))
    assert [each.name for each in pinned if each.pinned] == ["mine"], "it was pinned before it was here"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(b.engine.parts.scheduler, "pin_session", None)
        looks(two)  # what is pinned is not pinned once more
    a.call("POST", "/v1/cache/sessions/mine/unpin")
    looks(two)
    assert not any(sessions(each)["mine"]["pinned"] for each in two)
    b.call("DELETE", "/v1/cache/sessions/mine", key="two", status=404)
    b.call("DELETE", "/v1/cache/sessions/mine")
    assert "mine" not in sessions(b)
    looks(two)
    for each in two:
        assert "mine" not in sessions(each)
        each.call("DELETE", "/v1/cache/sessions/mine", status=404)
    a.published()
    b.published()
    for each in two:
        assert chat(each, f"1 {LONG}", "new")["prompt_tokens_details"]["cached_tokens"] < 10, "only its own first words"
        each.call("DELETE", "/v1/cache/sessions/new")
        each.published()
        looks(two)


def test_a_registered_prompt_begins_requests_on_the_other_server(two: list[Replica]) -> None:
    a, b = two
    without = chat(b, "Hello!")["prompt_tokens"]
    prompt = a.call("PUT", "/v1/cache/prompts/default", {"text": f"You are a miller. {LONG}{LONG}"})
    a.published()
    looks(two)
    (listed,) = b.call("GET", "/v1/cache/prompts")["data"]
    assert (listed["name"], listed["tokens"]) == ("default", prompt["tokens"])
    assert b.call("GET", "/v1/cache/prompts", key="two")["data"] == []
    assert chat(b, "Hello!", key="two")["prompt_tokens"] == without
    before = b.fetches()
    usage = chat(b, "Hello!")
    assert usage["prompt_tokens"] == chat(a, "Hello!")["prompt_tokens"] > without
    # The request that registers the prompt here runs beside this one; the first of the two fetches for both.
    assert usage["prompt_tokens_details"]["cached_tokens"] >= prompt["tokens"] - 5
    assert b.fetches() > before
    b.call("PUT", "/v1/cache/prompts/default", {"text": "You are a sailor."})
    looks(two)
    assert chat(a, "Hello!")["prompt_tokens"] == chat(b, "Hello!")["prompt_tokens"] < usage["prompt_tokens"]
    a.call("DELETE", "/v1/cache/prompts/default", key="two", status=404)
    a.call("DELETE", "/v1/cache/prompts/default")
    looks(two)
    for each in two:  # a prompt that a server was just registering is let go when that has ended
        wait_for(lambda at=each: at.call("GET", "/v1/cache/prompts")["data"] == [])
        assert chat(each, "Hello!")["prompt_tokens"] == without
        each.call("DELETE", "/v1/cache/prompts/default", status=404)


def test_a_look_that_reads_what_a_client_is_about_to_delete_does_not_bring_it_back(
    two: list[Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    a = two[0]
    without = chat(a, "Hello!")["prompt_tokens"]
    a.call("PUT", "/v1/cache/prompts/default", {"text": "You are a miller."})
    looks(two)
    ids, read, armed = a.engine.shared_ids, Notices.facts, [True]
    assert ids is not None

    def facts(notices: Notices) -> dict[str, Any]:
        found = read(notices)
        if notices is ids.notices and armed:
            armed.clear()
            a.call("DELETE", "/v1/cache/prompts/default")
        return found

    monkeypatch.setattr(Notices, "facts", facts)
    wait_for(lambda: not armed)  # the next look
    monkeypatch.undo()
    looks(two)
    assert [chat(each, "Hello!")["prompt_tokens"] for each in two] == [without, without]


def test_a_reset_clears_the_tenants_cache_on_all_servers(two: list[Replica]) -> None:
    a, b = two
    for each in two:
        chat(each, f"2 {LONG}", "reset")
        chat(each, f"2 {LONG}", "kept", key="two")
    a.call("PUT", "/v1/cache/prompts/other", {"text": LONG})
    a.call("POST", "/reset_prefix_cache")
    looks(two)
    for each in two:
        each.published()
        assert sessions(each) == {}
        assert "kept" in sessions(each, "two")
        assert each.call("GET", "/v1/cache/prompts")["data"] == []
    assert chat(b, f"2 {LONG}")["prompt_tokens_details"]["cached_tokens"] == 0
    assert chat(b, f"2 {LONG}", key="two")["prompt_tokens_details"]["cached_tokens"] > 20
    b.call("POST", "/reset_prefix_cache", key="admin")
    looks(two)
    assert sessions(a, "two") == {}


def test_the_only_key_of_a_server_clears_nothing_of_other_servers_keys(
    two: list[Replica], tmp_path_factory: pytest.TempPathFactory
) -> None:
    a, _ = two
    chat(a, f"3 {LONG}", "kept")
    a.call("PUT", "/v1/cache/prompts/default", {"text": "You are a miller."})
    store = Path(str(a.engine.config.cache.shared).removeprefix("file://"))
    with replica(store.parent / "c", ("three",), None) as c:
        chat(c, f"3 {LONG}", "own", key="three")
        c.published()
        assert c.call("POST", "/reset_prefix_cache", key="three")["cleared"] == "all"
        assert sessions(c, "three") == {}
    looks([a])
    assert "kept" in sessions(a)
    assert [each["name"] for each in a.call("GET", "/v1/cache/prompts")["data"]] == ["default"]
    a.call("DELETE", "/v1/cache/prompts/default")


def salt_of(at: Replica, key: str) -> str:
    caller = at.service.state.tenants.identify(f"Bearer {key}")
    assert caller is not None
    return at.service.state.tenants.salt(caller, None)


def test_a_store_that_is_gone_costs_no_change(two: list[Replica], monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes hold on the server that was asked at once, on others when the store is there again."""
    monkeypatch.setattr(remote, "REST_S", 1.0)
    a, b = two
    for each in two:
        chat(each, LONG, "mine")
    store = Path(str(a.engine.config.cache.shared).removeprefix("file://"))
    store.rename(store.with_name("away"))
    store.write_text("no folder")
    a.call("POST", "/v1/cache/sessions/mine/pin")
    a.call("PUT", "/v1/cache/prompts/default", {"text": "You are a miller."})
    a.call("DELETE", "/v1/cache/prompts/default")
    a.call("DELETE", "/v1/cache/sessions/mine")
    a.call("DELETE", "/v1/cache/sessions/mine", status=503)  # others may have it
    assert a.respond("Hello!")["store"]
    assert "mine" not in sessions(a)
    assert "mine" in sessions(b)
    store.unlink()
    store.with_name("away").rename(store)
    wait_for(lambda: not shared_rests(a) and not shared_rests(b))
    looks(two)
    assert "mine" not in sessions(b)
    assert b.call("GET", "/v1/cache/prompts")["data"] == []


def shared_rests(at: Replica) -> bool:
    stats = at.engine.stats().shared
    assert stats is not None
    return stats.rests
