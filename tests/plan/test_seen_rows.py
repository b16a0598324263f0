"""Copies in host that lack rows before sliding windows: what may be left out, and what comes of such copies later."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.plan.fake_executor import FakeExecutor
from tests.plan.prefix_kit import Prompting, prompted
from tests.plan.server_kit import Steady, words

WINDOW = 6  # rows; extents have sixteen, in blocks of four


@pytest.fixture(autouse=True)
def _whose_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with prompted(monkeypatch):
        yield


class Windowed(Prompting):
    """One of two layers has a window, and loads leave out what it does not show."""

    def __init__(self, **more: object) -> None:
        super().__init__(**more)
        self.capacity = replace(self.capacity, layers=2, window_block_bytes=20)
        self.settings["sliding_window"] = WINDOW
        self.begin_anew()

    def begin_anew(self) -> None:
        """A new process, which knows what is on disk and what was noted."""
        self.remember(last=True)
        old = self.executor
        self.executor = FakeExecutor(self.capacity, Steady(), self.faults, WINDOW)
        self.executor.files, self.executor.catalog, self.executor.texts = old.files, old.catalog, old.texts
        self.scheduler = self.make()
        self.scheduler.restore(list(old.catalog.values()), self.now)
        self.scheduler.recall({kind: dict(items) for kind, items in self.notes.items()})

    def partial(self) -> int:
        """Rows of extents whose copies in host lack some."""
        return sum(e.rows for e in self.scheduler.cache.index.extents.values() if e.host == "partial")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_registered_prefix_is_never_computed_again(when: str) -> None:
    """It is pinned, and so would stay for ever as the first load left it."""
    server, prefix = Windowed(), words(32, 1000)
    text = [*prefix, *words(40, 2000)]
    if when == "before":
        server.register(prefix, "")
    server.ask(text)
    server.to_disk()
    server.begin_anew()
    assert server.hits(server.ask([*text, 7])) == (0, 0, 72)
    assert server.partial() > 0
    if when == "after":
        server.register(prefix, "")
    for number in range(3):
        server.scheduler.drop_contexts()
        assert server.cached([*prefix, *words(9, 3000 + 100 * number)]) == len(prefix)


def test_room_is_made_only_for_what_is_loaded() -> None:
    server, text, others = Windowed(host_slots=64), words(96, 1000), [words(8, 3000 + 100 * n) for n in range(9)]
    for each in (text, *others):
        server.ask(each)
    server.to_disk()
    for each in (text, *others):
        server.ask([*each, 7])
    assert server.partial() == len(text)
    assert server.scheduler.cache.host.pool.free < len(text) / 4
    server.scheduler.drop_contexts()
    before, loads = server.scheduler.stats().counters.evicted_host, len(server.loads())
    server.submit([*text, 8])
    server.step()
    assert len(server.loads()) == loads
    assert server.scheduler.stats().counters.evicted_host == before


def test_conversations_that_come_back_together_find_what_they_share() -> None:
    """The first to come back is far beyond what the others share with it."""
    server, shared = Windowed(), words(64, 1000)
    texts = [[*shared, *words(80, 2000 + 100 * number)] for number in range(3)]
    for text in texts:
        server.ask(text)
    server.to_disk()
    server.begin_anew()
    jobs = [server.submit([*text, 7, 8]) for text in (*texts, [*shared, *words(20, 4000)])]
    server.finish()
    assert server.partial() > 0
    assert [sum(server.hits(job)) for job in jobs] == [144, 144, 144, 64]
