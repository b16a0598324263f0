"""After a restart: records of the catalog are matched again, and useless ones are named."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afterglow.plan.options import Capacity
from afterglow.plan.prefix.index import Index
from afterglow.plan.scheduler import Scheduler
from afterglow.plan.step import Drop, ExtentRecord, MoveDone, StepResult
from tests.plan.fake_executor import pack
from tests.plan.server_kit import Server, words
from tests.plan.tiers_kit import FILE_BYTES, make_extent

CAPACITY = Capacity(400, 100, 100_000, FILE_BYTES, 16, 4)
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=9)


def record(
    tokens: list[int], parent: ExtentRecord | None = None, parent_rows: int = 0, *, used: float = 1.0, salt: str = ""
) -> ExtentRecord:
    """Below all of its parent, unless `parent_rows` says less. Its name is made up."""
    name = f"{tokens}{parent.id if parent else ''}{parent_rows}{salt}".replace(" ", "")
    rows = parent_rows or (parent.rows if parent else 0)
    return ExtentRecord(name, parent and parent.id, rows, salt, "exact", pack(tokens), 100, used)


def restored(records: list[ExtentRecord], disk_bytes: int = 100_000, now: float = 50.0) -> tuple[Scheduler, list[str]]:
    scheduler = Scheduler(replace(CAPACITY, disk_bytes=disk_bytes))
    useless = scheduler.restore(records, now)
    scheduler.check()
    return scheduler, [item.id for item in useless]


def matched(scheduler: Scheduler, tokens: list[int], salt: str = "") -> list[tuple[str, int, int]]:
    views = scheduler.cache.index.match(salt, pack(tokens)).views
    return [(view.extent.id, view.start, view.stop) for view in views]


def test_records_come_in_any_order() -> None:
    top = record([1, 2, 3])
    tail = record([4, 5], top)
    branch = record([6], top, 1)
    end = record([7], tail)
    other = record([1, 2, 3], salt="a")
    records = [top, tail, branch, end, other]
    for seed in range(20):
        random.Random(seed).shuffle(records)
        scheduler, useless = restored(records)
        assert useless == []
        assert matched(scheduler, [1, 2, 3, 4, 5, 7, 8]) == [(top.id, 0, 3), (tail.id, 0, 2), (end.id, 0, 1)]
        assert matched(scheduler, [1, 6]) == [(top.id, 0, 1), (branch.id, 0, 1)]
        assert matched(scheduler, [1, 2, 9], salt="a") == [(other.id, 0, 2)]


def test_records_of_no_use_are_returned() -> None:
    top = record([1, 2, 3, 4])
    tail = record([5, 6], top)
    bad = [
        record([7], record([9])),  # its parent is not there
        record([7], record([7], record([9]))),  # nor is the parent of this one
        replace(record([8], top), kind="session"),
        replace(record([9], top), kind="approx"),
        replace(record([10], top), parent_rows=0),
        replace(record([11], top), parent_rows=5),
        record([12], top, salt="a"),  # not the tenant of its parent
        record([], top),
        replace(record([13]), id="ring", parent="ring", parent_rows=1),
        replace(record([4], top, 3), id="there already"),
    ]
    scheduler, useless = restored([*bad, tail, top])
    assert sorted(useless) == sorted(item.id for item in bad)
    assert matched(scheduler, [1, 2, 3, 4, 5, 6]) == [(top.id, 0, 4), (tail.id, 0, 2)]
    assert scheduler.stats().extents == 2
    assert scheduler.stats().disk_bytes == 200, "those are not counted"


def test_of_a_record_that_comes_twice_one_is_returned() -> None:
    top = record([1, 2])
    assert restored([top, top])[1] == [top.id]


@pytest.mark.parametrize("overlapping", [False, True])
@settings(max_examples=100, deadline=None)
@given(texts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), max_size=12), seed=st.integers(0, 999))
def test_what_was_matched_before_is_matched_after(overlapping: bool, texts: list[list[int]], seed: int) -> None:
    """Either texts branch anywhere, or jobs that do not read compute anew, and cut otherwise, what others had."""
    index = Index()
    for number, text in enumerate(texts):
        views, rows = index.match("", pack(text))
        if overlapping:  # and branches only where extents end
            whole = takewhile(lambda view: view.stop == view.extent.rows, views) if number % 3 else ()
            rows = sum(view.stop - view.start for view in whole)
        if rows < len(text):
            index.insert(make_extent(text[rows:], text[:rows], serial=number), pack(text[:rows]))
    records = [extent.record() for extent in index.extents.values()]
    random.Random(seed).shuffle(records)
    scheduler, useless = restored(records)
    assert useless == []
    for text in texts:
        assert scheduler.cache.index.match("", pack(text)).rows == len(text)


def test_a_longer_extent_does_not_cost_the_shorter_one_that_was_there_first() -> None:
    """Nor what hangs below it. As a job that does not read leaves them; whatever their names."""
    for short_name, long_name in (("a", "b"), ("b", "a")):
        short, long = replace(record([1, 2]), id=short_name), replace(record([1, 2, 3, 4]), id=long_name)
        branch = record([9], short)
        scheduler, useless = restored([long, branch, short])
        assert useless == []
        assert matched(scheduler, [1, 2, 3, 4]) == [(short.id, 0, 2), (long.id, 2, 4)]
        assert matched(scheduler, [1, 2, 9]) == [(short.id, 0, 2), (branch.id, 0, 1)]


# ------------------------------------------------------------------------------------------- a smaller budget


def end_drops(scheduler: Scheduler) -> list[str]:
    """Run the first step; the extents whose files it drops."""
    step = scheduler.schedule(51.0)
    assert all(isinstance(move, Drop) for move in step.moves)
    scheduler.commit(step, StepResult({}, {}), [MoveDone(move.move, True) for move in step.moves], 51.0)
    scheduler.check()
    return [move.extent for move in step.moves if isinstance(move, Drop)]


def test_a_smaller_budget_drops_leaves_first() -> None:
    top = record([1], used=1)
    tail = record([2], top, used=9)
    end = record([3], tail, used=9)
    other = record([4], used=5)
    records = [top, tail, end, other]
    for budget, gone in [(400, []), (300, [other]), (200, [other, end]), (100, [other, end, tail]), (99, records)]:
        scheduler, useless = restored(records, budget)
        assert useless == []
        assert sorted(end_drops(scheduler)) == sorted(item.id for item in gone)
        assert scheduler.stats().disk_bytes == 400 - 100 * len(gone) <= budget
        assert matched(scheduler, [1, 2, 3]) == [(item.id, 0, 1) for item in (top, tail, end) if item not in gone]


def test_without_a_disk_nothing_is_restored() -> None:
    scheduler, useless = restored([record([1])], disk_bytes=0)
    assert useless == []
    assert scheduler.stats().extents == 0


# ----------------------------------------------------------------------------------------------------- use


def test_a_clock_that_was_set_back_makes_nothing_last_for_ever() -> None:
    future, past = record([1], used=1e9), record([2], used=40.0)
    scheduler, _ = restored([future, past], now=50.0)
    used = {extent.id: extent.last_used for extent in scheduler.cache.index.extents.values()}
    assert used == {future.id: 50.0, past.id: 40.0}
    # Extents used from now on outlive it.
    scheduler, _ = restored([replace(future, last_used=60.0), future], now=50.0)
    assert [extent.last_used for extent in scheduler.cache.index.extents.values()] == [50.0]


def test_matches_after_a_restart_count_as_disk() -> None:
    server = Server(disk_bytes=100_000)
    first = server.ask(words(30), max_tokens=8)
    server.restart()
    job = server.ask([*server.text(first), 7], max_tokens=2)
    assert server.hits(job) == (0, 0, 37)
    assert server.scheduler.stats().counters.hit_disk == 37
    assert server.computed(job) == 2 + 1


def test_use_outlives_a_restart() -> None:
    """The order of eviction goes on where it was."""
    server = Server(disk_bytes=500)
    old, young = server.ask(words(8), max_tokens=0), server.ask(words(8, 1000), max_tokens=0)
    server.ask([*words(8), 1], max_tokens=0, write=False)  # used again
    server.restart()
    assert [item.rows for item in server.executor.catalog.values()] == [8, 8]
    server.ask(words(8, 2000), max_tokens=0)
    server.restart()
    left = {item.tokens for item in server.executor.catalog.values()}
    assert server.specs[old].prompt in left
    assert server.specs[young].prompt not in left
