"""Find the part of a JSON schema that cannot be enforced, so that the error can name it."""

from __future__ import annotations

import re
from collections.abc import Callable

from afterglow.json_schema import SHARED, parts

MAX_TRIALS = 500  # parts of a schema that are compiled to find the one

_UNIMPLEMENTED = re.compile(r'Unimplemented keys: \["([^"]+)"')
_PLACE = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: ")
_VALUE = re.compile(r"(?:Expected .+|Value) for '(\w+)'")
_KEYWORDS = {  # in an error's text: the keyword that it is about
    "regex": "pattern",
    "Unknown format": "format",
    "Invalid type": "type",
    "oneOf constraints": "oneOf",
    "Pointer ": "$ref",
    "Resource ": "$ref",
    "minLength (": "minLength",
    "enum": "enum",
    "patternProperty": "patternProperties",
}


def find_offending(schema: object, error: str, error_of: Callable[[object], str]) -> tuple[str, str]:
    """Find the smallest part of a schema that gives `error`. `error_of` compiles a part, and returns its error or "".

    Returns the part's path, to append to the name of the schema's field, and the error.
    """
    trials = 0
    error = _bare(error)

    def search(part: object, path: str) -> str:
        nonlocal trials
        for name, child in parts(part):
            trials += 1
            if trials > MAX_TRIALS:
                break
            if _bare(error_of(_alone(child, schema))) == error:
                return search(child, path + name)
        return path + _keyword(part, error)

    return search(schema, ""), error


def reason_of(error: str) -> str:
    """Say in one line why a grammar was refused."""
    found = _UNIMPLEMENTED.search(error)
    if found:
        return f"the keyword {found[1]!r} cannot be enforced"
    lines = [line.strip() for line in error.splitlines() if line.strip()] or ["it cannot be enforced"]
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if lines[0].startswith("NoExtension"):
        return "no text satisfies it"
    return (f"invalid regular expression: {said[0]}" if said else lines[0])[:500]


def _bare(error: str) -> str:
    """Return an error without its place in a larger grammar, and the references that led there."""
    return _PLACE.sub("", error.partition("\n  while processing ")[0])


def _alone(part: object, schema: object) -> object:
    """Make a part of a schema a schema of its own: with the definitions that it may refer to."""
    if not isinstance(part, dict) or not isinstance(schema, dict):
        return part
    return {**{name: schema[name] for name in SHARED if name in schema}, **part}


def _keyword(part: object, error: str) -> str:
    found = _UNIMPLEMENTED.search(error) or _VALUE.search(error)
    wanted = [found[1]] if found else [keyword for text, keyword in _KEYWORDS.items() if text in error]
    return next((f".{keyword}" for keyword in wanted if isinstance(part, dict) and keyword in part), "")
