"""Generated JSON schemas and a model that knows no language: every reply that ends must validate, by another library."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from afterglow import CacheConfig, EngineConfig, LanguageModel, SamplingParams, load_model
from afterglow.request import Grammar, Request
from tests.structured_model import random_model

Schema = dict[str, Any]
BATCH = 10  # schemas whose replies are drawn side by side
TOKENS = 600
FORMATS = ("uuid", "ipv4", "date")  # times may have a leap second, which the other library takes for a mistake
PATTERNS = ("^[a-c]{2,5}$", "^x[0-9]?y$", "^(ab|cd){1,3}$")

_ids = count()


def integers() -> st.SearchStrategy[Schema]:
    def make(low: int, size: int, exclusive: bool) -> Schema:
        top = {"exclusiveMaximum": low + size + 1} if exclusive else {"maximum": low + size}
        return {"type": "integer", "minimum": low, **top}

    return st.builds(make, st.integers(-1000, 1000), st.integers(0, 5000), st.booleans())


def texts() -> st.SearchStrategy[Schema]:
    def make(least: int, more: int) -> Schema:
        return {"type": "string", "minLength": least, "maxLength": least + more}

    return st.one_of(
        st.builds(make, st.integers(0, 4), st.integers(0, 8)),
        st.sampled_from(PATTERNS).map(lambda pattern: {"type": "string", "pattern": pattern}),
        st.sampled_from(FORMATS).map(lambda name: {"type": "string", "format": name}),
    )


def values() -> st.SearchStrategy[Schema]:
    plain = st.one_of(st.none(), st.booleans(), st.integers(-99, 99), st.text(max_size=6))
    return st.one_of(
        st.just({"type": "null"}),
        st.just({"type": "boolean"}),
        st.just({"type": "number", "minimum": -1, "maximum": 1}),
        st.lists(plain, min_size=1, max_size=4).map(lambda several: {"enum": several}),
        plain.map(lambda one: {"const": one}),
        integers(),
        texts(),
    )


def arrays(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    def make(items: Schema, least: int, more: int, first: list[Schema]) -> Schema:
        found = {"type": "array", "items": items, "minItems": least, "maxItems": least + more}
        return {**found, "prefixItems": first} if first else found

    return st.builds(make, inner, st.integers(0, 2), st.integers(0, 2), st.lists(inner, max_size=2))


def objects(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    def make(properties: dict[str, Schema], needed: list[bool]) -> Schema:
        required = [name for name, wanted in zip(properties, needed, strict=False) if wanted]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    return st.builds(
        make, st.dictionaries(st.text(max_size=6), inner, max_size=4), st.lists(st.booleans(), min_size=4, max_size=4)
    )


def nested(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    choices = st.lists(inner, min_size=2, max_size=3).map(lambda several: {"anyOf": several})
    return st.one_of(arrays(inner), objects(inner), choices)


def with_definitions(schema: Schema, shared: Schema) -> Schema:
    """Have a schema refer to another one, twice."""
    properties = {"one": {"$ref": "#/$defs/shared"}, "two": {"$ref": "#/$defs/shared"}, "three": schema}
    return {"$defs": {"shared": shared}, "type": "object", "properties": properties, "required": ["one"],
            "additionalProperties": False}  # fmt: skip


SCHEMAS = st.one_of(
    st.recursive(values(), nested, max_leaves=6),
    st.builds(with_definitions, st.recursive(values(), nested, max_leaves=3), st.one_of(values(), objects(values()))),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LanguageModel]:
    cache = CacheConfig(device_cache=2**27, host_cache=2**26, disk_cache=0)
    folder = random_model(tmp_path_factory.mktemp("random"))
    with load_model(folder, EngineConfig(cache=cache, threads=1, max_batch=BATCH)) as loaded:
        yield loaded


def validated(model: LanguageModel, schemas: list[Schema]) -> Counter[str]:
    """Draw a reply for each schema, in one batch, and count how they end. Those that end must validate."""
    requests = []
    for number, schema in enumerate(schemas):
        grammar = Grammar("json_schema", json.dumps(schema), compact=number % 2 == 0)
        sampling = SamplingParams(max_tokens=TOKENS, temperature=0.5 + number % 3, seed=number, grammar=grammar)
        requests.append(Request(f"schema-{next(_ids)}", model.tokenizer.encode(f"Kite {number}:"), sampling))
    ends: Counter[str] = Counter()
    for schema, reply in zip(schemas, model.generate(requests), strict=True):
        ends[reply.finish_reason] += 1
        if reply.finish_reason == "stop":
            checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
            jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(reply.text))
    return ends


def run(model: LanguageModel, batches: int) -> Counter[str]:
    ends: Counter[str] = Counter()

    @settings(
        max_examples=batches,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(SCHEMAS, min_size=BATCH, max_size=BATCH))
    def draw(schemas: list[Schema]) -> None:
        ends.update(validated(model, schemas))

    draw()
    print(dict(ends))
    return ends


def test_replies_to_some_schemas_validate(model: LanguageModel) -> None:
    ends = run(model, 4)
    assert ends["stop"] >= 0.9 * ends.total() > 30


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_replies_to_a_thousand_schemas_validate(model: LanguageModel) -> None:
    ends = run(model, int(os.environ.get("AFTERGLOW_SCHEMAS", "1000")) // BATCH)
    assert ends.total() >= 1000
    assert ends["stop"] >= 0.9 * ends.total()
