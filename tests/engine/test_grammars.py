"""Replies that must follow a grammar: on an engine with random weights, which knows no language at all."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from afterglow import CacheConfig, EngineConfig, LanguageModel, RequestError, SamplingParams, load_model
from afterglow.engine.grammars import compiler
from afterglow.engine.grammars.compiler import Grammars, find_offending
from afterglow.request import Completion, Grammar, Request
from tests.structured_model import random_model

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PLACES = [" the mill", " kite", "river"]
REGEX = Grammar("regex", "[a-f]{3,8}")
CHOICE = Grammar("choice", json.dumps(PLACES))
SCHEMA = Grammar("json_schema", json.dumps(PERSON))
COMPACT = Grammar("json_schema", json.dumps(PERSON), compact=True)
LARK = Grammar("grammar", 'start: "a" b*\nb: "x" | "y"')
GBNF = Grammar("grammar", 'root ::= "a" [0-9]+')


def follows(grammar: Grammar, text: str) -> bool:
    """Check a whole reply by other means than the library's."""
    if grammar.kind == "json_schema":
        value = json.loads(text)
        assert isinstance(value["name"], str)
        assert type(value["age"]) is int
        assert set(value["tags"]) <= {"red", "blue"}
        spaces = re.search(r"[ \n\t]", re.sub(r'"[^"]*"', "", text))
        return value.keys() == PERSON["properties"].keys() and not (grammar.compact and spaces)
    patterns = {REGEX: "[a-f]{3,8}", CHOICE: " the mill| kite|river", LARK: "a[xy]*", GBNF: "a[0-9]+"}
    return re.fullmatch(patterns[grammar], text) is not None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LanguageModel]:
    cache = CacheConfig(device_cache=2**26, host_cache=2**26, disk_cache=0)
    folder = random_model(tmp_path_factory.mktemp("random"))
    with load_model(folder, EngineConfig(cache=cache, threads=1)) as loaded:
        yield loaded


def ask(model: LanguageModel, grammar: Grammar | None, max_tokens: int = 300, **sampling: Any) -> Completion:
    params = SamplingParams(max_tokens=max_tokens, grammar=grammar, **sampling)
    (reply,) = model.generate("The kite", params)
    return reply


@pytest.mark.parametrize("grammar", [REGEX, CHOICE, SCHEMA, COMPACT, LARK, GBNF], ids=lambda g: g.kind)
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {"seed": 1},
        {"seed": 2, "ignore_eos": True},
        {"seed": 3, "min_tokens": 40, "logprobs": 3},
        {"seed": 4, "repetition_penalty": 1.3, "presence_penalty": 1.0, "top_k": 5, "top_p": 0.9},
        {"seed": 5, "temperature": 5.0, "logit_bias": {65: 100.0}},
    ],
    ids=lambda sampling: "-".join(sampling),
)
def test_a_reply_that_ends_follows_its_grammar(
    model: LanguageModel, grammar: Grammar, sampling: dict[str, Any]
) -> None:
    reply = ask(model, grammar, **sampling)
    if reply.finish_reason == "stop":
        assert follows(grammar, reply.text), reply.text
    else:
        assert grammar in (LARK, GBNF), "all others have a longest text"
        assert sampling.keys() & {"ignore_eos", "min_tokens", "temperature", "logit_bias", "seed"}


def test_max_tokens_may_end_a_reply_inside_of_json(model: LanguageModel) -> None:
    whole, cut = ask(model, SCHEMA, seed=1), ask(model, SCHEMA, max_tokens=9, seed=1)
    assert cut.finish_reason == "length"
    assert (whole.tokens[:9], len(cut.tokens)) == (cut.tokens, 9)
    with pytest.raises(ValueError):
        json.loads(cut.text)


def test_the_first_mask_is_the_tokens_that_begin_a_choice(model: LanguageModel) -> None:
    grammars = Grammars(model.engine.vocab_size, model.engine.eos_token_ids)
    grammars.use_tokenizer(model.tokenizer.serialized)
    constraint = grammars.constraint(SamplingParams(grammar=CHOICE))
    assert constraint is not None
    constraint.compute()
    texts = [model.tokenizer.token_bytes(token) for token in range(model.engine.vocab_size)]
    begins = [bool(text) and any(c.encode().startswith(text) for c in PLACES) for text in texts]
    assert sum(begins) > 2
    assert (~constraint.forbidden).tolist() == begins


def test_requests_of_one_batch_get_the_tokens_that_they_get_alone(model: LanguageModel) -> None:
    """Constrained ones and others, greedy ones and seeded ones."""
    kinds: Sequence[Grammar | None] = [None, SCHEMA, None, REGEX, None, COMPACT, CHOICE, None, SCHEMA]
    made = [
        SamplingParams(max_tokens=60, temperature=number % 3, seed=number, grammar=grammar, ignore_eos=True)
        for number, grammar in enumerate(kinds)
    ]
    prompts = [model.tokenizer.encode(f"The {number} kites") for number in range(len(made))]

    def requests(name: str) -> list[Request]:
        return [Request(f"{name}-{n}", p, s) for n, (p, s) in enumerate(zip(prompts, made, strict=True))]

    together = model.generate(requests("together"))
    alone = [model.generate(request)[0] for request in requests("alone")]
    assert [reply.tokens for reply in together] == [reply.tokens for reply in alone]


