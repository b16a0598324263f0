"""Requests that end early: `max_tokens`, `stop` and disconnects, inside calls and inside of JSON, in chat and responses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest

from tests.scripted_model import Scripted, scripted
from tests.server.test_structured import SCHEMA, STRICT
from tests.server.test_tools import ASK, CALL, FORMATS, WEATHER, respond
from tests.server.test_tools import ask as ask_chat
from tests.waiting import wait_for

WHOLE = {"city": "Köln", "days": 2}
LONG = {
    "type": "object",
    "properties": {"city": {"type": "string", "minLength": 3000}},
    "required": ["city"],
    "additionalProperties": False,
}
SHORT = {"/chat/completions": {"max_tokens": 5}, "/responses": {"max_output_tokens": 5}}
TWO = f'Let me look.\n{CALL}\n<tool_call>\n{{"name": "clock", "arguments": {{"zone": "UTC"}}}}\n</tool_call>'  # the second is cut


@dataclass
class Reply:
    """What a client gets of a chat reply, whole or from a stream."""

    content: str = ""
    calls: list[list[str]] = field(default_factory=list)  # name, arguments
    finish: str | None = None


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    with scripted(tmp_path_factory.mktemp("hermes")) as server:
        yield server


@pytest.fixture(scope="module", params=list(FORMATS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Scripted, str]]:
    template, specials, eos, call = FORMATS[request.param]
    with scripted(tmp_path_factory.mktemp(request.param), template, specials, eos) as server:
        yield server, call


def ask(server: Scripted, said: str, *, stream: bool, **fields: Any) -> Reply:
    """Ask for a reply that would be `said` if it were not cut."""
    server.say(said)
    answer = ask_chat(server, stream=stream, **fields)
    if not stream:
        choice = answer.choices[0]
        calls = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or ()]
        return Reply(choice.message.content or "", calls, choice.finish_reason)
    reply = Reply()
    for chunk in answer:
        (choice,) = chunk.choices
        reply.content += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            if call.function.name:
                assert call.index == len(reply.calls)
                assert call.id
                reply.calls.append([call.function.name, ""])
            reply.calls[call.index][1] += call.function.arguments or ""
        reply.finish = choice.finish_reason or reply.finish
    return reply


def test_max_tokens_anywhere_in_a_call(model: tuple[Scripted, str]) -> None:
    """In each format: no call that the model did not name, and of its arguments the beginning."""
    server, call = model
    whole = ask(server, call, stream=False)
    ((_, arguments),) = whole.calls
    assert json.loads(arguments) == WHOLE
    length = len(server.said[-1])
    cuts = []
    for count in range(1, length, 5):
        reply = ask(server, call, stream=count % 2 == 1, max_tokens=count)
        assert reply.finish == "length"
        for name, some in reply.calls:
            assert name == "weather"
            assert arguments.startswith(some.rstrip("\ufffd")), "the reply may end within a character"
        assert "".join(reply.content.split()) in "".join(call.split()), "marks are text where no call has begun"
        assert len(reply.calls) <= 1
        cuts.append(len(reply.calls[0][1]) if reply.calls else -1)
    assert cuts == sorted(cuts), "more of the reply is more of the call"
    assert -1 in cuts, "the call has not begun"
    assert any(0 < cut < len(arguments) for cut in cuts)


@pytest.mark.parametrize("stream", [False, True])
def test_a_second_call_that_is_cut(hermes: Scripted, stream: bool) -> None:
    hermes.say(TWO)
    length = len(hermes.said[-1])
    hermes.runner.scripts.clear()
    reply = ask(hermes, TWO, stream=stream, max_tokens=length - 16)
    assert (reply.finish, reply.content) == ("length", "Let me look.")
    (first, second) = reply.calls
    assert (first[0], json.loads(first[1]), second[0]) == ("weather", WHOLE, "clock")
    assert '{"zone": "UTC"}'.startswith(second[1])
    assert second[1] != '{"zone": "UTC"}'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "content", "calls"),
    [
        ("<tool_call>", "Let me look.\n", []),
        ("tool_c", "Let me look.\n<", []),
        ('"weather', 'Let me look.\n<tool_call>{"name":', []),
        ('"city"', "Let me look.", [["weather", "{"]]),
        ("öl", "Let me look.", [["weather", '{"city":"K']]),
        ("2}", "Let me look.", [["weather", '{"city":"Köln", "days":']]),
        ("</tool_call>\n", "Let me look.", [["weather", '{"city":"Köln", "days":2}']]),
        ("clock", "Let me look.", [["weather", '{"city":"Köln", "days":2}']]),
        ("UTC", "Let me look.", [["weather", '{"city":"Köln", "days":2}'], ["clock", '{"zone": "']]),
    ],
)
def test_stop_strings_inside_of_calls(
    hermes: Scripted, stop: str, content: str, calls: list[list[str]], stream: bool
) -> None:
    """The reply ends there. It ends in calls if all that began are whole."""
    reply = ask(hermes, TWO, stream=stream, stop=stop)
    whole = bool(calls) and not any(arguments.endswith(('"', ":", "K", "{")) for _, arguments in calls)
    assert reply.finish == ("tool_calls" if whole else "stop")
    assert reply.calls == calls
    if stop != "clock":  # the beginning of a second call, which has no name yet
        assert reply.content == content


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_ends_within_a_call(hermes: Scripted, stream: bool) -> None:
    hermes.say(CALL, CALL, "Rain.")
    length = len(hermes.said[-3])
    cut = _response(hermes, stream, max_output_tokens=length - 20)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    (item,) = cut.output
    assert (item.type, item.name, item.status) == ("function_call", "weather", "incomplete")
    assert '{"city":"Köln", "days":2}'.startswith(item.arguments)
    stopped = _response(hermes, stream, extra_body={"stop": ["ln"]})
    (item,) = stopped.output
    assert (stopped.status, item.status, item.arguments) == ("completed", "incomplete", '{"city":"Kö')
    result = {"type": "function_call_output", "call_id": item.call_id, "output": "cut"}
    assert respond(hermes, [result], previous_response_id=stopped.id).output_text == "Rain."


def _response(server: Scripted, stream: bool, **fields: Any) -> Any:
    found = respond(server, "And in Köln?", stream=stream, **fields)
    return [*found][-1].response if stream else found


# --------------------------------------------------------------------------------------------------------- JSON


def test_max_tokens_anywhere_in_json(hermes: Scripted) -> None:
    """In chat and responses, whole and streamed: each is a beginning of the same object."""
    hermes.runner.free = True
    fields = {"temperature": 0, "messages": [ASK], "response_format": STRICT}
    whole = hermes.client.chat.completions.create(model="model", max_tokens=200, **fields)  # type: ignore[call-overload]
    text = whole.choices[0].message.content
    assert set(json.loads(text)) == {"colour", "count"}
    form: Any = {"format": {"type": "json_schema", "name": "kite", "schema": SCHEMA, "strict": True}}
    for count in range(1, whole.usage.completion_tokens - 1, 3):
        chunks = hermes.client.chat.completions.create(model="model", max_tokens=count, stream=True, **fields)  # type: ignore[call-overload]
        choices = [chunk.choices[0] for chunk in chunks]
        assert choices[-1].finish_reason == "length"
        assert text.startswith("".join(choice.delta.content or "" for choice in choices))
        events = [
            *hermes.client.responses.create(
                model="model",
                input=ASK["content"],
                text=form,
                max_output_tokens=max(count, 1),
                stream=True,
                temperature=0,
            )
        ]
        assert events[-1].type == "response.incomplete"
        assert text.startswith(events[-1].response.output_text)
        assert events[-1].response.output[0].status == "incomplete"
    hermes.runner.free = False


def test_max_tokens_within_a_forced_call(hermes: Scripted) -> None:
    hermes.runner.free = True
    fields = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 0, "tools": [WEATHER]}
    whole = ask(hermes, "", stream=False, max_tokens=300, **fields)
    for count in (3, 12, 16, 20):
        reply = ask(hermes, "", stream=count % 8 == 4, max_tokens=count, **fields)
        assert reply.finish == "length"
        assert len(reply.calls) <= 1
        for name, arguments in reply.calls:
            assert name == "weather"
            assert whole.calls[0][1].startswith(arguments)
    hermes.runner.free = False


# --------------------------------------------------------------------------------------------------- disconnects


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/chat/completions", "/responses"])
@pytest.mark.parametrize("what", ["call", "json", "forced"])
def test_a_client_that_leaves_leaves_nothing_but_rows(hermes: Scripted, path: str, stream: bool, what: str) -> None:
    """No request is left, and the prompt's rows are found again."""
    question = f"{path} {stream} {what}: what is the weather?"
    function = {**WEATHER["function"], "parameters": LONG}  # type: ignore[dict-item]
    if path == "/chat/completions":
        tools: list[Any] = [{"type": "function", "function": function}]
        body: dict[str, Any] = {"messages": [{"role": "user", "content": question}]}
        form: dict[str, Any] = {
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": LONG}}
        }
    else:
        tools = [{"type": "function", **function}]
        body = {"input": question}
        form = {"text": {"format": {"type": "json_schema", "name": "x", "schema": LONG}}}
    body |= {"call": {"tools": tools}, "json": form, "forced": {"tools": tools, "tool_choice": "required"}}[what]
    body |= {"stream": stream, "temperature": 0}
    hermes.runner.free = what != "call"
    hermes.say('<tool_call>\n{"name": "weather", "arguments": {"city": "' + "Köln " * 1000)
    if stream:
        with httpx.stream("POST", f"{hermes.url}/v1{path}", json=body, timeout=30) as answer:
            lines = (line for line in answer.iter_lines() if line.startswith("data:"))
            for _ in range(8):
                next(lines)
    else:
        before = hermes.engine.stats().engine.generation_tokens
        with closing(HTTPConnection(hermes.url.removeprefix("http://"), timeout=30)) as client:
            client.request("POST", f"/v1{path}", json.dumps(body), {"Content-Type": "application/json"})
            wait_for(lambda: hermes.engine.stats().engine.generation_tokens >= before + 8)

    def gone() -> bool:
        now = hermes.engine.stats().plan
        return now.running == now.waiting == now.loading == now.saves_in_flight == 0

    wait_for(gone)
    hermes.runner.scripts.clear()
    hermes.engine.settle()
    again = httpx.post(f"{hermes.url}/v1{path}", json={**body, "stream": False, **SHORT[path]})
    hermes.runner.free = False
    usage = again.json()["usage"]
    prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
    details = usage.get("prompt_tokens_details", usage.get("input_tokens_details"))
    assert details["cached_tokens"] == prompt - 1
