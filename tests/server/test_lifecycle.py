"""Hanging up, waiting, dying and shutting down."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from afterglow.engine.stats import EngineStats
from afterglow.importance.chunk_loader import ImportanceStats
from afterglow.plan.stats import Counters, Stats
from afterglow.server.json_responses import ClientGone
from afterglow.server.lifecycle.service import Service
from afterglow.server.metrics.collector import flatten
from afterglow.server.metrics.metric_names import ROWS, number_at
from afterglow.server.replies.pending_replies import EventStream, event
from afterglow.server.server_config import ServerConfig
from afterglow.store.moving.store_stats import StoreStats
from afterglow.store.shared.counters import SharedStats
from tests import doors
from tests.server.conftest import Running, running
from tests.waiting import wait_for

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def post_and_leave(server: Running, body: dict[str, Any]) -> None:
    """Send a request and hang up while it waits."""

    async def main() -> None:
        async with httpx.AsyncClient(base_url=server.url) as http:
            sent = asyncio.ensure_future(http.post(CHAT, json=body))
            while not server.engine.in_flight:
                await asyncio.sleep(0.005)
            sent.cancel()
            await asyncio.gather(sent, return_exceptions=True)

    asyncio.run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_hanging_up_in_the_queue_cancels(model_dir: Path, stream: bool) -> None:
    with running(model_dir, hold=True) as server:
        post_and_leave(server, {**HI, "stream": stream, "n": 2})
        wait_for(lambda: len(server.engine.cancelled) == 2)
        wait_for(lambda: server.engine.in_flight == 0)
        assert sorted(server.engine.cancelled) == sorted(r.id for r in server.engine.requests)


@pytest.mark.parametrize("stream", [True, False])
def test_hanging_up_while_running_cancels(model_dir: Path, stream: bool) -> None:
    with running(model_dir, step_seconds=0.02) as server:
        post_and_leave(server, {**HI, "stream": stream, "ignore_eos": True})
        wait_for(lambda: len(server.engine.cancelled) == 1)
        wait_for(lambda: server.engine.in_flight == 0)
        with server.http() as http:
            wait_for(lambda: 'afterglow:http_responses_total{status="499"} 1.0' in http.get("/metrics").text)


def test_leaving_a_stream_early_cancels(model_dir: Path) -> None:
    with running(model_dir, step_seconds=0.01) as server:
        stream = server.openai().chat.completions.create(
            model="fake-model", stream=True, extra_body={"ignore_eos": True}, **HI
        )
        next(iter(stream))
        stream.close()
        wait_for(lambda: server.engine.cancelled)
        wait_for(lambda: server.engine.in_flight == 0)


def test_a_stream_that_nobody_began_to_read_is_closed() -> None:
    """The client is gone before the first byte could be sent: the generator never runs, its jobs end."""
    closed: list[bool] = []

    async def events() -> AsyncGenerator[bytes, None]:
        yield b""  # pragma: no cover

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def send(message: object) -> None:
        await asyncio.sleep(10)

    async def main() -> None:
        with pytest.raises(ClientGone):
            await EventStream(events(), lambda: closed.append(True))({"type": "http"}, receive, send)  # type: ignore[arg-type]

    asyncio.run(main())
    assert closed == [True]


def test_an_event_is_one_line_to_every_client() -> None:
    data = event({"text": "a\u2028b\x85c\nd🙂"})
    assert len(data.decode().strip().splitlines()) == 1
    assert json.loads(data[6:]) == {"text": "a\u2028b\x85c\nd🙂"}


def test_waiting_requests_never_block_health_and_metrics(model_dir: Path) -> None:
    with running(model_dir, hold=True) as server:
        replies: list[str | None] = []

        def ask() -> None:
            reply = server.openai().chat.completions.create(model="fake-model", **HI)
            replies.append(reply.choices[0].message.content)

        threads = [threading.Thread(target=ask) for _ in range(12)]
        for thread in threads:
            thread.start()
        wait_for(lambda: server.engine.in_flight == 12, seconds=15)
        with server.http() as http:
            assert http.get("/health").status_code == 200
            assert "vllm:num_requests_waiting" in http.get("/metrics").text
            assert http.get("/v1/models").status_code == 200
        assert replies == []
        server.engine.gate.set()
        for thread in threads:
            thread.join(15)
        assert len(replies) == 12
        assert len(set(replies)) == 1


def test_tokenising_much_text_does_not_block_others(model_dir: Path) -> None:
    with running(model_dir) as server, server.http() as http:
        body = {"prompt": "the mill is near the river. " * 60_000}
        answers: list[httpx.Response] = []
        thread = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{server.url}/tokenize", json=body, timeout=60))
        )
        thread.start()
        polls = 0
        while thread.is_alive():
            assert http.get("/health").status_code == 200
            polls += 1
            time.sleep(0.01)
        thread.join()
        assert answers[0].status_code == 200
        assert polls > 1


def test_detokenising_much_does_not_block_others(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, threads = server.tokenizer.decode, []

    def watched(*args: Any) -> str:
        threads.append(threading.current_thread())
        return decode(*args)

    monkeypatch.setattr(server.tokenizer, "decode", watched)
    ids = server.tokenizer.encode("the mill ") * 10_000
    with server.http() as http:
        assert http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == "the mill " * 10_000
        assert http.post("/detokenize", json={"tokens": ids[:5]}).status_code == 200
    assert threads[0] is not server.thread
    assert threads[1] is server.thread


def test_a_client_that_leaves_while_it_sends(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running(model_dir) as server, server.http() as http:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
            client.sendall(head.encode() + b'{"messages": [')
            time.sleep(0.1)
        wait_for(lambda: 'responses_total{status="499"} 1.0' in http.get("/metrics").text)
    assert not [record for record in caplog.records if record.exc_info]


def test_a_path_is_one_line_of_the_log(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    access = logging.getLogger("afterglow.access")
    access.addHandler(caplog.handler)  # another test may have set logging up, and then records do not reach the root
    try:
        with caplog.at_level("INFO", "afterglow.access"), server.http() as http:
            http.get("/x%0a12:00:00 INFO forged")
            wait_for(lambda: any("forged" in r.getMessage() for r in caplog.records))
    finally:
        access.removeHandler(caplog.handler)
    assert [r.getMessage() for r in caplog.records if "forged" in r.getMessage()]
    assert not [record for record in caplog.records if "\n" in record.getMessage()]


def test_what_a_dashboard_asks_for_all_day_is_not_logged(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    access = logging.getLogger("afterglow.access")
    access.addHandler(caplog.handler)
    try:
        with caplog.at_level("INFO", "afterglow.access"), server.http() as http:
            for path in ("/health", "/metrics", "/dashboard/data", "/v1/cache/sessions", "/v1/models"):
                assert http.get(path).status_code == 200
            wait_for(lambda: any("/v1/models" in r.getMessage() for r in caplog.records))
    finally:
        access.removeHandler(caplog.handler)
    lines = {r.getMessage() for r in caplog.records if r.name == access.name}
    assert [line for line in lines if "/v1/models" not in line] == []


def test_two_signals_at_once_are_one(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """`timeout` sends its signal to the process and to its group."""
    service = Service(server.engine, server.tokenizer, ServerConfig(port=0))
    codes: list[int] = []
    stops: list[bool] = []
    monkeypatch.setattr("afterglow.server.lifecycle.service.os._exit", codes.append)
    monkeypatch.setattr(service, "stop", lambda: stops.append(True))
    with contextlib.closing(service.socket):
        service.on_signal()
        service.on_signal()
        assert (stops, codes) == ([True], [])
        assert doors.stopped_at(service) is not None
        doors.stop_earlier(service, 0.6)
        service.on_signal()
        assert codes == [130]


def test_an_engine_that_dies_while_the_server_drains_is_said(model_dir: Path) -> None:
    with running(model_dir, ServerConfig(port=0, grace=60.0), hold=True) as server:
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(httpx.post(server.url + CHAT, json=HI, timeout=30)))
        thread.start()
        wait_for(lambda: server.engine.in_flight == 1)
        server.service.stop()
        wait_for(lambda: server.service.state.bridge.draining)
        server.engine.die()
        thread.join(20)
        assert answers[0].json()["error"]["code"] == "engine_dead"


def test_a_dead_engine_is_said(model_dir: Path) -> None:
    with running(model_dir, hold=True) as server, server.http() as http:
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(httpx.post(server.url + CHAT, json=HI, timeout=20)))
        thread.start()
        stream = server.openai().chat.completions.create(model="fake-model", stream=True, **HI)
        wait_for(lambda: server.engine.in_flight == 2)
        server.engine.die()
        thread.join(10)
        assert answers[0].status_code == 503
        assert answers[0].json()["error"]["code"] == "engine_dead"
        with pytest.raises(openai.APIError, match="engine has stopped"):
            list(stream)
        assert http.get("/health").status_code == 503
        assert http.post(CHAT, json=HI).status_code == 503
        assert 'afterglow:healthy{model_name="fake-model"} 0.0' in http.get("/metrics").text


def test_shutting_down_lets_short_requests_finish(model_dir: Path) -> None:
    with running(model_dir, ServerConfig(port=0, grace=60), step_seconds=0.01) as server:
        stream = server.openai().chat.completions.create(model="fake-model", stream=True, **HI)
        chunks = [next(iter(stream))]
        server.service.stop()
        chunks += list(stream)
        assert chunks[-1].choices[0].finish_reason == "stop"
        server.thread.join(10)
        assert not server.thread.is_alive()
        with pytest.raises(httpx.ConnectError):
            server.http().get("/health")


def test_shutting_down_ends_long_requests_after_the_grace_period(model_dir: Path) -> None:
    with running(model_dir, step_seconds=0.05) as server:
        stream = server.openai().chat.completions.create(
            model="fake-model", stream=True, extra_body={"ignore_eos": True}, **HI
        )
        next(iter(stream))
        server.service.stop()
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        server.thread.join(10)
        assert not server.thread.is_alive()
        assert server.engine.cancelled


def test_the_metrics_are_valid_and_complete(server: Running) -> None:
    server.openai().chat.completions.create(model="fake-model", **HI)
    with server.http() as http:
        answer = http.get("/metrics")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    for name in (
        "vllm:time_to_first_token_seconds",
        "vllm:e2e_request_latency_seconds",
        "vllm:inter_token_latency_seconds",
        "vllm:num_requests_running",
        "vllm:kv_cache_usage_perc",
        "vllm:prompt_tokens",
        "vllm:prefix_cache_hits",
        "vllm:request_success",
    ):
        assert name in families
    sources = {s.labels["source"] for s in families["vllm:prompt_tokens_cached_by_source"].samples}
    assert sources == {"device", "host", "disk", "shared"}


# The same as a number that has a name, in other units or counted in another place: not published.
REPEATED = {
    *("plan.counters.query_tokens", "plan.counters.hit_device", "plan.counters.hit_host", "plan.counters.hit_disk"),
    "plan.counters.hit_shared",
    *("plan.device_rows", "plan.device_rows_total", "plan.host_slots", "plan.host_slots_total"),
    *("plan.disk_bytes", "plan.disk_bytes_total", "store.disk_bytes", "importance.read_bytes"),
}


def test_every_number_of_the_engine_has_a_name() -> None:
    plan = Stats(read_rate=1.0, fetch_rate=1.0, prefill_rate=1.0)
    table = flatten(EngineStats(plan=plan, importance=ImportanceStats(), shared=SharedStats()))
    assert [row.path for row in ROWS if number_at(table, row.path) is None] == []
    assert set(table) - {path for row in ROWS for path in row.path.split(" + ")} == REPEATED
    assert len({(row.name, row.labels) for row in ROWS}) == len(ROWS)


def test_numbers_that_are_not_known_yet_are_left_out(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = dict.fromkeys((f.name for f in dataclasses.fields(Stats)), 3)
    plan = Stats(**{**numbers, "read_rate": None, "counters": Counters(truncations=7)})  # type: ignore[arg-type]
    with running(model_dir) as server, server.http() as http:
        stats = EngineStats(plan=plan, store=StoreStats(errors={"io": 2}))
        monkeypatch.setattr(server.engine, "stats", lambda: stats)
        text = http.get("/metrics").text
        found = http.get("/v1/cache/stats").json()
    assert 'afterglow:truncated_prompts_total{model_name="fake-model"} 7.0' in text
    assert 'afterglow:store_errors_total{kind="io",model_name="fake-model"} 2.0' in text
    assert "read_bytes_per_second" not in text
    assert found["engine"]["plan"]["counters"]["truncations"] == 7
