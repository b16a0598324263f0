"""The JSON file of a table: parts are kept in it as they end, and a further run goes on from there."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from afterglow.bench.report import about, commit
from benchmarks.papers.cachedattention.overflow.summary import Part, Row


@dataclass(frozen=True)
class Form:
    """How a table's rows and goals are made of its parts, and whether rows are less than a full run has."""

    rows: Callable[[Sequence[Part]], list[Row]]
    goals: Callable[[Sequence[Row]], list[dict[str, Any]]]
    is_short: Callable[[Sequence[Row]], bool]


@dataclass
class PartsFile:
    """The JSON file of a table, with all parts that are done. Raises: SystemExit for a file of other settings."""

    options: argparse.Namespace
    settings: dict[str, Any]
    form: Form
    parts: list[Part] = field(default_factory=list)

    def __post_init__(self) -> None:
        path: Path | None = self.options.json
        if path is None or not path.is_file():
            return
        found = json.loads(path.read_text())
        if found["settings"] != self.settings:
            raise SystemExit(f"{path} is of other settings: {found['settings']}; name another file")
        self.parts = found["parts"]

    def has(self, text: str, arm: str, part: int | str) -> bool:
        """Tell whether a part is done."""
        return any((p["text"], p["arm"], p["part"]) == (text, arm, part) for p in self.parts)

    def add(self, part: Part) -> None:
        """Take a part, and write the file anew: it is whole at any time."""
        self.parts.append(part | {"commit": commit()})
        path: Path | None = self.options.json
        if path is not None:
            rows = self.rows()
            facts = {**about(self.options), "rows": rows, "goals": self.form.goals(rows)}
            facts["quick"] = self.form.is_short(rows)
            beside = path.with_name(path.name + ".part")
            beside.write_text(json.dumps(facts | self.more(), indent=1) + "\n")
            beside.replace(path)

    def rows(self) -> list[Row]:
        """Return the table's rows, as far as they go."""
        return self.form.rows(self.parts)

    def more(self) -> dict[str, Any]:
        """Return what the file holds besides."""
        return {"settings": self.settings, "parts": self.parts}
