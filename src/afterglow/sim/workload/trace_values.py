"""Reading single values out of a line: each says what it wants and what it found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from afterglow.errors import AfterglowError, RequestError
from afterglow.request import Breakpoint

MAX_BLOCK = 2**48  # number of a block
MAX_TOKENS = 2**27  # of one prompt or reply: beyond it a number is damage


class BadLine(AfterglowError):
    """A line that cannot be read; the message gives the reason."""


def json_object(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadLine(f"it is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise BadLine(f"it must be a JSON object, not {shown(row)}")
    return row


def real(row: Mapping[str, Any], key: str) -> float:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e15:
        raise BadLine(f"{key} must be a number, {said(row, key)}")
    return float(value)


def tokens(row: Mapping[str, Any], key: str, least: int = 0) -> int:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_TOKENS:
        raise BadLine(f"{key} must be a whole number from {least} to {MAX_TOKENS}, {said(row, key)}")
    return value


def hashes(row: Mapping[str, Any], key: str, most: int, kind: type) -> list[Any]:
    """Block hashes; there may be fewer than blocks, not more."""
    value = row.get(key)
    if not isinstance(value, list) or not all(type(item) is kind for item in value):
        what = "strings" if kind is str else "whole numbers"
        raise BadLine(f"{key} must be a list of {what}, {said(row, key)}")
    if kind is int and value and not 0 <= min(value) <= max(value) < MAX_BLOCK:
        raise BadLine(
            f"{key} must be numbers from 0 to {MAX_BLOCK - 1}, not {shown(min(value))} to {shown(max(value))}"
        )
    if len(value) > most:
        raise BadLine(f"{key} has {len(value)} hashes, and there are {most} blocks")
    return value


def marks(row: Mapping[str, Any], key: str, most: int) -> tuple[Breakpoint, ...]:
    """Breakpoints of a prompt of `most` tokens, [tokens, seconds] each, in ascending order; none where the key is missing."""
    value = row.get(key)
    if value is None:
        return ()
    try:
        found = tuple(Breakpoint(rows, float(seconds)) for rows, seconds in value)
    except (TypeError, ValueError, RequestError) as error:
        raise BadLine(f"{key} must be a list of [tokens, seconds], {said(row, key)}") from error
    ends = [0, *(each.rows for each in found), most + 1]
    if not all(type(end) is int for end in ends) or any(b <= a for a, b in zip(ends, ends[1:], strict=False)):
        raise BadLine(f"{key} must be in ascending order, and within the {most} tokens of the prompt, {said(row, key)}")
    return found


def whole(cell: str) -> int | str:
    return int(cell) if cell.isdecimal() and len(cell) < 16 else cell


def said(row: Mapping[str, Any], key: str) -> str:
    return f"not {shown(row[key])}" if key in row else "and is missing"


def shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:60]}..."
