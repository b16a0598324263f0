"""`pydantic-ai`, over both of OpenAI's APIs."""

from __future__ import annotations

import asyncio
from typing import Any

import stage
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


def agent(url: str, model: str, api: str, **more: Any) -> Agent[Any, Any]:
    make = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    return Agent(make(model, provider=provider), retries=0, model_settings={"max_tokens": 400}, **more)


def chat(api: str) -> stage.Scene:
    return lambda url, model: agent(url, model, api).run_sync(stage.HELLO).output


def stream(api: str) -> stage.Scene:
    async def pieces(url: str, model: str) -> list[str]:
        async with agent(url, model, api).run_stream(stage.HELLO) as result:
            return [text async for text in result.stream_text(delta=True, debounce_by=None)]

    return lambda url, model: asyncio.run(pieces(url, model))


def tools(api: str) -> stage.Scene:
    async def both(url: str, model: str) -> Any:
        """The loop once whole and once streamed."""
        asked = agent(url, model, api, tools=[stage.weather])
        whole = (await asked.run(stage.QUESTION)).output
        once = stage.called()
        async with asked.run_stream(stage.QUESTION) as result:
            streamed = await result.get_output()
        assert (streamed, stage.called()) == (whole, once)
        return {"answer": whole, "called": once}

    return lambda url, model: asyncio.run(both(url, model))


def parse(api: str, form: Any) -> stage.Scene:
    return lambda url, model: agent(url, model, api, output_type=form).run_sync("A kite?").output.model_dump()


def refused(api: str) -> stage.Scene:
    form = NativeOutput(stage.Tagged)
    return lambda url, model: stage.said(lambda: agent(url, model, api, output_type=form).run_sync("Tags?"))


scenes: dict[str, stage.Scene] = {}
for prefix, which in (("", "chat"), ("responses_", "responses")):
    scenes[prefix.rstrip("_") or "chat"] = chat(which)
    scenes |= {f"{prefix}stream": stream(which), f"{prefix}tools": tools(which)}
    scenes |= {f"{prefix}parse": parse(which, NativeOutput(stage.Kite))}
    scenes |= {f"{prefix}parse_by_call": parse(which, ToolOutput(stage.Kite)), f"{prefix}refused": refused(which)}
stage.perform(scenes)
