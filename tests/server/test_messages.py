"""`/v1/messages` as coding agents use it, in plain HTTP, on a scripted model: blocks, events, histories, marks, mistakes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx
import pytest

from afterglow.server.server_config import ServerConfig
from tests import scripted_model as kit
from tests.engine.stepping import hold_from
from tests.scripted_model import Scripted, scripted
from tests.server.conftest import running
from tests.text import toys
from tests.waiting import wait_for

TOOLS: list[dict[str, Any]] = [
    {
        "name": "Bash",
        "description": "Runs a command.\n\n" + "Usage notes:\n- Quote paths that contain spaces.\n" * 20,
        "input_schema": {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "object",
            "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
            "required": ["command"],
            "additionalProperties": False,
        },
    },
    {"name": "Read", "description": "Reads a file.", "input_schema": {"type": "object", "properties": {}}},
]
MARK = {"type": "ephemeral"}
SYSTEM = [
    {"type": "text", "text": "You are a coding agent.", "cache_control": MARK},
    {"type": "text", "text": "Be brief.\nDo what was asked.", "cache_control": MARK},
]
ASK = {"role": "user", "content": [{"type": "text", "text": "<system-reminder>\nx\n</system-reminder>"},
                                   {"type": "text", "text": "List the files.", "cache_control": MARK}]}  # fmt: skip
CALL = '<tool_call>\n{"name":"Bash","arguments":{"command":"ls  -l", "timeout":2}}\n</tool_call>'  # not as the template spaces it
HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,fine-grained-tool-streaming-2025-05-14",
}


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    with scripted(tmp_path_factory.mktemp("hermes")) as server:
        yield server


def post(server: Scripted, path: str = "", **body: Any) -> httpx.Response:
    whole = {"model": "model", "max_tokens": 300, "messages": [ASK], "temperature": 0, **body}
    return httpx.post(f"{server.url}/v1/messages{path}", json=whole, headers=HEADERS, timeout=30)


def ask(server: Scripted, **body: Any) -> dict[str, Any]:
    found = post(server, **body)
    assert found.status_code == 200, found.text
    return dict(found.json())


def stream(server: Scripted, **body: Any) -> list[tuple[str, dict[str, Any]]]:
    return events(post(server, stream=True, **body).text)


def events(text: str) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        assert name.startswith("event: ")
        assert data.startswith("data: ")
        found.append((name[7:], json.loads(data[6:])))
        assert found[-1][1]["type"] == found[-1][0]
    return found


def total(usage: dict[str, Any]) -> int:
    return int(usage["input_tokens"] + usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"])


# ------------------------------------------------------------------------------------------------------- replies


def test_a_plain_reply(hermes: Scripted) -> None:
    hermes.say("Hello.")
    answer = post(hermes, messages=[{"role": "user", "content": "Hi"}], metadata={"user_id": "user_1_session_2"})
    found = answer.json()
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert found["id"].startswith("msg_")
    assert (found["type"], found["role"], found["model"]) == ("message", "assistant", "model")
    assert found["content"] == [{"type": "text", "text": "Hello."}]
    assert (found["stop_reason"], found["stop_sequence"]) == ("end_turn", None)
    assert found["usage"]["output_tokens"] == len(hermes.said[-1]) + 1
    assert total(found["usage"]) == len(hermes.requests[-1].prompt)
    assert "<|im_start|>user\nHi<|im_end|>" in hermes.prompt()


def test_what_claude_code_sends_for_its_accounts_is_left_out(hermes: Scripted) -> None:
    """Its first block of the system prompt is another one in each request, so that nothing behind it would be found."""
    prompts = []
    for number in ("0a1b2", "3c4d5"):
        header = f"x-anthropic-billing-header: cc_version=2.1.36.1; cc_entrypoint=cli; cch={number};"
        system = [{"type": "text", "text": header}, *SYSTEM]
        hermes.say("Hello.")
        found = ask(hermes, system=system)
        prompts.append(hermes.prompt())
        counted = post(hermes, "/count_tokens", system=system).json()["input_tokens"]
        assert counted == total(found["usage"]) == len(hermes.requests[-1].prompt)
    hermes.say("Hello.", "Hello.", "Hello.")
    ask(hermes, system=SYSTEM)
    assert prompts == [hermes.prompt()] * 2
    ask(hermes, system="Be brief.")
    whole = hermes.prompt()
    ask(hermes, system="x-anthropic-billing-header: cc_version=2; cch=0a1b2;\nBe brief.")
    assert hermes.prompt() == whole, "as one text"


def test_text_then_calls(hermes: Scripted) -> None:
    hermes.say(f'Let me look.\n\n{CALL}\n<tool_call>\n{{"name": "Read", "arguments": {{}}}}\n</tool_call>')
    found = ask(hermes, tools=TOOLS, system=SYSTEM)
    text, first, second = found["content"]
    assert text == {"type": "text", "text": "Let me look."}
    assert (first["type"], first["name"], first["input"]) == ("tool_use", "Bash", {"command": "ls  -l", "timeout": 2})
    assert (second["name"], second["input"]) == ("Read", {})
    assert found["stop_reason"] == "tool_use"
    assert "You are a coding agent.\nBe brief." in hermes.prompt()
    assert hermes.prompt().count("Quote paths") == 20


def test_a_stream_of_one_token_begins_without_a_reason(hermes: Scripted) -> None:
    hermes.say("Yes.")
    found = stream(hermes, max_tokens=1)
    message = found[0][1]["message"]
    assert (message["stop_reason"], message["stop_sequence"]) == (None, None)
    (delta,) = (data["delta"] for kind, data in found if kind == "message_delta")
    assert delta["stop_reason"] == "max_tokens"


def test_events_of_a_stream(hermes: Scripted) -> None:
    hermes.say(f"Look:\n{CALL}")
    found = stream(hermes, tools=TOOLS)
    kinds = [kind for kind, _ in found]
    assert list(dict.fromkeys(kinds)) == [
        *("message_start", "content_block_start", "ping", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    assert kinds[:3] == ["message_start", "content_block_start", "ping"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    message = found[0][1]["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    assert total(message["usage"]) == len(hermes.requests[-1].prompt)
    blocks: list[dict[str, Any]] = []
    for kind, data in found:
        if kind == "content_block_start":
            assert data["index"] == len(blocks)
            blocks.append({**data["content_block"], "said": ""})
        elif kind == "content_block_delta":
            assert data["index"] == len(blocks) - 1
            delta = data["delta"]
            field = {"text_delta": "text", "input_json_delta": "partial_json"}[delta["type"]]
            blocks[-1]["said"] += delta[field]
    text, call = blocks
    assert (text["type"], text["text"], text["said"]) == ("text", "", "Look:")
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "Bash", {})
    assert json.loads(call["said"]) == {"command": "ls  -l", "timeout": 2}
    assert found[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert found[-2][1]["usage"]["output_tokens"] == len(hermes.said[-1]) + 1


def test_stop_sequences_are_named(hermes: Scripted) -> None:
    hermes.say("one two three four", "one two three four")
    found = ask(hermes, stop_sequences=["five", "three"])
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "three")
    assert found["content"] == [{"type": "text", "text": "one two "}]
    ending = stream(hermes, stop_sequences=["three"])[-2][1]
    assert ending["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "three"}


def test_the_length_may_end_within_a_call(hermes: Scripted) -> None:
    hermes.say(CALL, CALL)
    cut = len(hermes.said[-1]) - 12
    found = ask(hermes, tools=TOOLS, max_tokens=cut)
    assert found["stop_reason"] == "max_tokens"
    (call,) = found["content"]
    assert call["input"]["command"].startswith("ls"), "what is there"
    again = ask(hermes, tools=TOOLS, max_tokens=cut, stream=False)
    result = {"type": "tool_result", "tool_use_id": again["content"][0]["id"], "content": "cut", "is_error": True}
    ask(hermes, tools=TOOLS, messages=[ASK, {"role": "assistant", "content": again["content"]},
                                       {"role": "user", "content": [result]}])  # fmt: skip
    assert "<tool_response>\nError: cut\n</tool_response>" in hermes.prompt()


def test_the_context_ends_a_reply_that_may_be_longer(hermes: Scripted) -> None:
    """Agents ask for as many tokens as their own models may give."""
    hermes.say("a" * 300)
    found = ask(hermes, max_tokens=32_000, messages=[{"role": "user", "content": "z" * 4040}])
    assert found["stop_reason"] == "model_context_window_exceeded"
    assert total(found["usage"]) + found["usage"]["output_tokens"] == 4096


def test_no_tokens_warm_the_cache(hermes: Scripted) -> None:
    found = ask(hermes, max_tokens=0, system="Warm this up, please.")
    assert (found["content"], found["stop_reason"], found["usage"]["output_tokens"]) == ([], "max_tokens", 0)
    hermes.engine.settle()
    again = ask(hermes, system="Warm this up, please.")
    assert again["usage"]["cache_read_input_tokens"] == len(hermes.requests[-1].prompt) - 1


# ------------------------------------------------------------------------------------------------------- tool choice


@pytest.fixture(scope="module")
def free(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    """A server on a model whose tokens are its own: random, but for the grammar."""
    with scripted(tmp_path_factory.mktemp("free")) as server:
        server.runner.free = True
        yield server


LIMITED = {
    "name": "f",
    "input_schema": {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    },
}


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "f"}])
def test_choices_are_kept_to(free: Scripted, choice: dict[str, Any]) -> None:
    choice = {**choice, "disable_parallel_tool_use": True}
    found = ask(free, tools=[LIMITED, TOOLS[1]], tool_choice=choice, temperature=1, seed=3)
    assert found["stop_reason"] == "tool_use"
    (call,) = found["content"]
    if choice["type"] == "tool":
        assert (call["name"], call["input"]["n"] in (1, 2)) == ("f", True)


def test_an_output_format_is_kept_to(free: Scripted) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    found = ask(free, output_config={"format": {"type": "json_schema", "schema": schema}}, temperature=1, seed=1)
    assert json.loads(found["content"][0]["text"]).keys() == {"ok"}


def test_none_calls_nothing_and_one_call_ends_the_reply(hermes: Scripted) -> None:
    hermes.say(CALL, f"{CALL}\n{CALL}")
    found = ask(hermes, tools=TOOLS, tool_choice={"type": "none"})
    assert found["content"] == [{"type": "text", "text": CALL}]
    found = ask(hermes, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert len(found["content"]) == 1


# ------------------------------------------------------------------------------------------------------- histories

FORMATS = {
    "hermes": (kit.HERMES, (), "<|im_end|>", CALL),
    "fallback": (toys.CHATML, (), "<|im_end|>", CALL),
    "llama": (
        *(kit.LLAMA, kit.LLAMA_SPECIALS, "<|eot_id|>"),
        '<|python_tag|>{"name": "Bash", "parameters": {"command": "ls  -l","timeout":2}}',
    ),
    "harmony": (
        *(kit.HARMONY, kit.HARMONY_SPECIALS, "<|call|>"),
        '<|channel|>commentary to=functions.Bash <|constrain|>json<|message|>{"command": "ls  -l","timeout":2}',
    ),
}


@pytest.fixture(scope="module", params=list(FORMATS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Scripted, str]]:
    template, specials, eos, call = FORMATS[request.param]
    with scripted(tmp_path_factory.mktemp(request.param), template, specials, eos) as server:
        yield server, call


def test_turns_go_on_cached(model: tuple[Scripted, str]) -> None:
    """In every turn the cached rows are the longest common prefix with what was computed before, but for one token; streamed
    and whole turns alternate, and the marks move on as agents move them."""
    server, call = model
    messages: list[Any] = []
    user: dict[str, Any] = ASK
    computed: list[list[int]] = []
    for turn in range(6):
        server.say(call if turn % 3 != 2 else _plain(server, f"It is {turn}."))
        body = {"system": SYSTEM, "tools": TOOLS, "messages": [*messages, user]}
        found = _joined(stream(server, **body)) if turn % 2 else ask(server, **body)
        server.engine.settle()
        prompt = list(server.requests[-1].prompt)
        known = max((_common(prompt, rows) for rows in computed), default=0)
        assert found["usage"]["cache_read_input_tokens"] == min(known, len(prompt) - 1)
        assert total(found["usage"]) == len(prompt)
        if computed:
            assert known >= len(computed[-1]), "the reply's rows, all but the last token's, are used again"
        computed.append([*prompt, *server.said[-1], server.runner.end][:-1])
        messages += [_unmarked(user), {"role": "assistant", "content": found["content"]}]
        if found["stop_reason"] == "tool_use":
            result = [{"type": "text", "text": f"rain {turn}"}]
            block = {"type": "tool_result", "tool_use_id": found["content"][-1]["id"], "content": result}
            user = {"role": "user", "content": [{**block, "cache_control": MARK}]}
        else:
            user = {"role": "user", "content": "And now?"}


def _plain(server: Scripted, text: str) -> str:
    return f"<|channel|>final<|message|>{text}" if server.tokenizer.encode("<|channel|>")[1:] == [] else text


def _common(a: list[int], b: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _unmarked(message: dict[str, Any]) -> dict[str, Any]:
    if isinstance(message["content"], str):
        return message
    blocks = [{key: value for key, value in block.items() if key != "cache_control"} for block in message["content"]]
    return {**message, "content": blocks}


def _joined(found: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Put a message together from its events, as clients do."""
    message: dict[str, Any] = found[0][1]["message"]
    said: list[str] = []
    for kind, data in found:
        if kind == "content_block_start":
            message["content"].append(dict(data["content_block"]))
            said.append("")
        elif kind == "content_block_delta":
            said[-1] += data["delta"].get("text", "") + data["delta"].get("partial_json", "")
        elif kind == "message_delta":
            message |= data["delta"]
            message["usage"] |= data["usage"]
    for block, text in zip(message["content"], said, strict=True):
        block |= {"text": text} if block["type"] == "text" else {"input": json.loads(text)}
    return message


