"""Responses that clients go on from by their id, on any engine.

Each engine keeps what it needs in its own file. A response is written to the shared store as well, before its client has its id, and an
engine that does not know an id fetches it and the responses before it. A deletion is a record of its own beside the conversation, which
every engine looks for before it answers from its file. While the store fails engines go by what they have; responses that it has not got
yet are noted in the engine's file, and written when it answers, also after a restart.
"""

from __future__ import annotations

import contextlib
import logging
import random
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final

from afterglow.errors import StoreError
from afterglow.store.database.connection import Schema
from afterglow.store.database.conversation_file import ConversationFile
from afterglow.store.database.conversations import (
    MAX_BYTES,
    MAX_DEPTH,
    SCHEMA,
    TTL_S,
    Conversations,
    Item,
    StoredResponse,
)
from afterglow.store.shared.objects import WRITE_S
from afterglow.store.shared.records import Records

log = logging.getLogger("afterglow.store")

RESPONSES: Final = "responses"
DELETED: Final = "deleted"
BATCH: Final = 64  # responses whose ids a response names, and that are fetched at a time
CLEAN_S: Final = 6 * 3600.0  # between looks for records that have expired
TABLES: Final = (
    "CREATE TABLE IF NOT EXISTS unpublished (number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, tenant TEXT NOT NULL)",
)
MAX_UNPUBLISHED: Final = 4096


