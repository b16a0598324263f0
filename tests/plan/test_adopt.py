"""Rows that another engine has computed are taken over at any time, wherever the two have cut them."""

from __future__ import annotations

from collections.abc import Sequence

from afterglow.plan.options import Capacity, SchedulerOptions
from afterglow.plan.prefix.extent import Extent
from afterglow.plan.prefix.index import Index
from afterglow.plan.scheduler import Scheduler
from afterglow.plan.step import Drop
from tests.plan.fake_executor import pack
from tests.plan.tiers_kit import FILE_BYTES, make_extent

TOKENS = list(range(10))


def another(*cuts: int, tokens: Sequence[int] = TOKENS) -> list[Extent]:
    """What another engine has of these tokens: extents up to each cut."""
    index = Index()
    for number, (start, stop) in enumerate(zip((0, *cuts), cuts, strict=False)):
        extent = make_extent(tokens[start:stop], tokens[:start], serial=number)
        assert index.insert(extent, pack(list(tokens[:start]))).outcome == "inserted"
    return [view.extent for view in index.match("", pack(list(tokens))).views]


def one(disk_bytes: int = 100_000) -> Scheduler:
    return Scheduler(Capacity(400, 100, disk_bytes, FILE_BYTES, 16, 4), SchedulerOptions(digest="m"))


def adopted(scheduler: Scheduler, path: list[Extent], ttl: float | None = None, now: float = 1.0) -> list[str]:
    taken = scheduler.adopt("", pack(TOKENS), path, ttl, now)
    scheduler.check()
    assert not any(extent in path for extent in taken), "they are another engine's"
    return [extent.id for extent in taken]


def test_a_path_is_taken_over_once() -> None:
    scheduler, path = one(), another(3, 7, 10)
    assert adopted(scheduler, path) == [extent.id for extent in path]
    assert scheduler.knows("", pack(TOKENS))
    assert scheduler.stats().disk_bytes == sum(extent.file_bytes for extent in path)
    assert adopted(scheduler, path) == []


def test_only_rows_that_are_not_there_are() -> None:
    scheduler, theirs = one(), another(3, 7, 10)
    own = another(5)
    assert adopted(scheduler, own) == [own[0].id]
    assert adopted(scheduler, theirs) == [theirs[1].id, theirs[2].id], "the second begins before the own one ends"
    assert scheduler.cache.index.match("", pack(TOKENS)).rows == 10


def test_what_has_nothing_above_it_is_not() -> None:
    scheduler, path = one(), another(3, 7, 10)
    assert adopted(scheduler, path[1:]) == []
    assert scheduler.stats().extents == 0


def test_it_is_kept_for_its_time_from_now_on() -> None:
    scheduler = one()
    adopted(scheduler, another(3, 7), ttl=60.0, now=100.0)
    assert scheduler.schedule(159.0).wake_at == 160.0
    drops = [move for move in scheduler.schedule(160.0).moves if isinstance(move, Drop)]
    assert len(drops) == 2
    assert scheduler.stats().extents == 0


def test_the_budget_holds_again_with_the_next_step() -> None:
    scheduler = one(disk_bytes=250)
    path = another(3, 7, 10)
    assert len(adopted(scheduler, path)) == 3
    step = scheduler.schedule(2.0)
    assert [move.extent for move in step.moves if isinstance(move, Drop)] == [path[2].id], "leaves go first"
    scheduler.check()


def test_the_tokens_before_an_extent_are_told_as_long_as_they_are_there() -> None:
    scheduler, path = one(), another(3, 7, 10)
    taken = scheduler.adopt("", pack(TOKENS), path, None, 1.0)
    records = [extent.record() for extent in taken]
    assert [scheduler.cache.prefix_of(record) for record in records] == [pack(TOKENS[:n]) for n in (0, 3, 7)]
    scheduler.reset(2.0)
    assert [scheduler.cache.prefix_of(record) for record in records] == [b"", None, None]