def test_numbers_that_javascript_writes_otherwise_are_the_same_call(hermes: Scripted) -> None:
    hermes.say(CALL.replace('"timeout":2', '"timeout": 2.0'))
    found = ask(hermes, tools=TOOLS)
    (call,) = found["content"]
    call["input"]["timeout"] = 2
    hermes.engine.settle()
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "a.py"}
    said = [ASK, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    again = ask(hermes, tools=TOOLS, messages=said)
    assert again["usage"]["replies_details"] == {"spliced": 1, "retokenised": 0}
    assert again["usage"]["cache_read_input_tokens"] >= total(found["usage"]) + found["usage"]["output_tokens"] - 1


# ------------------------------------------------------------------------------------------------------- marks


def test_marks_end_where_blocks_end(hermes: Scripted) -> None:
    hermes.engine.reset_cache()
    found = ask(hermes, system=SYSTEM, tools=TOOLS, messages=[ASK])
    breakpoints = hermes.requests[-1].breakpoints
    texts = [hermes.tokenizer.decode(list(hermes.requests[-1].prompt)[: each.rows], False) for each in breakpoints]
    assert all(each.ttl_s == 300 for each in breakpoints)
    assert len(texts) == 2, "the template writes the tools behind the system message: both its blocks end there"
    assert texts[0].endswith(
        '"Read", "description": "Reads a file.", "parameters": {"type": "object", "properties": {}}}}\n'
    )
    assert texts[1].endswith("List the files.")
    usage = found["usage"]
    assert usage["cache_read_input_tokens"] == 0
    assert usage["cache_creation_input_tokens"] == breakpoints[-1].rows
    assert usage["cache_creation"] == {
        "ephemeral_5m_input_tokens": breakpoints[-1].rows,
        "ephemeral_1h_input_tokens": 0,
    }
    assert usage["input_tokens"] == len(hermes.requests[-1].prompt) - breakpoints[-1].rows


def test_lifetimes_are_counted_apart(hermes: Scripted) -> None:
    hermes.engine.reset_cache()
    hour = {"type": "ephemeral", "ttl": "1h"}
    tools = [TOOLS[0], {**TOOLS[1], "cache_control": hour}]
    found = ask(hermes, tools=tools, cache_control={"type": "ephemeral", "ttl": "5m"}, messages=[_unmarked(ASK)])
    long, short = hermes.requests[-1].breakpoints
    assert (long.ttl_s, short.ttl_s) == (3600, 300)
    creation = found["usage"]["cache_creation"]
    assert creation == {"ephemeral_5m_input_tokens": short.rows - long.rows, "ephemeral_1h_input_tokens": long.rows}
    hermes.engine.settle()
    again = ask(hermes, tools=tools, messages=[{"role": "user", "content": "Another question."}])
    assert again["usage"]["cache_read_input_tokens"] >= long.rows
    assert again["usage"]["cache_creation_input_tokens"] == 0


def test_marks_of_results_and_calls_are_found(hermes: Scripted) -> None:
    call = {"type": "tool_use", "id": "a", "name": "Bash", "input": {"command": "ls"}, "cache_control": MARK}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "src  tests", "cache_control": MARK}
    said = [{"type": "text", "text": "Look.", "cache_control": MARK}, call]
    ask(hermes, tools=TOOLS, messages=[_unmarked(ASK), {"role": "assistant", "content": said},
                                       {"role": "user", "content": [result, {"type": "text", "text": "And?"}]}])  # fmt: skip
    request = hermes.requests[-1]
    texts = [hermes.tokenizer.decode(list(request.prompt)[: each.rows], False) for each in request.breakpoints]
    assert texts[0].endswith("\nLook.")
    assert texts[1].endswith("</tool_call><|im_end|>\n")
    assert texts[2].endswith("\nsrc  tests")


