"""`litellm`."""

from __future__ import annotations

import json
from typing import Any

import litellm
import stage

litellm.telemetry = False


def ask(url: str, model: str, messages: list[Any], **more: Any) -> Any:
    return litellm.completion(
        model=f"openai/{model}", api_base=f"{url}/v1", api_key="none", messages=messages, max_tokens=400, **more
    )


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def chat(url: str, model: str) -> str:
    return str(ask(url, model, user(stage.HELLO)).choices[0].message.content)


def stream(url: str, model: str) -> list[str]:
    chunks = ask(url, model, user(stage.HELLO), stream=True)
    return [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]


def tools(url: str, model: str) -> Any:
    messages = user(stage.QUESTION)
    for turn in range(3):
        found = ask(url, model, messages, tools=[{"type": "function", "function": stage.TOOL}], stream=turn % 2 == 0)
        if turn % 2 == 0:
            found = litellm.stream_chunk_builder([*found])
        message = found.choices[0].message
        if not message.tool_calls:
            return {"answer": message.content, "called": stage.called()}
        messages.append(message.model_dump())
        for call in message.tool_calls:
            result = stage.weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    raise AssertionError("no answer after three turns")


def parse(url: str, model: str) -> Any:
    reply = ask(url, model, user("A kite?"), response_format=stage.Kite)
    return json.loads(reply.choices[0].message.content)


def refused(url: str, model: str) -> str:
    return stage.said(lambda: ask(url, model, user("Tags?"), response_format=stage.Tagged))


def responses(url: str, model: str) -> str:
    reply = litellm.responses(model=f"openai/{model}", api_base=f"{url}/v1", api_key="none", input=stage.HELLO)
    return "".join(part.text for item in reply.output if item.type == "message" for part in item.content)


stage.perform(
    {"chat": chat, "stream": stream, "tools": tools, "parse": parse, "refused": refused, "responses": responses}
)
