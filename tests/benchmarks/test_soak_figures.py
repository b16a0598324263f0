"""The soak's figures: what is judged in runs of which length, and that a short one is recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.engine import soak


def row(**more: Any) -> dict[str, Any]:
    first, later = {"mover": 2, "saver": 1}, {"mover": 2, "checksums": 1, "saver": 1}
    marks = {"threads": [first, first, later, later], "files": [9, 9, 10, 11], "memory_bytes": [1, 2, 3, 4]}
    return {"turns": 20_000, "compared": 400, "compared_cut": 200, "telling": 20} | marks | more


def test_what_grows_is_missed() -> None:
    assert all(goal["met"] for goal in soak.goals(row()))
    for wrong in (
        {"threads": [{"mover": 2, "saver": 1}] * 3 + [{"mover": 2, "saver": 3}]},
        {"threads": [{"mover": 2}] * 3 + [{"mover": 2, "new": 2}]},
        {"files": [9, 9, 9, 12]},
        {"memory_bytes": [1, 2, 3, 4 + soak.MOST_GROWTH]},
        {"compared": 300},
        {"compared_cut": 100},
        {"telling": 10},
    ):
        assert [goal["met"] for goal in soak.goals(row(**wrong))].count(False) == 1, wrong
    assert len(soak.goals(row(turns=400))) == 2


@pytest.mark.timeout(900)
def test_the_command_writes(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    assert soak.main(["--turns", "60", "--json", str(path)]) == 0
    (found,) = json.loads(path.read_text())["rows"]
    assert found["turns"] >= 60
    assert found["reused_rows"] > 0
    assert len(found["memory_bytes"]) >= 3
