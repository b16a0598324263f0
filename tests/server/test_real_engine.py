"""The server on the real engine and the bundled model: what the fake cannot show."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from afterglow.config import CacheConfig, EngineConfig
from afterglow.engine.engine import Engine
from afterglow.request import Request, SamplingParams
from afterglow.server.api.openapi import document
from afterglow.server.lifecycle.service import Service
from afterglow.server.server_config import ServerConfig
from afterglow.text import Tokenizer
from tests.engine.stepping import hold_from
from tests.waiting import wait_for

BUNDLED = Path(__file__).parents[2] / "src/afterglow/assets/model"
pytestmark = pytest.mark.skipif(not (BUNDLED / "config.json").is_file(), reason="no bundled model here")

FACT = {"role": "user", "content": "My name is Ada. I keep the red kite in the old mill near the river."}


@dataclass
class Real:
    engine: Engine
    client: openai.OpenAI

    def chat(self, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        return self.client.chat.completions.create(model="afterglow", messages=messages, temperature=0, **kwargs)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    cache = CacheConfig(
        device_cache=64 << 20,
        host_cache=64 << 20,
        disk_cache=64 << 20,
        cache_dir=tmp_path_factory.mktemp("cache"),
    )
    engine = Engine.load(BUNDLED, EngineConfig(threads=1, cache=cache))
    engine.start()
    config = ServerConfig(port=0, grace=0.5, served_model_name=("afterglow",))
    service = Service(engine, Tokenizer(BUNDLED), config, BUNDLED)
    thread = threading.Thread(target=service.run, kwargs={"signals": False})
    thread.start()
    wait_for(lambda: service.started)
    with openai.OpenAI(base_url=f"{service.address}/v1", api_key="none", max_retries=0) as client:
        yield Real(engine, client)
    service.stop()
    thread.join(20)
    engine.close()


def cached(reply: Any) -> dict[str, int]:
    return dict(reply.usage.model_dump()["cached_tokens_details"])


def test_a_conversation_is_cached_but_for_its_new_tokens(real: Real) -> None:
    messages: list[dict[str, Any]] = [FACT]
    salt = {"cache_salt": "conversation"}
    before = 0
    for turn in range(4):
        reply = real.chat(messages, max_tokens=12, extra_body=salt)
        real.engine.settle()
        usage = reply.usage
        assert usage.prompt_tokens_details.cached_tokens == before
        assert sum(cached(reply).values()) == before
        before = usage.prompt_tokens + usage.completion_tokens - 1  # the last token was never fed
        messages += [
            {"role": "assistant", "content": reply.choices[0].message.content},
            {"role": "user", "content": f"And what about number {turn}?"},
        ]


def test_a_salt_hides_everything(real: Real) -> None:
    for salt, expected in (("one", 0), ("two", 0)):
        reply = real.chat([FACT], max_tokens=2, extra_body={"cache_salt": salt})
        assert sum(cached(reply).values()) == expected
    real.engine.settle()
    again = real.chat([FACT], max_tokens=2, extra_body={"cache_salt": "one"})
    assert sum(cached(again).values()) == again.usage.prompt_tokens - 1


def test_streams_side_by_side_equal_single_requests(real: Real) -> None:
    prompts = [[{**FACT, "content": FACT["content"] * n}] for n in (1, 2, 3)] * 2
    single = [real.chat(p, max_tokens=16).choices[0].message.content for p in prompts[:3]]
    found: dict[int, str] = {}

    def run(number: int) -> None:
        chunks = real.chat(prompts[number], max_tokens=16, stream=True)
        found[number] = "".join(c.choices[0].delta.content or "" for c in chunks)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[n] for n in range(6)] == single * 2


def test_leaving_frees_the_engine(real: Real, monkeypatch: pytest.MonkeyPatch) -> None:
    hold_from(real.engine, 20, monkeypatch)
    stream = real.chat([FACT], max_tokens=1500, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    wait_for(lambda: real.engine.stats().plan.running == 1)
    stream.close()
    wait_for(lambda: real.engine.stats().plan.running == 0)


def test_loglikelihoods_equal_those_of_transformers(real: Real) -> None:
    """As an evaluation harness asks: token ids, echo, one token that is dropped again."""
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer(BUNDLED)
    texts = ["My name is Ada. I keep the red kite", "The mill is near the river, and the boat is blue."]
    prompts = [tokenizer.encode(text) for text in texts]
    model = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32).eval()
    # Twice: cached rows must not change the numbers.
    for _ in range(2):
        reply = real.client.completions.create(
            model="afterglow", prompt=prompts, echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234
        )
        for ids, choice in zip(prompts, reply.choices, strict=True):
            assert choice.logprobs is not None
            assert choice.logprobs.token_logprobs is not None
            assert choice.logprobs.tokens is not None
            assert choice.logprobs.top_logprobs is not None
            got = choice.logprobs.token_logprobs[:-1]
            assert len(got) == len(ids)
            assert got[0] is None
            with torch.no_grad():
                wanted = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)
            for row, token in enumerate(ids[1:]):
                assert got[row + 1] == pytest.approx(wanted[row, token].item(), abs=1e-3)
                top = choice.logprobs.top_logprobs[row + 1]
                greedy = max(top, key=top.__getitem__) == choice.logprobs.tokens[row + 1]
                assert greedy == (wanted[row].argmax().item() == token)


def test_zero_tokens_only_fill_the_cache(real: Real) -> None:
    reply = real.client.completions.create(
        model="afterglow", prompt="The boat is blue and the mill is old.", max_tokens=0
    )
    assert reply.choices[0].text == ""
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 0


def test_resetting_forgets(real: Real) -> None:
    real.chat([FACT], max_tokens=1)
    real.engine.settle()
    assert sum(cached(real.chat([FACT], max_tokens=1)).values()) > 0
    real.engine.settle()
    real.client.post("../reset_prefix_cache", cast_to=object)
    real.engine.settle()
    assert sum(cached(real.chat([FACT], max_tokens=1)).values()) == 0


def test_why_tokens_were_computed(real: Real) -> None:
    """Cached and missed tokens are the whole prompt, and misses have a reason; but never that other tenants have the rows."""
    text = "Please keep in mind that the blue lantern stands on the shelf behind the wooden door. " * 6

    def ask(content: str, salt: str, **more: Any) -> Any:
        reply = real.chat([{"role": "user", "content": content}], max_tokens=2, extra_body={"cache_salt": salt, **more})
        usage = reply.usage.model_dump()
        missed = usage["missed_tokens_details"]
        assert sum(missed.values()) + sum(usage["cached_tokens_details"].values()) == usage["prompt_tokens"]
        real.engine.settle()
        return missed

    (first,) = ask(text, "why").items()
    assert first[0] == "cold"
    assert ask(text, "why") == {"cold": 1}  # the last token of a prompt is always computed
    assert ask(text, "another tenant") == {"cold": first[1]}
    real.engine.reset_cache()
    assert set(ask(text, "why")) == {"deleted"}


def test_nothing_is_said_of_prompts_that_have_not_begun(real: Real) -> None:
    """In the first chunks of several prompts, those that wait count as nothing, not as recomputed."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    prompts = [f"{word} is a word of its own" for word in ("Zinc", "Yarn", "Xylem")]
    chunks = list(
        real.client.completions.create(
            model="afterglow",
            prompt=prompts,
            max_tokens=3,
            stream=True,
            stream_options=options,
            extra_body={"cache_salt": "first"},
        )
    )
    usages = [chunk.usage.model_dump() for chunk in chunks if chunk.usage is not None]
    assert all(usage["missed_tokens_details"].keys() == {"cold"} for usage in usages)
    missed = [usage["missed_tokens_details"]["cold"] for usage in usages]
    assert missed == sorted(missed)
    assert missed[-1] == usages[-1]["prompt_tokens"]