class SharedConversations(Conversations):
    """Conversations of this engine's own file, and of a shared store."""

    schema: ClassVar[Schema] = replace(SCHEMA, later=(*SCHEMA.later, *TABLES))

    def __init__(
        self,
        folder: Path | None,
        records: Records,
        *,
        ttl_s: float = TTL_S,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._records = records
        self._next_clean = clock() + CLEAN_S * random.uniform(
            0.1, 1.0
        )  # servers that start together do not clean together
        self._writing: dict[str, float] = {}  # until when a write that was given up may still arrive in the store
        self._deleted: dict[str, str] = {}  # of these, those that were deleted since, and whose they were
        super().__init__(folder, ttl_s=ttl_s, max_bytes=max_bytes, clock=clock)
        self.unpublished = Unpublished(self.file)

    def add(
        self,
        response: str,
        tenant: str,
        previous: str | None,
        model: str,
        body: Mapping[str, Any],
        items: Sequence[Mapping[str, Any]],
    ) -> None:
        super().add(response, tenant, previous, model, body, items)
        try:
            self.unpublished.add(response, tenant)  # a store that hangs may outlive this process
            self._publish(response, tenant)
        except StoreError as error:
            log.warning("other servers do not know a response yet: %s", error)

    def get(self, response: str, tenant: str) -> StoredResponse | None:
        self._bring(response, tenant, 1)
        return super().get(response, tenant)

    def chain(self, response: str, tenant: str) -> list[Item] | None:
        self._bring(response, tenant, MAX_DEPTH)
        return super().chain(response, tenant)

    def delete(self, response: str, tenant: str) -> bool:
        found = self.get(response, tenant)
        if found is None:
            return False
        if response in self._writing:
            self._deleted[response] = tenant
        try:
            self._records.put(DELETED, _tree(tenant, found.root), response, {})
            self._records.delete(RESPONSES, tenant, response)
        finally:
            super().delete(response, tenant)
        return True

    def sweep(self) -> int:
        """Drop what has expired; write to the store what could not be written before."""
        gone = super().sweep()
        for work in (self._publish_late, self._delete_late):
            with contextlib.suppress(StoreError):
                work()
        if self._clock() >= self._next_clean:
            self._next_clean = self._clock() + CLEAN_S
            with contextlib.suppress(StoreError):
                self._records.clean()
        return gone

    # ------------------------------------------------------------------------------------------- the shared store

    def _publish_late(self) -> None:
        """Write to the store what it may not have yet, unless others have deleted it meanwhile: it may have got there. Raises: StoreError."""
        for response, tenant in self.unpublished.read():
            found = super().get(response, tenant)
            if found is not None:
                self._drop(found.root, tenant, self._records.marks(DELETED, _tree(tenant, found.root)))
            self._publish(response, tenant)

    def _publish(self, response: str, tenant: str) -> None:
        """Write a response to the store, if it is still there, and note that it is written. Raises: StoreError."""
        found = super().get(response, tenant)
        if found is not None:
            before = self._writing.get(response)
            self._writing[response] = self._clock() + WRITE_S
            self._write(found, tenant)
            if before is None and response not in self._deleted:
                self._writing.pop(response, None)
        self.unpublished.remove(response)

    def _delete_late(self) -> None:
        """Delete what a write that was given up may have brought back. Raises: StoreError."""
        for response, until in [*self._writing.items()]:
            tenant = self._deleted.get(response)
            if tenant is not None:
                self._records.delete(RESPONSES, tenant, response)
            if self._clock() >= until:
                self._writing.pop(response, None)
                self._deleted.pop(response, None)

    def _write(self, found: StoredResponse, tenant: str) -> None:
        """Write a response to the store. Raises: StoreError."""
        before = [] if found.previous is None else self.line(found.previous, tenant, BATCH)
        value = {
            "previous": found.previous,
            "root": found.root,
            "created": found.created,
            "model": found.model,
            "body": found.body,
            "items": found.items,
            "before": before,
        }
        self._records.put(RESPONSES, tenant, found.id, value)

    def _bring(self, response: str, tenant: str, most: int) -> None:
        """Fetch a response, and those before it, `most` in all, as far as they are not here; drop what others have deleted.

        Raises:
            StoreError: the store fails, and the response is not here.
        """
        known = self.line(response, tenant, most)
        try:
            while len(known) < most:
                last = super().get(known[-1], tenant) if known else None
                wanted = response if last is None else last.previous
                if wanted is None or not self._fetch(wanted, tenant, most - len(known)):
                    break
                before, known = len(known), self.line(response, tenant, most)
                if len(known) <= before:  # it has expired
                    break
            first = super().get(response, tenant)
            deleted = self._records.marks(DELETED, _tree(tenant, first.root)) if first is not None else set()
        except StoreError as error:
            if not known:
                raise
            log.warning("a conversation is answered as it is known here: %s", error)
            return
        if first is not None:
            self._drop(first.root, tenant, deleted)

    def _drop(self, root: str, tenant: str, deleted: set[str]) -> None:
        """Drop responses of a conversation by the marks of their deletions. Raises: StoreError."""
        for each in self.names(root, tenant) if deleted else ():
            if self._records.mark(_tree(tenant, root), each) in deleted:
                super().delete(each, tenant)

    def _fetch(self, response: str, tenant: str, most: int) -> bool:
        """Fetch a response and up to `BATCH` before it. False: it is not there. Raises: StoreError."""
        found = self._records.get(RESPONSES, tenant, [response]).get(response)
        if found is None:
            return False
        wanted = [str(each) for each in found["before"]][: most - 1]
        before = self._records.get(RESPONSES, tenant, wanted) if wanted else {}
        ends = float(found["created"]) + self._ttl_s  # of all its conversation
        line = [(name, before[name]) for name in reversed(wanted) if name in before]
        for name, value in [*line, (response, found)]:
            self.copy(_response(name, value, ends), tenant)
        return True


class Unpublished:
    """Ids of responses that the shared store may not have yet, and whose they are, in the order in which they were added: a table of a
    server's own file, so that a restart forgets none. Every method raises StoreError where the file fails."""

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


def _response(name: str, value: Mapping[str, Any], ends: float) -> StoredResponse:
    """Read a record of a response."""
    facts = (value["previous"], value["root"], float(value["created"]), ends, value["model"])
    return StoredResponse(name, *facts, value["body"], value["items"])


def _tree(tenant: str, root: str) -> str:
    """Name the owner of a conversation's deletions."""
    return f"{tenant}\n{root}"
