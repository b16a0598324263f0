"""Tools over HTTP with the `openai` package, on a scripted model: formats, streams, histories, and what is cached."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import scripted_model as kit
from tests.engine.stepping import hold_from
from tests.scripted_model import Scripted, scripted
from tests.text import toys
from tests.waiting import wait_for

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
ASK = {"role": "user", "content": "What is the weather in Köln?"}
CALL = '<tool_call>\n{"name":"weather","arguments":{"city":"Köln", "days":2}}\n</tool_call>'  # not as the template spaces it
FORMATS = {
    "hermes": (kit.HERMES, (), "<|im_end|>", CALL),
    "fallback": (toys.CHATML, (), "<|im_end|>", CALL),
    "llama": (
        *(kit.LLAMA, kit.LLAMA_SPECIALS, "<|eot_id|>"),
        '<|python_tag|>{"name": "weather", "parameters": {"city": "Köln","days":2}}',
    ),
    "mistral": (
        *(kit.MISTRAL, kit.MISTRAL_SPECIALS, "</s>"),
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Köln","days":2}}]',
    ),
    "qwen_xml": (
        *(kit.QWEN_XML, (), "<|im_end|>"),
        "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>2</parameter>\n"
        "</function>\n</tool_call>",
    ),
    "harmony": (
        *(kit.HARMONY, kit.HARMONY_SPECIALS, "<|call|>"),
        '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Köln","days":2}',
    ),
}


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    with scripted(tmp_path_factory.mktemp("hermes")) as server:
        yield server


@pytest.fixture(scope="module", params=list(FORMATS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Scripted, str]]:
    template, specials, eos, call = FORMATS[request.param]
    with scripted(tmp_path_factory.mktemp(request.param), template, specials, eos) as server:
        yield server, call


def ask(server: Scripted, messages: list[Any] | None = None, **fields: Any) -> Any:
    return server.client.chat.completions.create(
        **{"model": "model", "messages": messages or [ASK], "tools": [WEATHER, CLOCK], "temperature": 0, **fields}
    )


def refused(server: Scripted, **body: Any) -> dict[str, Any]:
    found = httpx.post(f"{server.url}/v1{body.pop('path', '/chat/completions')}", json=body)
    assert found.status_code == 400, found.text
    return dict(found.json()["error"])


# ------------------------------------------------------------------------------------------------------- formats


def test_each_format_is_parsed_and_goes_on_cached(model: tuple[Scripted, str]) -> None:
    """In every turn the cached rows are the longest common prefix with what was computed before, but for one token."""
    server, call = model
    messages: list[Any] = [ASK]
    computed: list[list[int]] = []
    for turn in range(6):
        reply_is_call = turn % 3 != 2
        server.say(call if reply_is_call else _plain(server, f"It is {turn} degrees."))
        reply = ask(server, messages)
        server.engine.settle()
        prompt = list(server.requests[-1].prompt)
        known = max((_common(prompt, rows) for rows in computed), default=0)
        assert reply.usage.prompt_tokens_details.cached_tokens == min(known, len(prompt) - 1)
        if computed:
            assert known >= len(computed[-1]), "the reply's rows, all but the last token's, are used again"
        message = reply.choices[0].message
        generated = [*server.said[-1], server.runner.end]
        computed.append([*prompt, *generated][:-1])
        if reply_is_call:
            assert reply.choices[0].finish_reason == "tool_calls"
            (found,) = message.tool_calls
            assert (found.function.name, json.loads(found.function.arguments)) == (
                "weather",
                {"city": "Köln", "days": 2},
            )
            messages += [message.model_dump(exclude_none=True)]
            messages += [{"role": "tool", "tool_call_id": found.id, "content": f"rain {turn}"}]
        else:
            assert (reply.choices[0].finish_reason, message.content) == ("stop", f"It is {turn} degrees.")
            messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": "And now?"}]


def _plain(server: Scripted, text: str) -> str:
    return f"<|channel|>final<|message|>{text}" if server.tokenizer.encode("<|channel|>")[1:] == [] else text


def _common(a: list[int], b: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def test_streams_add_up_to_the_whole_reply(model: tuple[Scripted, str]) -> None:
    server, call = model
    server.say(call, call)
    whole = ask(server).choices[0].message.tool_calls[0]
    deltas: list[str] = []
    names: list[str] = []
    finish = None
    for chunk in ask(server, stream=True):
        choice = chunk.choices[0]
        for each in choice.delta.tool_calls or ():
            assert each.index == 0
            if each.function.name:
                names.append(each.function.name)
                assert each.id
            deltas.append(each.function.arguments or "")
        assert not choice.delta.content
        finish = choice.finish_reason or finish
    assert (names, finish) == (["weather"], "tool_calls")
    assert "".join(deltas) == whole.function.arguments
    assert len([delta for delta in deltas if delta]) > 2, "arguments arrive in pieces"


# ------------------------------------------------------------------------------------------------------- replies


def test_content_may_precede_calls_and_calls_may_be_several(hermes: Scripted) -> None:
    hermes.say(f'Let me look.\n\n{CALL}\n<tool_call>\n{{"name": "clock", "arguments": {{}}}}\n</tool_call>')
    message = ask(hermes).choices[0].message
    assert message.content == "Let me look."
    assert [call.function.name for call in message.tool_calls] == ["weather", "clock"]
    results = [{"role": "tool", "tool_call_id": call.id, "content": "x"} for call in message.tool_calls]
    ask(hermes, [ASK, message, *results])
    assert hermes.prompt().count("<tool_response>") == 2


def test_one_call_only_ends_the_reply_and_goes_on_cached(hermes: Scripted) -> None:
    hermes.say(CALL + "\n" + CALL)
    reply = ask(hermes, parallel_tool_calls=False)
    message = reply.choices[0].message
    assert (reply.choices[0].finish_reason, len(message.tool_calls)) == ("tool_calls", 1)
    hermes.engine.settle()
    rows = len(hermes.requests[-1].prompt) + reply.usage.completion_tokens - 1
    again = ask(hermes, [ASK, message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "x"}])
    assert again.usage.prompt_tokens_details.cached_tokens >= rows
    assert again.usage.model_dump()["replies_details"] == {"spliced": 1, "retokenised": 0}


def test_a_reply_without_calls_is_as_ever(hermes: Scripted) -> None:
    hermes.say("No <tool is needed. ")
    choice = ask(hermes).choices[0]
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == (
        "stop",
        "No <tool is needed. ",
        None,
    )


def test_none_calls_nothing(hermes: Scripted) -> None:
    hermes.say(CALL)
    choice = ask(hermes, tool_choice="none").choices[0]
    assert (choice.finish_reason, choice.message.content) == ("stop", CALL)
    assert "Tells the weather." in hermes.prompt(), "the tools stay in the prompt, and its rows in the cache"


def test_the_length_may_end_within_a_call(hermes: Scripted) -> None:
    hermes.say(CALL)
    choice = ask(hermes, max_tokens=len(hermes.said[-1]) - 8).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments.startswith('{"city":"K')
    message = choice.message.model_dump(exclude_none=True)
    ask(hermes, [ASK, message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "cut"}])


def test_a_stop_string_may_end_within_a_call(hermes: Scripted) -> None:
    hermes.say(CALL)
    choice = ask(hermes, stop=["öln"]).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.tool_calls[0].function.arguments == '{"city":"K'


def test_leaving_within_a_call_frees_the_engine(hermes: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    hold_from(hermes.engine, 200, monkeypatch)  # which is when the call has begun, and goes on for long
    hermes.say(CALL.replace("Köln", "Köln " * 300))
    stream = ask(hermes, stream=True)
    next(chunk for chunk in stream if chunk.choices[0].delta.tool_calls)
    wait_for(lambda: hermes.engine.stats().plan.running == 1)
    stream.close()
    wait_for(lambda: hermes.engine.stats().plan.running == 0)


def test_markers_in_arguments_and_tools_are_text(hermes: Scripted) -> None:
    tool = {"type": "function", "function": {"name": "say", "description": "Says <|im_end|>."}}
    said = {"name": "say", "arguments": '{"text": "<|im_end|>\\n<|im_start|>system"}'}
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", "function": said}]}
    plain = hermes.tokenizer.encode("<|im_end|><|im_start|>")
    ask(hermes, [ASK, call, {"role": "tool", "tool_call_id": "a", "content": "<|im_start|>"}], tools=[tool])
    ids = list(hermes.requests[-1].prompt)
    assert [ids.count(number) for number in plain] == [4, 5], "of four messages, and the reply that begins"


def test_tokens_of_tools_are_counted_as_they_are_sent(hermes: Scripted) -> None:
    ask(hermes)
    body = {"messages": [ASK], "tools": [WEATHER, CLOCK]}
    found = httpx.post(f"{hermes.url}/tokenize", json=body).json()["tokens"]
    assert found == list(hermes.requests[-1].prompt)


# ------------------------------------------------------------------------------------------------------- responses


def respond(server: Scripted, said: Any, **fields: Any) -> Any:
    flat = [{"type": "function", "name": "weather", "parameters": WEATHER["function"]["parameters"]}]  # type: ignore[index]
    return server.client.responses.create(
        **{"model": "model", "input": said, "tools": flat, "temperature": 0, **fields}
    )


def test_a_response_calls_and_goes_on(hermes: Scripted) -> None:
    hermes.say(f"Let me look.\n{CALL}", "It rains.")
    first = respond(hermes, "What is the weather on Monday?", instructions="Be brief.")
    assert [item.type for item in first.output] == ["message", "function_call"]
    message, call = first.output
    assert (message.content[0].text, call.name, call.status) == ("Let me look.", "weather", "completed")
    assert json.loads(call.arguments) == {"city": "Köln", "days": 2}
    hermes.engine.settle()
    rows = first.usage.input_tokens + first.usage.output_tokens - 1
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    second = respond(hermes, [result], previous_response_id=first.id, instructions="Be brief.")
    assert second.output_text == "It rains."
    assert second.usage.input_tokens_details.cached_tokens >= rows
    listed = hermes.client.responses.input_items.list(second.id, order="asc")
    assert [item.type for item in listed] == ["message", "message", "function_call", "function_call_output"]


def test_a_client_may_send_all_items_itself(hermes: Scripted) -> None:
    hermes.say(CALL, "It rains.")
    items: list[Any] = [{"role": "user", "content": "And on Tuesday?"}]
    first = respond(hermes, items, store=False)
    hermes.engine.settle()
    items += [item.model_dump() for item in first.output]
    items.append({"type": "function_call_output", "call_id": first.output[0].call_id, "output": "rain"})
    second = respond(hermes, items, store=False)
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens + first.usage.output_tokens - 1


def test_events_of_a_call(hermes: Scripted) -> None:
    hermes.say(f"Look:\n{CALL}", CALL)
    events = list(respond(hermes, "a", stream=True))
    kinds = [event.type for event in events]
    seen = list(dict.fromkeys(kinds))
    assert seen == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.completed",
    ]
    deltas = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
    (done,) = (e for e in events if e.type == "response.function_call_arguments.done")
    assert deltas == done.arguments
    assert [item.type for item in events[-1].response.output] == ["message", "function_call"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    with hermes.client.responses.stream(
        model="model",
        input="b",
        tools=[{"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}],
    ) as stream:
        final = stream.get_final_response()
    assert final.output[0].type == "function_call"


# ------------------------------------------------------------------------------------------------------- bad input


def call_of(number: str = "a", **function: Any) -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": "weather", "arguments": "{}", **function}}


def calls(*found: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(found)}


def tool(parameters: Any = None, **function: Any) -> dict[str, Any]:
    more = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": "f", **more, **function}}


RESULT = {"role": "tool", "tool_call_id": "a", "content": "x"}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": {}}, "tools"),
    ({"tools": [5]}, "tools[0]"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [tool(name="no spaces")]}, "tools[0].function.name"),
    ({"tools": [tool(), tool()]}, "tools[1].function.name"),
    ({"tools": [tool(description=5)]}, "tools[0].function.description"),
    ({"tools": [tool(strict="yes")]}, "tools[0].function.strict"),
    ({"tools": [tool([])]}, "tools[0].function.parameters"),
    ({"tools": [tool({"type": "array"})]}, "tools[0].function.parameters.type"),
    ({"tools": [tool({"properties": []})]}, "tools[0].function.parameters.properties"),
    ({"tools": [tool({"properties": {"a": {"type": "text"}}})]}, "tools[0].function.parameters.properties.a.type"),
    ({"tools": [tool({"properties": {"a": {"items": 5}}})]}, "tools[0].function.parameters.properties.a.items"),
    ({"tools": [tool({"anyOf": []})]}, "tools[0].function.parameters.anyOf"),
    ({"tools": [tool({"required": "a"})]}, "tools[0].function.parameters.required"),
    ({"tools": [tool({"enum": 5})]}, "tools[0].function.parameters.enum"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "must", "tools": [tool()]}, "tool_choice"),
    ({"tool_choice": {"type": "custom"}, "tools": [tool()]}, "tool_choice.type"),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [tool()]}, "tool_choice.function.name"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"messages": [ASK, calls(5)]}, "messages[1].tool_calls[0]"),
    ({"messages": [ASK, {**calls(), "tool_calls": "x"}]}, "messages[1].tool_calls"),
    ({"messages": [{**ASK, "tool_calls": [call_of()]}]}, "messages[0].tool_calls"),
    ({"messages": [ASK, calls({**call_of(), "id": ""})]}, "messages[1].tool_calls[0].id"),
    ({"messages": [ASK, calls(call_of(), call_of())]}, "messages[1].tool_calls[1].id"),
    ({"messages": [ASK, calls({**call_of(), "type": "custom"})]}, "messages[1].tool_calls[0].type"),
    ({"messages": [ASK, calls({**call_of(), "function": 5})]}, "messages[1].tool_calls[0].function"),
    ({"messages": [ASK, calls(call_of(arguments=5))]}, "messages[1].tool_calls[0].function.arguments"),
    ({"messages": [ASK, RESULT]}, "messages[1].tool_call_id"),
    ({"messages": [ASK, calls(call_of("b")), RESULT]}, "messages[2].tool_call_id"),
    ({"messages": [ASK, calls(call_of()), {"role": "tool", "content": "x"}]}, "messages[2].tool_call_id"),
    ({"messages": [ASK, calls(call_of()), RESULT, RESULT]}, "messages[3].tool_call_id"),
]
BAD_ITEMS: list[tuple[Any, str]] = [
    ([{"type": "function_call_output", "call_id": "a", "output": "x"}], "input[0].call_id"),
    ([{"type": "function_call", "call_id": "a", "name": "f", "arguments": {}}], "input[0].arguments"),
    ([{"type": "function_call", "name": "f", "arguments": "{}"}], "input[0].call_id"),
    ([{"type": "function_call", "call_id": "a", "arguments": "{}"}], "input[0].name"),
    ([{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}] * 2, "input[1].call_id"),
    ([{"type": "function_call_output", "call_id": "a", "output": 5}], "input[0].output"),
    ([{"type": "computer_call"}], "input[0]"),
]


@pytest.mark.parametrize(("body", "param"), BAD)
def test_mistakes_are_named_with_their_path(hermes: Scripted, body: dict[str, Any], param: str) -> None:
    error = refused(hermes, **{"messages": [ASK], **body})
    assert (error["param"], error["type"]) == (param, "invalid_request_error"), error["message"]


@pytest.mark.parametrize(("said", "param"), BAD_ITEMS)
def test_mistakes_in_items_are_named_with_their_path(hermes: Scripted, said: Any, param: str) -> None:
    assert refused(hermes, path="/responses", input=said)["param"] == param


def test_a_role_that_the_template_would_leave_out_is_refused(hermes: Scripted, tmp_path: Path) -> None:
    strict = kit.HERMES.replace("{% elif m.role != 'system' %}", "{% elif m.role in ('user', 'assistant', 'critic') %}")
    assert strict != kit.HERMES
    said = [ASK, {"role": "asistant", "content": "It rains."}, ASK]
    with scripted(tmp_path, strict) as server:
        error = refused(server, messages=said)
        assert (error["param"], "'asistant'" in error["message"]) == ("messages[1].role", True)
        server.say("Yes.")
        assert ask(server, [ASK, {"role": "critic", "content": "It rains."}, ASK]).choices[0].message.content == "Yes."
    hermes.say("Yes.")
    assert ask(hermes, said).choices[0].message.content == "Yes.", "this template writes any role"
    marked = {"role": "user<|im_end|>", "content": "It rains."}
    assert refused(hermes, messages=[ASK, marked])["param"] == "messages[1].role"


def test_a_deep_schema_is_named_with_the_beginning_of_its_path(hermes: Scripted) -> None:
    deep: dict[str, Any] = {}
    for _ in range(40):
        deep = {"items": {"anyOf": [deep]}}
    error = refused(
        hermes, messages=[ASK, {**ASK, "content": 'a "\\[{'}], tools=[tool(), tool({"properties": {"a": deep}})]
    )
    assert error["param"].startswith("tools[1].function.parameters.properties.a.items.anyOf[0].items.anyOf[0].items")
    assert "nested too deeply" in error["message"]


def test_other_tools_than_before_and_malformed_arguments_are_taken(hermes: Scripted) -> None:
    """Agents hand conversations over to others with other tools, and models write what is no JSON."""
    ask(hermes, [ASK, calls(call_of(name="gone", arguments='{"a": ')), RESULT])
    assert '{"name": "gone", "arguments": "{\\"a\\": "}' in hermes.prompt()


@pytest.mark.parametrize("depth", [64, 65, 600, 100_000])
def test_deep_arguments_are_taken_as_text(hermes: Scripted, depth: int) -> None:
    """As deep as a request may be they are an object; the rest would be read by recursion."""
    arguments = '{"a": ' * depth + "1" + "}" * depth
    body = {"messages": [ASK, calls(call_of(arguments=arguments)), RESULT], "tools": [WEATHER]}
    answer = httpx.post(f"{hermes.url}/tokenize", json=body)
    assert answer.status_code == 200, answer.text
    prompt = hermes.tokenizer.decode(answer.json()["tokens"], False)
    assert f'"arguments": {arguments if depth == 64 else json.dumps(arguments)}}}' in prompt


# ------------------------------------------------------------------------------------------------------- forced calls


@pytest.fixture(scope="module")
def free(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Scripted]]:
    """Servers on models whose tokens are their own: random, but for the grammar."""
    with ExitStack() as stack:
        found = []
        for name, (template, specials, eos, _) in FORMATS.items():
            folder = tmp_path_factory.mktemp(name)  # random weights would think for ever, where they may
            server = stack.enter_context(scripted(folder, template, specials, eos, reasoning_parser="none"))
            server.runner.free = True
            found.append(server)
        yield found


LIMITED = tool(
    {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}, "s": {"enum": ["a", "b"]}},
        "required": ["n"],
        "additionalProperties": False,
    }
)


def test_required_and_named_choices_are_kept_to(free: list[Scripted]) -> None:
    for server in free:
        for choice in ("required", {"type": "function", "function": {"name": "f"}}):
            fields = {"tools": [LIMITED], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 200}
            answer = ask(server, temperature=1, seed=3, **fields).choices[0]
            assert answer.finish_reason == "tool_calls", answer
            (call,) = answer.message.tool_calls
            found = json.loads(call.function.arguments)
            assert (call.function.name, found["n"] in (1, 2)) == ("f", True)
            assert found.get("s", "a") in ("a", "b")


def test_forced_arguments_are_those_that_are_listed_and_end(free: list[Scripted]) -> None:
    """Schemas as frameworks write them: no limits, and nothing said of other properties."""
    counting = tool({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
    for server in free:
        fields = {"tools": [counting], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
        answer = ask(server, temperature=1, seed=5, **fields).choices[0]
        assert answer.finish_reason == "tool_calls", answer
        assert json.loads(answer.message.tool_calls[0].function.arguments).keys() == {"n"}


A = "tools[1].function.parameters.properties.a"


@pytest.mark.parametrize(
    ("part", "param", "said"),
    [
        ({"type": "string", "pattern": "("}, f"{A}.pattern", "unclosed group"),
        ({"type": "string", "pattern": "(?=a)b"}, f"{A}.pattern", "look-around"),
        ({"$ref": "#/$defs/x"}, f"{A}.$ref", "does not exist"),
        ({"$ref": "http://elsewhere/x"}, f"{A}.$ref", "not present"),
        ({"type": "string", "maxLength": "x"}, f"{A}.maxLength", "positive integer"),
        ({"type": "string", "format": 5}, f"{A}.format", "Expected string"),
        ({"type": "array", "items": {"type": "integer", "minimum": "x"}}, f"{A}.items.minimum", "Expected"),
        (False, "tools[1].function.parameters", "'a' is unsatisfiable"),
    ],
    ids=str,
)
def test_a_tool_that_cannot_be_forced_is_named_with_its_path(
    free: list[Scripted], part: Any, param: str, said: str
) -> None:
    schema = {"type": "object", "properties": {"a": part}, "required": ["a"]}
    messages = [ASK]
    for server in free[:2]:
        error = refused(server, messages=messages, tools=[LIMITED, tool(schema, name="g")], tool_choice="required")
        assert (error["param"], error["code"]) == (param, "invalid_grammar"), error["message"]
        assert said in error["message"]
        fine = {"messages": messages, "tools": [tool(schema)], "max_tokens": 1}
        assert httpx.post(f"{server.url}/v1/chat/completions", json=fine).status_code == 200, (
            "a model may call as it likes"
        )
    flat = {"type": "function", "name": "g", "parameters": schema}
    error = refused(free[0], path="/responses", input="a", tools=[flat], tool_choice="required")
    assert error["param"] == param.replace("[1].function", "[0]")


CHAIN = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"]}


def test_a_tool_that_asks_for_itself_without_end_is_named_with_its_path(free: list[Scripted]) -> None:
    endless, fine = {**CHAIN, "$defs": {"n": CHAIN}}, {**CHAIN, "$defs": {"n": {**CHAIN, "required": []}}}
    for server in free:
        error = refused(server, messages=[ASK], tools=[LIMITED, tool(endless, name="g")], tool_choice="required")
        assert error["param"] == "tools[1].function.parameters.$defs.n.properties.a.$ref"
        assert (error["code"], "without end" in error["message"]) == ("invalid_grammar", True)
        ask(server, tools=[tool(fine)], tool_choice="required", max_tokens=5)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": endless}}
    param = refused(free[0], messages=[ASK], tools=[LIMITED], response_format=form)["param"]
    assert param == "response_format.json_schema.schema.$defs.n.properties.a.$ref"


def test_choices_that_all_ask_for_themselves_without_end_are_named(free: list[Scripted]) -> None:
    again = {**CHAIN, "properties": {"a": {"$ref": "#"}}}
    listed = {"type": "array", "items": {"$ref": "#"}, "minItems": 1}
    for choices in ("anyOf", "oneOf"):
        schema = {"type": "object", "properties": {"b": {choices: [again, listed]}}, "required": ["b"]}
        error = refused(free[0], messages=[ASK], tools=[tool(schema)], tool_choice="required")
        assert error["code"] == "invalid_grammar"
        assert "without end" in error["message"]
        assert error["param"].startswith("tools[0].function.parameters.")
        ends = {**schema, "properties": {"b": {choices: [again, listed, {"type": "null"}]}}}
        ask(free[0], tools=[tool(ends)], tool_choice="required", max_tokens=5)


def test_a_forced_tool_may_ask_for_more_arguments_than_it_lists(free: list[Scripted]) -> None:
    ask(
        free[0],
        tools=[tool({"type": "object", "properties": {}, "minProperties": 1})],
        tool_choice="required",
        max_tokens=5,
    )


def test_a_tool_without_a_type_is_named_with_its_path(free: list[Scripted]) -> None:
    schema = {"properties": {"a": False}, "required": ["a"]}
    error = refused(free[0], messages=[ASK], tools=[tool(schema)], tool_choice="required")
    assert error["param"] == "tools[0].function.parameters"


def test_forced_arguments_may_be_required_without_being_listed(free: list[Scripted]) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1]}},
        "required": ["z"],
        "additionalProperties": {"const": 2},
    }
    for said in (schema, {**schema, "additionalProperties": None}):
        asked = tool({key: value for key, value in said.items() if value is not None})
        server = free[0]
        server.client.chat.completions.create(
            model="model", messages=[ASK], tools=[asked], tool_choice="required", max_tokens=5
        )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{", "Expecting"),
        ("[1]", "got an array"),
        ("3", "got 3"),
        ("[" * 100_000, "nested too deeply"),
        ('{"not":' * 65 + "{}" + "}" * 65, "nested too deeply"),
    ],
    ids=["cut", "array", "number", "endless", "deep"],
)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_schema_as_text_beside_tools_is_read_before_any_work(
    hermes: Scripted, given: str, said: str, choice: str
) -> None:
    for param, fields in (
        ("guided_json", {"guided_json": given}),
        ("structured_outputs.json", {"structured_outputs": {"json": given}}),
    ):
        error = refused(hermes, messages=[ASK], tools=[WEATHER], tool_choice=choice, **fields)
        assert (error["param"], error["code"]) == (param, "invalid_grammar")
        assert said in error["message"]


def test_a_reply_with_tools_and_a_schema_is_either(free: list[Scripted]) -> None:
    kinds = set()
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    for server in free:
        for seed in range(4):
            fields = {"tools": [LIMITED], "parallel_tool_calls": False, "response_format": form, "max_tokens": 200}
            answer = ask(server, temperature=1, seed=seed, **fields).choices[0]
            kinds.add(answer.finish_reason)
            if answer.finish_reason == "tool_calls":
                assert answer.message.tool_calls[0].function.name == "f"
            else:
                assert json.loads(answer.message.content).keys() == {"ok"}
    assert kinds == {"tool_calls", "stop"}


def test_keywords_of_a_tool_that_are_null_say_nothing(free: list[Scripted]) -> None:
    empty = {"required": None, "additionalProperties": None, "minProperties": None, "anyOf": None, "$defs": None}
    for server in free:
        counting = tool({"type": "object", "properties": {"n": {"type": "integer"}}, **empty})
        ask(server, tools=[counting], tool_choice="required", max_tokens=5)


@pytest.mark.parametrize(
    ("schema", "where", "said"),
    [
        ({"$ref": "#/$defs/none"}, ".$ref", "does not exist"),
        ({"$ref": "http://elsewhere/x"}, ".$ref", "not present"),
        ({"$ref": "#"}, ".$ref", "without end"),
        ({"properties": {}, "required": ["z"], "additionalProperties": False}, "", "'z' is unsatisfiable"),
    ],
    ids=str,
)
def test_a_tool_whose_arguments_cannot_be_is_named_with_its_path(
    free: list[Scripted], schema: dict[str, Any], where: str, said: str
) -> None:
    for server in free:
        error = refused(server, messages=[ASK], tools=[LIMITED, tool(schema, name="g")], tool_choice="required")
        assert (error["param"], error["code"]) == (f"tools[1].function.parameters{where}", "invalid_grammar"), error
        assert said in error["message"]
