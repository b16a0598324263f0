"""`langchain-openai`: `ChatOpenAI`, over both of OpenAI's APIs."""

from __future__ import annotations

from typing import Any

import stage
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


def llm(url: str, model: str, api: str) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        model=model,
        max_retries=0,
        max_tokens=400,
        use_responses_api=api == "responses",
    )


def chat(api: str) -> stage.Scene:
    return lambda url, model: llm(url, model, api).invoke(stage.HELLO).text


def stream(api: str) -> stage.Scene:
    return lambda url, model: [text for chunk in llm(url, model, api).stream(stage.HELLO) if (text := chunk.text)]


def tools(api: str) -> stage.Scene:
    def loop(url: str, model: str) -> Any:
        bound = llm(url, model, api).bind_tools([tool(stage.weather)])
        messages: list[Any] = [HumanMessage(stage.QUESTION)]
        for turn in range(3):
            if turn % 2:
                reply: Any = bound.invoke(messages)
            else:
                first, *rest = bound.stream(messages)
                reply = sum(rest, start=first)
            if not reply.tool_calls:
                return {"answer": reply.text, "called": stage.called()}
            assert not reply.invalid_tool_calls, reply
            messages.append(reply)
            messages += [
                ToolMessage(stage.weather(**call["args"]), tool_call_id=call["id"]) for call in reply.tool_calls
            ]
        raise AssertionError("no answer after three turns")

    return loop


def parse(api: str, method: str) -> stage.Scene:
    def kite(url: str, model: str) -> Any:
        asked = llm(url, model, api).with_structured_output(stage.Kite, method=method)
        return asked.invoke("A kite?").model_dump()

    return kite


def refused(api: str) -> stage.Scene:
    def tags(url: str, model: str) -> str:
        asked = llm(url, model, api).with_structured_output(stage.Tagged, method="json_schema")
        return stage.said(lambda: asked.invoke("Tags?"))

    return tags


scenes: dict[str, stage.Scene] = {}
for prefix, which in (("", "chat"), ("responses_", "responses")):
    scenes[prefix.rstrip("_") or "chat"] = chat(which)
    scenes |= {f"{prefix}stream": stream(which), f"{prefix}tools": tools(which)}
    scenes |= {
        f"{prefix}parse": parse(which, "json_schema"),
        f"{prefix}parse_by_call": parse(which, "function_calling"),
    }
    scenes |= {f"{prefix}refused": refused(which)}
stage.perform(scenes)
