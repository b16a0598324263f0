"""Reasoning over HTTP with the `openai` package, on a scripted model: formats, streams, early ends, and what goes to templates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests import reasoning_templates as kit
from tests.reasoning_templates import FORMATS, THOUGHT
from tests.scripted_model import Scripted, scripted

ASK = {"role": "user", "content": "What is the weather in Köln?"}
ANSWER = "Take an umbrella."


@pytest.fixture(scope="module", params=list(FORMATS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Scripted, str]]:
    template, specials, eos, thought = FORMATS[request.param]
    with scripted(tmp_path_factory.mktemp(request.param), template, specials, eos) as server:
        yield server, thought


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    with scripted(tmp_path_factory.mktemp("qwen"), kit.QWEN) as server:
        yield server


def ask(server: Scripted, messages: list[Any] | None = None, **fields: Any) -> Any:
    return server.client.chat.completions.create(
        **{"model": "model", "messages": messages or [ASK], "temperature": 0, **fields}
    )


def test_reasoning_is_told_from_the_answer(model: tuple[Scripted, str]) -> None:
    server, thought = model
    server.say(thought + ANSWER)
    reply = ask(server)
    message = reply.choices[0].message
    assert (message.reasoning_content, message.content) == (THOUGHT, ANSWER)
    assert reply.choices[0].finish_reason == "stop"
    details = reply.usage.completion_tokens_details
    assert len(server.tokenizer.encode(THOUGHT)) <= details.reasoning_tokens < reply.usage.completion_tokens


def test_streams_add_up(model: tuple[Scripted, str]) -> None:
    server, thought = model
    for width in (1, 3, 50):
        server.say(thought + ANSWER, width=width)
        parts: dict[str, str] = {"reasoning_content": "", "content": ""}
        order = []
        for chunk in ask(server, stream=True):
            delta = chunk.choices[0].delta.model_dump()
            for name in parts:
                if delta.get(name):
                    parts[name] += delta[name]
                    order.append(name)
        assert parts == {"reasoning_content": THOUGHT, "content": ANSWER}
        assert order == sorted(order, reverse=True)


def test_a_reply_may_have_no_reasoning(qwen: Scripted) -> None:
    for said in ("Hello <think> you", "<thin", "<think>\n\n</think>\n\nHello"):
        qwen.say(said)
        message = ask(qwen).choices[0].message
        assert not hasattr(message, "reasoning_content")
        assert message.content == said.removeprefix("<think>\n\n</think>\n\n")


def test_the_end_may_come_within_the_reasoning(model: tuple[Scripted, str]) -> None:
    server, thought = model
    server.say(thought + ANSWER)
    head = thought[: thought.index("rains")]
    tokens = len(server.said[-1]) - len(ANSWER)  # at most
    reply = ask(server, max_tokens=min(tokens, -(-len(head) // 3)))
    choice = reply.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("length", None)
    assert THOUGHT.startswith(choice.message.reasoning_content)
    assert reply.usage.completion_tokens_details.reasoning_tokens > 0


def test_stop_strings_are_looked_for_in_the_answer_alone(model: tuple[Scripted, str]) -> None:
    server, thought = model
    for stop, content in (("It rains", ANSWER), ("city", ANSWER), (" umbrella", "Take an"), ("final", ANSWER)):
        server.say(thought + ANSWER)
        choice = ask(server, stop=[stop]).choices[0]
        assert (choice.message.reasoning_content, choice.message.content) == (THOUGHT, content)
        assert choice.finish_reason == "stop"


def test_efforts_and_switches_reach_the_template(qwen: Scripted) -> None:
    off = "assistant\n<think>\n\n</think>\n\n"
    for fields, closed in (
        ({}, False),
        ({"reasoning_effort": "none"}, True),
        ({"reasoning_effort": "high"}, False),
        ({"extra_body": {"enable_thinking": False}}, True),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, True),
        ({"reasoning_effort": "none", "extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}, False),
    ):
        qwen.say("<think>" if closed else "Hello")
        message = ask(qwen, **fields).choices[0].message
        assert qwen.prompt().endswith(off) == closed
        assert message.content == ("<think>" if closed else "Hello")
    found = httpx.post(f"{qwen.url}/v1/chat/completions", json={"messages": [ASK], "reasoning_effort": "utmost"})
    assert (found.status_code, found.json()["error"]["param"]) == (400, "reasoning_effort")


def test_reasoning_in_the_history_is_handed_to_the_template(qwen: Scripted) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for name in ("reasoning_content", "reasoning"):
        said = {"role": "assistant", "content": None, name: "Because.", "tool_calls": [call]}
        qwen.say("Well.", "Well.")
        ask(qwen, [ASK, said, {"role": "tool", "tool_call_id": "c1", "content": "9"}])
        assert "<think>\nBecause.\n</think>\n\n<tool_call>" in qwen.prompt()
        ask(qwen, [ASK, said, {"role": "tool", "tool_call_id": "c1", "content": "9"}, ASK])
        assert "Because" not in qwen.prompt()
    bad = [{"role": "assistant", "content": "", "reasoning_content": 5}, {**ASK, "reasoning_content": "x"}]
    for message in bad:
        found = httpx.post(f"{qwen.url}/v1/chat/completions", json={"messages": [message]})
        assert (found.status_code, found.json()["error"]["param"]) == (400, "messages[0].reasoning_content")


def test_reasoning_can_be_left_out(qwen: Scripted) -> None:
    qwen.say(kit.TAGGED + ANSWER)
    message = ask(qwen, extra_body={"include_reasoning": False}).choices[0].message
    assert not hasattr(message, "reasoning_content")
    assert message.content == ANSWER


def test_calls_follow_reasoning(qwen: Scripted) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    qwen.say(kit.TAGGED + '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
    choice = ask(qwen, tools=tools).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.reasoning_content == THOUGHT
    assert choice.message.tool_calls[0].function.name == "f"


def test_responses_have_items_for_reasoning(model: tuple[Scripted, str]) -> None:
    server, thought = model
    server.say(thought + ANSWER, thought + ANSWER)
    whole = server.client.responses.create(model="model", input="Weather?", temperature=0)
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    assert whole.output[0].content[0].text == THOUGHT
    assert whole.output_text == ANSWER
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    streamed = {"reasoning": "", "text": ""}
    with server.client.responses.stream(model="model", input="Weather?", temperature=0) as events:
        for event in events:
            if event.type == "response.reasoning_text.delta":
                streamed["reasoning"] += event.delta
            elif event.type == "response.output_text.delta":
                streamed["text"] += event.delta
        final = events.get_final_response()
    assert streamed == {"reasoning": THOUGHT, "text": ANSWER}
    assert [item.type for item in final.output] == ["reasoning", "message"]
    server.say("Bye.")
    items = [item.model_dump(exclude_none=True) for item in final.output]
    reply = server.client.responses.create(model="model", input=[ASK, *items, {"role": "user", "content": "Bye"}])
    assert server.prompt().count(ANSWER) == 1
    assert (THOUGHT in server.prompt()) == (server.tokenizer.chat_template.source == kit.KEPT)
    assert reply.status == "completed"
