"""Tokens as Anthropic counts them, from marks and what was cached."""

from __future__ import annotations

import pytest

from afterglow.request import Breakpoint, Truncation
from afterglow.server.api.anthropic_messages import as_breakpoints, input_usage, moved

SHORT, LONG = 300.0, 3600.0


def test_breakpoints_are_in_order_once_each_and_live_longest() -> None:
    found = as_breakpoints([(50, SHORT), (20, SHORT), (50, LONG), (0, LONG)])
    assert found == (Breakpoint(20, SHORT), Breakpoint(50, LONG))


@pytest.mark.parametrize(("cached", "marks", "read", "short", "long", "rest"), [
    (0, [], 0, 0, 0, 100),
    (60, [], 60, 0, 0, 40),
    (0, [(80, SHORT)], 0, 80, 0, 20),
    (30, [(80, SHORT)], 30, 50, 0, 20),
    (90, [(80, SHORT)], 90, 0, 0, 10),
    (0, [(40, LONG), (80, SHORT)], 0, 40, 40, 20),
    (0, [(40, SHORT), (80, LONG)], 0, 0, 80, 20),  # rows before a mark of an hour are kept for an hour
    (50, [(40, LONG), (80, SHORT)], 50, 30, 0, 20),
    (99, [(100, SHORT)], 99, 1, 0, 0),
])  # fmt: skip
def test_tokens_add_up(
    cached: int, marks: list[tuple[int, float]], read: int, short: int, long: int, rest: int
) -> None:
    found = input_usage(100, cached, as_breakpoints(marks))
    assert found == {
        "input_tokens": rest,
        "cache_creation_input_tokens": short + long,
        "cache_read_input_tokens": read,
        "cache_creation": {"ephemeral_5m_input_tokens": short, "ephemeral_1h_input_tokens": long},
    }


def test_breakpoints_move_with_what_is_left_out() -> None:
    marks = as_breakpoints([(10, SHORT), (30, SHORT), (70, SHORT), (90, LONG)])
    oldest = Truncation(dropped=50, kept=50, reused=True)
    assert moved(marks, None, 20) == marks
    assert moved(marks, oldest, 20) == (Breakpoint(10, SHORT), Breakpoint(20, SHORT), Breakpoint(40, LONG))
    assert moved(marks, Truncation(50, 50, True, "importance"), 20) == (Breakpoint(10, SHORT),)
