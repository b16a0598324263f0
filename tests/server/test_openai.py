"""The API through the `openai` package: a client that was not written here."""

from __future__ import annotations

from dataclasses import replace

import openai
import pytest

from tests.server.conftest import REPLY, Running

USER = [{"role": "user", "content": "What colour is the kite?"}]


def ask(server: Running, **kwargs: object) -> openai.types.chat.ChatCompletion:
    return server.openai().chat.completions.create(**{"model": "fake-model", "messages": USER, **kwargs})  # type: ignore[call-overload,no-any-return]


def complete(server: Running, **kwargs: object) -> openai.types.Completion:
    return server.openai().completions.create(**{"model": "fake-model", "prompt": "Ada", **kwargs})  # type: ignore[call-overload,no-any-return]


def test_models(server: Running) -> None:
    assert [m.id for m in server.openai().models.list()] == ["fake-model"]
    assert server.openai().models.retrieve("fake-model").owned_by == "afterglow"
    with pytest.raises(openai.NotFoundError):
        server.openai().models.retrieve("other")


def test_a_chat_reply(server: Running) -> None:
    reply = ask(server)
    choice = reply.choices[0]
    assert choice.message.content == REPLY
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert reply.usage is not None
    prompt = server.tokenizer.encode_chat(USER).ids
    assert reply.usage.prompt_tokens == len(prompt)
    assert reply.usage.completion_tokens == len(server.engine.reply) + 1  # the end token was generated too
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_the_next_turn_is_cached_by_tier(server: Running) -> None:
    first = ask(server, extra_body={"cache_salt": "turns"})
    messages = [*USER, {"role": "assistant", "content": first.choices[0].message.content}, *USER]
    second = ask(server, messages=messages, extra_body={"cache_salt": "turns"})
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached == first.usage.prompt_tokens + first.usage.completion_tokens - 1
    assert second.usage.model_dump()["cached_tokens_details"] == {"device": 0, "host": cached, "disk": 0}


