"""Tables of `docs/reference.md`, from the code that they describe: options, endpoints, statuses of errors, metrics.

`scripts/readme.py` puts them into the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import typer.main

from afterglow.cli.commands import app
from afterglow.server.api.openapi import ENDPOINTS, ERRORS
from afterglow.server.metrics.metric_names import ROWS


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table in Markdown."""
    lines = [heads, ["---"] * len(heads), *([_cell(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "\\<")


def options(name: str) -> str:
    """List the options of a command, in the groups that its help has."""
    group: Any = typer.main.get_command(app)
    found: dict[str, list[Sequence[str]]] = {}
    for each in group.commands[name].params:
        if each.param_type_name == "option" and each.name not in ("help", "config"):
            panel = each.rich_help_panel or "Options"
            names = " or ".join(f"`{word}`" for word in [*each.opts, *each.secondary_opts])
            about = (each.help or "").replace("\\[", "[")
            found.setdefault(panel, []).append((names, _default(each), about))
    heads = ("option", "default", "what it does")
    return "\n\n".join(f"**{panel}**\n\n{table(heads, rows)}" for panel, rows in found.items())


def _default(option: Any) -> str:
    """Write a default as it is typed; nothing where the description says it."""
    value = option.default
    if not option.show_default or value in (None, (), [], ""):
        return ""
    if isinstance(value, bool):
        return f"`{(option.opts if value else option.secondary_opts)[0]}`"
    return f"`{value}`"


def endpoints(_: str) -> str:
    """List the endpoints."""
    rows = [(f"`{each.method} {each.path}`", each.summary, "no" if each.open else "yes") for each in ENDPOINTS]
    return table(("endpoint", "what it does", "needs a key, where there are keys"), rows)


def statuses(_: str) -> str:
    """List the statuses of errors."""
    return table(("status", "meaning"), [(str(status), about) for status, about in ERRORS.items()])


def metrics(_: str) -> str:
    """List the metrics of the engine's numbers."""
    labels: dict[str, dict[str, list[str]]] = {}
    known = {row.name: row for row in ROWS}
    for row in ROWS:
        for label, value in row.labels:
            labels.setdefault(row.name, {}).setdefault(label, []).append(value)
    said = {name: "; ".join(f"`{key}`: {', '.join(of)}" for key, of in each.items()) for name, each in labels.items()}
    rows = [(f"`{name}`", row.kind, said.get(name, ""), row.help) for name, row in known.items()]
    return table(("metric", "kind", "labels", "meaning"), rows)


TABLES: dict[str, Callable[[str], str]] = {
    "options": options,
    "endpoints": endpoints,
    "statuses": statuses,
    "metrics": metrics,
}


def reference(source: str) -> str:
    """Make the table that a region names, for example `options serve`."""
    kind, _, about = source.partition(" ")
    return TABLES[kind](about)
