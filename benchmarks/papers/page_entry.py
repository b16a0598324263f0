"""An entry of docs/papers.md about goals that are not met."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.papers.page_simulated import Found

Figures = Callable[[Found], Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Missed:
    """An explanation of goals of one or more files of results: those whose names `goals`, a regular expression, matches.

    `file` may name several, apart by spaces. `{name}` in the texts stands for a figure that `figures` takes from the first file.
    `fewer` says why less than two ways were tried.
    """

    file: str
    what: str
    goals: str
    cause: str
    tried: tuple[str, ...]
    changes: str
    fewer: str = ""
    figures: Figures | None = None

    @property
    def files(self) -> list[str]:
        """Name the files of results."""
        return self.file.split()

    def explains(self, file: str, goal: str) -> bool:
        """Say whether the entry is about a goal of a file."""
        return file in self.files and re.search(self.goals, goal) is not None

    def lines(self, found: Found) -> list[str]:
        """Write cause, tries, and what would change it, as items of a list. `found`: the first file of results."""
        figures = self.figures(found) if self.figures is not None else {}
        cause, fewer, changes, *tried = (
            text.format_map(figures) for text in (self.cause, self.fewer, self.changes, *self.tried)
        )
        if not tried:
            ways = [f"- Tried: {fewer}\n"]
        else:
            ways = ["- Tried:\n", *(f"  - {way}\n" for way in tried), *([f"  - {fewer}\n"] if fewer else [])]
        return [f"- Cause: {cause}\n", *ways, f"- What would change it: {changes}\n"]
