"""`--truncation-policy` on the real engine and the bundled model: the usage says by what a prompt was cut."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from afterglow.choices import TruncationPolicy
from afterglow.config import CacheConfig, EngineConfig
from afterglow.engine.engine import Engine
from afterglow.server.lifecycle.service import Service
from afterglow.server.server_config import ServerConfig
from afterglow.text import Tokenizer
from tests.server.test_real_responses import BUNDLED, WINDOW
from tests.waiting import wait_for

pytestmark = pytest.mark.skipif(not (BUNDLED / "config.json").is_file(), reason="no bundled model here")


@contextmanager
def serving(folder: Path, policy: TruncationPolicy) -> Iterator[httpx.Client]:
    cache = CacheConfig(device_cache=64 << 20, host_cache=64 << 20, disk_cache=64 << 20, cache_dir=folder)
    config = EngineConfig(threads=1, cache=cache, max_model_len=WINDOW, truncation_policy=policy)
    engine = Engine.load(BUNDLED, config)
    engine.start()
    service = Service(engine, Tokenizer(BUNDLED), ServerConfig(port=0, grace=0.5), BUNDLED)
    thread = threading.Thread(target=service.run, kwargs={"signals": False})
    thread.start()
    wait_for(lambda: service.started)
    try:
        with httpx.Client(base_url=service.address, timeout=60) as client:
            yield client
    finally:
        service.stop()
        thread.join(20)
        engine.close()


def respond(client: httpx.Client, said: str, previous: str | None) -> dict[str, Any]:
    body = {"input": said, "previous_response_id": previous, "truncation": "auto", "max_output_tokens": 12}
    reply = client.post("/v1/responses", json=body | {"instructions": "Be brief.", "temperature": 0})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def metric(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    (line,) = [line for line in lines if line.startswith((f"{name}_total ", f"{name}_total{{"))]
    return float(line.split()[1])


def talk(client: httpx.Client, turns: int, previous: str | None = None) -> list[dict[str, Any]]:
    found = []
    for turn in range(turns):
        said = f"This is fact number {turn}: the boat of {turn} people is blue and near the river."
        found.append(respond(client, said, previous))
        previous = found[-1]["id"]
    return found


def test_a_conversation_is_cut_by_importance_and_by_what_is_left_after_a_restart(tmp_path: Path) -> None:
    with serving(tmp_path, "importance") as client:
        cuts = [reply["usage"]["truncation"] for reply in talk(client, 12) if "truncation" in reply["usage"]]
        assert len(cuts) > 3
        assert {cut["policy"] for cut in cuts} == {"importance"}
        assert all(cut["reused"] for cut in cuts)
        assert len({cut["dropped_tokens"] for cut in cuts}) > 1, "it overflows more than once"
        assert metric(client, "afterglow:truncated_prompts_unscored") == 0
        before = talk(client, 5)[-1]  # another one, which fits
        assert "truncation" not in before["usage"]
    with serving(tmp_path, "importance") as client:
        reply = respond(client, "the boat is blue and near the river. " * 14, before["id"])
        assert reply["usage"]["truncation"]["policy"] == "sinks_and_recent", "the scores are gone"
        assert metric(client, "afterglow:truncated_prompts_unscored") == 1


def test_the_other_policies_say_their_names(tmp_path: Path) -> None:
    for policy in ("oldest", "oldest_tokens", "sinks_and_recent"):
        with serving(tmp_path / policy, policy) as client:
            last = talk(client, 9)[-1]
            assert last["usage"]["truncation"]["policy"] == policy
