"""What a function's schema says of its arguments, where a format writes each of them by itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from afterglow.json_schema import referred

# Beside these, properties may be listed elsewhere.
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "if", "$ref")
_NOTHING = {"allOf": [False]}  # a schema that no value follows: a grammar with it is refused


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a function: a schema for each name, and the schema of all other arguments; False if there are none."""

    named: Mapping[str, Any]
    required: frozenset[str]
    others: Any


def arguments_of(schema: Mapping[str, Any]) -> Arguments:
    """Read the schema of a function's arguments: with what it names by `$ref` and `allOf`."""
    found = list(_parts(schema))
    said = {keyword: value for part in reversed(found) for keyword, value in part.items() if value is not None}
    listed = [each for part in found if isinstance(each := part.get("properties"), Mapping)]
    named = {name: value for properties in reversed(listed) for name, value in properties.items()}
    wanted = [each for part in found if isinstance(each := part.get("required"), list)]
    required = [name for names in wanted for name in names if isinstance(name, str)]
    said |= {"required": required} | ({"properties": named} if listed else {})
    for keyword in ("$ref", "allOf"):
        said.pop(keyword, None)
    others = said.get("additionalProperties", said.get("unevaluatedProperties", not closed(said)))
    if any(_target(part, schema) is None for part in found if part.get("$ref") is not None):
        others = _NOTHING
    unlisted = {name: others for name in required if name not in named}
    return Arguments({**named, **unlisted}, frozenset(required), others)


def closed(schema: Mapping[str, Any]) -> bool:
    """Tell whether a function has no other arguments than those that are listed: unless the schema says so, or asks for
    more."""
    listed, required = schema.get("properties"), schema.get("required") or ()
    if not isinstance(listed, Mapping) or not set(required) <= set(listed) or set(_OPEN) & set(schema):
        return False
    return schema.get("minProperties") in (None, *range(len(listed) + 1))


def _parts(schema: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """Return a schema, and those that its texts must follow as a whole too."""
    found: dict[int, Mapping[str, Any]] = {}
    waiting: list[Any] = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping) and id(part) not in found:
            found[id(part)] = part
            waiting += [_target(part, schema), *(part["allOf"] if isinstance(part.get("allOf"), list) else ())]
    return found.values()


def _target(part: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Find what `$ref` of a part names within the schema; None where there is no such thing."""
    found = referred(part.get("$ref"), schema)
    return None if found is None else found[1]


def types_of(schema: object, whole: Mapping[str, Any]) -> frozenset[str] | None:
    """Name the JSON types of the values that a part of the schema `whole` permits; None where that is any, or is not known."""
    return _types_of(schema, whole, set())


def _types_of(schema: object, whole: Mapping[str, Any], seen: set[int]) -> frozenset[str] | None:
    if not isinstance(schema, Mapping) or id(schema) in seen:
        return None
    seen.add(id(schema))
    named = schema.get("type")
    if isinstance(named, str | list):
        return frozenset([named] if isinstance(named, str) else filter(lambda each: isinstance(each, str), named))
    if (target := _target(schema, whole)) is not None:
        return _types_of(target, whole, seen)
    if "const" in schema:
        return frozenset([type_of(schema["const"])])
    if isinstance(values := schema.get("enum"), list):
        return frozenset(map(type_of, values))
    if isinstance(parts := schema.get("allOf"), list):
        known = [found for part in parts if (found := _types_of(part, whole, seen)) is not None]
        return frozenset.intersection(*known) if known else None
    if isinstance(ways := schema.get("anyOf", schema.get("oneOf")), list):
        permitted: frozenset[str] = frozenset()
        for way in ways:
            if (found := _types_of(way, whole, seen)) is None:
                return None
            permitted |= found
        return permitted
    return None


def type_of(value: object) -> str:
    """Name the JSON type of a value; that of each number is `number`."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"