@pytest.mark.parametrize("limits", [{}, {"minimum": 5}, {"exclusiveMaximum": 0}], ids=str)
def test_an_integer_without_limits_ends(model: LanguageModel, limits: dict[str, int]) -> None:
    """Not by the model's own doing: a random one would write digits until the reply is full."""
    schema = {"type": "object", "properties": {"n": {"type": "integer", **limits}}, "required": ["n"]}
    grammar = Grammar("json_schema", json.dumps({**schema, "additionalProperties": False}), compact=True)
    for seed in range(6):
        reply = ask(model, grammar, max_tokens=40, temperature=3.0, seed=seed)
        assert reply.finish_reason == "stop"
        number = json.loads(reply.text)["n"]
        assert limits.get("minimum", 1 - 2**53) <= number <= limits.get("exclusiveMaximum", 2**53) - 1


def test_log_probabilities_are_over_the_tokens_that_are_permitted(model: LanguageModel) -> None:
    reply = ask(model, CHOICE, temperature=0, logprobs=20)
    first = reply.logprobs[0]
    assert reply.tokens[0] == first.token
    total = sum(2.718281828459045**value for _, value in first.top)
    assert total == pytest.approx(
        1, abs=1e-5
    )  # float32 log-probabilities of fewer than 20 tokens that may begin a choice
    assert {model.tokenizer.decode([token])[0] for token, _ in first.top} == {" ", "r"}


def test_an_end_token_of_the_request_comes_where_the_grammar_may_end(model: LanguageModel) -> None:
    (x,) = model.tokenizer.encode("x")
    for seed in range(8):
        reply = ask(model, LARK, max_tokens=40, seed=seed, stop_token_ids=(x,))
        assert reply.tokens[0] != x
        assert reply.finish_reason == "length" or re.fullmatch("ay*", reply.text)


