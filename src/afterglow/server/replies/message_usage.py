"""The tokens of a message as Anthropic counts them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from afterglow.request import Breakpoint, Truncation

HOUR = 3600.0  # seconds: the longer of the two lifetimes


def as_breakpoints(marked: Iterable[tuple[int, float]]) -> tuple[Breakpoint, ...]:
    """Make breakpoints of marks, (rows, seconds) each: in order, and one for each row. Marks without rows are left out."""
    longest: dict[int, float] = {}
    for rows, seconds in marked:
        if rows > 0:
            longest[rows] = max(seconds, longest.get(rows, 0.0))
    return tuple(Breakpoint(rows, longest[rows]) for rows in sorted(longest))


def moved(breakpoints: Iterable[Breakpoint], cut: Truncation | None, head: int) -> tuple[Breakpoint, ...]:
    """Move breakpoints of a prompt that was truncated behind its first `head` rows to where their tokens are now. Those within what
    was left out are left out, as is every one behind the head where more than one part may have been left out."""
    if cut is None:
        return tuple(breakpoints)
    found = []
    for each in breakpoints:
        if each.rows <= head:
            found.append((each.rows, each.ttl_s))
        elif cut.policy == "oldest" and each.rows >= head + cut.dropped:
            found.append((each.rows - cut.dropped, each.ttl_s))
    return as_breakpoints(found)


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
