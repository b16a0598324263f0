"""The parts of JSON schemas, and what they mean beyond what a grammar's compiler enforces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

SHARED = ("$defs", "definitions")  # that references of any part may name
_ONE = ("items", "additionalProperties", "additionalItems", "contains", "propertyNames", "not", "if", "then", "else")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = (*SHARED, "properties", "patternProperties", "dependentSchemas")

ENDLESS = "no text satisfies it: it asks for itself within itself, without end"

_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DAY = f"({_LEAP_YEAR}-02-29|[0-9]{{4}}-(02-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-[0-9]{{2}}))"
_TIME = "[0-9]{2}:[0-9]{2}:[0-5][0-9]"  # a leap second is there on few days, and most readers know none
_REAL = {"date": f"^{_DAY}$", "date-time": f"^{_DAY}.{_TIME}", "time": f"^{_TIME}"}

# Integers that every reader of JSON can represent. Without a limit, a model that does not know how to go on would write digits
# until the reply is full.
LARGEST = 2**53 - 1
_FREE = ("multipleOf", "enum", "const", "allOf", "anyOf", "oneOf", "$ref")  # beside these, numbers have other limits


def parts(schema: object) -> Iterator[tuple[str, object]]:
    """Yield the schemas inside a schema, with their paths."""
    if not isinstance(schema, dict):
        return
    for keyword in _NAMED:
        for name, child in schema[keyword].items() if isinstance(schema.get(keyword), dict) else ():
            yield f".{keyword}.{name}", child
    for keyword in _LISTS:
        for number, child in enumerate(schema[keyword]) if isinstance(schema.get(keyword), list) else ():
            yield f".{keyword}[{number}]", child
    for keyword in _ONE:
        if isinstance(schema.get(keyword), dict):
            yield f".{keyword}", schema[keyword]


_Group = list[tuple[str, dict[str, Any]]]  # parts with their paths: one of them is enough


def endless(schema: object) -> str | None:
    """Find a part of a schema that no text satisfies, because each of its texts would have another text of the part inside.
    Returns the path of what asks for that; None where there is none."""
    found: dict[int, list[_Group]] = {}  # by a part's id: what it needs
    users: dict[int, list[tuple[int, int]]] = {}  # which group of which part a part is in
    waiting: _Group = [("", schema)] if isinstance(schema, dict) else []
    while waiting:
        path, part = waiting.pop()
        if id(part) in found:
            continue
        waiting += [
            (path + name, each) for name, each in parts(part) if isinstance(each, dict) and name.startswith(_FOLLOWED)
        ]
        found[id(part)] = groups = list(_needed(path, part))
        if (target := referred(part.get("$ref"), schema)) is not None:
            groups.append([(f"{path}.$ref", target[1])])
            waiting.append(target)
        for number, group in enumerate(groups):
            for _, each in group:
                users.setdefault(id(each), []).append((id(part), number))
    open_groups = {part: set(range(len(groups))) for part, groups in found.items()}
    ends = [part for part, groups in open_groups.items() if not groups]
    while ends:
        for user, number in users.get(ends.pop(), ()):
            if number in open_groups[user]:
                open_groups[user].remove(number)
                if not open_groups[user]:
                    ends.append(user)
    at = next((part for part, groups in open_groups.items() if groups), None)
    seen = set()
    while at is not None:
        seen.add(at)
        where, each = found[at][min(open_groups[at])][0]
        if id(each) in seen:
            return where
        at = id(each)
    return None


_FOLLOWED = (
    ".properties.",
    ".patternProperties.",
    ".additionalProperties",
    ".items",
    ".prefixItems",
    ".allOf",
    ".anyOf",
    ".oneOf",
)


def _needed(path: str, part: Mapping[str, Any]) -> Iterator[_Group]:
    """Yield groups of parts inside a part: each of its texts has a text of one part of each group, or is one."""
    wanted: set[str] = set()
    if part.get("type") == "object" and isinstance(part.get("required"), list):
        wanted = {f".properties.{name}" for name in part["required"]}
    if part.get("type") == "array" and isinstance(least := part.get("minItems"), int):
        first = len(part["prefixItems"]) if isinstance(part.get("prefixItems"), list) else 0
        wanted = {f".prefixItems[{number}]" for number in range(min(first, least))} | (
            {".items"} if least > first else set()
        )
    for name, each in parts(part):
        if isinstance(each, dict) and (name in wanted or name.startswith(".allOf")):
            yield [(path + name, each)]
    for keyword in ("anyOf", "oneOf"):
        choices = part.get(keyword)
        if isinstance(choices, list) and choices and all(isinstance(each, dict) for each in choices):
            yield [(f"{path}.{keyword}[{number}]", each) for number, each in enumerate(choices)]


def referred(reference: object, schema: object) -> tuple[str, dict[str, Any]] | None:
    """Find the part that a reference within the schema names, with its path; None where that is none."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    path, part = "", schema
    for name in reference.split("/")[1:]:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        path, part = f"{path}.{name}", part.get(name) if isinstance(part, dict) else None
    return (path, part) if isinstance(part, dict) else None


def sharpened(schema: object) -> Any:
    """Return a schema that a compiler enforces as it is meant: days are in the calendar, integers end, and what asks for
    nothing is left out. All texts of the new schema are texts of the old one."""
    if not isinstance(schema, dict):
        return schema
    made = {keyword: _inside(keyword, value) for keyword, value in schema.items()}
    if made.get("uniqueItems") is False:
        del made["uniqueItems"]
    name = made.get("format")
    if isinstance(name, str) and name in _REAL:
        if "pattern" not in made:
            made["pattern"] = _REAL[name]
        elif isinstance(made.get("allOf", []), list):
            made["allOf"] = [*made.get("allOf", ()), {"pattern": _REAL[name]}]
    if made.get("type") == "integer" and not any(keyword in made for keyword in _FREE):
        _limit(made)
    return made


def _inside(keyword: str, value: Any) -> Any:
    if keyword in _NAMED and isinstance(value, dict):
        return {name: sharpened(child) for name, child in value.items()}
    if keyword in _LISTS and isinstance(value, list):
        return [sharpened(child) for child in value]
    return sharpened(value) if keyword in _ONE else value


def _limit(schema: dict[str, Any]) -> None:
    """Give an integer the limits that its schema lacks, unless the one that is there lies beyond them."""
    least = schema.get("minimum", schema.get("exclusiveMinimum"))
    most = schema.get("maximum", schema.get("exclusiveMaximum"))
    if most is None and (least is None or (isinstance(least, int | float) and least < LARGEST)):
        schema["maximum"] = LARGEST
    if least is None and (most is None or (isinstance(most, int | float) and most > -LARGEST)):
        schema["minimum"] = -LARGEST
