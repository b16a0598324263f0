"""Writes JSON that every client can read, whatever text is in it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from starlette.responses import Response


def to_json(value: object) -> bytes:
    """Write a value as UTF-8."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    if not text.isascii():
        # Legal in JSON, but many clients split an event stream at every line end of Unicode.
        for char in "\x85\u2028\u2029":
            text = text.replace(char, f"\\u{ord(char):04x}")
    return text.encode("utf-8", "replace")  # lone surrogates cannot be encoded


def write_json(value: object) -> bytes:
    """Write a large value piece by piece, so that other threads can run meanwhile."""
    return b"".join(_pieces(value, DEPTH))


def _pieces(value: object, depth: int) -> Iterator[bytes]:
    if depth and isinstance(value, dict) and value:
        for number, (key, member) in enumerate(value.items()):
            yield (b"," if number else b"{") + to_json(key) + b":"
            yield from _pieces(member, depth - 1)
        yield b"}"
    elif depth and isinstance(value, list) and value:
        step = 1 if isinstance(value[0], dict | list) else AT_ONCE
        for start in range(0, len(value), step):
            yield b"," if start else b"["
            if step == 1:
                yield from _pieces(value[start], depth - 1)
            else:
                yield to_json(value[start : start + step])[1:-1]
        yield b"]"
    else:
        yield to_json(value)


DEPTH = 6  # levels of arrays and objects that are written in pieces: down to single tokens of replies
AT_ONCE = 1000  # numbers or strings of an array that are written at once


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Answer with a value."""
    return Response(to_json(value), status, headers, "application/json")
