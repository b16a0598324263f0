"""Tables and JSON on standard output. A table fits the terminal; in a pipe no cell is wrapped or cut."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

NOTHING = "nothing is stored"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = False) -> None:
    """Print rows under their heads. `numbers`: align all columns but the first to the right."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i, head in enumerate(heads):
        made.add_column(Text(head), justify="right" if numbers and i else "left", overflow="fold")
    for row in rows:
        made.add_row(*map(Text, row))
    _print(made)


def lines(rows: Iterable[tuple[str, str]]) -> None:
    """Print names and their values, a line each."""
    made = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    for row in rows:
        made.add_row(*map(Text, row))
    _print(made)


def nested(facts: Mapping[str, Any], indent: str = "", around: str = "") -> list[tuple[str, str]]:
    """Make lines of figures that are nested by name. `around`: the name of the figures that these are in, which is not said twice."""
    rows = []
    for name, value in facts.items():
        shown = indent + name.replace("_", " ")
        if isinstance(value, Mapping):
            rows += nested(value, indent) if name == around else [(shown, ""), *nested(value, indent + "  ", name)]
        elif name != "object" and value is not None:
            rows.append((shown, str(value)))
    return rows


def print_json(value: object) -> None:
    """Print a value for programs."""
    print(json.dumps(value, indent=2))


def _print(made: Table) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(1, console.measure(made, options=console.options.update(max_width=1_000_000)).maximum)
    with console.capture() as captured:
        console.print(made)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))