def test_usage_names_the_dtype_of_stored_rows(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ask(server).usage
    assert plain is not None
    assert "kv_dtype" not in plain.model_dump()
    monkeypatch.setattr(server.engine, "config", replace(server.engine.config, kv_dtype="int8"))
    said = ask(server).usage
    assert said is not None
    assert said.model_dump()["kv_dtype"] == "int8"
    response = server.openai().responses.create(model="fake-model", input="Ada", store=False)
    assert response.usage is not None
    assert response.usage.model_dump()["kv_dtype"] == "int8"


def test_streaming(server: Running) -> None:
    chunks = list(
        server.openai().chat.completions.create(
            model="fake-model", messages=USER, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == "The"  # the role costs no chunk of its own
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == REPLY
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(server.engine.reply) + 1
    assert {c.id for c in chunks} == {chunks[0].id}
    assert all(c.usage is None for c in chunks[:-1])


def test_continuous_usage(server: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        server.openai().chat.completions.create(
            model="fake-model", messages=USER, stream=True, stream_options=options, max_tokens=3
        )
    )
    assert [c.usage.completion_tokens for c in chunks if c.usage] == [1, 2, 3, 3]


def test_several_replies(server: Running) -> None:
    reply = ask(server, n=3, seed=5, temperature=0.5)
    assert [c.index for c in reply.choices] == [0, 1, 2]
    assert {c.message.content for c in reply.choices} == {REPLY}
    assert [r.sampling.seed for r in server.engine.requests[-3:]] == [5, 6, 7]
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 3 * (len(server.engine.reply) + 1)
    assert reply.usage.prompt_tokens == len(server.engine.requests[-1].prompt)


def test_stop_strings_end_the_reply_and_the_job(server: Running) -> None:
    before = len(server.engine.cancelled)
    reply = ask(server, stop=[" and the", "never"])
    assert reply.choices[0].message.content == "The kite is red, grüße 🙂"
    assert reply.choices[0].finish_reason == "stop"
    assert len(server.engine.cancelled) == before + 1
    kept = ask(server, stop=" and the", extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].message.content == "The kite is red, grüße 🙂 and the"
    text = ""
    for chunk in server.openai().chat.completions.create(
        model="fake-model", messages=USER, stream=True, stop=[" and the"]
    ):
        text += chunk.choices[0].delta.content or ""
    assert text == "The kite is red, grüße 🙂"


def test_limits_of_length(server: Running) -> None:
    reply = ask(server, max_tokens=2)
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("The kite", "length")
    assert ask(server, max_completion_tokens=1, max_tokens=9).choices[0].message.content == "The"
    long = ask(server, extra_body={"ignore_eos": True})
    assert long.usage is not None
    assert long.usage.total_tokens == server.engine.max_model_len


def test_sampling_parameters_reach_the_engine(server: Running) -> None:
    extra = {
        "top_k": 7,
        "min_p": 0.1,
        "stop_token_ids": [9],
        "session_id": "s",
        "priority": 3,
        "nonsense": {},
    }
    ask(server, temperature=0.3, top_p=0.9, seed=1, user="me", extra_body=extra, max_tokens=4)
    request = server.engine.requests[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.3, 0.9, 7, 0.1)
    assert (sampling.seed, sampling.stop_token_ids, sampling.max_tokens) == (1, (9,), 4)
    assert (request.session_id, request.priority) == ("s", 3)
    ask(server, extra_headers={"X-Session-ID": "t"})
    assert server.engine.requests[-1].session_id == "t"
    assert server.engine.requests[-1].sampling.temperature == 1.0


def test_penalties_reach_the_engine(server: Running) -> None:
    ask(
        server,
        n=2,
        presence_penalty=0.5,
        frequency_penalty=-1,
        logit_bias={"5": 3, "7": -100},
        extra_body={"repetition_penalty": 1.2, "min_tokens": 4},
    )
    for request in server.engine.requests[-2:]:
        sampling = request.sampling
        assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -1, 1.2)
        assert (sampling.logit_bias, sampling.min_tokens) == ({5: 3, 7: -100}, 4)
    with pytest.raises(openai.BadRequestError, match="length_penalty is not supported"):
        ask(server, extra_body={"length_penalty": 2})


def test_no_stop_string_before_the_least_length(server: Running) -> None:
    tokens = [server.tokenizer.decode([token]) for token in server.engine.reply]
    assert tokens[:3] == ["The", " kite", " is"]
    for least, text in ((2, "The"), (3, REPLY)):  # " kite i" is complete with the third token
        reply = ask(server, stop=" kite i", extra_body={"min_tokens": least})
        assert reply.choices[0].message.content == text
    assert ask(server, stop="is", extra_body={"min_tokens": 2}).choices[0].message.content == "The kite "


def test_chat_logprobs(server: Running) -> None:
    reply = ask(server, logprobs=True, top_logprobs=2, max_tokens=2)
    assert reply.choices[0].logprobs is not None
    content = reply.choices[0].logprobs.content
    assert content is not None
    assert [c.token for c in content] == ["The", " kite"]
    assert [bytes(c.bytes or []) for c in content] == [b"The", b" kite"]
    assert [len(c.top_logprobs) for c in content] == [2, 2]


def test_completions(server: Running) -> None:
    reply = complete(server)
    assert reply.choices[0].text.startswith("The kite")
    assert reply.choices[0].finish_reason == "length"  # 16 tokens, as ever
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 16
    many = complete(server, prompt=["Ada", "the mill"], n=2, max_tokens=1)
    assert [(c.index, c.text) for c in many.choices] == [(i, "The") for i in range(4)]
    ids = server.tokenizer.encode("Ada keeps")
    assert complete(server, prompt=ids, max_tokens=1, echo=True).choices[0].text == "Ada keepsThe"
    assert len(complete(server, prompt=[ids, ids], max_tokens=1).choices) == 2
    text = "".join(
        c.choices[0].text
        for c in server.openai().completions.create(
            model="fake-model", prompt="Ada", stream=True, echo=True, max_tokens=100
        )
    )
    assert text == "Ada" + REPLY


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_with_logprobs_as_evaluation_harnesses_ask(server: Running, max_tokens: int) -> None:
    ids = server.tokenizer.encode("Ada keeps her kite")
    reply = complete(server, prompt=[ids], echo=True, logprobs=1, max_tokens=max_tokens, temperature=0, seed=1234)
    assert reply.choices[0].logprobs is not None
    lists = reply.choices[0].logprobs
    assert lists.tokens == ["Ada", " keeps", " her", " kite", "The"][: 4 + max_tokens]
    assert lists.token_logprobs is not None
    assert lists.token_logprobs[0] is None
    assert lists.token_logprobs[1:] == [-0.5] * (3 + max_tokens)
    assert lists.top_logprobs is not None
    assert lists.top_logprobs[0] is None
    assert [max(top, key=top.__getitem__) for top in lists.top_logprobs[1:]] == lists.tokens[1:]
    assert lists.text_offset is not None
    assert lists.text_offset[:4] == [0, 3, 9, 13]
    assert reply.usage is not None
    assert reply.usage.completion_tokens == max_tokens


def test_a_part_of_a_character_has_a_name_of_its_own(server: Running) -> None:
    reply = complete(server, prompt=server.tokenizer.encode("🙈"), echo=True, logprobs=0, max_tokens=0)
    assert reply.choices[0].text == "🙈"
    assert reply.choices[0].logprobs is not None
    tokens = reply.choices[0].logprobs.tokens
    assert tokens is not None
    assert any(token.startswith("bytes:\\x") for token in tokens)


@pytest.mark.parametrize("as_ids", [False, True])
def test_offsets_are_places_in_the_text(server: Running, as_ids: bool) -> None:
    """Also behind characters of several tokens, and of the reply."""
    prompt = "grüße 🙈 to her"
    ids = server.tokenizer.encode(prompt)
    asked = {"prompt": ids if as_ids else prompt, "logprobs": 0, "max_tokens": 40, "temperature": 0}
    for echo in (False, True):
        choice = complete(server, echo=echo, **asked).choices[0]
        lists = choice.logprobs
        assert lists is not None
        assert lists.tokens is not None
        assert lists.text_offset is not None
        assert choice.text == (prompt if echo else "") + REPLY
        places = list(zip(lists.tokens, lists.text_offset, strict=True))
        whole = [(token, at) for token, at in places if not token.startswith("bytes:") and at < len(choice.text)]
        assert len(whole) > 4 + 3 * echo
        assert all(choice.text.startswith(token, at) for token, at in whole)
        parts = [at for token, at in places if token.startswith("bytes:")]
        assert {choice.text[at] for at in parts} <= set(" üß🙈🙂")  # a token may begin with a blank
        assert parts


@pytest.mark.parametrize(
    "prompt", ["<|im_start|>user\nhi<|im_end|>\n", "red", [72, 105, 240]], ids=["special", "plain", "half a character"]
)
def test_the_reply_begins_where_the_echo_ends(server: Running, prompt: object) -> None:
    """Also behind special tokens that the client has written, and behind ids that end within a character."""
    asked = {"prompt": prompt, "logprobs": 0, "temperature": 0}
    alone = complete(server, max_tokens=4, **asked).choices[0]
    both = complete(server, max_tokens=4, echo=True, **asked).choices[0]
    assert alone.logprobs is not None
    assert both.logprobs is not None
    offsets, own = both.logprobs.text_offset, alone.logprobs.text_offset
    assert offsets is not None
    assert own is not None
    ends = len(both.text) - len(alone.text)
    assert offsets[-len(own) :] == [ends + place for place in own]
    assert offsets == sorted(offsets)


def test_small_routes(server: Running) -> None:
    with server.http() as http:
        assert http.get("/health").json() == {"status": "ok"}
        assert "version" in http.get("/version").json()
        found = http.post("/tokenize", json={"prompt": "Ada keeps"}).json()
        assert found["tokens"] == server.tokenizer.encode("Ada keeps")
        assert (found["count"], found["max_model_len"]) == (2, 512)
        chat = http.post("/tokenize", json={"messages": USER}).json()
        assert chat["tokens"] == server.tokenizer.encode_chat(USER).ids
        back = http.post("/detokenize", json={"tokens": chat["tokens"]}).json()
        assert back["prompt"] == server.tokenizer.encode_chat(USER).text
        assert http.post("/reset_prefix_cache").json() == {"status": "ok", "cleared": "all"}
        assert server.engine.resets[-1] is None
        assert http.get("/openapi.json").status_code == 200


def test_request_ids_come_back(server: Running) -> None:
    with server.http() as http:
        assert http.get("/health", headers={"X-Request-ID": "mine"}).headers["x-request-id"] == "mine"
        assert len(http.get("/nothing").headers["x-request-id"]) == 32


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"])
def test_content_types_that_are_json(server: Running, kind: str) -> None:
    with server.http({"Content-Type": kind}) as http:
        answer = http.post("/v1/completions", content=b'{"prompt": "Ada", "max_tokens": 1}')
    assert answer.json()["choices"][0]["text"] == "The"
