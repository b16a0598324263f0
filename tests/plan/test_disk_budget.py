"""Whether the disk's budget holds: after a restart with a smaller one, where files cannot be removed, and where a write
was given up but its call goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from afterglow.plan.options import Capacity
from afterglow.plan.scheduler import Scheduler
from afterglow.plan.step import Drop, ExtentRecord, Move, MoveDone, StepResult
from afterglow.plan.tiers.disk import STORE_BACKOFF_S
from tests.plan.fake_executor import pack
from tests.plan.tiers_kit import FILE_BYTES, Tiers, drops, stores

CAPACITY = Capacity(400, 100, 100_000, FILE_BYTES, 16, 4)


class Restarted:
    """Twelve files of 100 bytes each, and a plan that may have less."""

    def __init__(self, disk_bytes: int = 300) -> None:
        self.scheduler = Scheduler(replace(CAPACITY, disk_bytes=disk_bytes))
        records = [
            ExtentRecord(f"{number:040x}", None, 0, "", "exact", pack([number] * 4), 100, last_used=number)
            for number in range(1, 13)
        ]
        self.files = {record.id for record in records}
        self.scheduler.restore(records, 50.0)

    def step(self, now: float) -> list[Move]:
        step = self.scheduler.schedule(now)
        self.scheduler.commit(step, StepResult({}, {}), [], now)
        self.scheduler.check()
        return list(step.moves)

    def end(self, moves: list[Move], now: float, ok: Callable[[str], bool]) -> None:
        """Removals end; those fail whose files are not `ok`."""
        for move in moves:
            assert isinstance(move, Drop)
            done = ok(move.extent)
            self.files -= {move.extent} if done else set()
            self.scheduler.complete([MoveDone(move.move, done, why=None if done else "io")], now)
            self.scheduler.check()
            assert self.scheduler.stats().disk_bytes == 100 * len(self.files)

    @property
    def over(self) -> int:
        stats = self.scheduler.stats()
        return max(0, stats.disk_bytes - stats.disk_bytes_total)


def test_after_a_restart_with_less_the_files_are_over_the_budget_until_they_are_removed() -> None:
    plan = Restarted()
    assert plan.over == 900
    moves = plan.step(50)
    assert len(drops(moves)) == 9
    plan.end(moves[:4], 50, ok=lambda _: True)
    assert plan.over == plan.scheduler.stats().disk_over_bytes == 500
    plan.end(moves[4:], 51, ok=lambda _: True)
    assert (plan.over, plan.files) == (0, {f"{number:040x}" for number in (10, 11, 12)})
    assert plan.step(52) == []


def test_others_go_in_place_of_files_that_cannot_be_removed() -> None:
    plan = Restarted()
    stuck = {f"{number:040x}" for number in (2, 7)}
    plan.end(plan.step(50), 50, ok=lambda name: name not in stuck)
    assert plan.over == 200
    moves = plan.step(51)
    assert drops(moves) == [f"{number:040x}" for number in (10, 11)], "the least valuable that are left"
    plan.end(moves, 51, ok=lambda name: name not in stuck)
    assert plan.over == 0
    assert plan.scheduler.stats().counters.drop_failures == 2
    assert plan.step(52) == []
    again = plan.step(51 + STORE_BACKOFF_S)
    assert set(drops(again)) == stuck, "they are tried again"
    plan.end(again, 90, ok=lambda _: True)
    assert plan.files == {f"{12:040x}"}


def test_where_nothing_can_be_removed_the_cache_is_not_forgotten_for_nothing() -> None:
    plan = Restarted(disk_bytes=1000)
    tried = set()
    for second in range(int(STORE_BACKOFF_S) - 1):
        moves = plan.step(50.0 + second)
        tried |= set(drops(moves))
        plan.end(moves, 50.0 + second, ok=lambda _: False)
    assert len(tried) <= 5, "most of ten extents are still known"
    assert plan.scheduler.stats().extents == 12 - len(tried)
    assert plan.over == 200


def test_a_write_that_was_given_up_counts_until_its_call_returns() -> None:
    tiers = Tiers(disk_bytes=250)
    late, other, third = (tiers.add(number) for number in (1, 2, 3))
    assert tiers.placement.disk.store(late, now=0, why="evict") == "now"
    (store,) = tiers.planned()
    tiers.end(store, ok=False, busy=True)
    assert tiers.placement.disk.used == 100, "its temporary file may still be growing"
    assert tiers.placement.disk.store(late, now=0, why="evict") == "never", (
        "the call may still make a file of that name"
    )
    assert tiers.placement.disk.store(other, now=0, why="evict") == "now"
    assert tiers.placement.disk.store(third, now=0, why="evict") == "never", "there would be three files"
    assert stores(tiers.planned()) == [other.id]
    tiers.placement.complete(MoveDone(store.move, ok=False), now=1)
    assert tiers.placement.disk.used == 100
    assert tiers.placement.disk.store(late, now=1, why="evict") == "now"
    tiers.end_all()
    assert tiers.placement.disk.used == 200
