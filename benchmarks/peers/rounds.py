"""Rounds in which engines take turns, and what their repeats differ by."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from afterglow.bench.report import spread


def turns(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """(round, name): every variant in each round, and none always first: load from outside would count against the first."""
    for number in range(rounds):
        first = number % max(1, len(names))
        for name in (*names[first:], *names[:first]):
            yield number, name


def measured(figure: str, samples: Sequence[float], **labels: Any) -> dict[str, Any]:
    """Median and spread of repeats of the same, as a row of the JSON file."""
    return {
        "figure": figure,
        **labels,
        "value": round(statistics.median(samples), 5),
        "spread": round(spread(samples), 4),
        "samples": [round(sample, 5) for sample in samples],
    }


def best(rows: Sequence[dict[str, Any]], *, least: bool = False) -> dict[str, Any] | None:
    """The row of the best value; None of none."""
    return (min if least else max)(rows, key=lambda row: row["value"], default=None)


def ratio(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[float, float]:
    """Of the medians; and what it may differ by in another run, the larger of the two spreads."""
    return ours["value"] / theirs["value"], max(ours["spread"], theirs["spread"])