def test_the_reason_is_in_responses_too(real: Real) -> None:
    reply = real.client.responses.create(model="afterglow", input="a word that is quite new", max_output_tokens=2)
    usage = reply.usage.model_dump()  # type: ignore[union-attr]
    assert (
        sum(usage["missed_tokens_details"].values()) + usage["input_tokens_details"]["cached_tokens"]
        == usage["input_tokens"]
    )


def test_how_long_a_request_waited(real: Real) -> None:
    """Its parts, as the metrics have them, are the whole: the queue, the prefill, the decode."""
    outputs: list[Any] = []
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    blocker = Request("long", list(range(5, 900)), SamplingParams(max_tokens=1, temperature=0), reuse=False)
    real.engine.submit(blocker, lambda output: None)
    done = threading.Event()

    def sink(output: Any) -> None:
        outputs.append(output)
        if output.finish_reason is not None:
            done.set()

    real.engine.submit(Request("short", [5, 6, 7], params, reuse=False), sink)
    assert done.wait(20)
    assert outputs[0].waited > 0
    assert {output.waited for output in outputs} == {outputs[0].waited}


def twice() -> int:
    """A token that, generated twice, yields a text that the tokenizer turns into one token."""
    tokenizer = Tokenizer(BUNDLED)
    for token in range(tokenizer.vocab_size):
        text = tokenizer.decode([token, token])
        if text.isalpha() and len(tokenizer.encode(text, add_special_tokens=False)) == 1:
            return token
    raise AssertionError("every text has the tokens that it was generated as")


