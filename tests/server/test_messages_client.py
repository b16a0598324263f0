"""`/v1/messages` with the `anthropic` package: every answer and event is what its types say, and its helpers work."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, TypeAdapter

from tests import reasoning_templates as thinking
from tests.reasoning_templates import THOUGHT
from tests.scripted_model import Scripted, scripted
from tests.server.test_messages import ASK, CALL, MARK, SYSTEM, TOOLS, events

anthropic = pytest.importorskip("anthropic")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    with scripted(tmp_path_factory.mktemp("qwen"), thinking.QWEN) as server:
        yield server


@pytest.fixture(scope="module")
def client(qwen: Scripted) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=qwen.url, api_key="none", max_retries=0, timeout=30) as found:
        yield found


def test_a_message_with_all_kinds_of_blocks(qwen: Scripted, client: Any) -> None:
    qwen.say(f"{thinking.TAGGED}Look.\n{CALL}")
    found = client.messages.create(
        model="model", max_tokens=500, system=SYSTEM, tools=TOOLS, messages=[ASK],
        thinking={"type": "enabled", "budget_tokens": 1024}, tool_choice={"type": "auto"}, metadata={"user_id": "u"},
    )  # fmt: skip
    assert [block.type for block in found.content] == ["thinking", "text", "tool_use"]
    thought, text, call = found.content
    assert (thought.thinking, text.text, call.input) == (THOUGHT, "Look.", {"command": "ls  -l", "timeout": 2})
    assert thought.signature
    assert found.stop_reason == "tool_use"
    assert found.usage.cache_creation.ephemeral_5m_input_tokens == found.usage.cache_creation_input_tokens > 0
    assert 0 < found.usage.output_tokens_details.thinking_tokens < found.usage.output_tokens
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "a.py"}]}
    qwen.engine.settle()
    qwen.say("It is a.py.")
    again = client.messages.create(
        model="model", max_tokens=500, system=SYSTEM, tools=TOOLS,
        messages=[ASK, found.to_param(), {"role": "user", "content": [result]}],
    )  # fmt: skip
    assert again.content[0].text == "It is a.py."
    before = found.usage
    rows = before.input_tokens + before.cache_creation_input_tokens + before.cache_read_input_tokens
    assert again.usage.cache_read_input_tokens >= rows + before.output_tokens - 1, (
        "thoughts and calls come back as they were"
    )


def test_a_stream_is_put_together_by_the_client(qwen: Scripted, client: Any) -> None:
    qwen.say(f"{thinking.TAGGED}Look.\n{CALL}")
    with client.messages.stream(model="model", max_tokens=500, tools=TOOLS, messages=[ASK]) as stream:
        kinds = [event.type for event in stream]
        found = stream.get_final_message()
    assert {"thinking", "signature", "text", "input_json"} <= set(kinds)
    assert [block.type for block in found.content] == ["thinking", "text", "tool_use"]
    assert (found.content[0].thinking, found.content[1].text) == (THOUGHT, "Look.")
    assert found.content[0].signature
    assert found.content[2].input == {"command": "ls  -l", "timeout": 2}
    assert (found.stop_reason, found.usage.output_tokens) == ("tool_use", len(qwen.said[-1]) + 1)


def test_thoughts_may_be_left_out(qwen: Scripted, client: Any) -> None:
    hidden = {"type": "adaptive", "display": "omitted"}
    qwen.say(f"{thinking.TAGGED}Yes.", f"{thinking.TAGGED}Yes.")
    found = client.messages.create(model="model", max_tokens=500, messages=[ASK], thinking=hidden)
    assert [(block.type, getattr(block, "thinking", None)) for block in found.content] == [
        ("thinking", ""),
        ("text", None),
    ]
    with client.messages.stream(model="model", max_tokens=500, messages=[ASK], thinking=hidden) as stream:
        assert "thinking" not in [event.type for event in stream]
        assert stream.get_final_message().content[0].signature
    client.messages.create(model="model", max_tokens=5, messages=[ASK], thinking={"type": "disabled"})
    assert qwen.prompt().endswith("<think>\n\n</think>\n\n")


def test_events_are_of_the_clients_types(qwen: Scripted) -> None:
    """Strictly: the client itself takes nearly anything."""
    types = anthropic.types
    adapter: TypeAdapter[Any] = TypeAdapter(types.RawMessageStreamEvent)
    qwen.say(f"{thinking.TAGGED}Look.\n{CALL}")
    body = {"model": "model", "max_tokens": 500, "messages": [ASK], "tools": TOOLS, "system": SYSTEM, "stream": True}
    found = events(httpx.post(f"{qwen.url}/v1/messages", json=body, timeout=30).text)
    for kind, data in found:
        if kind != "ping":
            assert type(adapter.validate_python(data)).__name__.lower() == f"raw{kind.replace('_', '')}event"
    qwen.say(f"{thinking.TAGGED}Look.\n{CALL}")
    whole = httpx.post(f"{qwen.url}/v1/messages", json={**body, "stream": False}, timeout=30).text
    types.Message.model_validate_json(whole, strict=True)
    counted = httpx.post(f"{qwen.url}/v1/messages/count_tokens", json={"messages": [ASK]}).text
    types.MessageTokensCount.model_validate_json(counted, strict=True)


def test_counting_and_caching(qwen: Scripted, client: Any) -> None:
    fields: dict[str, Any] = {"model": "model", "messages": [ASK], "tools": TOOLS, "system": SYSTEM}
    counted = client.messages.count_tokens(**fields).input_tokens
    qwen.say("Yes.", "Yes.")
    found = client.messages.create(max_tokens=50, cache_control=MARK, **fields).usage
    assert found.input_tokens + found.cache_creation_input_tokens + found.cache_read_input_tokens == counted
    qwen.engine.settle()
    again = client.messages.create(max_tokens=50, **fields).usage
    assert (again.cache_read_input_tokens, again.input_tokens + again.cache_creation_input_tokens) == (counted - 1, 1)


def test_an_object_is_parsed(qwen: Scripted, client: Any) -> None:
    class Answer(BaseModel):
        ok: bool

    qwen.say('{"ok": true}')
    fields: dict[str, Any] = {"thinking": {"type": "disabled"}, "output_format": Answer}
    found = client.messages.parse(model="model", max_tokens=400, messages=[ASK], **fields)
    assert found.parsed_output == Answer(ok=True)
    grammar = qwen.requests[-1].sampling.grammar
    assert grammar is not None
    assert json.loads(grammar.text)["required"] == ["ok"]


def test_errors_are_of_the_clients_types(qwen: Scripted, client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError, match="does not exist") as missing:
        client.messages.create(model="claude", max_tokens=5, messages=[ASK])
    assert missing.value.request_id
    image = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\] is of type 'image'"):
        client.messages.create(model="model", max_tokens=5, messages=[{"role": "user", "content": [image]}])
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(model="model", max_tokens=5, messages=[{"role": "user", "content": "ab " * 9000}])