@pytest.mark.parametrize(
    ("grammar", "param", "said"),
    [
        (Grammar("regex", "("), "grammar", "unclosed group"),
        (Grammar("regex", "a(?=b)"), "grammar", "look-around"),
        (Grammar("regex", r"(a)\1"), "grammar", "backreferences"),
        (Grammar("regex", "(" * 5000 + ")" * 5000), "grammar", "regular expression"),
        (Grammar("regex", "a" * 200_000), "grammar", "at most 131072 characters"),
        (Grammar("choice", "[]"), "grammar", "at least one text"),
        (Grammar("choice", '["a", 3]'), "grammar", "at least one text"),
        (Grammar("choice", '["a"'), "grammar", "delimiter"),
        (Grammar("grammar", "start: foo"), "grammar", "foo"),
        (Grammar("grammar", "start: start"), "grammar", "no text satisfies it"),
        (Grammar("grammar", "start: " + "(" * 5000), "grammar", "deeply nested"),
        (Grammar("json_schema", '{"type": "obj'), "grammar", "Unterminated"),
        (Grammar("json_schema", "[1]"), "grammar", "an object"),
        (Grammar("json_schema", '{"x-guidance": {"lenient": true}}'), "grammar.x-guidance", "not accepted"),
        (Grammar("json_schema", '{"a":' * 3000 + "1" + "}" * 3000), "grammar", "recursion"),
    ],
    ids=lambda value: str(getattr(value, "text", ""))[:20],
)
def test_a_grammar_that_cannot_be_enforced_is_refused(
    model: LanguageModel, grammar: Grammar, param: str, said: str
) -> None:
    with pytest.raises(RequestError, match=re.escape(said)) as caught:
        ask(model, grammar)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, "invalid_grammar")
    assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize(
    ("part", "path"),
    [
        ({"type": "array", "uniqueItems": True}, ".uniqueItems"),
        ({"type": "string", "pattern": "(?=a)b"}, ".pattern"),
        ({"type": "string", "pattern": "("}, ".pattern"),
        ({"type": "string", "format": "nope"}, ".format"),
        ({"type": "thing"}, ".type"),
        ({"not": {"type": "string"}}, ".not"),
        ({"if": {"type": "string"}, "then": {"minLength": 2}}, ".if"),
        ({"$ref": "http://somewhere/else"}, ".$ref"),
        ({"$ref": "#/$defs/none"}, ".$ref"),
        ({"oneOf": [{"type": "string"}, {"minLength": 1}]}, ".oneOf"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("place", ["properties", "items", "anyOf", "$defs"])
def test_the_part_of_a_schema_that_cannot_be_enforced_is_named(
    model: LanguageModel, part: dict[str, Any], path: str, place: str
) -> None:
    fine = {"type": "string"}
    schema, where = {
        "properties": ({"type": "object", "properties": {"a": fine, "b": part}}, ".properties.b"),
        "items": ({"type": "object", "properties": {"a": {"items": part}}, "required": ["a"]}, ".properties.a.items"),
        "anyOf": ({"anyOf": [{"type": "null"}, part]}, ".anyOf[1]"),
        "$defs": ({"items": {"$ref": "#/$defs/a"}, "$defs": {"a": part, "b": fine}}, ".$defs.a"),
    }[place]
    with pytest.raises(RequestError) as caught:
        ask(model, Grammar("json_schema", json.dumps(schema), param="schema"))
    assert caught.value.param == "schema" + where + path


def test_the_search_for_the_offending_part_ends_in_time() -> None:
    """Each trial compiles all definitions, which may take half a second."""
    now, tried = 0.0, []

    def error_of(part: object) -> str:
        nonlocal now
        now += 0.5 * compiler.SEARCH_SECONDS
        tried.append(part)
        return "wrong" if "properties" in json.dumps(part) else ""

    inner = {"properties": {f"p{n}": {"properties": {}} for n in range(100)}}
    schema = {"properties": {"a": {"type": "null"}, "b": inner}}
    assert find_offending(schema, "wrong", error_of, lambda: now) == (".properties.b", "wrong")
    assert len(tried) == 2


def test_the_offending_part_of_a_schema_is_searched_once(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    found, searched = compiler.find_offending, []

    def counted(schema: object, *more: Any) -> tuple[str, str]:
        searched.append(schema)
        return found(schema, *more)

    monkeypatch.setattr(compiler, "find_offending", counted)
    grammars = Grammars(model.engine.vocab_size, model.engine.eos_token_ids)
    grammars.use_tokenizer(model.tokenizer.serialized)

    def ask_for(name: str, param: str) -> None:
        text = json.dumps({"properties": {name: {"uniqueItems": True}}})
        with pytest.raises(RequestError) as caught:
            grammars.check(Grammar("json_schema", text, param=param))
        path = f"{param}.properties.{name}.uniqueItems"
        assert str(caught.value) == f"{path}: the keyword 'uniqueItems' cannot be enforced"
        assert (caught.value.status, caught.value.param, caught.value.code) == (400, path, "invalid_grammar")

    ask_for("a", "schema")
    ask_for("a", "another_field")
    assert len(searched) == 1
    for number in range(compiler.MAX_KEPT):
        ask_for(f"b{number}", "schema")
    ask_for("a", "schema")
    assert len(searched) == compiler.MAX_KEPT + 2, "the oldest refusals are forgotten"


def test_thousands_of_rules_within_each_other_do_not_end_the_process(model: LanguageModel) -> None:
    rules = "".join(f'r{n}: "a" r{n + 1}\n' for n in range(5000))
    reply = ask(model, Grammar("grammar", f'start: r0\n{rules}r5000: "b"\n'), max_tokens=20)
    assert set(reply.text) == {"a"}
    links = {f"r{n}": {"type": "array", "items": {"$ref": f"#/$defs/r{n + 1}"}} for n in range(1500)}
    schema = {"$ref": "#/$defs/r0", "$defs": {**links, "r1500": {"type": "null"}}}
    assert ask(model, Grammar("json_schema", json.dumps(schema)), max_tokens=20).text.startswith("[")


def test_an_engine_without_a_tokenizer_refuses_grammars(model: LanguageModel) -> None:
    with pytest.raises(RequestError, match="no tokenizer"):
        Grammars(10, (1,)).check(REGEX)
    without_end = Grammars(model.engine.vocab_size, ())
    without_end.use_tokenizer(model.tokenizer.serialized)
    with pytest.raises(RequestError, match="no token that ends a text"):
        without_end.check(REGEX)


def test_a_request_that_is_cancelled_leaves_the_others_alone(model: LanguageModel) -> None:
    """A stop string ends a reply in the middle of its grammar."""
    prompt = model.tokenizer.encode("The kite")
    params = SamplingParams(max_tokens=100, temperature=0, grammar=COMPACT)
    replies = model.generate([Request("a", prompt, params), Request("b", prompt, params)], stop=['"age"'])
    assert [reply.finish_reason for reply in replies] == ["stop", "stop"]
    assert replies[0].text == replies[1].text
    assert follows(COMPACT, ask(model, COMPACT, temperature=0).text)


def test_the_vocabulary_of_masks_is_that_of_the_logits(tmp_path: Path, model: LanguageModel) -> None:
    """A model's vocabulary is often padded beyond the tokenizer's."""
    padded = Grammars(model.engine.vocab_size + 37, model.engine.eos_token_ids)
    padded.use_tokenizer(model.tokenizer.serialized)
    constraint = padded.constraint(SamplingParams(grammar=SCHEMA))
    assert constraint is not None
    constraint.compute()
    assert constraint.forbidden.shape == (model.engine.vocab_size + 37,)
    assert constraint.forbidden[model.engine.vocab_size :].all()
    fewer = Grammars(model.engine.vocab_size - 5, model.engine.eos_token_ids)  # the tokenizer's added tokens
    fewer.use_tokenizer(model.tokenizer.serialized)
    constraint = fewer.constraint(SamplingParams(grammar=SCHEMA))
    assert constraint is not None
    constraint.compute()
    assert constraint.forbidden.shape == (model.engine.vocab_size - 5,)
    assert not constraint.forbidden.all()
