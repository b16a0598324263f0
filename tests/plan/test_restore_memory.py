"""What a restart leaves in memory: a cache may have a million extents, so each is to cost little besides its tokens."""

from __future__ import annotations

import tracemalloc

from afterglow.plan.options import Capacity
from afterglow.plan.scheduler import Scheduler
from afterglow.plan.step import ExtentRecord
from tests.plan.fake_executor import pack

COUNT = 4000
TURNS = 8
ROWS = 100
MOST = 600  # bytes per extent that `restore` keeps besides names and tokens, which are the records'
MOST_MEANWHILE = 90  # and what it takes on top of that while it is at work


def records() -> list[ExtentRecord]:
    """Conversations of eight turns, each used as a whole at some time."""
    made: list[ExtentRecord] = []
    for number in range(COUNT):
        above = made[-1] if number % TURNS else None
        tokens = pack([number * 1000 + row for row in range(ROWS)])
        parent, rows = (above.id, above.rows) if above is not None else (None, 0)
        used = above.last_used if above is not None else float(number * 7919 % 5000)
        made.append(ExtentRecord(f"{number:040x}", parent, rows, "", "exact", tokens, 100, used))
    return made


def test_an_extent_costs_little_besides_its_tokens() -> None:
    scheduler = Scheduler(Capacity(400, 100, 100 * COUNT, (100,) * 16, 1024, 64))
    found = records()
    tracemalloc.start()
    try:
        assert scheduler.restore(found, 1e4) == []
        left, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert scheduler.stats().extents == COUNT
    assert left / COUNT < MOST
    assert (most - left) / COUNT < MOST_MEANWHILE


def test_names_and_first_rows_are_there_once() -> None:
    scheduler = Scheduler(Capacity(400, 100, 100 * COUNT, (100,) * 16, 1024, 64))
    scheduler.restore(records(), 1e4)
    extents = scheduler.cache.index.extents
    for extent in extents.values():
        if extent.parent is not None:
            assert extent.parent is extents[extent.parent].id
    assert len({id(extent.first_row) for extent in extents.values()}) == TURNS
