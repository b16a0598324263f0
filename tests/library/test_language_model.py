"""The library on the bundled model: batches, streams, conversations, limits."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from afterglow import (
    CacheConfig,
    ConfigError,
    EngineConfig,
    LanguageModel,
    Request,
    RequestError,
    SamplingParams,
    load_model,
)
from afterglow.library.locate import BUNDLED
from afterglow.request import Breakpoint, Grammar

GREEDY = SamplingParams(max_tokens=8, temperature=0)
CONFIG = EngineConfig(
    cache=CacheConfig(device_cache=2**28, host_cache=2**27, disk_cache=0), max_model_len=256, threads=1
)
FACT = [{"role": "user", "content": "My favorite color is teal. I live in Lisbon."}]


@pytest.fixture(scope="module")
def model() -> Iterator[LanguageModel]:
    with load_model(BUNDLED, config=CONFIG) as loaded:
        yield loaded


def test_texts_and_requests_go_in_one_batch_and_come_back_in_order(model: LanguageModel) -> None:
    ids = model.tokenizer.encode("The boat is")
    replies = model.generate(["I live in", Request("one", ids, replace(GREEDY, max_tokens=3)), "The boat is"], GREEDY)
    assert [len(reply.tokens) for reply in replies] == [8, 3, 8]
    assert replies[1].tokens == replies[2].tokens[:3]
    assert replies[2].text.startswith(replies[1].text)
    for reply in replies:
        assert reply.finish_reason == "length"
        assert reply.text == model.tokenizer.decode(reply.tokens)
        assert reply.cached.total + reply.missed.tokens > 0


def test_a_stop_string_ends_one_reply_of_a_batch_and_cancels_it(model: LanguageModel) -> None:
    (whole,) = model.generate("I live in Lisbon. I", replace(GREEDY, max_tokens=32))
    stop = whole.text[3:6]
    cut, other = model.generate(["I live in Lisbon. I", "The mill is"], replace(GREEDY, max_tokens=200), stop=[stop])
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert len(cut.tokens) < 32
    assert other.finish_reason in ("length", "stop")
    model.engine.settle()
    assert model.engine.stats().plan.running == 0


def test_log_probabilities_come_with_each_token(model: LanguageModel) -> None:
    (reply,) = model.generate("The boat is", replace(GREEDY, logprobs=2))
    assert [found.token for found in reply.logprobs] == list(reply.tokens)
    assert all(found.rank == 1 and len(found.top) == 2 and found.logprob <= 0 for found in reply.logprobs)


def test_a_stream_yields_the_text_piece_by_piece(model: LanguageModel) -> None:
    (whole,) = model.generate("The boat is", GREEDY)
    reply = model.stream("The boat is", GREEDY)
    seen = ""
    for piece in reply:
        seen += piece
        assert reply.text == seen
    assert reply.ended
    assert seen == whole.text == reply.completion.text
    assert reply.completion.tokens == whole.tokens


def test_leaving_a_stream_cancels_the_request(model: LanguageModel) -> None:
    reply = model.stream("The boat is", replace(GREEDY, max_tokens=200, ignore_eos=True))
    pieces = iter(reply)
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    model.engine.settle()
    assert not reply.ended
    assert reply.completion.finish_reason == "cancelled"
    assert len(reply.tokens) < 200


def test_a_reply_is_generated_once(model: LanguageModel) -> None:
    reply = model.stream("The boat is", GREEDY)
    first = next(iter(reply))
    with pytest.raises(RequestError, match="was begun already"):
        "".join(reply)
    assert reply.text.startswith(first)
    whole = model.stream("The boat is", GREEDY)
    text = "".join(whole)
    assert ("".join(whole), whole.text) == ("", text), "one that has ended has nothing more to tell"


def test_prompts_may_come_from_a_generator(model: LanguageModel) -> None:
    prompts = ["The boat is", "The mill is"]
    made = model.generate((each for each in prompts), GREEDY)  # type: ignore[arg-type]
    assert [each.tokens for each in made] == [each.tokens for each in model.generate(prompts, GREEDY)]


def test_a_conversation_finds_the_turn_before_with_the_generated_ids(model: LanguageModel) -> None:
    first = model.chat(FACT, GREEDY, salt="a conversation")
    longer = [*FACT, {"role": "assistant", "content": first.text}, {"role": "user", "content": "Where do I live?"}]
    spliced = model.tokenizer.spliced
    second = model.chat(longer, GREEDY, salt="a conversation")
    assert model.tokenizer.spliced == spliced + 1
    before = len(model.tokenizer.encode_chat(FACT).ids)
    assert second.cached.total >= before
    assert model.chat(longer, GREEDY, salt="another").cached.total == 0


def test_a_conversation_that_outgrows_the_context_is_truncated_or_refused(model: LanguageModel) -> None:
    long = [{"role": "user", "content": "I live in Lisbon. " * 12}, {"role": "assistant", "content": "Noted."}] * 6
    messages = [*long, {"role": "user", "content": "Where do I live?"}]
    reply = model.chat(messages, GREEDY, truncation=True)
    assert reply.truncation is not None
    assert reply.truncation.dropped > 0
    with pytest.raises(RequestError, match="maximum context length is 256 tokens") as refused:
        model.chat(messages, GREEDY)
    assert refused.value.code == "context_length_exceeded"


def test_a_reply_is_no_longer_than_the_context_has_room_for(model: LanguageModel) -> None:
    prompt = "I live in Lisbon. " * 40
    size = len(model.tokenizer.encode(prompt))
    assert size < 256
    (reply,) = model.generate(prompt, replace(GREEDY, max_tokens=4096, ignore_eos=True))
    assert len(reply.tokens) == 256 - size
    with pytest.raises(RequestError, match="maximum context length is 256 tokens"):
        model.generate("I live in Lisbon. " * 80, GREEDY)


def test_one_bad_request_cancels_those_of_its_call(model: LanguageModel) -> None:
    good = Request("good", model.tokenizer.encode("The boat is"), replace(GREEDY, max_tokens=200, ignore_eos=True))
    with pytest.raises(RequestError, match="outside the vocabulary"):
        model.generate([good, Request("bad", [10**6], GREEDY)])
    model.engine.settle()
    (again,) = model.generate(replace(good, sampling=GREEDY))  # its id is free again
    assert len(again.tokens) == 8


def test_threads_share_the_engine(model: LanguageModel) -> None:
    expected = model.generate(["The boat is", "I live in"], GREEDY)
    found: dict[int, str] = {}

    def work(number: int) -> None:
        (reply,) = model.generate(["The boat is", "I live in"][number % 2], GREEDY)
        found[number] = reply.text

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: expected[number % 2].text for number in range(6)}


def test_texts_become_vectors_of_unit_length(model: LanguageModel) -> None:
    found = model.embed(["A cat sat.", "The boat is blue."])
    assert found.vectors.shape[0] == 2
    assert (found.vectors.norm(dim=1) - 1).abs().max() < 1e-5


def test_a_closed_model_refuses(tmp_path: Path) -> None:
    with load_model(BUNDLED, config=CONFIG) as closed:
        pass
    with pytest.raises(RequestError):
        closed.generate("The boat is")


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        (CacheConfig, {"host_cache": "8G"}, "host_cache must be int, got '8G'"),
        (CacheConfig, {"cache_dir": 5}, "cache_dir must be Path or nothing, got 5"),
        (CacheConfig, {"ttl": True}, "ttl must be float or nothing, got True"),
        (EngineConfig, {"max_batch": "8"}, "max_batch must be int or nothing, got '8'"),
        (EngineConfig, {"cache": None}, "cache must be CacheConfig, got None"),
    ],
)
def test_a_setting_of_another_type_is_named(kind: type, given: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        kind(**given)


def test_a_folder_may_be_text_and_a_number_whole() -> None:
    assert CacheConfig(cache_dir="kv", ttl=5).cache_dir == Path("kv")  # type: ignore[arg-type]


BAD_SAMPLING: list[tuple[dict[str, object], str]] = [
    ({"max_tokens": 3.5}, "max_tokens must be a whole number, got 3.5"),
    ({"max_tokens": "3"}, "max_tokens must be a whole number, got '3'"),
    ({"temperature": None}, "temperature must be a number, got None"),
    ({"logprobs": 1.5}, "logprobs must be a whole number, or None, got 1.5"),
    ({"prompt_logprobs": 1.5}, "prompt_logprobs must be a whole number, or None, got 1.5"),
    ({"seed": 1.5}, "seed must be a whole number, or None, got 1.5"),
    ({"min_tokens": 2.5}, "min_tokens must be a whole number, got 2.5"),
    ({"stop_token_ids": 5}, "stop_token_ids must be token ids, got 5"),
    ({"stop_token_ids": ("a",)}, "stop_token_ids must be token ids, got ('a',)"),
    ({"logit_bias": {"a": 1.0}}, "got 1.0 for token a"),
    ({"grammar": "x"}, "grammar must be a Grammar, or None, got 'x'"),
    ({"ignore_eos": "no"}, "ignore_eos must be True or False, got 'no'"),
    ({"temperature": 10**400}, "temperature must be between 0 and 100"),
]
BAD_REQUESTS: list[tuple[dict[str, object], str]] = [
    ({"ttl_s": "3600"}, "ttl_s must be a number, or None, got '3600'"),
    ({"ttl_s": float("nan")}, "ttl_s must be 0 or more, got nan"),
    ({"kv_retention": "x"}, "kv_retention must be a number, or None, got 'x'"),
    ({"priority": "x"}, "priority must be a whole number, got 'x'"),
    ({"salt": None}, "salt must be text, got None"),
    ({"session_id": 5}, "session_id must be text, or None, got 5"),
    ({"breakpoints": (5,)}, "breakpoints must be of Breakpoint, got (5,)"),
    ({"sampling": {}}, "sampling must be a SamplingParams, got {}"),
    ({"truncation": "no"}, "truncation must be True or False, got 'no'"),
    ({"turns": (2.5,)}, "turns must be numbers of rows, got (2.5,)"),
    ({"discard": ((1.5, 2.5),)}, "discard must be pairs of rows, where each begins and ends, got ((1.5, 2.5),)"),
    ({"discard": (5,)}, "discard must be pairs of rows, where each begins and ends, got (5,)"),
    ({"prompt": b"abcd"}, "prompt must be token ids, got b'abcd'"),
    ({"prompt": set(range(999))}, "prompt must be a sequence, got {0, 1, 2, 3,"),
]


@pytest.mark.parametrize(("given", "says"), BAD_SAMPLING)
def test_a_sampling_parameter_of_another_type_is_named(given: dict[str, object], says: str) -> None:
    with pytest.raises(RequestError, match=re.escape(says)):
        SamplingParams(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(("given", "says"), BAD_REQUESTS)
def test_a_field_of_another_type_is_named(given: dict[str, object], says: str) -> None:
    with pytest.raises(RequestError, match=re.escape(says)):
        Request("a", **({"prompt": [1]} | given))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make", [lambda: Breakpoint(2.5), lambda: Breakpoint("2"), lambda: Breakpoint(2, "3"), lambda: Grammar("regex", 5)]
)
def test_parts_of_another_type_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(RequestError, match="must be"):
        make()


@pytest.mark.parametrize("ids", [["a"], [1.5], [-1], [2**40], [1, None]])
def test_ids_that_are_none_are_named_and_hurt_nobody(ids: list[object], model: LanguageModel) -> None:
    bad = next(each for each in ids if each != 1)
    with pytest.raises(RequestError, match=re.escape(f"token id {bad!r} is outside the vocabulary")):
        model.generate(Request("bad", ids, GREEDY))  # type: ignore[arg-type]
    assert len(model.generate("The boat is", GREEDY)[0].tokens) == 8


def test_one_stop_string_may_be_given_by_itself(model: LanguageModel) -> None:
    (whole,) = model.generate("I live in Lisbon. I", replace(GREEDY, max_tokens=32))
    stop = whole.text[3:6]
    for given in (stop, [stop]):
        (cut,) = model.generate("I live in Lisbon. I", replace(GREEDY, max_tokens=32), stop=given)
        assert cut.text == whole.text[: whole.text.index(stop)]
    (none,) = model.generate("I live in Lisbon. I", replace(GREEDY, max_tokens=32), stop=None)
    assert none.text == whole.text
    for bad in ([5], 5, {"a": 1}):
        with pytest.raises(RequestError, match=re.escape(f"stop must be text, or a sequence of texts, got {bad}")):
            model.generate("I live in", stop=bad)  # type: ignore[arg-type]


def test_one_text_may_be_embedded_by_itself(model: LanguageModel) -> None:
    alone, listed = model.embed("cat"), model.embed(["cat"])
    assert alone.vectors.shape[0] == 1
    assert alone.vectors.tolist() == listed.vectors.tolist()
    for bad in ([""], ["cat", 5]):
        with pytest.raises(RequestError, match=re.escape(f"texts[{len(bad) - 1}] must be a text that is not empty")):
            model.embed(bad)  # type: ignore[arg-type]
    long = "the cat sat on the mat " * 600
    with pytest.raises(RequestError, match=r"texts\[1\] has \d+ tokens.*truncate=\d+"):
        model.embed(["cat", long])
    with pytest.raises(RequestError, match=r"truncate: 1 tokens leave no room"):
        model.embed(long, truncate=1)
    assert model.embed(text for text in ["cat"]).vectors.shape[0] == 1  # type: ignore[arg-type]
    assert model.embed(["cat", long], truncate=64).tokens == model.embed("cat").tokens + 64


def test_a_reply_that_has_ended_is_not_asked_for_again(model: LanguageModel) -> None:
    reply = model.stream("I live in", replace(GREEDY, max_tokens=3))
    text, ids = "".join(reply), list(reply.tokens)
    assert list(reply) == []
    assert (reply.text, reply.tokens) == (text, ids)


def test_what_is_no_configuration_or_prompt_is_refused(model: LanguageModel) -> None:
    with pytest.raises(ConfigError, match="its field `cache`"):
        load_model(config=CacheConfig())  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="token ids go into a Request"):
        model.generate([[1, 2, 3]])  # type: ignore[list-item]


def test_a_reply_that_was_cut_off_goes_on_as_if_it_had_not_been(model: LanguageModel) -> None:
    whole = model.chat(FACT, replace(GREEDY, max_tokens=12), salt="whole")
    first = model.chat(FACT, replace(GREEDY, max_tokens=3), salt="cut")
    model.engine.settle()
    said = [*FACT, {"role": "assistant", "content": first.text}]
    rest = model.chat(said, replace(GREEDY, max_tokens=9), salt="cut", continue_final_message=True)
    assert (*first.tokens, *rest.tokens) == whole.tokens
    assert first.text + rest.text == whole.text
    assert rest.missed.tokens == 1, "the last token of the first part was never fed"
