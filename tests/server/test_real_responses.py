"""`/v1/responses` and `/v1/cache` on the real engine: rows are found again over turns, cuts and restarts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from afterglow.config import CacheConfig, EngineConfig
from afterglow.engine.engine import Engine
from afterglow.server.lifecycle.service import Service
from afterglow.server.server_config import ServerConfig
from afterglow.text import Tokenizer
from tests.waiting import wait_for

BUNDLED = Path(__file__).parents[2] / "src/afterglow/assets/model"
pytestmark = pytest.mark.skipif(not (BUNDLED / "config.json").is_file(), reason="no bundled model here")

WINDOW = 256


@dataclass
class Real:
    engine: Engine
    client: openai.OpenAI

    def respond(self, said: str, previous: Any = None, **kwargs: Any) -> Any:
        reply = self.client.responses.create(
            model="afterglow",
            input=said,
            previous_response_id=previous.id if previous is not None else None,
            temperature=0,
            **{"max_output_tokens": 12, **kwargs},
        )
        self.engine.settle()
        return reply


@contextmanager
def serving(folder: Path, **config: Any) -> Iterator[Real]:
    cache = CacheConfig(device_cache=64 << 20, host_cache=64 << 20, disk_cache=64 << 20, cache_dir=folder)
    engine = Engine.load(BUNDLED, EngineConfig(threads=1, cache=cache, max_model_len=WINDOW))
    engine.start()
    server = ServerConfig(port=0, grace=0.5, served_model_name=("afterglow",), **config)
    service = Service(engine, Tokenizer(BUNDLED), server, BUNDLED)
    thread = threading.Thread(target=service.run, kwargs={"signals": False})
    thread.start()
    wait_for(lambda: service.started)
    try:
        with openai.OpenAI(base_url=f"{service.address}/v1", api_key="key", max_retries=0) as client:
            yield Real(engine, client)
    finally:
        service.stop()
        thread.join(20)
        engine.close()


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    with serving(tmp_path_factory.mktemp("cache")) as value:
        yield value


def usage(reply: Any) -> dict[str, Any]:
    return dict(reply.usage.model_dump())


def rows(reply: Any) -> int:
    """Of its conversation when it ended; the last token was never fed."""
    return int(usage(reply)["input_tokens"] + usage(reply)["output_tokens"] - 1)


def test_every_turn_finds_all_of_the_last_one(real: Real) -> None:
    reply, before = None, 0
    for turn in range(4):
        reply = real.respond(f"Number {turn} is near the mill.", reply)
        assert usage(reply)["input_tokens_details"]["cached_tokens"] == before
        before = rows(reply)


def test_a_restart_loses_neither_the_text_nor_the_rows(tmp_path: Path) -> None:
    with serving(tmp_path) as first:
        one = first.respond("My name is Ada. I keep the red kite in the old mill.")
        two = first.respond("Do you know my name?", one)
    with serving(tmp_path) as second:
        assert second.client.responses.retrieve(two.id).output_text == two.output_text
        three = second.respond("And where is the kite?", two)
        assert usage(three)["input_tokens_details"]["cached_tokens"] == rows(two)
        assert usage(three)["cached_tokens_details"]["device"] == 0


def test_a_conversation_goes_on_beyond_the_context(real: Real) -> None:
    reply, cuts = None, []
    for turn in range(16):
        said = f"This is fact number {turn}: the boat of {turn} people is blue and near the river."
        reply = real.respond(said, reply, truncation="auto", instructions="Be brief.")
        spent = usage(reply)
        assert spent["input_tokens"] + spent["output_tokens"] <= WINDOW
        if spent.get("truncation"):
            cuts.append(spent["truncation"])
            assert spent["truncation"]["reused"] is True
            # The remaining rows are not computed again.
            assert spent["input_tokens_details"]["cached_tokens"] > 0
    assert len(cuts) > 3
    assert [cut["dropped_tokens"] for cut in cuts] == sorted(cut["dropped_tokens"] for cut in cuts)
    with pytest.raises(openai.BadRequestError) as caught:
        real.respond("and?", reply, instructions="Be brief.")
    assert caught.value.code == "context_length_exceeded"
    # A message that alone is too long cannot be helped, and is said before any work.
    with pytest.raises(openai.BadRequestError) as caught:
        real.respond("the mill " * 400, reply, truncation="auto")
    assert caught.value.code == "context_length_exceeded"


def test_chat_goes_on_beyond_the_context(real: Real) -> None:
    messages: list[Any] = [{"role": "system", "content": "Be brief."}]
    cached = []
    for turn in range(14):
        messages.append({"role": "user", "content": f"Fact {turn}: the boat of {turn} people is blue."})
        reply = real.client.chat.completions.create(
            model="afterglow",
            messages=messages,
            temperature=0,
            max_tokens=12,
            extra_body={"truncation": "auto", "session_id": "long"},
        )
        real.engine.settle()
        messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
        spent = reply.usage.model_dump() if reply.usage else {}
        if spent.get("truncation"):
            cached.append(spent["prompt_tokens_details"]["cached_tokens"] / spent["prompt_tokens"])
    assert len(cached) > 3
    assert max(cached) > 0.5


def test_conversations_are_listed_pinned_and_forgotten(real: Real) -> None:
    salt = {"cache_salt": "kite"}  # no other conversation's rows are among its own
    real.respond("The kite is red.", extra_body={"session_id": "kite", "prompt_cache_retention": 500, **salt})

    def call(method: str, path: str) -> Any:
        answer = real.client._client.request(method, f"cache/{path}", params=salt)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def listed() -> list[dict[str, Any]]:
        return list(call("GET", "sessions")["data"])

    (kite,) = listed()
    assert kite["name"] == "kite"
    assert sum(kite["cached_tokens"].values()) == kite["tokens"] > 0
    assert 400 < kite["expires"] - kite["last_used"] <= 500
    assert call("POST", "sessions/kite/pin")["pinned"] is True
    assert listed()[0]["pinned"] is True
    stats = call("GET", "stats")
    assert (stats["sessions"]["pinned"], stats["sessions"]["tokens"]) == (1, kite["tokens"])
    assert stats["engine"]["plan"]["extents"] > 0
    assert call("DELETE", "sessions/kite")["deleted"] is True
    real.engine.settle()
    assert listed() == []
    again = real.respond("The kite is red.", extra_body=salt)
    assert usage(again)["input_tokens_details"]["cached_tokens"] == 0


def test_two_keys_share_nothing(tmp_path: Path) -> None:
    said = "My name is Ada. I keep the red kite in the old mill near the river."
    with serving(tmp_path, api_key=("key", "other")) as real:
        first = real.respond(said)
        with openai.OpenAI(base_url=real.client.base_url, api_key="other", max_retries=0) as other:
            theirs = other.responses.create(model="afterglow", input=said, temperature=0, max_output_tokens=12)
            assert usage(theirs)["input_tokens_details"]["cached_tokens"] == 0
            assert theirs.output_text == first.output_text
            real.engine.settle()
            other._client.post("../reset_prefix_cache", headers={"Authorization": "Bearer other"})
            real.engine.settle()
            forgotten = other.responses.create(model="afterglow", input=said, temperature=0, max_output_tokens=12)
            assert usage(forgotten)["input_tokens_details"]["cached_tokens"] == 0
        mine = real.respond(said)
        assert usage(mine)["input_tokens_details"]["cached_tokens"] == usage(first)["input_tokens"] - 1
