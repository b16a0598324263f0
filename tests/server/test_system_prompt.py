"""A registered system prompt, on the real engine: computed before the first request, found by every tenant without any
tenant's text behind it, kept over a restart and by truncation; and the rights to register prompts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from afterglow.config import CacheConfig, EngineConfig
from afterglow.engine.engine import Engine
from afterglow.errors import ConfigError, RequestError
from afterglow.server.lifecycle.service import Service
from afterglow.server.server_config import ServerConfig, read_prompt
from afterglow.text import Tokenizer, chat_template
from tests import doors
from tests.server.conftest import running
from tests.server.fake_engine import FakeEngine
from tests.text import toys
from tests.waiting import wait_for

BUNDLED = Path(__file__).parents[2] / "src/afterglow/assets/model"
pytestmark = pytest.mark.skipif(not (BUNDLED / "config.json").is_file(), reason="no bundled model here")

PROMPT = "You keep the old mill near the river. " + " ".join(f"Boat number {n} is blue." for n in range(20))
HELLO = {"role": "user", "content": "Hello, what colour is the boat?"}
TOKENS = len(Tokenizer(BUNDLED).encode_chat([{"role": "system", "content": PROMPT}], add_generation_prompt=False).ids)


@dataclass
class Serving:
    engine: Engine
    http: httpx.Client

    def chat(self, *messages: dict[str, str], salt: str | None = None, key: str | None = None, **more: Any) -> Any:
        body = {"messages": list(messages), "max_tokens": 4, "temperature": 0, **more}
        body |= {"cache_salt": salt} if salt else {}
        reply = self.http.post("/v1/chat/completions", json=body, headers=bearer(key))
        assert reply.status_code == 200, reply.text
        return reply.json()

    def prompts(self, key: str | None = None) -> list[dict[str, Any]]:
        return list(self.http.get("/v1/cache/prompts", headers=bearer(key)).json()["data"])


def bearer(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def cached(reply: Any) -> int:
    return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])


@contextmanager
def serving(folder: Path, text: str | None = PROMPT, *, engine_more: Any = None, **more: Any) -> Iterator[Serving]:
    sizes = {"device_cache": 64 << 20, "host_cache": 64 << 20, "disk_cache": 64 << 20, "cache_dir": folder / "cache"}
    engine = Engine.load(BUNDLED, EngineConfig(threads=1, cache=CacheConfig(**sizes), **(engine_more or {})))
    engine.start()
    if text is not None:
        (folder / "prompt.txt").write_text(text, "utf-8")
        more["system_prompt_file"] = folder / "prompt.txt"
    service = Service(engine, Tokenizer(BUNDLED), ServerConfig(port=0, grace=0.5, **more), BUNDLED)
    problems: list[BaseException] = []

    def run() -> None:
        try:
            service.run(signals=False)
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_for(lambda: service.started or problems, 30)
    try:
        if problems:
            raise problems[0]
        with httpx.Client(base_url=service.address, timeout=60) as http:
            yield Serving(engine, http)
    finally:
        if service.started:
            service.stop()
        thread.join(20)
        engine.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("shared"), engine_more={"relay": "on"}) as value:
        yield value


def test_all_tenants_find_it_from_their_first_request_on_and_nothing_of_each_other(server: Serving) -> None:
    for salt in ("one", "two", None):
        assert cached(server.chat(HELLO, salt=salt)) == TOKENS
        server.engine.settle()
    for salt in ("one", "two", None):
        again = server.chat(HELLO, salt=salt)
        assert cached(again) == again["usage"]["prompt_tokens"] - 1


def test_the_answer_is_that_of_the_prompt_sent_as_a_system_message(server: Serving) -> None:
    short = server.chat(HELLO, salt="x", max_tokens=12)
    long = server.chat({"role": "system", "content": PROMPT}, HELLO, salt="y", max_tokens=12)
    assert short["choices"] == long["choices"]
    assert short["usage"]["prompt_tokens"] == long["usage"]["prompt_tokens"]
    assert cached(long) == TOKENS  # a client that sends the same tokens finds them


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_message_of_the_requests_own_is_in_its_place(server: Serving, role: str) -> None:
    reply = server.chat({"role": role, "content": "Be brief."}, HELLO, salt="own")
    assert reply["usage"]["prompt_tokens"] < TOKENS


def test_responses_begin_with_it_on_every_turn_and_store_what_the_client_said(server: Serving) -> None:
    body = {"input": "Tell me your name.", "max_output_tokens": 4, "temperature": 0, "cache_salt": "responses"}
    first = server.http.post("/v1/responses", json=body).json()
    assert first["usage"]["input_tokens_details"]["cached_tokens"] == TOKENS
    server.engine.settle()
    second = server.http.post("/v1/responses", json={**body, "previous_response_id": first["id"]}).json()
    known = first["usage"]["total_tokens"] - 1
    assert second["usage"]["input_tokens_details"]["cached_tokens"] == known
    items = server.http.get(f"/v1/responses/{second['id']}/input_items").json()["data"]
    assert all(item["role"] != "system" for item in items)
    alone = server.http.post("/v1/responses", json={**body, "instructions": "Be brief."}).json()
    assert alone["usage"]["input_tokens"] < TOKENS


def test_a_part_of_it_sent_as_tokens_is_no_hit(server: Serving) -> None:
    ids = Tokenizer(BUNDLED).encode_chat([{"role": "system", "content": PROMPT}], add_generation_prompt=False).ids
    for salt, tokens in (("first", ids[:-1]), ("second", [*ids[:100], 5, 6, 7]), ("third", ids[:1])):
        body = {"prompt": tokens, "max_tokens": 1, "cache_salt": f"guessing {salt}"}
        assert cached(server.http.post("/v1/completions", json=body).json()) == 0
    whole = {"prompt": [*ids, 3], "max_tokens": 1, "cache_salt": "guessing"}
    assert cached(server.http.post("/v1/completions", json=whole).json()) == len(ids)


def test_clearing_the_cache_leaves_it(server: Serving) -> None:
    server.chat(HELLO, salt="cleared")
    server.engine.settle()
    assert server.http.post("/reset_prefix_cache").status_code == 200
    assert cached(server.chat(HELLO, salt="cleared")) == TOKENS


def test_requests_of_two_tenants_read_it_together_and_a_tenants_own_below_it(
    server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = {"role": "user", "content": "The kite is red and the mill is old. " * 12}
    talks = [("r1", "One?"), ("r1", "Two?"), ("r2", "Three?")]
    server.chat(document, salt="r1")
    server.engine.settle()
    before = server.engine.stats()
    held, go, sent, submit = threading.Event(), threading.Event(), threading.Semaphore(0), server.engine.submit

    def submit_and_tell(*args: Any) -> None:
        submit(*args)
        sent.release()

    monkeypatch.setattr(server.engine, "submit", submit_and_tell)
    holder = threading.Thread(target=server.engine.ask, args=(lambda: (held.set(), go.wait(60)),))
    holder.start()
    assert held.wait(20)  # the engine begins when it has all three
    threads = [
        threading.Thread(
            target=server.chat,
            args=({**document, "content": document["content"] + text},),
            kwargs={"salt": salt, "max_tokens": 60, "ignore_eos": True},
        )
        for salt, text in talks
    ]
    for thread in threads:
        thread.start()
    assert all(sent.acquire(timeout=20) for _ in talks)
    go.set()
    for thread in (holder, *threads):
        thread.join(60)
    after = server.engine.stats()
    assert after.engine.relay.groups > before.engine.relay.groups
    assert after.engine.relay.levels == 2  # the prompt, and below it one tenant's document
    assert after.engine.relay.rows_saved - before.engine.relay.rows_saved >= TOKENS
    metrics = server.http.get("/metrics").text
    for text in ("relay_groups_total", "relay_levels", "registered_prefix_tokens"):
        assert f"afterglow:{text}" in metrics
    for text in ('what="saved"', 'what="read"'):
        assert text in metrics


def test_it_is_listed_and_cannot_be_removed_as_a_conversation(server: Serving) -> None:
    (card,) = server.prompts()
    assert (card["name"], card["tokens"], card["shared"], card["pinned"]) == ("system-prompt", TOKENS, True, True)
    assert card["cached_tokens"] == {"device": TOKENS, "host": TOKENS, "disk": TOKENS}
    for path in ("/v1/cache/sessions/system-prompt", "/v1/cache/prompts/system-prompt"):
        refused = server.http.delete(path)
        assert refused.status_code == 409
        assert "--system-prompt-file" in refused.json()["error"]["message"]
    assert server.http.get("/v1/cache/stats").json()["prompts"] == {"count": 1, "tokens": TOKENS}


@pytest.mark.parametrize("body", [{}, {"text": ""}, {"text": "  \n"}, {"text": 7}, {"text": "word " * 5000}])
def test_what_is_no_prompt_is_refused(server: Serving, body: dict[str, Any]) -> None:
    answer = server.http.put("/v1/cache/prompts/default", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "text"
    assert len(server.prompts()) == 1
    assert cached(server.chat(HELLO, salt="after")) >= TOKENS


def test_tenants_register_their_own_which_others_do_not_see(tmp_path: Path) -> None:
    with serving(tmp_path, api_key=("ann", "ben"), admin_key="boss") as server:
        own = {"text": "You are Ann's helper. " + "The sail is white. " * 10}
        done = server.http.put("/v1/cache/prompts/default", json=own, headers=bearer("ann")).json()
        assert done["tokens"] == sum(done["cached_tokens"][tier] for tier in ("host",))
        first = server.chat(HELLO, key="ann")
        assert cached(first) == done["tokens"]
        assert cached(server.chat(HELLO, key="ben")) == TOKENS
        own_message = {"role": "system", "content": own["text"].strip()}
        theirs = server.chat(own_message, HELLO, key="ben")
        assert cached(theirs) == 0
        assert [card["name"] for card in server.prompts("ann")] == ["system-prompt", "default"]
        assert [card["name"] for card in server.prompts("ben")] == ["system-prompt"]
        assert server.http.delete("/v1/cache/prompts/default", headers=bearer("ben")).status_code == 404
        refused = server.http.delete("/v1/cache/sessions/default", headers=bearer("ann"))
        assert (refused.status_code, "cache unregister" in refused.text) == (409, True)
        kept = {"text": "Count. " * 20}
        server.http.put("/v1/cache/prompts/second", json=kept, headers=bearer("ben")).raise_for_status()
        assert cached(server.chat({"role": "system", "content": kept["text"].strip()}, HELLO, key="ben")) > 20
    with serving(tmp_path, api_key=("ann", "ben"), admin_key="boss") as server:  # after a restart
        assert cached(server.chat(HELLO, key="ann")) == first["usage"]["prompt_tokens"] - 1
        assert [card["name"] for card in server.prompts("ann")] == ["system-prompt", "default"]
        assert server.http.delete("/v1/cache/prompts/default", headers=bearer("ann")).status_code == 200
        assert cached(server.chat(HELLO, key="ann")) == TOKENS


def test_a_restart_loads_it_and_another_prompt_takes_its_place(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        assert server.engine.stats().engine.prefilled_tokens == TOKENS
        server.chat(HELLO, salt="one")
    with serving(tmp_path) as server:
        assert server.engine.stats().engine.prefilled_tokens == 1
        again = server.chat(HELLO, salt="one")
        assert cached(again) == again["usage"]["prompt_tokens"] - 1
        assert cached(server.chat(HELLO, salt="two")) == TOKENS
    other = PROMPT.replace("mill", "boathouse")
    with serving(tmp_path, other) as server:
        assert server.engine.stats().engine.prefilled_tokens > TOKENS - 10
        assert len(server.prompts()) == 1
        assert 0 < cached(server.chat(HELLO, salt="one")) < again["usage"]["prompt_tokens"] - 4
    with serving(tmp_path, None) as server:
        assert server.prompts() == []
        assert cached(server.chat(HELLO, salt="one")) == 0


def test_truncation_keeps_it(tmp_path: Path) -> None:
    with serving(tmp_path, engine_more={"max_model_len": 512}) as server:
        messages = [HELLO]
        for turn in range(8):
            reply = server.chat(*messages, salt="long", truncation="auto", max_tokens=8)
            assert cached(reply) >= TOKENS
            text = reply["choices"][0]["message"]["content"]
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": f"And number {turn}? " + "The kite flies over the river. " * 3},
            ]
            server.engine.settle()
        assert reply["usage"]["truncation"]["dropped_tokens"] > 0
        assert reply["usage"]["truncation"]["reused"]


def test_always_puts_it_before_a_system_message_too(tmp_path: Path) -> None:
    with serving(tmp_path, system_prompt_mode="always") as server:
        own = server.chat({"role": "system", "content": "Be brief."}, HELLO)
        assert cached(own) == TOKENS
        assert own["usage"]["prompt_tokens"] > TOKENS + 10
        assert cached(server.chat(HELLO, salt="x")) == TOKENS


def test_without_reuse_requests_begin_with_it_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT)
    engine = Engine.load(BUNDLED, EngineConfig(threads=1, cache=CacheConfig(reuse=False)))
    engine.start()
    config = ServerConfig(port=0, grace=0.5, system_prompt_file=tmp_path / "prompt.txt")
    service = Service(engine, Tokenizer(BUNDLED), config, BUNDLED)
    thread = threading.Thread(target=service.run, kwargs={"signals": False})
    thread.start()
    wait_for(lambda: service.started, 30)
    with httpx.Client(base_url=service.address, timeout=60) as http:
        reply = Serving(engine, http).chat(HELLO)
        assert (cached(reply), reply["usage"]["prompt_tokens"] > TOKENS) == (0, True)
        assert http.put("/v1/cache/prompts/default", json={"text": "Hello there."}).status_code == 400
    service.stop()
    thread.join(20)
    engine.close()


# --------------------------------------------------------------------------------------------------- wrong inputs


def test_files_that_are_no_prompt_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.txt cannot be read: No such file"):
        read_prompt(tmp_path / "nowhere.txt")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_prompt(tmp_path)
    (tmp_path / "empty.txt").write_text(" \n ")
    with pytest.raises(ConfigError, match=r"empty.txt is empty"):
        read_prompt(tmp_path / "empty.txt")
    (tmp_path / "latin.txt").write_bytes("Grüße".encode("latin-1"))
    with pytest.raises(ConfigError, match="not UTF-8: byte 2 is 0xfc"):
        read_prompt(tmp_path / "latin.txt")
    with pytest.raises(ConfigError, match="--system-prompt-mode must be default or always, got 'never'"):
        ServerConfig(system_prompt_mode="never")  # type: ignore[arg-type]


def test_one_that_is_longer_than_the_context_is_refused_at_start(tmp_path: Path) -> None:
    refused = pytest.raises(ConfigError, match=r"--system-prompt-file: .*tokens, and this model's context is 256")
    with refused, serving(tmp_path, PROMPT * 3, engine_more={"max_model_len": 256}):
        pass


def test_one_that_half_of_the_host_cache_does_not_hold_is_refused_at_start(tmp_path: Path) -> None:
    engine = Engine.load(
        BUNDLED,
        EngineConfig(threads=1, cache=CacheConfig(host_cache=4 << 20, disk_cache=64 << 20, cache_dir=tmp_path / "c")),
    )
    engine.start()
    (tmp_path / "prompt.txt").write_text(PROMPT * 4)
    config = ServerConfig(port=0, system_prompt_file=tmp_path / "prompt.txt")
    service = Service(engine, Tokenizer(BUNDLED), config, BUNDLED)
    with pytest.raises(ConfigError, match="--host-cache"):
        service.run(signals=False)
    engine.close()


def test_a_server_that_is_stopped_while_it_computes_the_prompt_ends(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT)
    engine = FakeEngine([1], eos=2, hold=True)
    engine.start()
    config = ServerConfig(port=0, system_prompt_file=tmp_path / "prompt.txt")
    service = Service(engine, Tokenizer(model_dir), config, model_dir)
    thread = threading.Thread(target=service.run, kwargs={"signals": False})
    thread.start()
    wait_for(lambda: engine.registering)
    assert not service.started
    service.stop()
    thread.join(10)
    assert not thread.is_alive()
    engine.gate.set()
    engine.close()


def test_a_prompt_whose_tokens_change_with_the_date_is_registered_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dated = "{{ '<|im_start|>date ' + strftime_now('%d') + '<|im_end|>' }}" + toys.CHATML
    folder = toys.byte_level(tmp_path / "model", template=dated)
    days = [datetime(2026, 1, 30)]

    class Clock(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return days[-1]

    monkeypatch.setattr(chat_template, "datetime", Clock)
    (tmp_path / "prompt.txt").write_text("Be kind.")
    with running(folder, ServerConfig(port=0, system_prompt_file=tmp_path / "prompt.txt")) as server:
        (first,) = server.engine.prefix_ids.values()
        for _ in range(2):
            server.http().post("/v1/chat/completions", json={"messages": [HELLO]}).raise_for_status()
        assert list(server.engine.prefix_ids.values()) == [first]
        days.append(datetime(2026, 1, 31))
        server.http().post("/v1/chat/completions", json={"messages": [HELLO]}).raise_for_status()
        wait_for(lambda: list(server.engine.prefix_ids.values()) != [first])
        (second,) = server.engine.prefix_ids.values()
        assert list(server.engine.requests[-1].prompt)[: len(second)] == second


def test_a_prompt_that_cannot_be_computed_is_not_there_and_one_that_was_there_stays(
    server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = [1, 2, *range(100, 140), 5]
    server.engine.register_prefix("mine", old, salt="busy", about="words")

    def busy(*_: object) -> None:
        raise RequestError("too many are waiting already", status=429)

    with monkeypatch.context() as patch:
        patch.setattr(doors.registrar_of(server.engine), "_submit", busy)
        for name in ("mine", "new"):
            with pytest.raises(RequestError, match="waiting already"):
                server.engine.register_prefix(name, [*old, 7, 5], salt="busy", about="words")
    (left,) = server.engine.prefixes("busy")
    assert (left.name, left.about, left.tokens) == ("mine", "words", len(old))
    again = server.engine.register_prefix("mine", [*old, 7, 5], salt="busy", about="words")
    assert again.host == len(old) + 2
    assert server.engine.forget_prefix("mine", salt="busy")
