"""`afterglow bench disk` on a few small files: the shape of its results, not their speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from afterglow.bench import disk
from afterglow.errors import ConfigError


def test_all_rows_and_goals_are_there(tmp_path: Path) -> None:
    out = tmp_path / "disk.json"
    args = ["--quick", "--rows", "64", "70", "--mib", "1", "--cache-dir", str(tmp_path), "--json", str(out)]
    try:
        assert disk.main(args) == 0
    except ConfigError as error:
        pytest.skip(str(error))
    found = json.loads(out.read_text())
    assert len(found["rows"]) == 2 * 3 * 2
    assert len(found["goals"]) == 2 * 3 * 2
    for row in found["rows"]:
        assert row["mb_per_s"] > 0
        best = max(row["kept"]["mb_per_s"], row["reused"]["mb_per_s"])
        assert row["ratio"] == pytest.approx(row["mb_per_s"] / best, rel=0.01)
    assert [p.name for p in tmp_path.iterdir()] == ["disk.json"]


def test_where_the_page_cache_cannot_be_passed_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("afterglow.store.extents.extent_folder.supports_direct", lambda _: False)
    with pytest.raises(ConfigError, match="O_DIRECT"):
        disk.main(["--quick", "--cache-dir", str(tmp_path)])
    assert not list(tmp_path.iterdir())
