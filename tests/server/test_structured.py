"""Replies in a form, over HTTP, in each field that a client may ask for one with; random weights, so any form was enforced."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from afterglow.config import CacheConfig, EngineConfig
from afterglow.engine.engine import Engine
from afterglow.server.lifecycle.service import Service
from afterglow.server.server_config import ServerConfig
from afterglow.text import Tokenizer
from tests.structured_model import random_model
from tests.waiting import wait_for

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
STRICT = {"type": "json_schema", "json_schema": {"name": "kite", "strict": True, "schema": SCHEMA}}
TAGS = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}


@dataclass
class Served:
    http: httpx.Client
    openai: openai.OpenAI
    engine: Engine

    def text(self, path: str, **body: Any) -> str:
        """The text of a reply to a body that was accepted."""
        asked = {CHAT: {"messages": [{"role": "user", "content": "A kite?"}]}, COMPLETIONS: {"prompt": "A kite"}}
        limit = {"max_output_tokens": 200} if path == RESPONSES else {"max_tokens": 200}
        answer = self.http.post(path, json={**asked.get(path, {"input": "A kite?"}), **limit, "seed": 1, **body})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        if path == RESPONSES:
            assert found["status"] == "completed"
            return str(found["output"][0]["content"][0]["text"])
        (choice,) = found["choices"]
        assert choice["finish_reason"] == "stop"
        return str(choice["message"]["content"] if path == CHAT else choice["text"])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = random_model(tmp_path_factory.mktemp("random"))
    cache = CacheConfig(device_cache=2**26, host_cache=2**26, disk_cache=0)
    engine = Engine.load(folder, EngineConfig(threads=1, cache=cache))
    engine.start()
    service = Service(engine, Tokenizer(folder), ServerConfig(port=0, grace=0.5), folder)
    thread = threading.Thread(target=service.run, kwargs={"signals": False})
    thread.start()
    wait_for(lambda: service.started)
    with (
        httpx.Client(base_url=service.address, timeout=60) as http,
        openai.OpenAI(base_url=f"{service.address}/v1", api_key="none", max_retries=0) as client,
    ):
        yield Served(http, client, engine)
    service.stop()
    thread.join(20)
    engine.close()


def is_kite(text: str) -> bool:
    value = json.loads(text)
    return value.keys() == {"colour", "count"} and value["colour"] in ("red", "blue") and 0 <= value["count"] <= 99


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA, "disable_fallback": True}},
        {"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}},
    ],
    ids=["object", "text", "outputs", "compact"],
)
def test_vllms_fields_for_schemas(served: Served, path: str, fields: dict[str, Any]) -> None:
    assert is_kite(served.text(path, **fields))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
@pytest.mark.parametrize(
    ("kind", "given", "pattern"),
    [
        ("regex", "[a-c]{2,4}", "[a-c]{2,4}"),
        ("choice", ["red kite", "blue boat"], "red kite|blue boat"),
        ("grammar", 'start: "kite" | "boat"', "kite|boat"),
        ("grammar", 'root ::= "kite" | "boat"', "kite|boat"),
    ],
)
def test_vllms_other_fields(served: Served, path: str, kind: str, given: Any, pattern: str) -> None:
    assert re.fullmatch(pattern, served.text(path, **{f"guided_{kind}": given}))
    assert re.fullmatch(pattern, served.text(path, structured_outputs={kind: given}))


def test_openais_fields(served: Served) -> None:
    assert is_kite(served.text(CHAT, response_format=STRICT))
    assert is_kite(served.text(COMPLETIONS, response_format=STRICT))
    assert is_kite(served.text(RESPONSES, text={"format": {"type": "json_schema", "name": "kite", "schema": SCHEMA}}))
    free = served.text(CHAT, response_format={"type": "text"}, min_tokens=9, logit_bias={"2": 100})  # then the end
    assert free == served.text(CHAT, min_tokens=9, logit_bias={"2": 100})


def test_json_mode_gives_an_object(served: Served) -> None:
    greedy = {"temperature": 0}
    assert isinstance(json.loads(served.text(CHAT, response_format={"type": "json_object"}, **greedy)), dict)
    assert isinstance(json.loads(served.text(CHAT, structured_outputs={"json_object": True}, **greedy)), dict)
    assert isinstance(json.loads(served.text(RESPONSES, text={"format": {"type": "json_object"}}, **greedy)), dict)


class Kite(BaseModel):
    """A kite, as a client describes it."""

    colour: Literal["red", "blue"]
    sizes: list[int] = Field(max_length=3)


def test_openais_client_parses_replies(served: Served) -> None:
    messages: Any = [{"role": "user", "content": "A kite?"}]
    chat = served.openai.chat.completions.parse(
        model="", messages=messages, response_format=Kite, seed=1, max_tokens=300, extra_body={"model": None}
    )
    assert isinstance(chat.choices[0].message.parsed, Kite)
    response = served.openai.responses.parse(
        model="", input="A kite?", text_format=Kite, max_output_tokens=300, extra_body={"seed": 1, "model": None}
    )
    assert isinstance(response.output_parsed, Kite)
    assert response.text.format is not None
    assert response.text.format.type == "json_schema"


def test_streams_and_several_choices(served: Served) -> None:
    stream = served.openai.chat.completions.create(
        model="",
        messages=[{"role": "user", "content": "A kite?"}],
        response_format=STRICT,  # type: ignore[arg-type]
        n=4,
        stream=True,
        temperature=1.5,
        seed=3,
        max_tokens=200,
        extra_body={"model": None},
    )
    texts, ends = [""] * 4, [""] * 4
    for chunk in stream:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        ends[choice.index] += choice.finish_reason or ""
    assert ends == ["stop"] * 4
    assert all(map(is_kite, texts))
    assert len(set(texts)) > 1


def test_a_reply_that_is_cut_says_so(served: Served) -> None:
    body = {"messages": [{"role": "user", "content": "A kite?"}], "response_format": STRICT, "max_tokens": 3}
    choice = served.http.post(CHAT, json=body).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].startswith("{")
    made = served.http.post(RESPONSES, json={"input": "x", "guided_json": SCHEMA, "max_output_tokens": 3}).json()
    assert (made["status"], made["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


def test_logprobs_of_forbidden_tokens_are_left_out(served: Served) -> None:
    body = {"prompt": "A kite", "guided_choice": ["red kite", "blue boat"], "logprobs": 5, "temperature": 0}
    found = served.http.post(COMPLETIONS, json=body).json()["choices"][0]["logprobs"]
    assert {name[0] for name in found["top_logprobs"][0]} == {"r", "b"}


SCHEMA_FIELD = "response_format.json_schema.schema"
DEEP: dict[str, Any] = {}
for _ in range(40):
    DEEP = {"properties": {"a": DEEP}}
DEEP_PATH = ("guided_json" + ".properties.a" * 20)[:200] + "..."


@pytest.mark.parametrize(
    ("path", "fields", "param", "said"),
    [
        (CHAT, {"response_format": 3}, "response_format", "valid object"),
        (CHAT, {"response_format": {}}, "response_format.type", "null"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "with a schema"),
        (CHAT, {"response_format": {**STRICT, "json_schema": {"name": "x"}}}, SCHEMA_FIELD, "must be a JSON schema"),
        (
            CHAT,
            {"response_format": {**STRICT, "json_schema": {"name": 3, "schema": {}}}},
            "response_format.json_schema.name",
            "a string",
        ),
        (
            CHAT,
            {"response_format": {**STRICT, "json_schema": {"strict": "yes", "schema": {}}}},
            "response_format.json_schema.strict",
            "true or false",
        ),
        (
            CHAT,
            {"response_format": {**STRICT, "json_schema": {"schema": TAGS}}},
            f"{SCHEMA_FIELD}.properties.tags.uniqueItems",
            "'uniqueItems' cannot be enforced",
        ),
        (RESPONSES, {"text": {"format": {"type": "grammar"}}}, "text.format.type", "'grammar'"),
        (
            RESPONSES,
            {"text": {"format": {"type": "json_schema", "schema": TAGS}}},
            "text.format.schema.properties.tags.uniqueItems",
            "cannot be enforced",
        ),
        (RESPONSES, {"text": {"format": 3}}, "text.format", "an object"),
        (COMPLETIONS, {"guided_json": 3}, "guided_json", "a JSON schema"),
        (COMPLETIONS, {"guided_json": "{"}, "guided_json", "Expecting"),
        (COMPLETIONS, {"guided_json": "[" * 100_000}, "guided_json", "nested too deeply"),
        (COMPLETIONS, {"guided_json": TAGS}, "guided_json.properties.tags.uniqueItems", "cannot be enforced"),
        (COMPLETIONS, {"guided_regex": ""}, "guided_regex", "not empty"),
        (COMPLETIONS, {"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        (COMPLETIONS, {"guided_regex": "\ud800"}, "guided_regex", "surrogates"),
        (COMPLETIONS, {"guided_choice": []}, "guided_choice", "list of at least one text"),
        (COMPLETIONS, {"guided_choice": ["a", 1]}, "guided_choice", "list of at least one text"),
        (COMPLETIONS, {"guided_grammar": "start: nothing"}, "guided_grammar", "nothing"),
        (COMPLETIONS, {"guided_grammar": 'start: "a" | ' * 20_000}, "guided_grammar", "at most 131072 characters"),
        (COMPLETIONS, {"structured_outputs": {}}, "structured_outputs", "needs one of"),
        (COMPLETIONS, {"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex", "one form"),
        (COMPLETIONS, {"guided_regex": "a", "response_format": STRICT}, SCHEMA_FIELD, "one form"),
        (
            COMPLETIONS,
            {"structured_outputs": {"structural_tag": "{}"}},
            "structured_outputs.structural_tag",
            "not supported",
        ),
        (COMPLETIONS, {"guided_whitespace_pattern": " *"}, "guided_whitespace_pattern", "not supported"),
        (COMPLETIONS, {"guided_json": DEEP}, DEEP_PATH, "nested too deeply"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(
    served: Served, path: str, fields: dict[str, Any], param: str | None, said: str
) -> None:
    asked = {CHAT: {"messages": [{"role": "user", "content": "A kite?"}]}, COMPLETIONS: {"prompt": "A kite"}}
    body = json.dumps({**asked.get(path, {"input": "A kite?"}), **fields})
    answer = served.http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert said in error["message"]
    assert error["param"] == param
    assert served.engine.healthy


def test_a_grammar_that_breaks_in_a_reply_is_the_requests_fault(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"prompt": "A kite", "guided_regex": "[ab]{3}c{100000}", "max_tokens": 200}
    answer = served.http.post(COMPLETIONS, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "guided_regex", "invalid_grammar")
    assert "cannot follow its grammar" in error["message"]
    access = logging.getLogger("afterglow.access")
    access.addHandler(caplog.handler)
    try:
        with caplog.at_level("INFO", "afterglow.access"):
            with served.http.stream("POST", COMPLETIONS, json=body | {"stream": True}) as stream:
                last = [line for line in stream.iter_lines() if line.startswith("data: ")][-1]
            wait_for(lambda: any("failed: the reply cannot" in record.getMessage() for record in caplog.records))
    finally:
        access.removeHandler(caplog.handler)
    assert json.loads(last.removeprefix("data: "))["error"]["param"] == "guided_regex"