# ------------------------------------------------------------------------------------------------------- counting


def test_counted_tokens_are_those_of_the_prompt(hermes: Scripted) -> None:
    body = {"system": SYSTEM, "tools": TOOLS, "thinking": {"type": "enabled", "budget_tokens": 2000}}
    ask(hermes, **body)
    counted = httpx.post(f"{hermes.url}/v1/messages/count_tokens", json={"model": "model", "messages": [ASK], **body})
    assert counted.json() == {"input_tokens": len(hermes.requests[-1].prompt)}
    long = httpx.post(
        f"{hermes.url}/v1/messages/count_tokens", json={"messages": [{"role": "user", "content": "ab " * 9000}]}
    )
    assert long.json()["input_tokens"] > 4096, "agents ask whether a prompt is too long"


def test_a_conversation_that_is_cut_says_what_remains(model_dir: Path) -> None:
    config = ServerConfig(port=0, grace=0.5, chat_truncation="auto")
    with running(model_dir, config) as server:
        messages = [
            {"role": role, "content": f"{n} " + "ab " * 40} for n in range(7) for role in ("user", "assistant")
        ][:-1]
        body = {"messages": messages, "max_tokens": 100, "system": "Be brief.", "cache_control": MARK}
        found = server.http().post("/v1/messages", json=body).json()
        cut = found["usage"]["truncation"]
        assert cut["dropped_tokens"] > 0
        assert total(found["usage"]) == cut["kept_tokens"]
        (mark,) = server.engine.requests[-1].breakpoints
        assert found["usage"]["cache_creation_input_tokens"] == mark.rows - cut["dropped_tokens"]


