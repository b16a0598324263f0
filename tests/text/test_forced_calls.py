"""Grammars of calls that must be made: which texts they permit, and what arguments these become."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer, grammar_from

from afterglow.text import Tokenizer
from afterglow.text.tool_calls.formats import forced_grammar
from afterglow.text.tool_calls.qwen_xml import QwenXmlParser

Values = dict[str, Any]
TRIP: Values = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TRIPS: tuple[list[Values], list[Values]] = (
    [{"city": "Köln"}, {"city": "12", "days": 2}],
    [{}, {"days": 2}, {"city": "Köln", "days": "two"}, {"city": "Köln", "more": 1}],
)
N = {"type": "integer"}
CASES: dict[str, tuple[Values, list[Values], list[Values]]] = {
    "plain": (TRIP, *TRIPS),
    "reference": ({"$ref": "#/$defs/trip", "$defs": {"trip": TRIP}}, *TRIPS),
    "references": ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b~1c"}, "b/c": TRIP}}, *TRIPS),
    "references that others use": (
        {
            "$ref": "#/$defs/a",
            "$defs": {"a": {**TRIP, "properties": {**TRIP["properties"], "days": {"$ref": "#/$defs/n"}}}, "n": N},
        },
        *TRIPS,
    ),
    "all of": (
        {"allOf": [{"$ref": "#/definitions/trip"}, {"required": ["city"]}], "definitions": {"trip": TRIP}},
        *TRIPS,
    ),
    "beside a reference": (
        {"$ref": "#/$defs/trip", "properties": {"n": N}, "required": ["n"], "$defs": {"trip": TRIP}},
        [{"city": "Köln", "n": 1}, {"city": "Köln", "days": 2, "n": 1}],
        [{"n": 1}, {"city": "Köln"}],
    ),
    "null": (
        {"properties": {"n": N}, "required": None, "additionalProperties": None, "$defs": None},
        [{}, {"n": 1}],
        [{"m": 1}],
    ),
    "nothing": ({"type": "object", "properties": {}}, [{}], [{"m": 1}]),
    "anything": ({"type": "object"}, [{}, {"n": 1}, {"n": "x", "m-1": [{"a": None}]}], [{"a b": 1}, {"": 1}]),
    "strings": ({"additionalProperties": {"type": "string"}}, [{}, {"m": "1"}, {"m": "1", "n": "x\ny"}], [{"<": "1"}]),
    "numbers": ({"additionalProperties": N}, [{}, {"m": 1, "n": 2}], [{"m": "1"}]),
    "others too": (
        {"properties": {"n": N, "no": False}, "additionalProperties": True},
        [{}, {"n": 1}, {"m": [1]}, {"n": 1, "m": "x", "nn": 2}],
        [{"n": "x"}, {"no": 1}],
    ),
    "no others": ({"properties": {"n": N}, "additionalProperties": False, "minProperties": 1}, [{"n": 1}], [{"m": 1}]),
    "required and not listed": (
        {"properties": {"n": N}, "required": ["z"], "additionalProperties": {"const": 2}},
        [{"z": 2}, {"n": 1, "z": 2}, {"z": 2, "m": 2}],
        [{}, {"n": 1}, {"z": 3}, {"z": 2, "m": 3}],
    ),
    "required and nothing listed": ({"required": ["z"]}, [{"z": 2}, {"z": "x", "m": 3}], [{}, {"m": 3}]),
    "listed elsewhere": (
        {"properties": {"n": N}, "anyOf": [{"properties": {"m": N}, "required": ["m"]}, {"required": ["n"]}]},
        [{"m": 1}, {"n": 1}],
        [{"n": "x"}],
    ),
}


def written(values: Values, schema: Values) -> str:
    """Write a call, with strings as they are where the schema asks for strings."""
    strings = ("city", "m", "n") if schema.get("additionalProperties") == {"type": "string"} else ("city",)
    said = {key: value if key in strings else json.dumps(value) for key, value in values.items()}
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in said.items())
    return f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"


@pytest.mark.parametrize("name", CASES)
def test_a_forced_call_follows_its_schema_where_each_argument_has_a_tag(byte_level: Tokenizer, name: str) -> None:
    schema, fine, wrong = CASES[name]
    grammar = grammar_from("grammar", forced_grammar("qwen3_coder", {"f": schema}, json.dumps, several=False))
    tokenizer = LLTokenizer(byte_level.serialized())
    whole = LLMatcher(tokenizer, grammar, log_level=0)
    assert not whole.is_error(), whole.get_error()
    for values in (*fine, *wrong):
        matcher, text = whole.deep_copy(), written(values, schema)
        ids = tokenizer.tokenize_str(text)
        permitted = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
        assert permitted == (values in fine), values
        if permitted:
            parser = QwenXmlParser({"f": schema})
            parser.push(text)
            found = json.loads(parser.calls[0].arguments)
            assert found == values
            jsonschema.validate(found, {key: value for key, value in schema.items() if value is not None})


@pytest.mark.parametrize(
    "schema", [{"$ref": "#"}, {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}]
)
def test_references_in_a_circle_end(schema: Values) -> None:
    assert forced_grammar("qwen3_coder", {"f": schema}, json.dumps, several=False)


def test_references_to_what_is_no_schema_are_read() -> None:
    """A default is checked by none."""
    said = {"properties": {"a": {"type": "string", "enum": 5}, "b": 5}, "required": ["a", []], "allOf": 5}
    for default in (said, {"properties": 5, "required": 5, "additionalProperties": 5}, 5):
        schema = {"$ref": "#/default", "default": default}
        assert forced_grammar("qwen3_coder", {"f": schema}, json.dumps, several=False)
