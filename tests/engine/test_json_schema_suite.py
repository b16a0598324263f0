"""JSON Schema's own test suite against the grammars of schemas: no invalid instance can be written, valid ones can, and schemas that
cannot be enforced are refused by name."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice, permutations, product
from pathlib import Path
from typing import Any

import pytest

from afterglow import RequestError
from afterglow.engine.grammars.compiler import Grammars
from afterglow.request import Grammar, SamplingParams
from afterglow.text import Tokenizer
from tests.text import toys

SUITE: dict[str, list[Any]] = json.loads(
    (Path(__file__).parent / "json_schema_suite/draft2020-12.json").read_text("utf-8")
)
# Keywords that are not enforced, and reasons of which no keyword is the cause.
OUTSIDE = {
    *("not", "if", "then", "else", "oneOf", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames"),
    *("dependentRequired", "dependentSchemas", "unevaluatedProperties", "unevaluatedItems"),
    *("$dynamicRef", "$dynamicAnchor", "patternProperties", "format"),
}
REASONS = re.compile(
    r"Unsatisfiable schema: schema is false"  # no text satisfies it
    r"|Expected positive integer for '\w+', got \d\.0|Value for 'multipleOf' has too many digits"
    r"|'\$dynamicAnchor' cannot be enforced"  # of the schema that describes schemas
)
# Valid instances that no reply is, by name of the file and the instance.
NEVER_WRITTEN = {
    "const|enum": "float|0\\.0|1\\.0|-2\\.0",  # integers have no decimal point
    "type": "part is an integer",
    "format/email": "quoted string with|IPv6-address-literal",
    "format/ipv6": "decimal octets|between the sections|ipv4-mapped|a long valid ipv6",  # IPv4 inside of IPv6
    "format/time|format/date-time": "leap second",
}


@dataclass
class Matching:
    """The engine's compiler, for a vocabulary of bytes and some words."""

    tokenizer: Tokenizer
    grammars: Grammars

    def refusal(self, schema: object) -> RequestError | None:
        """Return why the schema cannot be enforced, if it cannot."""
        try:
            self.grammars.check(Grammar("json_schema", json.dumps(schema), param="schema"))
        except RequestError as error:
            return error
        return None

    def accepts(self, schema: object, text: str) -> bool:
        """Tell whether a reply to a request with the schema may be this text, token by token, and end there."""
        params = SamplingParams(grammar=Grammar("json_schema", json.dumps(schema)))
        constraint = self.grammars.constraint(params)
        assert constraint is not None
        constraint.compute()
        for token in self.tokenizer.encode(text, add_special_tokens=False):
            if constraint.error is not None or constraint.forbidden[token]:
                return False
            constraint.took([token])
            constraint.compute()
        return constraint.error is None and not constraint.forbidden[self.grammars.eos_ids[0]]


@pytest.fixture(scope="module")
def matching(tmp_path_factory: pytest.TempPathFactory) -> Matching:
    folder = tmp_path_factory.mktemp("tokenizer")
    toys.byte_level(folder)
    tokenizer = Tokenizer(folder)
    grammars = Grammars(tokenizer.vocab_size, tokenizer.encode("<|im_end|>", add_special_tokens=False))
    grammars.use_tokenizer(tokenizer.serialized)
    return Matching(tokenizer, grammars)


def texts(value: Any) -> Iterator[str]:
    """Yield the JSON of a value with its properties in each order: a schema puts its own first."""
    if isinstance(value, dict):
        for order in permutations(value.items()):
            for inner in product(*(texts(child) for _, child in order)):
                pairs = [
                    f"{json.dumps(name, ensure_ascii=False)}: {text}"
                    for (name, _), text in zip(order, inner, strict=True)
                ]
                yield f"{{{', '.join(pairs)}}}"
    elif isinstance(value, list):
        for inner in product(*map(texts, value)):
            yield f"[{', '.join(inner)}]"
    else:
        yield json.dumps(value, ensure_ascii=False)


def never_written(file: str, instance: dict[str, Any]) -> bool:
    said = f"{instance['description']} {json.dumps(instance['data'])}"
    return any(re.fullmatch(files, file) and re.search(names, said) for files, names in NEVER_WRITTEN.items())


@pytest.mark.parametrize("file", SUITE)
def test_only_valid_instances_can_be_written(matching: Matching, file: str) -> None:
    ends: Counter[str] = Counter()
    for group in SUITE[file]:
        name, schema = f"{file}: {group['description']}", group["schema"]
        refusal = matching.refusal(schema)
        if refusal is not None:
            assert (refusal.status, refusal.code) == (400, "invalid_grammar")
            keyword = str(refusal.param).rpartition(".")[2]
            assert keyword in OUTSIDE or REASONS.search(str(refusal)), f"{name}: {refusal}"
            ends["refused"] += 1
            continue
        for instance in group["tests"]:
            written = any(map(partial(matching.accepts, schema), islice(texts(instance["data"]), 200)))
            if instance["valid"]:
                assert written != never_written(file, instance), f"{name}: {instance}"
            else:
                assert not written, f"{name}: {instance}"
            ends["agreed"] += 1
    assert ends.total() > 0


def test_most_of_the_suite_is_enforced(matching: Matching) -> None:
    """A library that refuses more, or a suite that has shrunk, is noticed."""
    groups = [group for found in SUITE.values() for group in found]
    enforced = sum(matching.refusal(group["schema"]) is None for group in groups)
    assert (enforced, len(groups)) >= (164, 251)
