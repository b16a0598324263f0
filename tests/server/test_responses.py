"""`/v1/responses` through the `openai` package: turns, streams, truncation, and storage."""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from afterglow.errors import RequestError, StoreError
from afterglow.server.server_config import ServerConfig
from afterglow.store.database.conversations import FILE, Conversations
from tests.server.conftest import REPLY, Running, running
from tests.text import toys
from tests.waiting import wait_for

URL = "/v1/responses"


def respond(server: Running, said: Any = "What colour is the kite?", key: str = "none", **kwargs: Any) -> Any:
    return server.openai(key).responses.create(**{"model": "fake-model", "input": said, **kwargs})


def prompt_of(server: Running) -> str:
    return server.tokenizer.decode(list(server.engine.requests[-1].prompt), False)


def usage(reply: Any) -> dict[str, Any]:
    return dict(reply.usage.model_dump())


# ------------------------------------------------------------------------------------------------- one turn


def test_a_response(server: Running) -> None:
    reply = respond(server, instructions="Be brief.", metadata={"k": "v"}, user="me", temperature=0.5, top_p=0.9)
    assert reply.output_text == REPLY
    assert reply.id.startswith("resp_")
    assert (reply.status, reply.error, reply.incomplete_details) == ("completed", None, None)
    assert (reply.object, reply.model, reply.instructions) == ("response", "fake-model", "Be brief.")
    assert (reply.metadata, reply.user, reply.temperature, reply.top_p) == ({"k": "v"}, "me", 0.5, 0.9)
    assert (reply.store, reply.truncation, reply.previous_response_id) == (True, "disabled", None)
    (message,) = reply.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert prompt_of(server) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat colour is the kite?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    spent = usage(reply)
    assert spent["input_tokens"] == len(server.engine.requests[-1].prompt)
    assert spent["output_tokens"] == len(server.engine.reply) + 1
    assert spent["total_tokens"] == spent["input_tokens"] + spent["output_tokens"]
    assert spent["output_tokens_details"] == {"reasoning_tokens": 0}
    assert "truncation" not in spent
    sampling = server.engine.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p) == (0.5, 0.9)


def test_the_limit_of_length_makes_it_incomplete(server: Running) -> None:
    reply = respond(server, max_output_tokens=2)
    assert reply.output_text == "The kite"
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert reply.output[0].status == "incomplete"
    assert respond(server, "Go on.", previous_response_id=reply.id).status == "completed"


