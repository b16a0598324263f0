"""Responses that the shared store may not have yet: a table of a server's own file, so that a restart forgets none."""

from __future__ import annotations

import sqlite3
from typing import Final

from afterglow.store.database.conversation_file import ConversationFile

TABLES: Final = (
    "CREATE TABLE IF NOT EXISTS unpublished (number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, tenant TEXT NOT NULL)",
)
MAX_UNPUBLISHED: Final = 4096


class Unpublished:
    """Ids of responses, and whose they are, in the order in which they were added. Every method raises StoreError where the file fails."""

    def __init__(self, file: ConversationFile) -> None:
        """`file` has `TABLES`."""
        self._file = file

    def add(self, response: str, tenant: str) -> None:
        """Add a response; beyond MAX_UNPUBLISHED the first goes."""

        def work(db: sqlite3.Connection) -> None:
            db.execute("INSERT OR IGNORE INTO unpublished (id, tenant) VALUES (?, ?)", (response, tenant))
            latest = "SELECT number FROM unpublished ORDER BY number DESC LIMIT ?"
            db.execute(f"DELETE FROM unpublished WHERE number NOT IN ({latest})", (MAX_UNPUBLISHED,))

        self._file.run(work)

    def read(self) -> list[tuple[str, str]]:
        """List ids and tenants, the first to come first."""
        query = "SELECT id, tenant FROM unpublished ORDER BY number"
        return self._file.run(lambda db: [(str(each), str(tenant)) for each, tenant in db.execute(query)])

    def remove(self, response: str) -> None:
        """Remove a response, if it is there."""
        self._file.run(lambda db: db.execute("DELETE FROM unpublished WHERE id = ?", (response,)))
