"""`openai-agents`, over both of OpenAI's APIs."""

from __future__ import annotations

import asyncio
from typing import Any

import agents
import openai
import stage

agents.set_tracing_disabled(True)


def agent(url: str, model: str, api: str, **more: Any) -> agents.Agent[Any]:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    make = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel
    settings = agents.ModelSettings(max_tokens=400)
    return agents.Agent(
        name="weather man", instructions="Be brief.", model=make(model, client), model_settings=settings, **more
    )


def chat(api: str) -> stage.Scene:
    return lambda url, model: agents.Runner.run_sync(agent(url, model, api), stage.HELLO).final_output


def stream(api: str) -> stage.Scene:
    async def pieces(url: str, model: str) -> list[str]:
        result = agents.Runner.run_streamed(agent(url, model, api), stage.HELLO)
        events = [event async for event in result.stream_events()]
        raw = [event.data for event in events if event.type == "raw_response_event"]
        return [data.delta for data in raw if data.type == "response.output_text.delta"]

    return lambda url, model: asyncio.run(pieces(url, model))


def tools(api: str) -> stage.Scene:
    async def both(url: str, model: str) -> str:
        """The loop once whole and once streamed."""
        asked = agent(url, model, api, tools=[agents.function_tool(stage.weather)])
        whole = (await agents.Runner.run(asked, stage.QUESTION)).final_output
        once = stage.called()
        streamed = agents.Runner.run_streamed(asked, stage.QUESTION)
        async for _ in streamed.stream_events():
            pass
        assert (streamed.final_output, stage.called()) == (whole, once)
        stage.weather(**once[0])
        return str(whole)

    return lambda url, model: {"answer": asyncio.run(both(url, model)), "called": stage.called()}


def parse(api: str) -> stage.Scene:
    def kite(url: str, model: str) -> Any:
        asked = agent(url, model, api, output_type=stage.Kite)
        return agents.Runner.run_sync(asked, "A kite?").final_output.model_dump()

    return kite


def refused(api: str) -> stage.Scene:
    schema = agents.AgentOutputSchema(stage.Tagged, strict_json_schema=False)
    return lambda url, model: stage.said(
        lambda: agents.Runner.run_sync(agent(url, model, api, output_type=schema), "Tags?")
    )


scenes: dict[str, stage.Scene] = {}
for prefix, which in (("", "chat"), ("responses_", "responses")):
    scenes[prefix.rstrip("_") or "chat"] = chat(which)
    scenes |= {f"{prefix}stream": stream(which), f"{prefix}tools": tools(which)}
    scenes |= {f"{prefix}parse": parse(which), f"{prefix}refused": refused(which)}
stage.perform(scenes)
