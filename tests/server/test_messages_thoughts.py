"""Conversations over `/v1/messages` with models that think: in every turn nothing but the new message is computed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import httpx
import pytest

from tests import reasoning_templates as kit
from tests.reasoning_templates import THOUGHT
from tests.scripted_model import Scripted, scripted
from tests.server.test_messages import CALL, MARK, SYSTEM, TOOLS
from tests.waiting import wait_for


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    with scripted(tmp_path_factory.mktemp("qwen"), kit.QWEN) as server:
        yield server


class Thinking:
    """A client that sends thoughts back, or not."""

    def __init__(self, server: Scripted, returns: bool) -> None:
        self.server = server
        self.returns = returns
        self.messages: list[dict[str, Any]] = []

    def turn(self, block: dict[str, Any], reply: str) -> dict[str, Any]:
        """Send a marked block; only that, and the template's marks around it, may be computed."""
        server = self.server
        server.say(reply)
        said = [*self.messages, {"role": "user", "content": [{**block, "cache_control": MARK}]}]
        body = {"system": SYSTEM, "tools": TOOLS, "messages": said, "max_tokens": 300, "temperature": 0}
        body |= {"thinking": {"type": "enabled", "budget_tokens": 1024}, "cache_salt": f"{self.returns}"}
        answer = httpx.post(f"{server.url}/v1/messages", json=body, timeout=30)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        wait_for(lambda: not server.service.state.kept_replies.busy)
        server.engine.settle()
        usage, prompt = found["usage"], list(server.requests[-1].prompt)
        if self.messages:
            new = server.tokenizer.decode(prompt[usage["cache_read_input_tokens"] :], False)
            assert len(new) <= len(str(block.get("text") or block["content"])) + 100, new
        assert found["content"][0]["thinking"] == THOUGHT
        content = found["content"] if self.returns else found["content"][1:]
        self.messages += [{"role": "user", "content": [block]}, {"role": "assistant", "content": content}]
        return found


@pytest.mark.parametrize("returns", [True, False])
def test_turns_with_thoughts_calls_and_results(qwen: Scripted, returns: bool) -> None:
    client = Thinking(qwen, returns)
    for number in range(3):
        block: dict[str, Any] = {"type": "text", "text": f"Question {number}?"}
        for step in range(2):
            call = client.turn(block, f"{kit.TAGGED}Look {step}.\n{CALL}")["content"][-1]
            block = {"type": "tool_result", "tool_use_id": call["id"], "content": f"a.py {step}"}
        client.turn(block, f"{kit.TAGGED}It is {number}.")
    assert sum(1 for _ in takewhile(lambda each: each.breakpoints, reversed(qwen.requests))) >= 9
