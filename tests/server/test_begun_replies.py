"""Replies that go on from the beginning that a client gives, over each API that has them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import reasoning_templates as kit
from tests.scripted_model import Scripted, scripted
from tests.server.test_messages import HEADERS

ASK = {"role": "user", "content": "What colour is the kite, and what is <think>?"}
BEGUN = {"role": "assistant", "content": "The kite"}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    with scripted(tmp_path_factory.mktemp("model")) as found:
        yield found


def post(server: Scripted, path: str, **body: Any) -> httpx.Response:
    whole = {"model": "model", "max_tokens": 100, "temperature": 0, **body}
    return httpx.post(f"{server.url}{path}", json=whole, headers=HEADERS, timeout=30)


def content(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("last", "fields"),
    [
        (BEGUN, {"continue_final_message": True, "add_generation_prompt": False}),
        (BEGUN, {"continue_final_message": True}),
        ({**BEGUN, "prefix": True}, {}),
    ],
)
def test_a_chat_goes_on_from_the_last_message(server: Scripted, last: dict[str, Any], fields: dict[str, Any]) -> None:
    server.say(" is red.")
    assert content(post(server, CHAT, messages=[ASK, last], **fields)) == " is red."
    assert server.prompt().endswith("<|im_start|>assistant\nThe kite")


def test_without_the_field_a_new_reply_begins(server: Scripted) -> None:
    server.say("Red.")
    assert content(post(server, CHAT, messages=[ASK, BEGUN], add_generation_prompt=True)) == "Red."
    assert server.prompt().endswith("The kite<|im_end|>\n<|im_start|>assistant\n")


def test_a_reply_that_its_length_cut_off_goes_on_and_is_cached_as_a_whole(server: Scripted) -> None:
    asked = {"cache_salt": "cut", "messages": [ASK]}
    server.say("The kite is red")
    first = post(server, CHAT, **{**asked, "max_tokens": len(server.said[-1])})
    assert first.json()["choices"][0]["finish_reason"] == "length"
    server.engine.settle()
    begun = {"role": "assistant", "content": content(first)}
    server.say(", and the mill is near.")
    second = post(server, CHAT, **{**asked, "messages": [ASK, begun], "continue_final_message": True})
    server.engine.settle()
    usage = second.json()["usage"]
    assert usage["replies_details"] == {"spliced": 1, "retokenised": 0}
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
    whole = {"role": "assistant", "content": begun["content"] + content(second)}
    server.say("No.")
    third = post(server, CHAT, **{**asked, "messages": [ASK, whole, {"role": "user", "content": "Sure?"}]}).json()
    assert third["usage"]["replies_details"] == {"spliced": 1, "retokenised": 0}
    # The end token was drawn and not fed.
    assert third["usage"]["prompt_tokens_details"]["cached_tokens"] == (usage["total_tokens"] - 1)


def test_anthropics_last_message_may_be_the_assistants(server: Scripted) -> None:
    server.say(" is red.")
    text = [{"type": "text", "text": "The"}, {"type": "text", "text": " kite"}]
    answer = post(server, "/v1/messages", messages=[ASK, {"role": "assistant", "content": text}])
    assert answer.status_code == 200, answer.text
    assert answer.json()["content"] == [{"type": "text", "text": " is red."}]
    assert server.prompt().endswith("<|im_start|>assistant\nThe kite")


def test_tokens_of_a_begun_reply_are_those_of_the_request(server: Scripted) -> None:
    server.say("")
    assert post(server, CHAT, messages=[ASK, BEGUN], continue_final_message=True).status_code == 200
    wanted = list(server.requests[-1].prompt)
    for last, fields in ((BEGUN, {"continue_final_message": True}), ({**BEGUN, "prefix": True}, {})):
        assert post(server, "/tokenize", messages=[ASK, last], **fields).json()["tokens"] == wanted
    counted = post(server, "/v1/messages/count_tokens", messages=[ASK, BEGUN]).json()
    assert counted["input_tokens"] == len(wanted)


def test_a_marked_beginning_and_a_forced_call(server: Scripted) -> None:
    mark = {"type": "ephemeral"}
    server.say(" is red.")
    block = {"type": "text", "text": "The kite", "cache_control": mark}
    answer = post(server, "/v1/messages", messages=[ASK, {"role": "assistant", "content": [block]}]).json()
    usage = answer["usage"]
    assert usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"] >= usage["input_tokens"]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    server.say('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
    called = {"tools": [tool], "tool_choice": "required", "continue_final_message": True}
    message = post(server, CHAT, messages=[ASK, BEGUN], **called).json()["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f"]


def test_behind_a_registered_prompt_mistakes_have_the_clients_numbers(tmp_path: Path) -> None:
    prompt = tmp_path / "system.txt"
    prompt.write_text("Be brief.")
    with scripted(tmp_path, system_prompt_file=prompt) as found:
        answer = post(found, CHAT, messages=[ASK], continue_final_message=True)
        assert answer.json()["error"]["param"] == "messages[0]"
        found.say(" is red.")
        assert content(post(found, CHAT, messages=[ASK, BEGUN], continue_final_message=True)) == " is red."
        assert found.prompt().startswith("<|im_start|>system\nBe brief.")


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        (CHAT, {"messages": [ASK], "continue_final_message": True}, "messages[0]", "has the role 'user'"),
        (
            CHAT,
            {"messages": [ASK, BEGUN], "continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
            "must be false, or left out",
        ),
        (CHAT, {"messages": [ASK], "add_generation_prompt": False}, "add_generation_prompt", "is not supported"),
        (CHAT, {"messages": [{**ASK, "prefix": True}]}, "messages[0]", "continue_final_message (or prefix)"),
        ("/tokenize", {"prompt": "a", "continue_final_message": True}, "continue_final_message", "needs messages"),
        ("/v1/completions", {"prompt": "a", "continue_final_message": True}, "continue_final_message", "not supported"),
        ("/v1/responses", {"input": "a", "continue_final_message": True}, "continue_final_message", "not supported"),
    ],
)
def test_mistakes_are_named(server: Scripted, path: str, body: dict[str, Any], param: str, says: str) -> None:
    answer = post(server, path, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert says in error["message"]


@pytest.mark.parametrize(
    ("form", "begun", "reply", "reasoning", "answer"),
    [
        ("r1", "<think>\nLet me", " see.\n</think>\n\nRed.", "see.", "Red."),
        ("qwen", "<think>\nHm.\n</think>\n\nThe", " kite.", None, " kite."),
        ("qwen", "Thoughts begin with ", "<think> and end.", None, "<think> and end."),
        ("qwen", "It", " is a mark.", None, " is a mark."),
    ],
)
def test_reasoning_goes_on_where_the_beginning_ends_in_it(
    tmp_path: Path, form: str, begun: str, reply: str, reasoning: str | None, answer: str
) -> None:
    template, _, eos, _ = kit.FORMATS[form]
    with scripted(tmp_path, template, (), eos) as found:
        found.say(reply)
        messages = [ASK, {"role": "assistant", "content": begun}]
        got = post(found, CHAT, messages=messages, continue_final_message=True).json()["choices"][0]["message"]
        assert (got.get("reasoning_content"), got["content"]) == (reasoning, answer)
        assert found.prompt().endswith(begun)
