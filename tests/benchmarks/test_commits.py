"""One checkout beside another: processes that are alike are compared, and each measures its own package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.common.paths import ROOT
from benchmarks.engine import commits


def process(rate: float, huge: int = 100) -> dict[str, Any]:
    return {"rates": {"decode": rate}, "huge_bytes": huge}


def test_processes_without_huge_pages_are_left_out() -> None:
    """Of each arm's own: one may need less memory."""
    this = [process(10, 50), process(2, 20), process(12, 48)]
    (row,) = commits.compared({"this": this, "other": [process(10), process(5, 60), process(10, 99)]})
    assert (row["this"], row["other"], row["ratio"]) == (11, 10, 1.1)
    assert row["compared"] == {"this": 2, "other": 2}


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        commits.main([str(tmp_path)])
    assert "is no checkout: it has no src/afterglow" in capsys.readouterr().err


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    (tmp_path / "src" / "afterglow").mkdir(parents=True)
    (tmp_path / "src" / "afterglow" / "__init__.py").write_text("")
    with pytest.raises(RuntimeError, match="No module named"):
        commits.process(tmp_path, 1)


@pytest.mark.long
def test_a_checkout_beside_itself(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert commits.main([str(ROOT), "--quick", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert len(found["rows"]) == 6
    assert all(row["this"] > 0 for row in found["rows"])
