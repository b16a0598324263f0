"""The `openai` package: chat completions and responses."""

from __future__ import annotations

import json
from typing import Any

import openai
import stage


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def chat(url: str, model: str) -> str | None:
    reply = client(url).chat.completions.create(model=model, messages=user(stage.HELLO))
    return reply.choices[0].message.content


def stream(url: str, model: str) -> list[str]:
    with client(url).chat.completions.stream(model=model, messages=user(stage.HELLO)) as events:
        return [event.delta for event in events if event.type == "content.delta"]


def tools(url: str, model: str) -> str | None:
    """The loop of an agent, by hand; each other turn is streamed."""
    messages = user(stage.QUESTION)
    for _ in range(3):
        with client(url).chat.completions.stream(
            model=model, messages=messages, tools=[{"type": "function", "function": stage.TOOL}]
        ) as events:
            message = events.get_final_completion().choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = stage.weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    raise AssertionError("no answer after three turns")


def parse(url: str, model: str) -> Any:
    reply = client(url).chat.completions.parse(
        model=model, messages=user("A kite?"), response_format=stage.Kite, max_tokens=400
    )
    parsed = reply.choices[0].message.parsed
    assert parsed is not None
    return parsed.model_dump()


def required(url: str, model: str) -> list[Any]:
    """A call that must be made, with arguments that are parsed."""
    tool = openai.pydantic_function_tool(stage.Kite, name="sell")
    reply = client(url).chat.completions.parse(
        model=model,
        messages=user("Sell!"),
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=400,
    )
    return [call.function.parsed_arguments.model_dump() for call in reply.choices[0].message.tool_calls or ()]


def refused(url: str, model: str) -> str:
    return stage.said(
        lambda: client(url).chat.completions.parse(
            model=model, messages=user("Tags?"), response_format=stage.Tagged, max_tokens=50
        )
    )


def responses(url: str, model: str) -> str:
    return client(url).responses.create(model=model, input=stage.HELLO).output_text


def responses_stream(url: str, model: str) -> list[str]:
    with client(url).responses.stream(model=model, input=stage.HELLO) as events:
        return [event.delta for event in events if event.type == "response.output_text.delta"]


def responses_tools(url: str, model: str) -> str:
    tool: Any = {"type": "function", **stage.TOOL, "strict": False}
    said: Any = stage.QUESTION
    before: str | None = None
    for _ in range(3):
        with client(url).responses.stream(
            model=model, input=said, previous_response_id=before or openai.omit, tools=[tool]
        ) as events:
            reply = events.get_final_response()
        calls = [item for item in reply.output if item.type == "function_call"]
        if not calls:
            return reply.output_text
        before = reply.id
        said = [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": stage.weather(**json.loads(call.arguments)),
            }
            for call in calls
        ]
    raise AssertionError("no answer after three turns")


def responses_parse(url: str, model: str) -> Any:
    reply = client(url).responses.parse(model=model, input="A kite?", text_format=stage.Kite, max_output_tokens=400)
    assert reply.output_parsed is not None
    return reply.output_parsed.model_dump()


def responses_refused(url: str, model: str) -> str:
    return stage.said(lambda: client(url).responses.parse(model=model, input="Tags?", text_format=stage.Tagged))


def counted(scene: stage.Scene) -> stage.Scene:
    return lambda url, model: {"answer": scene(url, model), "called": stage.called()}


stage.perform(
    {
        "chat": chat,
        "stream": stream,
        "tools": counted(tools),
        "parse": parse,
        "required": required,
        "refused": refused,
        "responses": responses,
        "responses_stream": responses_stream,
        "responses_tools": counted(responses_tools),
        "responses_parse": responses_parse,
        "responses_refused": responses_refused,
    }
)
