"""Breakpoints of a request: which are refused, and by what name."""

from __future__ import annotations

import pytest

from afterglow.engine.requests import RequestLimits, check
from afterglow.errors import RequestError
from afterglow.plan.prefix.truncation import Rules
from afterglow.request import Breakpoint, ContextWindow, Request

LIMITS = RequestLimits(400, 512, Rules(ContextWindow(512)), relative_positions=True)


def checked(*rows: int) -> None:
    check(Request("r", [1] * 100, breakpoints=tuple(Breakpoint(each) for each in rows)), LIMITS)


def test_breakpoints_within_the_prompt_in_ascending_order_are_taken() -> None:
    checked()
    checked(1, 50, 99, 100)


@pytest.mark.parametrize(("rows", "said"), [
    ((101,), "within the 100 tokens of the prompt, got \\[101\\]"),
    ((50, 50), "ascending order"),
    ((50, 20), "ascending order"),
    ((1, 2, 3, 4, 5), "may have 4 breakpoints, got 5"),
])  # fmt: skip
def test_others_are_refused_by_name(rows: tuple[int, ...], said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        checked(*rows)
    assert caught.value.param == "breakpoints"


@pytest.mark.parametrize(("rows", "ttl", "said"), [
    (0, 300.0, "after 1 row or more, got 0"),
    (-1, 300.0, "after 1 row or more, got -1"),
    (1, 0.0, "more than 0 and at most 86400 seconds, got 0"),
    (1, float("nan"), "got nan"),
    (1, float("inf"), "got inf"),
])  # fmt: skip
def test_a_breakpoint_has_a_row_and_a_lifetime(rows: int, ttl: float, said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        Breakpoint(rows, ttl)
    assert caught.value.param == "breakpoints"
