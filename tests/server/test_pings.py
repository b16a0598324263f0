"""Streams that have nothing to say yet: comments keep them alive, and end with them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from afterglow.server.replies import pending_replies
from tests import doors
from tests.server.conftest import REPLY, Running, running
from tests.waiting import wait_for

MESSAGE = [{"role": "user", "content": "hi"}]
STREAMS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGE}),
    ("/v1/completions", {"prompt": "hi", "max_tokens": 100}),
    ("/v1/responses", {"input": "hi"}),
]
EVERY = 0.03


@pytest.fixture
def held(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """A server whose engine gives no token before its gate is opened."""
    monkeypatch.setattr(pending_replies, "PING_SECONDS", EVERY)
    with running(model_dir, hold=True) as server:
        yield server


def test_every_five_seconds() -> None:
    assert pending_replies.PING_SECONDS == 5.0


def test_anthropics_pings_are_events(held: Running) -> None:
    body = {"messages": MESSAGE, "max_tokens": 100, "stream": True}
    with held.http() as http, http.stream("POST", "/v1/messages", json=body) as answer:
        lines: list[str] = []
        for line in answer.iter_lines():
            lines.append(line)
            if lines.count("event: ping") == 3:
                held.engine.gate.set()
    assert lines[:3] == ["event: ping", 'data: {"type":"ping"}', ""]
    assert ": ping" not in lines
    assert "event: message_start" in lines
    assert lines[-3:] == ["event: message_stop", 'data: {"type":"message_stop"}', ""]
    wait_for(lambda: pings_alive(held) == 0)


@pytest.mark.parametrize(("path", "body"), STREAMS)
def test_comments_until_the_first_token_and_none_after_the_last(held: Running, path: str, body: dict[str, Any]) -> None:
    with held.http() as http, http.stream("POST", path, json={**body, "stream": True}) as answer:
        lines: list[str] = []
        for line in answer.iter_lines():
            lines.append(line)
            if lines.count(": ping") == 3:
                held.engine.gate.set()
        last = [line for line in lines if line][-1]
        assert last == "data: [DONE]" or "response.completed" in last
        assert lines[lines.index(": ping") + 1] == ""  # an event of its own, with nothing in it
    wait_for(lambda: pings_alive(held) == 0)


def test_a_client_of_openai_sees_only_the_reply(held: Running) -> None:
    chunks = held.openai().chat.completions.create(model="fake-model", messages=MESSAGE, stream=True)  # type: ignore[arg-type]
    time.sleep(3 * EVERY)
    held.engine.gate.set()
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == REPLY


@pytest.mark.parametrize(("path", "body"), STREAMS)
def test_who_hangs_up_meanwhile_is_cancelled(held: Running, path: str, body: dict[str, Any]) -> None:
    with held.http() as http, http.stream("POST", path, json={**body, "stream": True}) as answer:
        lines = answer.iter_lines()
        while next(lines) != ": ping":
            pass
        assert not held.engine.cancelled
    wait_for(lambda: held.engine.cancelled == [held.engine.requests[0].id])
    wait_for(lambda: pings_alive(held) == 0)


def test_a_client_that_does_not_read_gets_no_heap_of_comments() -> None:
    """While a chunk waits for the client, no comment is put behind it."""
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))
        if sent[-1] == b"slow":
            await asyncio.sleep(10 * EVERY)

    async def events() -> Any:
        yield b"slow"
        await asyncio.sleep(1.5 * EVERY)

    async def work() -> None:
        answer = pending_replies.EventStream(events(), lambda: None)
        await answer._send_all(send)

    before, pending_replies.PING_SECONDS = pending_replies.PING_SECONDS, EVERY
    try:
        asyncio.run(work())
    finally:
        pending_replies.PING_SECONDS = before
    assert sent[:2] == [b"", b"slow"]
    assert sent[2:] in ([pending_replies.PING, b""], [b""])


def pings_alive(server: Running) -> int:
    """Tasks of the server's loop that would send comments."""
    loop = doors.loop_of(server.service)
    return sum("_ping" in repr(task.get_coro()) for task in asyncio.all_tasks(loop))


def test_comments_cost_nothing_while_tokens_come(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_replies, "PING_SECONDS", 60.0)
    with running(model_dir) as server, httpx.Client(base_url=server.url) as http:
        answer = http.post("/v1/chat/completions", json={"messages": MESSAGE, "stream": True})
    assert ": ping" not in answer.text