# ------------------------------------------------------------------------------------------------------- mistakes


def user(*blocks: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(blocks)}]


def said(*blocks: Any) -> list[dict[str, Any]]:
    return [ASK, {"role": "assistant", "content": list(blocks)}, {"role": "user", "content": "x"}]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
TEXT = {"type": "text", "text": "x"}
USE = {"type": "tool_use", "id": "a", "name": "Bash", "input": {}}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages is required"),
    ({"messages": []}, "messages must be"),
    ({"messages": [5]}, "messages[0] must be"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": user(5)}, "messages[0].content[0]"),
    ({"messages": user(TEXT, IMAGE)}, "messages[0].content[1] is of type 'image'"),
    ({"messages": user({"type": "document", "source": {}})}, "messages[0].content[0] is of type 'document'"),
    ({"messages": user({"type": "text"})}, "messages[0].content[0].text"),
    ({"messages": user({"type": "tool_result", "tool_use_id": "a"})}, "messages[0].content[0].tool_use_id"),
    ({"messages": user({"type": "tool_result"})}, "messages[0].content[0].tool_use_id"),
    ({"messages": said({"type": "server_tool_use"})}, "messages[1].content[0] is of type 'server_tool_use'"),
    ({"messages": said({**USE, "id": 5})}, "messages[1].content[0].id"),
    ({"messages": said({**USE, "name": ""})}, "messages[1].content[0].name"),
    ({"messages": said({**USE, "input": "{}"})}, "messages[1].content[0].input"),
    ({"messages": said(USE, USE)}, "messages[1].content[1].id"),
    ({"messages": said({"type": "thinking", "thinking": 5})}, "messages[1].content[0].thinking"),
    ({"messages": said(USE)[:2]}, "messages[1]: a message with calls cannot be continued"),
    ({"messages": said({"type": "thinking", "thinking": "x"})[:2]}, "messages[1] has no content"),
    ({"messages": [*said(TEXT)[:2], *user()]}, "messages: the last message has no content"),
    (
        {"messages": [*said(USE)[:2], *user(*[{"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}])]},
        "messages[2].content[0].content[0] is of type 'image'",
    ),
    (
        {"messages": [*said(USE)[:2], *user(*[{"type": "tool_result", "tool_use_id": "a"}] * 2)]},
        "messages[2].content[1].tool_use_id",
    ),
    ({"system": [IMAGE]}, "system[0] is of type 'image'"),
    ({"system": 5}, "system must be"),
    ({"max_tokens": None}, "max_tokens is required"),
    ({"max_tokens": -1}, "max_tokens must be"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"tools": {}}, "tools must be"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0] is of type 'web_search_20250305'"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema is required"),
    ({"tools": [{"name": "f f", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type"),
    ({"tools": [{"name": "f", "input_schema": {"properties": {"a": 5}}}]}, "tools[0].input_schema.properties.a"),
    ({"tools": [TOOLS[1], TOOLS[1]]}, "tools[1].name"),
    ({"tools": [{**TOOLS[1], "defer_loading": True}]}, "tools[0].defer_loading"),
    ({"tools": TOOLS, "tool_choice": "auto"}, "tool_choice must be"),
    ({"tools": TOOLS, "tool_choice": {"type": "must"}}, "tool_choice.type"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "often"}}, "thinking.type"),
    ({"output_config": {"effort": "none"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"metadata": {"user_id": 5}}, "metadata.user_id"),
    ({"container": "c"}, "container is not supported"),
    ({"mcp_servers": [{}]}, "mcp_servers is not supported"),
    ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management.edits[0]"),
    ({"cache_control": {"type": "forever"}}, "cache_control.type"),
    ({"messages": user({**TEXT, "cache_control": {**MARK, "ttl": "2h"}})}, "messages[0].content[0].cache_control.ttl"),
    ({"messages": user({**TEXT, "text": "", "cache_control": MARK})}, "messages[0].content[0].cache_control"),
    ({"messages": user(*[{**TEXT, "cache_control": MARK}] * 5)}, "messages[0].content[4].cache_control: at most 4"),
    ({"messages": user({**TEXT, "cache_control": {**MARK, "ttl": "1h"}}), "cache_control": MARK}, "cache_control.ttl"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "told"), BAD)
def test_mistakes_are_named_with_their_path(hermes: Scripted, body: dict[str, Any], told: str) -> None:
    answer = post(hermes, **body)
    found = answer.json()
    assert (answer.status_code, found["type"], found["error"]["type"]) == (400, "error", "invalid_request_error")
    assert told in found["error"]["message"]
    assert found["request_id"] == answer.headers["request-id"]


def test_errors_have_anthropics_form(hermes: Scripted) -> None:
    def check(answer: httpx.Response, status: int, kind: str, told: str) -> None:
        found = answer.json()
        assert (answer.status_code, found["type"], found["error"]["type"]) == (status, "error", kind), found
        assert told in found["error"]["message"]

    check(post(hermes, model="claude"), 404, "not_found_error", "'claude' does not exist")
    check(post(hermes, path="/batches"), 404, "not_found_error", "/v1/messages/batches")
    check(httpx.get(f"{hermes.url}/v1/messages"), 405, "invalid_request_error", "GET")
    check(httpx.post(f"{hermes.url}/v1/messages", content=b"{"), 415, "invalid_request_error", "Content-Type")
    long = post(hermes, messages=[{"role": "user", "content": "ab " * 9000}])
    check(long, 400, "invalid_request_error", "prompt is too long: ")
    assert " > 4095 maximum" in long.text


def test_what_changes_nothing_is_taken(hermes: Scripted) -> None:
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}, {"type": "clear_tool_uses_20250919"}]}
    hermes.say("Fine.")
    found = ask(
        hermes,
        context_management=edits,
        thinking={"type": "adaptive"},
        output_config={"effort": "max"},
        service_tier="auto",
        messages=[{"role": "system", "content": "Be kind."}, *said({"type": "redacted_thinking", "data": "x"}, TEXT)],
    )
    assert found["content"] == [{"type": "text", "text": "Fine."}]
    assert found["context_management"] == {"applied_edits": []}


# ------------------------------------------------------------------------------------------------------- ends


def test_leaving_within_a_call_frees_the_engine(hermes: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    hold_from(hermes.engine, 200, monkeypatch)  # which is when the call has begun, and goes on for long
    hermes.say(CALL.replace("ls", "ls " * 800))
    body = {"model": "model", "max_tokens": 3000, "messages": [ASK], "tools": TOOLS, "stream": True}
    with httpx.stream("POST", f"{hermes.url}/v1/messages", json=body, timeout=30) as answer:
        lines = answer.iter_lines()  # kept: the client leaves with it
        next(line for line in lines if "partial_json" in line)
        wait_for(lambda: hermes.engine.stats().plan.running == 1)
    wait_for(lambda: hermes.engine.stats().plan.running == 0)


def test_a_server_that_stops_says_so_in_the_stream(tmp_path_factory: pytest.TempPathFactory) -> None:
    with scripted(tmp_path_factory.mktemp("stopping")) as server:
        server.say("ab " * 1300)
        body = {"model": "model", "max_tokens": 3900, "messages": [ASK], "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/messages", json=body, timeout=30) as answer:
            lines = answer.iter_lines()
            next(line for line in lines if "text_delta" in line)
            server.service.stop()
            rest = list(lines)
        assert rest[-3] == "event: error"
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["type"] == "overloaded_error"


def test_keys_come_in_either_header(tmp_path_factory: pytest.TempPathFactory) -> None:
    with scripted(tmp_path_factory.mktemp("keys"), api_key=("secret",)) as server:
        for headers, status in (
            ({"x-api-key": "secret"}, 200),
            ({"Authorization": "Bearer secret"}, 200),
            ({"Authorization": "Bearer other", "x-api-key": "secret"}, 200),
            ({"x-api-key": "other"}, 401),
            ({}, 401),
        ):
            body = {"max_tokens": 2, "messages": [ASK]}
            answer = httpx.post(f"{server.url}/v1/messages", json=body, headers=headers, timeout=30)
            assert answer.status_code == status
        assert answer.json()["error"]["type"] == "authentication_error"
