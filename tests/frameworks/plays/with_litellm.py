"""`litellm`, over chat completions and over Anthropic's API."""

from __future__ import annotations

import json
from typing import Any

import litellm
import stage

litellm.telemetry = False


def ask(api: str, url: str, model: str, messages: list[Any], **more: Any) -> Any:
    base = url if api == "anthropic" else f"{url}/v1"
    return litellm.completion(
        model=f"{api}/{model}", api_base=base, api_key="none", messages=messages, max_tokens=400, **more
    )


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def chat(api: str) -> stage.Scene:
    return lambda url, model: ask(api, url, model, user(stage.HELLO)).choices[0].message.content


def stream(api: str) -> stage.Scene:
    def pieces(url: str, model: str) -> list[str]:
        chunks = ask(api, url, model, user(stage.HELLO), stream=True)
        return [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]

    return pieces


def tools(api: str) -> stage.Scene:
    def loop(url: str, model: str) -> Any:
        messages = user(stage.QUESTION)
        tool = {"type": "function", "function": stage.TOOL}
        for turn in range(3):
            found = ask(api, url, model, messages, tools=[tool], stream=turn % 2 == 0)
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

    return loop


def parse(url: str, model: str) -> Any:
    reply = ask("openai", url, model, user("A kite?"), response_format=stage.Kite)
    return json.loads(reply.choices[0].message.content)


def refused(url: str, model: str) -> str:
    return stage.said(lambda: ask("openai", url, model, user("Tags?"), response_format=stage.Tagged))


def responses(url: str, model: str) -> str:
    reply = litellm.responses(model=f"openai/{model}", api_base=f"{url}/v1", api_key="none", input=stage.HELLO)
    return "".join(part.text for item in reply.output if item.type == "message" for part in item.content)


scenes: dict[str, stage.Scene] = {"parse": parse, "refused": refused, "responses": responses}
for prefix, which in (("", "openai"), ("messages_", "anthropic")):
    scenes[prefix.rstrip("_") or "chat"] = chat(which)
    scenes |= {f"{prefix}stream": stream(which), f"{prefix}tools": tools(which)}
stage.perform(scenes)
