"""Requests that attend to a part of their cached prefix, over HTTP: the share they ask for, and what they are told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from afterglow.config import CacheConfig, EngineConfig
from afterglow.engine.engine import Engine
from afterglow.server.lifecycle.service import Service
from afterglow.server.server_config import ServerConfig
from afterglow.text import Tokenizer
from tests.server.test_real_engine import BUNDLED, Real
from tests.waiting import wait_for

pytestmark = pytest.mark.skipif(not (BUNDLED / "config.json").is_file(), reason="no bundled model here")

TEXT = "Please keep in mind that the blue lantern stands on the shelf behind the wooden door. " * 12
ROWS_LEAST = 64  # fewer are all taken


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    folder: Path = tmp_path_factory.mktemp("cache")
    cache = CacheConfig(
        device_cache=64 << 20, host_cache=64 << 20, disk_cache=64 << 20, cache_dir=folder, source="load"
    )
    engine = Engine.load(BUNDLED, EngineConfig(threads=1, cache=cache, importance=1.0))
    engine.start()
    service = Service(
        engine, Tokenizer(BUNDLED), ServerConfig(port=0, grace=0.5, served_model_name=("afterglow",)), BUNDLED
    )
    thread = threading.Thread(target=service.run, kwargs={"signals": False})
    thread.start()
    wait_for(lambda: service.started)
    with openai.OpenAI(base_url=f"{service.address}/v1", api_key="none", max_retries=0) as client:
        yield Real(engine, client)
    service.stop()
    thread.join(20)
    engine.close()


def conversation(real: Real, salt: str) -> list[dict[str, Any]]:
    """A turn whose rows are cached, and the next one."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": TEXT}]
    reply = real.chat(messages, max_tokens=4, extra_body={"cache_salt": salt})
    real.engine.settle()
    assert "kv_selection" not in reply.usage.model_dump()
    answer = {"role": "assistant", "content": reply.choices[0].message.content}
    return [
        *messages,
        answer,
        {"role": "user", "content": "Where does the lantern stand, and behind which door?"},
    ]


def test_a_chat_takes_the_share_that_it_asks_for(real: Real) -> None:
    messages = conversation(real, "chat")
    usage = real.chat(
        messages, max_tokens=4, extra_body={"cache_salt": "chat", "kv_retention": 0.25}
    ).usage.model_dump()
    told = usage["kv_selection"]
    assert ROWS_LEAST < told["tokens"] == sum(usage["cached_tokens_details"].values())
    assert abs(told["kept_tokens"] - 0.25 * told["tokens"]) <= 1
    assert told["kept_tokens"] <= told["taken_tokens"] <= told["tokens"]
    assert told["layers"] == real.engine.decoder.spec.layers >= told["fallback_layers"] >= 0
    assert told["renewals"] == usage["completion_tokens"] - 1
    real.engine.settle()  # its prompt is computed exactly meanwhile
    for share in (1.0, None):
        exact = real.chat(messages, max_tokens=4, extra_body={"cache_salt": "chat", "kv_retention": share})
        found = exact.usage.model_dump()
        assert "kv_selection" not in found
        assert sum(found["cached_tokens_details"].values()) == found["prompt_tokens"] - 1


def test_a_stream_and_a_response_are_told_too(real: Real) -> None:
    messages, body = conversation(real, "stream"), {"cache_salt": "stream", "kv_retention": 0.5}
    *_, last = real.chat(messages, max_tokens=4, stream=True, stream_options={"include_usage": True}, extra_body=body)
    told = last.usage.model_dump()["kv_selection"]
    assert abs(told["kept_tokens"] - 0.5 * told["tokens"]) <= 1
    body["cache_salt"] = "response"
    messages = conversation(real, "response")
    made = real.client.responses.create(model="afterglow", input=messages, max_output_tokens=4, extra_body=body)  # type: ignore[arg-type]
    told = made.usage.model_dump()["kv_selection"]  # type: ignore[union-attr]
    assert abs(told["kept_tokens"] - 0.5 * told["tokens"]) <= 1


def test_a_plain_completion_takes_a_share(real: Real) -> None:
    extra = {"cache_salt": "plain", "kv_retention": 0.25}
    real.client.completions.create(model="afterglow", prompt=TEXT, max_tokens=1, extra_body={"cache_salt": "plain"})
    real.engine.settle()
    made = real.client.completions.create(
        model="afterglow", prompt=TEXT + "And so the blue lantern", max_tokens=2, extra_body=extra
    )
    assert made.usage is not None
    told = made.usage.model_dump()["kv_selection"]
    assert abs(told["kept_tokens"] - 0.25 * told["tokens"]) <= 1


@pytest.mark.parametrize("share", [0, -1, 1.5, "half", [0.5]])
def test_shares_that_make_no_sense_are_refused(real: Real, share: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        real.chat([{"role": "user", "content": "hi"}], max_tokens=1, extra_body={"kv_retention": share})
    assert "kv_retention" in str(refused.value)


def test_it_is_counted(real: Real) -> None:
    text = real.client.get("../metrics", cast_to=str)
    found = {
        line.split("{")[0]: float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if "importance" in line and line[0] != "#"
    }
    assert found["afterglow:importance_requests_total"] >= 3
