"""JSON as it goes over the wire: whatever text it holds, it can be sent."""

from __future__ import annotations

import json
from collections.abc import Mapping

from starlette.responses import Response


def to_json(value: object) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    if not text.isascii():
        # Legal in JSON, but many clients split an event stream at whatever Unicode calls a line's end.
        for char in "\x85\u2028\u2029":
            text = text.replace(char, f"\\u{ord(char):04x}")
    return text.encode("utf-8", "replace")  # lone surrogates are no text


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(value), status, headers, "application/json")