def test_input_may_be_items(server: Running) -> None:
    said = [
        {"role": "developer", "content": "Rhyme."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
        {"role": "user", "content": "d", "id": "msg_mine"},
    ]  # fmt: skip
    reply = respond(server, said)
    assert prompt_of(server).startswith(
        "<|im_start|>system\nRhyme.<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n"
        "<|im_start|>user\nd<|im_end|>\n"
    )
    listed = server.openai().responses.input_items.list(reply.id, order="asc")
    assert [item.role for item in listed] == ["developer", "user", "assistant", "user"]  # type: ignore[union-attr]
    assert [item.id for item in listed][-1] == "msg_mine"


def test_fields_reach_the_engine(server: Running) -> None:
    extra = {
        "session_id": "s",
        "priority": 2,
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "cache_salt": "x",
    }
    respond(server, extra_body=extra)
    request = server.engine.requests[-1]
    assert (request.session_id, request.priority, request.ttl_s) == ("s", 2, 86400.0)
    tenant, _, own = request.salt.partition("/")
    assert (tenant, len(own), request.cache_key) == ("", 32, f"{request.salt}/k"), "salts reach no disk in clear"


def test_neutral_values_of_unsupported_fields_are_fine(server: Running) -> None:
    reply = respond(
        server,
        tools=[],
        tool_choice="auto",
        include=["reasoning.encrypted_content"],
        text={"format": {"type": "text"}},
        background=False,
        parallel_tool_calls=False,
        service_tier="auto",
        reasoning={"effort": "low"},
    )
    assert reply.status == "completed"


# ----------------------------------------------------------------------------------------------- more turns


def test_turns_go_on_and_reuse_the_generated_ids(server: Running) -> None:
    """The fake model's ids for its reply are not the tokenizer's own: only they find it in the cache."""
    ids = [i for c in REPLY for i in server.tokenizer.encode(c)]
    reply, server.engine.reply = server.engine.reply, ids
    try:
        first = respond(server, "one", extra_body={"cache_salt": "turns"})
        second = respond(server, "two", previous_response_id=first.id, extra_body={"cache_salt": "turns"})
        prompt = list(server.engine.requests[-1].prompt)
        start = usage(first)["input_tokens"]
        assert prompt[start : start + len(ids)] == ids
        cached = usage(second)["input_tokens_details"]["cached_tokens"]
        assert cached == start + usage(first)["output_tokens"] - 1
        assert usage(second)["cached_tokens_details"] == {"device": 0, "host": cached, "disk": 0}
    finally:
        server.engine.reply = reply


def test_the_state_is_a_tree_and_instructions_are_not_inherited(server: Running) -> None:
    first = respond(server, "one", instructions="Be brief.")
    second = respond(server, "two", previous_response_id=first.id)
    assert "Be brief." not in prompt_of(server)
    assert second.previous_response_id == first.id
    respond(server, "other", previous_response_id=first.id, instructions="Be loud.")
    text = prompt_of(server)
    assert text.startswith("<|im_start|>system\nBe loud.<|im_end|>\n<|im_start|>user\none<|im_end|>\n")
    assert "two" not in text
    third = respond(server, "three", previous_response_id=second.id)
    assert [said in prompt_of(server) for said in ("one", "two", "three", "other")] == [True, True, True, False]
    listed = list(server.openai().responses.input_items.list(third.id, order="asc", limit=2))
    assert [item.content[0].text for item in listed] == ["one", REPLY, "two", REPLY, "three"]  # type: ignore[union-attr,index]
    newest = server.openai().responses.input_items.list(third.id, limit=1)
    assert newest.has_more
    assert newest.data[0].content[0].text == "three"  # type: ignore[union-attr,index]
    assert "_reply" not in json.dumps([item.model_dump() for item in listed])


def test_retrieving_and_deleting(server: Running) -> None:
    client = server.openai()
    reply = respond(server)
    again = client.responses.retrieve(reply.id)
    assert again.model_dump() == reply.model_dump()
    client.responses.delete(reply.id)
    for call in (
        client.responses.retrieve,
        client.responses.delete,
        client.responses.input_items.list,
    ):
        with pytest.raises(openai.NotFoundError, match="not found"):
            call(reply.id)
    with pytest.raises(openai.BadRequestError) as caught:
        respond(server, previous_response_id=reply.id)
    assert caught.value.code == "previous_response_not_found"
    assert caught.value.param == "previous_response_id"


def test_what_is_not_stored_is_not_there(server: Running) -> None:
    reply = respond(server, store=False)
    assert reply.store is False
    with pytest.raises(openai.NotFoundError):
        server.openai().responses.retrieve(reply.id)


def test_a_store_that_fails_costs_no_reply(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise StoreError("no space")

    monkeypatch.setattr(server.engine.conversations, "add", full)
    reply = respond(server)
    assert (reply.status, reply.output_text, reply.store) == ("completed", REPLY, False)
    monkeypatch.setattr(server.engine.conversations, "get", full)
    with pytest.raises(openai.InternalServerError) as caught:
        server.openai().responses.retrieve(reply.id)
    assert caught.value.status_code == 503


@pytest.fixture(scope="module")
def keyed(model_dir: Path) -> Iterator[Running]:
    with running(model_dir, ServerConfig(port=0, api_key=("one", "two"), grace=0.5)) as value:
        yield value


def test_another_tenants_responses_do_not_exist(keyed: Running) -> None:
    mine = respond(keyed, key="one")
    theirs = keyed.openai("two")
    for call in (theirs.responses.retrieve, theirs.responses.delete, theirs.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            call(mine.id)
    with pytest.raises(openai.BadRequestError) as caught:
        respond(keyed, key="two", previous_response_id=mine.id)
    assert caught.value.code == "previous_response_not_found"
    assert keyed.openai("one").responses.retrieve(mine.id).id == mine.id


def test_conversations_survive_a_restart_with_their_ids(model_dir: Path, tmp_path: Path) -> None:
    with running(model_dir, conversations=Conversations(tmp_path)) as server:
        server.engine.reply = [i for c in REPLY for i in server.tokenizer.encode(c)]
        first = respond(server, "one")
    with running(model_dir, conversations=Conversations(tmp_path)) as server:
        assert server.openai().responses.retrieve(first.id).output_text == REPLY
        second = respond(server, "two", previous_response_id=first.id)
        prompt = list(server.engine.requests[-1].prompt)
        ids = [i for c in REPLY for i in server.tokenizer.encode(c)]
        start = usage(first)["input_tokens"]
        assert prompt[start : start + len(ids)] == ids  # the memory of replies was empty
        assert second.status == "completed"


def test_a_damaged_database_costs_conversations_and_nothing_else(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running(model_dir, conversations=Conversations(tmp_path)) as server:
        first = respond(server, "one")
    (tmp_path / FILE).write_bytes(b"x" * 8192)
    with caplog.at_level(logging.WARNING, "afterglow.store"):
        conversations = Conversations(tmp_path)
    assert "was damaged" in caplog.text
    with running(model_dir, conversations=conversations) as server:
        with pytest.raises(openai.BadRequestError, match="not found"):
            respond(server, "two", previous_response_id=first.id)
        assert respond(server, "two").store is True
    with closing(sqlite3.connect(tmp_path / FILE)) as db:
        assert db.execute("SELECT COUNT(*) FROM responses").fetchone() == (1,)


# -------------------------------------------------------------------------------------------------- streams


def test_the_order_of_events(server: Running) -> None:
    events = list(respond(server, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events[4:-4]) == REPLY
    assert events[-4].text == events[-3].part.text == REPLY
    done = events[-1].response
    assert (done.status, done.output_text) == ("completed", REPLY)
    assert events[0].response.status == "in_progress"
    assert events[0].response.usage is None
    assert {event.item_id for event in events[3:-2]} == {done.output[0].id}
    assert server.openai().responses.retrieve(done.id).model_dump() == done.model_dump()


def test_a_stream_is_server_sent_events(server: Running) -> None:
    with server.http() as http:
        lines = http.post(URL, json={"input": "hi", "stream": True, "max_output_tokens": 1}).text.split("\n\n")
    for block in filter(None, lines):
        event, data = block.split("\n")
        assert event == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert event == "event: response.incomplete"


def test_the_packages_own_accumulation(server: Running) -> None:
    with server.openai().responses.stream(model="fake-model", input="hi") as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == REPLY
    assert final.usage is not None
    second = server.openai().responses.create(model="fake-model", input="more", previous_response_id=final.id)
    assert second.previous_response_id == final.id


def test_a_failure_in_mid_stream_is_an_event(server: Running) -> None:
    server.engine.fail = "the disk caught fire"
    events = list(respond(server, stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.status == "failed"
    assert events[-1].response.error.message == "the disk caught fire"
    server.engine.fail = "again"
    with pytest.raises(openai.InternalServerError, match="again"):
        respond(server)


def test_a_bug_in_mid_stream_is_an_event_too(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(server.tokenizer, "remember", broken)
    events = list(respond(server, stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.message == "internal error"


def test_a_failure_in_mid_stream_has_its_code_and_what_there_was(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: object) -> None:
        raise RequestError("too ambiguous", code="invalid_grammar")

    monkeypatch.setattr(server.tokenizer, "remember", refused)
    failed = list(respond(server, stream=True))[-1].response
    assert (failed.error.code, failed.error.message) == ("invalid_grammar", "too ambiguous")
    assert failed.output[0].content[0].text == REPLY


def test_leaving_a_stream_early_cancels_and_stores_nothing(model_dir: Path) -> None:
    with running(model_dir, step_seconds=0.01) as server:
        stream = respond(server, stream=True, extra_body={"ignore_eos": True})
        events = [next(iter(stream)) for _ in range(6)]
        stream.close()
        wait_for(lambda: server.engine.cancelled)
        wait_for(lambda: server.engine.in_flight == 0)
        with pytest.raises(openai.NotFoundError):
            server.openai().responses.retrieve(events[0].response.id)


def test_hanging_up_without_a_stream_cancels(model_dir: Path) -> None:
    with running(model_dir, hold=True) as server:

        async def main() -> None:
            async with httpx.AsyncClient(base_url=server.url) as http:
                sent = asyncio.ensure_future(http.post(URL, json={"input": "hi"}))
                while not server.engine.in_flight:
                    await asyncio.sleep(0.005)
                sent.cancel()
                await asyncio.gather(sent, return_exceptions=True)

        asyncio.run(main())
        wait_for(lambda: len(server.engine.cancelled) == 1)
        assert server.engine.conversations.count("") == (0, 0)


def test_a_server_that_ends_fails_its_streams(model_dir: Path) -> None:
    with running(model_dir, step_seconds=0.05) as server:
        stream = respond(server, stream=True, extra_body={"ignore_eos": True})
        next(iter(stream))
        server.service.stop()
        assert list(stream)[-1].type == "response.failed"


# ----------------------------------------------------------------------------------------------- truncation


def test_a_conversation_that_outgrows_the_context(server: Running) -> None:
    """512 tokens: refused by default, and cut by turns where that was asked for."""
    reply = respond(server, instructions="Be brief.", input="the mill " * 60)
    system = server.tokenizer.encode_chat([{"role": "system", "content": "Be brief."}], add_generation_prompt=False).ids
    for _ in range(3):
        with pytest.raises(openai.BadRequestError) as caught:
            for _ in range(9):
                last = respond(server, "the river " * 30, previous_response_id=reply.id, instructions="Be brief.")
                reply = last
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.param == "input"
    cut = respond(server, "the river " * 30, previous_response_id=reply.id, instructions="Be brief.", truncation="auto")
    assert (cut.status, cut.truncation) == ("completed", "auto")
    request = server.engine.requests[-1]
    said = usage(cut)["truncation"]
    assert request.truncation
    assert said["dropped_tokens"] + said["kept_tokens"] == len(request.prompt) > 512 - 64
    assert usage(cut)["input_tokens"] == said["kept_tokens"] <= 512
    assert said["reused"] in (True, False)
    assert "note" not in said
    assert list(request.prompt[: request.turns[0]]) == system
    for row in request.turns:
        assert server.tokenizer.decode(list(request.prompt[row:]), False).startswith("<|im_start|>user\n")
    again = respond(server, "so?", previous_response_id=cut.id, instructions="Be brief.", truncation="auto")
    assert usage(again)["truncation"]["dropped_tokens"] >= said["dropped_tokens"]


def test_what_fits_is_not_cut(server: Running) -> None:
    reply = respond(server, truncation="auto")
    assert reply.output_text == REPLY
    request = server.engine.requests[-1]
    assert (request.truncation, request.turns) == (True, ())
    assert "truncation" not in usage(reply)


def test_a_reply_longer_than_the_context_is_refused_even_so(server: Running) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        respond(server, truncation="auto", max_output_tokens=512)
    assert (caught.value.param, caught.value.code) == ("max_output_tokens", "context_length_exceeded")


def long_chat(count: int = 12) -> list[dict[str, str]]:
    pairs = [
        ({"role": "user", "content": f"{n} the mill " * 9}, {"role": "assistant", "content": "yes"})
        for n in range(count)
    ]
    return [*(message for pair in pairs for message in pair), {"role": "user", "content": "so?"}]


def test_chat_is_cut_where_it_asks_for_that(server: Running) -> None:
    with server.http() as http:
        refused = http.post("/v1/chat/completions", json={"messages": long_chat()})
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        cut = http.post("/v1/chat/completions", json={"messages": long_chat(), "truncation": "auto", "n": 2}).json()
        assert cut["usage"]["truncation"]["dropped_tokens"] > 0
        assert cut["usage"]["prompt_tokens"] == cut["usage"]["truncation"]["kept_tokens"]
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        text = http.post("/v1/chat/completions", json={"messages": long_chat(), "truncation": "auto", **stream}).text
        assert '"dropped_tokens"' in text
        bad = http.post("/v1/chat/completions", json={"messages": long_chat(1), "truncation": "always"})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "truncation")
        bad = http.post("/v1/completions", json={"prompt": "Ada", "truncation": "auto"})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "truncation")
        assert http.post("/v1/completions", json={"prompt": "Ada", "truncation": "disabled"}).status_code == 200


def test_the_server_may_cut_chats_by_default(model_dir: Path) -> None:
    config = ServerConfig(port=0, grace=0.5, chat_truncation="auto")
    with running(model_dir, config) as server, server.http() as http:
        cut = http.post("/v1/chat/completions", json={"messages": long_chat()}).json()
        assert cut["usage"]["truncation"]["dropped_tokens"] > 0
        refused = http.post("/v1/chat/completions", json={"messages": long_chat(), "truncation": "disabled"})
        assert refused.status_code == 400


def test_a_template_without_turns_says_so(model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = "{% for m in messages %}{{ loop.index ~ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    folder = toys.byte_level(tmp_path / "m", template=source)
    with caplog.at_level(logging.WARNING, "afterglow.server"), running(folder) as server, server.http() as http:
        messages = [{"role": "system", "content": "Be brief."}, *long_chat()]
        for _ in range(2):
            cut = http.post("/v1/chat/completions", json={"messages": messages, "truncation": "auto"}).json()
        said = cut["usage"]["truncation"]
        assert said["note"].startswith("not cut between turns: this model's chat template")
        turns = server.engine.requests[-1].turns
        assert len(turns) == 1
        kept = server.tokenizer.decode(list(server.engine.requests[-1].prompt[: turns[0]]))
        assert kept.startswith("1system: Be brief.")
    assert caplog.text.count("are left out instead") == 1


# ---------------------------------------------------------------------------------------------- wrong input

BAD: list[tuple[dict[str, Any], str, str]] = [
    ({}, "input", "string or a list"),
    ({"input": []}, "input", "at least one item"),
    ({"input": 5}, "input", "string or a list"),
    ({"input": ["hi"]}, "input[0]", "is 'hi'"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].arguments", "JSON in a string, got null"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "'item_reference'"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "got 'tool'"),
    ({"input": [{"role": "user"}]}, "input[0].content", "got null"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]", "'input_image'"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0]", "input_text"),
    ({"input": [{"role": "user", "content": ["x"]}]}, "input[0].content[0]", "is 'x'"),
    ({"input": "x", "max_output_tokens": 0}, "max_output_tokens", "1 or more, got 0"),
    ({"input": "x", "max_output_tokens": 10**6}, "max_output_tokens", "512 tokens"),
    ({"input": "x", "truncation": "always"}, "truncation", "got 'always'"),
    ({"input": "x", "temperature": 7000}, "temperature", "between 0 and 100"),
    ({"input": "x", "metadata": {"a": 5}}, "metadata", "string"),
    ({"input": "x", "metadata": {"k" * 65: "v"}}, "metadata", "at most 16 pairs"),
    ({"input": "x", "metadata": {str(n): "v" for n in range(17)}}, "metadata", "at most 16 entries"),
    ({"input": "x", "previous_response_id": "resp_nothing"}, "previous_response_id", "not found"),
    ({"input": "x", "previous_response_id": 5}, "previous_response_id", "string"),
    ({"input": "x", "background": True}, "background", "not supported"),
    ({"input": "x", "conversation": "conv_1"}, "conversation", "not supported"),
    ({"input": "x", "prompt": {"id": "p"}}, "prompt", "not supported"),
    ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search'; only functions are supported"),
    ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema", "null"),
    ({"input": "x", "text": {"verbosity": "low"}}, "text.verbosity", "not supported"),
    ({"input": "x", "include": ["message.output_text.logprobs"]}, "include", "not supported"),
    ({"input": "x", "top_logprobs": 3}, "top_logprobs", "not supported"),
    ({"input": "x", "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "cannot set messages"),
    ({"input": "x", "store": "yes"}, "store", "bool"),
    ({"input": "x", "instructions": 5}, "instructions", "string"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "says"), BAD)
def test_bad_values_name_the_field(server: Running, body: dict[str, Any], param: str, says: str) -> None:
    before = len(server.engine.requests)
    with server.http() as http:
        answer = http.post(URL, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert says in error["message"]
    assert len(server.engine.requests) == before


def test_a_complaint_of_the_template_is_about_the_input(tmp_path: Path) -> None:
    with running(toys.byte_level(tmp_path / "m", template=toys.INST)) as server, server.http() as http:
        answer = http.post(URL, json={"input": "hi", "instructions": "Be brief."})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
    assert "Only user and assistant roles are supported!" in answer.json()["error"]["message"]


def test_bad_queries(server: Running) -> None:
    reply = respond(server)
    with server.http() as http:
        for path, param in (
            (f"{reply.id}?stream=true", "stream"),
            (f"{reply.id}/input_items?limit=0", "limit"),
            (f"{reply.id}/input_items?limit=many", "limit"),
            (f"{reply.id}/input_items?limit={'9' * 5000}", "limit"),
            (f"{reply.id}/input_items?limit=000000001{'0' * 5000}", "limit"),
            (f"{reply.id}/input_items?limit=0000000011", "limit"),
            (f"{reply.id}/input_items?order=up", "order"),
            (f"{reply.id}/input_items?after=msg_x", "after"),
        ):
            answer = http.get(f"{URL}/{path}")
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert http.get(f"{URL}/resp_nothing").status_code == 404
        assert http.get(URL).status_code == 405


def test_many_at_once_do_not_mix(server: Running) -> None:
    """Chains side by side, each on its own."""
    failures: list[object] = []

    def chain(number: int) -> None:
        previous = None
        for turn in range(3):
            reply = respond(server, f"chain {number} turn {turn}", previous_response_id=previous)
            previous = reply.id
        listed = server.openai().responses.input_items.list(previous, order="asc", limit=100)
        said = [item.content[0].text for item in listed if item.role == "user"]  # type: ignore[union-attr,index]
        if said != [f"chain {number} turn {turn}" for turn in range(3)]:
            failures.append(said)

    threads = [threading.Thread(target=chain, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []
