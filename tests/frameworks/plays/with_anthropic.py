"""The `anthropic` package, over `/v1/messages`."""

from __future__ import annotations

from typing import Any

import anthropic
import stage

TOOL = {
    "name": stage.TOOL["name"],
    "description": stage.TOOL["description"],
    "input_schema": stage.TOOL["parameters"],
}


def client(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def text_of(reply: Any) -> str:
    return "".join(block.text for block in reply.content if block.type == "text")


def chat(url: str, model: str) -> str:
    return text_of(client(url).messages.create(model=model, max_tokens=400, messages=[user(stage.HELLO)]))


def stream(url: str, model: str) -> list[str]:
    with client(url).messages.stream(model=model, max_tokens=400, messages=[user(stage.HELLO)]) as events:
        return [*events.text_stream]


def tools(url: str, model: str) -> Any:
    """The loop of an agent, by hand; each other turn is streamed."""
    messages: list[Any] = [user(stage.QUESTION)]
    for turn in range(3):
        asked: dict[str, Any] = {"model": model, "max_tokens": 400, "messages": messages, "tools": [TOOL]}
        if turn % 2:
            reply = client(url).messages.create(**asked)
        else:
            with client(url).messages.stream(**asked) as events:
                reply = events.get_final_message()
        calls = [block for block in reply.content if block.type == "tool_use"]
        assert (reply.stop_reason == "tool_use") == bool(calls)
        if not calls:
            return {"answer": text_of(reply), "called": stage.called()}
        messages.append({"role": "assistant", "content": [block.model_dump() for block in reply.content]})
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": stage.weather(**call.input)} for call in calls
        ]
        messages.append(user(results))
    raise AssertionError("no answer after three turns")


def required(url: str, model: str) -> Any:
    """A call that must be made."""
    tool = {"name": "sell", "input_schema": stage.Kite.model_json_schema()}
    reply = client(url).messages.create(
        model=model,
        max_tokens=400,
        messages=[user("Sell!")],
        tools=[tool],
        tool_choice={"type": "tool", "name": "sell"},
    )
    return [stage.Kite(**block.input).model_dump() for block in reply.content if block.type == "tool_use"]


def malformed(url: str, model: str) -> str:
    tool = {"name": "sell", "input_schema": {"type": "object", "properties": {"tags": {"type": "heap"}}}}
    asked: Any = {"model": model, "max_tokens": 400, "messages": [user("Sell!")], "tools": [tool]}
    return stage.said(lambda: client(url).messages.create(**asked))


stage.perform(
    {
        "chat": chat,
        "stream": stream,
        "tools": tools,
        "required": required,
        "malformed": malformed,
    }
)
