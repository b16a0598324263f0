"""Every mistake gets an OpenAI-shaped error with the mistake, the value and the field; and no work is done."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from afterglow.errors import ConfigError
from afterglow.server.lifecycle.service import listen
from afterglow.server.server_config import ServerConfig
from afterglow.text import lengths
from afterglow.text.chat_template import ChatTemplate
from tests.server.conftest import Running, running
from tests.waiting import wait_for

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
ADA: dict[str, Any] = {"prompt": "Ada"}

IGNORED = {  # once: replies were other ones than asked for, without a word
    "add_generation_prompt": False,
    "allowed_token_ids": [1],
    "bad_words": ["a"],
    "chat_template": "{{ messages }}",
    "detokenize": False,
    "documents": [{"text": "a"}],
    "dry_multiplier": 0.8,
    "grammar": 'root ::= "a"',
    "json_schema": {"type": "object"},
    "logits_processors": ["a"],
    "mirostat": 2,
    "n_probs": 5,
    "prompt_logprobs": 0,
    "return_tokens_as_token_ids": True,
    "top_a": 0.2,
    "truncate_prompt_tokens": 2,
    "typical_p": 0.5,
    "xtc_probability": 0.5,
}
BAD = [
    (CHAT, {}, "messages", "messages is required"),
    (CHAT, {"messages": []}, "messages", "at least one"),
    (CHAT, {**HI, "temperature": -1}, "temperature", "between 0 and 100, got -1"),
    (CHAT, {**HI, "temperature": 1e9}, "temperature", "between 0 and 100"),
    (CHAT, {**HI, "temperature": "hot"}, "temperature", "got 'hot'"),
    (CHAT, {**HI, "top_p": 0}, "top_p", "greater than 0 and at most 1"),
    (CHAT, {**HI, "top_p": 1.5}, "top_p", "at most 1"),
    (CHAT, {**HI, "top_k": -5}, "top_k", "positive"),
    (CHAT, {**HI, "min_p": 2}, "min_p", "between 0 and 1"),
    (CHAT, {**HI, "seed": 2**70}, "seed", "64-bit|int"),
    (CHAT, {**HI, "n": 0}, "n", "between 1 and"),
    (CHAT, {**HI, "n": 10**6}, "n", "between 1 and"),
    (CHAT, {**HI, "max_tokens": -1}, "max_tokens", "0 or more"),
    (CHAT, {**HI, "max_tokens": 10**9}, "max_tokens", "512 tokens, but 10000000"),
    (CHAT, {**HI, "max_tokens": True}, "max_tokens", "max_tokens"),
    (CHAT, {**HI, "top_logprobs": 3}, "top_logprobs", "needs logprobs"),
    (
        CHAT,
        {**HI, "logprobs": True, "top_logprobs": 99},
        "top_logprobs",
        "top_logprobs must be between 0 and 20, got 99",
    ),
    (CHAT, {**HI, "max_tokens": 10**4000}, "max_tokens", "64-bit integer, got 1000"),
    (CHAT, {**HI, "seed": 10**4000}, "seed", "64-bit integer"),
    (CHAT, {**HI, "temperature": 10**4000}, "temperature", "temperature"),
    (CHAT, {**HI, "prompt_cache_retention": 10**4000}, "prompt_cache_retention", "got 1000"),
    (CHAT, {**HI, "stop_token_ids": [10**4000]}, "stop_token_ids", "64-bit integer"),
    (CHAT, {**HI, "stop_token_ids": 5}, "stop_token_ids", "valid array, got 5"),
    (CHAT, {**HI, "stream_options": []}, "stream_options", "valid object.*, got an array"),
    (CHAT, {**HI, "include_stop_str_in_output": None}, "include_stop_str_in_output", "got null"),
    (CHAT, {**HI, "n": 65}, "n", "65 replies .* queue holds 64"),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages[0].content", "got null"),
    (CHAT, {"messages": [{"role": [1], "content": "x"}]}, "messages[0].role", "got an array"),
    (CHAT, {"messages": [{"role": "user", "content": [None]}]}, "messages[0].content[0]", "is null"),
    (TEXT, {"prompt": ["a"] * 33, "n": 2}, "prompt", "66 replies .* queue holds 64"),
    (TEXT, {"prompt": [10**4000]}, "prompt", "outside the vocabulary"),
    (CHAT, {**HI, "stop": [""]}, "stop", "non-empty"),
    (CHAT, {**HI, "stop": 7}, "stop", "stop"),
    (CHAT, {**HI, "cache_salt": ""}, "cache_salt", "non-empty"),
    (CHAT, {**HI, "cache_salt": 5}, "cache_salt", "string"),
    (CHAT, {**HI, "stream_options": {"include_usage": True}}, "stream_options", "stream"),
    (CHAT, {**HI, "tools": [{"type": "function"}]}, "tools[0].function", "an object with a name, got null"),
    (CHAT, {**HI, "tool_choice": "required"}, "tool_choice", "needs tools"),
    (CHAT, {**HI, "response_format": {"type": "structural_tag"}}, "response_format.type", "'structural_tag'"),
    (CHAT, {**HI, "length_penalty": 0.5}, "length_penalty", "not supported"),
    (CHAT, {**HI, "presence_penalty": 2.5}, "presence_penalty", "between -2 and 2, got 2.5"),
    (CHAT, {**HI, "frequency_penalty": -3}, "frequency_penalty", "between -2 and 2, got -3"),
    (CHAT, {**HI, "repetition_penalty": 0}, "repetition_penalty", "greater than 0 .*, got 0"),
    (CHAT, {**HI, "logit_bias": {"x": 1}}, "logit_bias", "must be token ids, as decimal strings, got 'x'"),
    (CHAT, {**HI, "logit_bias": {"05": 1}}, "logit_bias", "got '05'"),
    (CHAT, {**HI, "logit_bias": {"9" * 5000: 1}}, "logit_bias", "must be token ids"),
    (CHAT, {**HI, "logit_bias": {"5": 100.5}}, "logit_bias", "between -100 and 100, got 100.5 for token 5"),
    (CHAT, {**HI, "logit_bias": {"5": None}}, "logit_bias", "got null"),
    (CHAT, {**HI, "logit_bias": [5]}, "logit_bias", "valid object"),
    (CHAT, {**HI, "min_tokens": -1}, "min_tokens", "0 or more, got -1"),
    (CHAT, {**HI, "min_tokens": 9, "max_tokens": 8}, "min_tokens", "at most the 8 tokens .*, got 9"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0]",
        "image",
    ),
    (CHAT, {**HI, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "cannot set messages"),
    *((CHAT, {**HI, name: value}, name, f"{name} is not supported") for name, value in IGNORED.items()),
    *((TEXT, {**ADA, name: value}, name, f"{name} is not supported") for name, value in IGNORED.items()),
    (CHAT, {**HI, "echo": True}, "echo", "echo is not supported"),
    (CHAT, {**HI, "verbosity": "high"}, "verbosity", "verbosity is not supported"),
    (CHAT, {**HI, "best_of": 3}, "best_of", "best_of must equal n"),
    (CHAT, {**HI, "max_completion_tokens": -5}, "max_completion_tokens", "max_completion_tokens must be 0 or more"),
    (CHAT, {**HI, "max_completion_tokens": 9999}, "max_completion_tokens", "9999 for the reply"),
    (CHAT, {**HI, "max_tokens": -5}, "max_tokens", "max_tokens must be 0 or more"),
    ("/v1/responses", {"input": "a", "max_output_tokens": 9999}, "max_output_tokens", "9999 for the reply"),
    (TEXT, {}, "prompt", "prompt must be a string"),
    (TEXT, {"prompt": ""}, "prompt", "empty"),
    (TEXT, {"prompt": []}, "prompt", "none may be empty"),
    (TEXT, {"prompt": [[]]}, "prompt", "none may be empty"),
    (TEXT, {"prompt": ["a", 5]}, "prompt", "prompt must be"),
    (TEXT, {"prompt": [1, -4]}, "prompt", "token id -4 is outside the vocabulary of 400"),
    (TEXT, {"prompt": [10**12]}, "prompt", "outside the vocabulary"),
    (TEXT, {**ADA, "suffix": "end"}, "suffix", "suffix is not supported"),
    (TEXT, {**ADA, "best_of": 3}, "best_of", "must equal n"),
    (TEXT, {**ADA, "logprobs": -1}, "logprobs", "between 0 and 20"),
    ("/tokenize", {}, "prompt", "either prompt or messages"),
    ("/detokenize", {}, "tokens", "tokens is required"),
    ("/detokenize", {"tokens": [1] * (2**20 + 1)}, "tokens", "at most 1048576 tokens .* got 1048577"),
    ("/tokenize", {"prompt": "x" * (2**22 + 1)}, "prompt", "at most 4194304 characters .* got 4194305"),
    ("/detokenize", {"tokens": [-1]}, "tokens", "between 0 and 399"),
]


@pytest.mark.parametrize(("path", "body", "param", "says"), BAD)
def test_bad_values_name_the_field(server: Running, path: str, body: dict[str, Any], param: str, says: str) -> None:
    before = len(server.engine.requests)
    with server.http() as http:
        answer = http.post(path, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    import re

    assert re.search(says, error["message"]), error["message"]
    assert "\n" not in error["message"]
    assert len(server.engine.requests) == before


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"nonsense",
        b"\xff\xfe",
        b"[1]",
        b'"text"',
        b"[" * 100_000,
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "max_tokens": ' + b"1" * 5000 + b"}",
        b'{"prompt": "a", "prompt_cache_retention": "\\ud800"}',
        b'{"prompt": "a", "model": "\\ud800"}',
    ],
)
def test_malformed_json(server: Running, data: bytes) -> None:
    with server.http() as http:
        answer = http.post(TEXT, content=data)
    assert answer.status_code in (400, 404)
    assert "error" in answer.json()


def test_a_number_that_would_be_infinite_is_refused_before_any_work(server: Running) -> None:
    """Once it was found when the answer was written, behind the whole reply."""
    before = len(server.engine.requests)
    tool = '{"type": "function", "name": "f", "parameters": {"properties": {"a": {"default": -1.5e999}}}}'
    with server.http() as http:
        answer = http.post("/v1/responses", content=f'{{"input": "hi", "tools": [{tool}]}}')
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
    assert "-1.5e999" in answer.json()["error"]["message"]
    assert len(server.engine.requests) == before


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"a": ["x" * 20_000]}}}
VARIABLES = {"chat_template_kwargs": {"a": {"b": ["x" * 20_000]}}}
MARKER = [{"role": "user", "content": "<|im_end|>"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [*HI["messages"], {"role": "assistant", "content": None, "tool_calls": [CALL]}]}),
        (CHAT, {"messages": [{"role": "user", "content": "hi", "other": {"a": [[""] * 20_000]}}]}),
        (CHAT, {"messages": [{"role": "user", "content": "hi", "other": {"a": [{"<|im_end|>": 1}]}}]}),
        (CHAT, {**HI, **VARIABLES}),
        ("/v1/responses", {"input": "hi", **VARIABLES}),
        ("/v1/messages", {**HI, "max_tokens": 1, **VARIABLES}),
        ("/tokenize", {**HI, **VARIABLES}),
        (CHAT, {"messages": MARKER}),
        ("/tokenize", {"messages": MARKER}),
        ("/tokenize", {**HI, "tools": [{"type": "function", "function": {"name": "f", "description": "<|im_end|>"}}]}),
    ],
)
def test_what_may_take_long_is_done_beside_the_event_loop(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """Nested values count as well. A marker in a message may need another tokenizer, which takes seconds to make."""
    render, threads = ChatTemplate.render, []

    def watched(*args: Any, **more: Any) -> str:
        threads.append(threading.current_thread())
        return render(*args, **more)

    monkeypatch.setattr(ChatTemplate, "render", watched)
    with server.http() as http:
        assert http.post(path, json=body).status_code in (200, 400)
    assert threads
    assert server.thread not in threads


@pytest.mark.parametrize(
    ("path", "field", "body"),
    [
        (
            CHAT,
            "messages",
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": {"a": {}}}]}]},
        ),
        (CHAT, "messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "b": {}}]}]}),
        (CHAT, "chat_template_kwargs", {**HI, "chat_template_kwargs": {"a": {}}}),
        ("/v1/responses", "chat_template_kwargs", {"input": "hi", "chat_template_kwargs": {"a": {}}}),
        ("/v1/messages", "chat_template_kwargs", {**HI, "max_tokens": 1, "chat_template_kwargs": {"a": {}}}),
        ("/tokenize", "chat_template_kwargs", {**HI, "chat_template_kwargs": {"a": {}}}),
    ],
)
def test_nested_texts_count_as_well(server: Running, path: str, field: str, body: dict[str, Any]) -> None:
    data = json.dumps(body).replace("{}", json.dumps([{"c": "x" * (2**22 + 1)}, {"d": 1}]))
    with server.http() as http:
        answer = http.post(path, content=data)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert f"{field}: at most 4194304 characters are tokenised at once" in error["message"]
    if path != "/v1/messages":  # Anthropic's errors have no such field
        assert error["param"] == field


def test_a_large_image_is_refused_by_name(server: Running) -> None:
    """A prompt that is too long would be cut by agents, and sent again."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 5_000_000}}
    with server.http() as http:
        answer = http.post(CHAT, json={"messages": [{"role": "user", "content": [image]}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content[0]"
    assert "of type 'image_url'" in answer.json()["error"]["message"]


def test_an_error_about_text_that_is_none(server: Running) -> None:
    body = b'{"input": [{"role": "\\ud800", "content": "hi"}]}'
    with server.http() as http:
        answer = http.post("/v1/responses", content=body)
    assert answer.status_code == 400
    assert "input[0].role must be one of" in answer.json()["error"]["message"]


def test_a_response_under_an_id_that_is_no_text_is_not_there(server: Running) -> None:
    with server.http() as http:
        answer = http.post("/v1/responses", content=b'{"input": "hi", "previous_response_id": "\\ud800"}')
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "previous_response_not_found")


def test_neutral_values_of_unsupported_fields_are_fine(server: Running) -> None:
    neutral = {
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "tools": [],
        "tool_choice": "none",
    }
    with server.http() as http:
        body = {
            **HI,
            **neutral,
            "response_format": {"type": "text"},
            "stop": None,
            "n": None,
            "temperature": None,
        }
        assert http.post(CHAT, json=body).status_code == 200


def test_unknown_routes_methods_and_models(server: Running) -> None:
    with server.http() as http:
        for path in ("/v1", "/v1/nothing", "/v1/models/other/x"):
            answer = http.get(path)
            assert answer.status_code == 404
            assert answer.json()["error"]["message"]
        assert http.get(CHAT).status_code == 405
        assert http.get(CHAT).json()["error"]["code"] == "method_not_allowed"
        answer = http.post(CHAT, json={**HI, "model": "gpt-9"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert "'gpt-9'" in answer.json()["error"]["message"]


def test_a_prompt_that_cannot_fit_names_both_numbers(server: Running) -> None:
    before = len(server.engine.requests)
    long = "the mill " * 400
    size = len(server.tokenizer.encode(long))
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai().completions.create(model="fake-model", prompt=long)
    assert caught.value.code == "context_length_exceeded"
    assert "512" in caught.value.message
    assert str(size) in caught.value.message
    with pytest.raises(openai.BadRequestError):
        server.openai().chat.completions.create(
            model="fake-model", messages=[{"role": "user", "content": long}], stream=True
        )
    assert len(server.engine.requests) == before


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": "x" * 4_000_000}),
        (TEXT, {"prompt": ["x", "x" * 1_000_000]}),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 1_000_000}]}),
        ("/v1/responses", {"input": "x" * 1_000_000}),
    ],
)
def test_what_is_too_long_for_certain_is_not_tokenised(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    monkeypatch.setattr(lengths, "encode", None)
    with server.http() as http:
        answer = http.post(path, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == next(iter(body))
    assert "512 tokens, but the prompt has" in error["message"]


def test_the_last_free_token(server: Running) -> None:
    ids = server.tokenizer.encode("Ada") * 511
    with server.http() as http:
        assert http.post(TEXT, json={"prompt": ids}).json()["usage"]["completion_tokens"] == 1
        assert http.post(TEXT, json={"prompt": ids, "max_tokens": 2}).status_code == 400
        assert http.post(TEXT, json={"prompt": ids * 2}).status_code == 400
        assert http.post(TEXT, json={"prompt": [*ids, 5]}).status_code == 400
        assert http.post(TEXT, json={"prompt": [*ids, 5], "max_tokens": 0}).status_code == 200


@pytest.fixture(scope="module")
def guarded(model_dir: Path) -> Iterator[Running]:
    config = ServerConfig(port=0, api_key=("key-one", "key-two"), max_body=2000, grace=0.5)
    with running(model_dir, config, max_queue=1, hold=True) as value:
        yield value


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer wrong", "key-one", "Basic key-one", "Bearer key-one2", "Bearer \xff"],
)
def test_wrong_keys(guarded: Running, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
    with guarded.http() as http:
        for method, path in (
            ("GET", "/metrics"),
            ("POST", "/reset_prefix_cache"),
            ("GET", "/nothing"),
            ("POST", CHAT),
        ):
            answer = http.request(method, path, headers=headers)  # type: ignore[arg-type]
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert http.get("/health", headers=headers).status_code == 200  # type: ignore[arg-type]
    assert guarded.engine.resets == []


def test_right_keys(guarded: Running) -> None:
    for key in ("key-one", "key-two"):
        assert [m.id for m in guarded.openai(key).models.list()] == ["fake-model"]


def test_bodies_that_are_too_large(guarded: Running) -> None:
    headers = {"Authorization": "Bearer key-one"}
    with guarded.http(headers=headers) as http:
        answer = http.post(TEXT, content=b"x" * 2001)
        assert answer.status_code == 413
        assert "2000 bytes" in answer.json()["error"]["message"]

        def chunks() -> Iterator[bytes]:  # no declared length: it has to be counted
            for _ in range(30):
                yield b"x" * 100

        answer = http.post(TEXT, content=chunks())
        assert answer.status_code == 413
        assert http.post(TEXT, content=b"x" * 2000).status_code == 400


def test_a_full_queue(guarded: Running) -> None:
    headers = {"Authorization": "Bearer key-one"}
    with guarded.http(headers=headers) as http, httpx.Client(base_url=guarded.url, headers=headers) as other:
        with other.stream("POST", CHAT, json={**HI, "stream": True}):
            wait_for(lambda: guarded.engine.in_flight == 1)
            answer = http.post(CHAT, json={**HI, "stream": True})
            assert answer.status_code == 429
            assert answer.json()["error"]["code"] == "queue_full"
        wait_for(lambda: guarded.engine.in_flight == 0)


def test_tenants_never_share(guarded: Running) -> None:
    """The salt that reaches the engine tells keys and clients' salts apart, and does not hold the key."""
    guarded.engine.gate.set()
    salts = []
    for key in ("key-one", "key-two"):
        for salt in (None, "s", "t"):
            guarded.openai(key).chat.completions.create(
                model="fake-model", extra_body={"cache_salt": salt} if salt else {}, max_tokens=1, **HI
            )
            salts.append(guarded.engine.requests[-1].salt)
    guarded.openai("key-one").chat.completions.create(model="fake-model", max_tokens=1, **HI)
    assert guarded.engine.requests[-1].salt == salts[0]
    assert len(set(salts)) == 6
    assert not any("key-" in salt for salt in salts)
    guarded.engine.gate.clear()


def test_without_keys_and_salt_all_share(server: Running) -> None:
    with server.http() as http:
        http.post(CHAT, json=HI)
        assert server.engine.requests[-1].salt == ""


def test_a_port_in_use_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is in use"):
            listen(ServerConfig(port=port))
    with pytest.raises(ConfigError, match="cannot listen on"):
        listen(ServerConfig(host="nowhere.invalid", port=0))


def test_defaults_of_the_model(model_dir: Path, tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "m"
    shutil.copytree(model_dir, folder)
    config = {
        "temperature": 0.6,
        "top_k": 20,
        "max_new_tokens": 3,
        "do_sample": True,
        "repetition_penalty": 1.1,
    }
    (folder / "generation_config.json").write_text(json.dumps(config))
    with running(folder) as server, server.http() as http:
        assert http.post(CHAT, json=HI).json()["usage"]["completion_tokens"] == 3
        sampling = server.engine.requests[-1].sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 20, 1.0)
        assert sampling.repetition_penalty == 1.1
        assert http.post(CHAT, json={**HI, "max_tokens": 5, "temperature": 0}).json()["usage"]["completion_tokens"] == 5