def test_a_reply_that_comes_back_as_text_may_have_other_tokens(real: Real) -> None:
    """Why two servers may count one conversation differently: one remembers which tokens a reply was generated as, the
    other tokenises its text, in which byte pairs may merge. Each is right about the tokens that it was given."""
    token = twice()
    forced = {"cache_salt": "one", "logit_bias": {str(token): 100}, "ignore_eos": True, "return_token_ids": True}
    first = real.chat([FACT], max_tokens=2, extra_body=forced)
    assert first.choices[0].token_ids == [token, token]
    messages = [
        FACT,
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "Where is the kite?"},
    ]
    told = {}
    for salt, how in (("one", {"spliced": 1, "retokenised": 0}), ("other", {"spliced": 0, "retokenised": 1})):
        more = {"cache_salt": salt, "return_token_ids": True}
        answer = real.chat(messages, max_tokens=8, logprobs=True, extra_body=more)
        assert answer.usage.model_dump()["replies_details"] == how
        assert len(answer.prompt_token_ids) == answer.usage.prompt_tokens
        replay = {"return_token_ids": True, "cache_salt": f"replay of {salt}"}
        again = real.client.completions.create(
            model="afterglow",
            prompt=answer.prompt_token_ids,
            max_tokens=8,
            temperature=0,
            logprobs=0,
            extra_body=replay,
        )
        assert again.choices[0].model_dump()["token_ids"] == answer.choices[0].token_ids
        logprobs = [entry.logprob for entry in answer.choices[0].logprobs.content]
        assert again.choices[0].logprobs is not None
        assert again.choices[0].logprobs.token_logprobs == pytest.approx(logprobs, abs=1e-4)
        told[salt] = answer.prompt_token_ids
    assert len(told["one"]) == len(told["other"]) + 1
    at = len(first.prompt_token_ids)
    assert told["one"][:at] == told["other"][:at]
    assert told["one"][at + 2 :] == told["other"][at + 1 :], "only the reply differs"
    real.client.post("../reset_prefix_cache", cast_to=object)
    forgotten = real.chat(messages, max_tokens=1, extra_body={"cache_salt": "one", "return_token_ids": True})
    assert forgotten.prompt_token_ids == told["other"]


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_told_where_they_are_asked_for(real: Real, stream: bool) -> None:
    text = {"model": "afterglow", "prompt": "Please keep in mind", "max_tokens": 4, "temperature": 0}
    plain = real.client.completions.create(**text).model_dump()  # type: ignore[call-overload]
    assert "token_ids" not in plain["choices"][0]
    body = {**text, "stream": stream, "extra_body": {"return_token_ids": True}}
    made = real.client.completions.create(**body)  # type: ignore[call-overload]
    chunks = [chunk.choices[0].model_dump() for chunk in (made if stream else [made])]
    tokenizer = Tokenizer(BUNDLED)
    assert chunks[0]["prompt_token_ids"] == tokenizer.encode("Please keep in mind")
    generated = [token for chunk in chunks for token in chunk["token_ids"]]
    assert tokenizer.decode(generated) == plain["choices"][0]["text"]
    chat = real.chat([FACT], max_tokens=4, stream=stream, extra_body={"return_token_ids": True})
    found = [chunk.model_dump() for chunk in (chat if stream else [chat])]
    assert found[0]["prompt_token_ids"] == tokenizer.encode_chat([FACT]).ids
    assert sum(len(chunk["choices"][0]["token_ids"]) for chunk in found) == 4
    response = real.client.responses.create(
        model="afterglow", input=FACT["content"], max_output_tokens=4, extra_body={"return_token_ids": True}
    ).model_dump()
    assert response["prompt_token_ids"] == found[0]["prompt_token_ids"]
    assert len(response["token_ids"]) == response["usage"]["output_tokens"]
    stored = real.client.responses.retrieve(response["id"]).model_dump()
    assert "token_ids" not in stored, "it is no part of the response"


@pytest.mark.parametrize("name", ["temperature", "presence_penalty", "priority", "kv_retention", "n", "top_logprobs"])
def test_the_largest_values_are_as_openapi_json_says(real: Real, name: str) -> None:
    (said,) = [one for one in document(keys=False)["components"]["schemas"]["ChatBody"]["properties"][name]["anyOf"]
               if one["type"] != "null"]  # fmt: skip
    most = said["maximum"]
    hi = [{"role": "user", "content": "hi"}]
    real.client.chat.completions.create(
        model="afterglow", messages=hi, max_tokens=1, extra_body={"logprobs": True, name: most}
    )
    with pytest.raises(openai.BadRequestError) as refused:
        real.client.chat.completions.create(
            model="afterglow", messages=hi, max_tokens=1, extra_body={"logprobs": True, name: most + 1}
        )
    assert refused.value.param == name
