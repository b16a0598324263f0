"""Transactions: a failed one leaves no trace, and the next one works."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from afterglow.store.database.connection import transact


def test_a_failed_transaction_is_undone_and_its_error_passes_through(tmp_path: Path) -> None:
    def half(db: sqlite3.Connection) -> None:
        db.execute("INSERT INTO numbers VALUES (2)")
        db.execute("INSERT INTO numbers VALUES (1)")  # is there already

    def add(db: sqlite3.Connection) -> str:
        db.execute("INSERT INTO numbers VALUES (3)")
        return "done"

    with closing(sqlite3.connect(tmp_path / "x.sqlite", isolation_level=None)) as db:
        db.execute("CREATE TABLE numbers (number INTEGER PRIMARY KEY)")
        db.execute("INSERT INTO numbers VALUES (1)")
        with pytest.raises(sqlite3.IntegrityError):
            transact(db, half)
        assert not db.in_transaction
        assert transact(db, add) == "done"
    with closing(sqlite3.connect(tmp_path / "x.sqlite")) as other:
        assert other.execute("SELECT number FROM numbers ORDER BY number").fetchall() == [(1,), (3,)]
