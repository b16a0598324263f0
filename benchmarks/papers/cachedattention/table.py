"""Rows of paper value, simulated value and deviation, and goals made from the rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

Row = dict[str, Any]
Paper = Literal["ATC", "arXiv"]


def row(
    paper: Paper,
    figure: str,
    what: str,
    printed: float | str,
    simulated: float,
    *,
    within: float | None = None,
    note: str = "",
) -> Row:
    """One row. Shares are in % (` %` in `what`), and their deviation is in points; all others' is relative, in %.

    `within`: the largest deviation, either way, that meets the goal of this row; None: it has none.
    """
    simulated = float(f"{simulated:.4g}")
    deviation = None
    if not isinstance(printed, str):
        deviation = simulated - printed if " %" in what else 100 * (simulated / printed - 1)
        deviation = round(deviation, 2)
    return {
        "paper": paper,
        "figure": figure,
        "what": what,
        "printed": printed,
        "simulated": simulated,
        "deviation": deviation,
        "within": within,
        "met": None if within is None or deviation is None else abs(deviation) <= within,
        "note": note,
    }


def holds(paper: Paper, figure: str, what: str, values: Sequence[float], note: str = "") -> Row:
    """A row about an order: met if the values fall, one after the other (equal ones do not)."""
    met = all(a > b for a, b in zip(values, values[1:], strict=False))
    shown = " > ".join(f"{value:.3g}" for value in values)
    found = row(paper, figure, what, "falls", values[0] if values else 0.0, note=note or shown)
    return found | {"met": met, "simulated": "falls" if met else "does not"}


def shown(found: Row) -> tuple[str, ...]:
    """A row of the table that is printed."""
    unit = "pt" if " %" in found["what"] else "%"
    deviation = "" if found["deviation"] is None else f"{found['deviation']:+.1f} {unit}"
    met = {True: "met", False: "MISSED", None: ""}[found["met"]]
    numbers = (found["printed"], found["simulated"])
    printed, simulated = (x if isinstance(x, str) else f"{x:g}" for x in numbers)
    return found["what"], printed, simulated, deviation, met, found["note"]


def missed(rows: Iterable[Row]) -> list[Row]:
    """Rows whose goal is not met."""
    return [found for found in rows if found["met"] is False]
