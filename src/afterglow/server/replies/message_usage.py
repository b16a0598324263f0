"""The tokens of a message as Anthropic counts them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from afterglow.request import Breakpoint

HOUR = 3600.0  # seconds: the longer of the two lifetimes


def as_breakpoints(marked: Iterable[tuple[int, float]]) -> tuple[Breakpoint, ...]:
    """Make breakpoints of marks, (rows, seconds) each: in order, and one for each row. Marks without rows are left out."""
    longest: dict[int, float] = {}
    for rows, seconds in marked:
        if rows > 0:
            longest[rows] = max(seconds, longest.get(rows, 0.0))
    return tuple(Breakpoint(rows, longest[rows]) for rows in sorted(longest))


def input_usage(prompt: int, cached: int, breakpoints: Sequence[Breakpoint]) -> dict[str, Any]:
    """Split the `prompt` tokens: found in the cache, computed up to the last breakpoint, and the rest. A token up to several
    breakpoints is kept for the longest of their lifetimes."""
    last = max((each.rows for each in breakpoints), default=0)
    hours = max((each.rows for each in breakpoints if each.ttl_s >= HOUR), default=0)
    created = max(0, last - cached)
    for_an_hour = max(0, hours - cached)
    return {
        "input_tokens": prompt - cached - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": cached,
        "cache_creation": {
            "ephemeral_5m_input_tokens": created - for_an_hour,
            "ephemeral_1h_input_tokens": for_an_hour,
        },
    }
