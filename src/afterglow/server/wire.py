"""JSON as it goes over the wire: whatever text it holds, it can be sent."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from starlette.responses import Response


def to_json(value: object) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    if not text.isascii():
        # Legal in JSON, but many clients split an event stream at whatever Unicode calls a line's end.
        for char in "\x85\u2028\u2029":
            text = text.replace(char, f"\\u{ord(char):04x}")
    return text.encode("utf-8", "replace")  # lone surrogates are no text


def write_json(value: object) -> bytes:
    """The same for what may be large: piece by piece, so that other threads run meanwhile."""
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


DEPTH = 6  # arrays and objects within each other that are written in pieces: down to single tokens of replies
AT_ONCE = 1000  # numbers or strings of an array


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(value), status, headers, "application/json")
