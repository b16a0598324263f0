"""A row of a paper's figure or table: the printed value beside the model's."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]
FITTED = "fitted"


def row(figure: str, what: str, paper: float | str, simulated: float | str, note: str = "") -> Row:
    """One row. `deviation`: relative, but for shares in % (` %` in `what`), where it is their difference."""
    deviation = None
    if isinstance(simulated, int | float):
        simulated = float(f"{simulated:.4g}")
        if isinstance(paper, int | float):
            deviation = round((simulated - paper) / 100 if " %" in what else simulated / paper - 1, 4)
    return {
        "figure": figure,
        "what": what,
        "paper": paper,
        "simulated": simulated,
        "deviation": deviation,
        "note": note,
    }
