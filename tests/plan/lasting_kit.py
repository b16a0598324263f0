"""A server whose notes outlive it, as the catalog keeps them; and the rows left of a conversation, tier by tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from afterglow.plan.retention.sessions import SessionState
from afterglow.plan.step import Step
from tests.plan.fake_executor import FakeExecutor, pack
from tests.plan.server_kit import Server, Steady


class Lasting(Server):
    """One engine, started as often as a test likes."""

    def __init__(self, **more: object) -> None:
        self.notes: dict[str, dict[str, str]] = {}
        super().__init__(**more)  # type: ignore[arg-type]

    def remember(self, last: bool = False) -> None:
        """As the engine does now and then, and at the end (`last`): what the plan wants to know after a restart goes to the
        catalog."""
        for kind, key, value in self.scheduler.cache.take_notes(last):
            if value is None:
                self.notes.get(kind, {}).pop(key, None)
            else:
                self.notes.setdefault(kind, {})[key] = value

    def note_uses(self) -> None:
        """As the engine does now and then: the catalog is told how extents were used."""
        for use in self.scheduler.cache.disk.take_touched():
            self.executor.catalog[use.extent] = replace(
                self.executor.catalog[use.extent], last_used=use.last_used, hits=use.hits, expires=use.expires
            )

    def flush(self) -> None:
        """Everything to disk, as far as there is room."""
        self.finish()
        self.scheduler.flush(self.now)
        for _ in range(100):
            self.step()
            if self.scheduler.flushed:
                return
        raise AssertionError("the flush never ends")

    def restart(self, *, after: float = 0.0, disk_bytes: int | None = None, **changed: object) -> None:
        """Everything to disk, and a new process `after` seconds, perhaps with other settings."""
        self.flush()
        self.note_uses()
        self.remember(last=True)
        old = self.executor
        self.executor = FakeExecutor(self.capacity, Steady(), self.faults)
        if disk_bytes is not None:  # to the executor it does not matter: files above the budget have yet to go
            self.capacity = replace(self.capacity, disk_bytes=disk_bytes)
        self.executor.files, self.executor.catalog, self.executor.texts = old.files, old.catalog, old.texts
        self.settings |= changed
        self.now += after
        self.scheduler = self.make()
        assert self.scheduler.restore(list(old.catalog.values()), self.now) == []
        self.scheduler.recall({kind: dict(items) for kind, items in self.notes.items()})
        self.scheduler.check()

    def to_host(self) -> None:
        """No row of ended jobs stays on the device."""
        self.scheduler.drop_contexts()
        self.finish()

    def to_disk(self) -> None:
        """No row of ended jobs stays in host, nor on the device."""
        self.scheduler.drop_contexts()
        self.flush()
        self.scheduler.drop_clean_host()
        self.finish()

    # ---------------------------------------------------------------------------------------- looking on

    def session(self, name: str, tenant: str = "") -> SessionState:
        """A conversation as its tenant sees it."""
        (found,) = (state for state in self.scheduler.cache.sessions.listing(tenant) if state.name == name)
        return found

    def names(self, tenant: str = "") -> list[str]:
        return [state.name for state in self.scheduler.cache.sessions.listing(tenant)]

    def known(self, tokens: Sequence[int], salt: str = "") -> int:
        """Rows of a token string that are cached anywhere."""
        return self.scheduler.cache.index.match(salt, pack(list(tokens))).rows

    def is_empty(self) -> bool:
        """Is nothing left in any tier?"""
        stats = self.scheduler.stats()
        used = (stats.extents, stats.contexts, stats.device_rows, stats.host_slots, stats.disk_bytes)
        return used == (0, 0, 0, 0, 0) and not self.executor.files and not self.executor.catalog

    def sleep(self, until: float) -> Step:
        """As an idle engine does: it looks again when the last step said, and when moves have ended; not more often."""
        step = self.step()
        while True:
            if not step.idle or self.executor.busy:
                step = self.step()
            elif step.wake_at is not None and step.wake_at <= until:
                self.now = max(self.now, step.wake_at)
                step = self.step()
            else:
                self.now = max(self.now, until)
                return step
