"""How long extents are kept is in the catalog, survives it where it is lost, and old catalogs are still read."""

from __future__ import annotations

import contextlib
import sqlite3
from math import inf
from pathlib import Path

import pytest

from afterglow.plan.step import Use
from afterglow.store import admin
from tests.store.store_kit import Kit, extent_name, name_of

EARLIER = "id, parent, parent_rows, salt, kind, tokens, rows, file, bytes, last_used, hits, crc32c"


def ends(kit: Kit) -> dict[str, float]:
    return {record.id: record.expires for record in kit.store.records()}


def test_ends_survive_a_restart_as_they_were_last_noted(tmp_path: Path) -> None:
    with Kit(tmp_path) as kit:
        for number, end in enumerate((50.5, 60.0, 70.0, inf)):
            assert kit.put(number, 64, [number], expires=end).ok
        kit.store.touch([Use(extent_name(1), 5.0, 2, 99.0), Use(extent_name(2), 6.0, 1, inf)])
    with Kit(tmp_path) as kit:
        assert ends(kit) == {extent_name(0): 50.5, extent_name(1): 99.0, extent_name(2): inf, extent_name(3): inf}


@pytest.mark.parametrize("how", ["lost", "damaged row"])
def test_without_the_catalog_ends_are_as_they_were_when_the_extent_was_written(tmp_path: Path, how: str) -> None:
    with Kit(tmp_path) as kit:
        kit.put(1, 64, [1], expires=50.5)
        kit.put(2, 64, [2])
        path = kit.path / "catalog.sqlite"
    if how == "lost":
        path.unlink()
    else:
        with contextlib.closing(sqlite3.connect(path)) as db, db:
            db.execute("UPDATE extents SET crc32c = 1")
    with Kit(tmp_path) as kit:
        assert ends(kit) == {extent_name(1): 50.5, extent_name(2): inf}


def test_catalogs_of_before_there_were_ends_are_read_and_lose_nothing(tmp_path: Path) -> None:
    with Kit(tmp_path) as kit:
        kit.put(1, 64, [1])
        kit.store.note("session", [("a", "1")])
        folder = kit.path
    with contextlib.closing(sqlite3.connect(folder / "catalog.sqlite")) as db, db:
        db.execute("ALTER TABLE extents DROP COLUMN expires")
    assert admin.check(folder, name_of=name_of).ok, "which changes nothing"
    with Kit(tmp_path) as kit:
        assert ends(kit) == {extent_name(1): inf}
        assert kit.store.stats().errors == {}
        assert kit.store.notes("session") == {"a": "1"}
        kit.store.touch([Use(extent_name(1), 5.0, 2, 99.0)])
    with contextlib.closing(sqlite3.connect(folder / "catalog.sqlite")) as db, db:
        assert db.execute("PRAGMA user_version").fetchone() == (1,), "programs of before read it, too"
        row = db.execute(f"SELECT {EARLIER} FROM extents").fetchone()
        db.execute(f"INSERT OR REPLACE INTO extents ({EARLIER}) VALUES (?,?,?,?,?,?,?,?,?,?,?,?)", row)  # as they do
    with Kit(tmp_path) as kit:
        assert ends(kit) == {extent_name(1): inf}
