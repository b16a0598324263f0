"""Writes as soon as rows are there: parents first, and again when it failed; but not for ever."""

from __future__ import annotations

from afterglow.plan.prefix.extent import Extent
from afterglow.plan.step import Store
from afterglow.plan.tiers.disk import MAX_STORE_FAILURES, STORE_BACKOFF_S
from afterglow.plan.tiers.write_back import MAX_WRITES
from tests.plan.lasting_kit import Lasting
from tests.plan.server_kit import words
from tests.plan.tiers_kit import Tiers, drops, stores


def again(tiers: Tiers, now: float) -> list[str]:
    """What the next step writes."""
    tiers.placement.background(now, 0)
    return stores(tiers.planned())


def fails(tiers: Tiers, now: float) -> None:
    for move in list(tiers.moves):
        tiers.end(move, ok=False, now=now)


def test_what_could_not_be_written_is_written_later() -> None:
    tiers = Tiers(disk_bytes=1000)
    extent = tiers.add(1, through=True)
    assert stores(tiers.planned()) == [extent.id]
    fails(tiers, now=1)
    assert again(tiers, now=2) == [], "not at once"
    assert tiers.placement.retry_at == 1 + STORE_BACKOFF_S
    assert again(tiers, now=1 + STORE_BACKOFF_S) == [extent.id]
    tiers.end_all()
    assert extent.disk == "ready"
    assert tiers.placement.retry_at == float("inf")
    assert again(tiers, now=1000) == []


def test_it_is_tried_a_few_times_and_once_more_when_it_must_leave() -> None:
    tiers = Tiers(host_slots=1, disk_bytes=1000)
    extent = tiers.add(1, through=True)
    tried, now = stores(tiers.planned()), 0.0
    while tiers.moves:
        fails(tiers, now)
        now += 2 * STORE_BACKOFF_S
        tried += again(tiers, now)
    assert tried == [extent.id] * MAX_WRITES
    assert tiers.placement.retry_at == float("inf")
    assert tiers.placement.host.take_slots(1, now + STORE_BACKOFF_S) is None
    assert stores(tiers.planned()) == [extent.id]


def test_a_sick_disk_is_left_alone_first() -> None:
    tiers = Tiers(disk_bytes=1000)
    extents = [tiers.add(number, through=True) for number in range(MAX_STORE_FAILURES)]
    tiers.planned()
    fails(tiers, now=5)
    late = tiers.add(9, now=6, through=True)
    assert stores(tiers.planned()) == []
    assert again(tiers, now=5 + STORE_BACKOFF_S - 1) == []
    assert again(tiers, now=5 + STORE_BACKOFF_S) == [*(extent.id for extent in extents), late.id]


def test_what_found_no_room_is_written_when_there_is() -> None:
    tiers = Tiers(disk_bytes=200)
    old = [tiers.on_disk(1, now=1), tiers.on_disk(2, now=2)]
    new = tiers.add(3, now=3, through=True)
    (drop,) = tiers.planned()
    assert drops([drop]) == [old[0].id]
    assert again(tiers, now=4) == []
    tiers.end(drop, now=4)
    assert again(tiers, now=4) == [new.id]


def test_each_one_that_waits_for_room_gets_its_own() -> None:
    tiers = Tiers(disk_bytes=300)
    old = [tiers.on_disk(number, now=number) for number in (1, 2, 3)]
    new = [tiers.add(number, now=number, through=True) for number in (4, 5, 6)]
    written: list[str] = []
    for _ in range(8):
        tiers.placement.background(9, 0)
        written += stores(tiers.planned())
        tiers.end_all(now=9)
    assert written == [extent.id for extent in new]
    assert all(extent.dead for extent in old)


def family(tiers: Tiers) -> tuple[Extent, Extent, Extent]:
    parent = tiers.add(1, now=1)
    child = tiers.add(2, now=2, below=parent)
    return parent, child, tiers.add(3, now=3, below=child, through=True)


def test_what_it_hangs_below_is_written_first() -> None:
    tiers = Tiers(disk_bytes=1000)
    parent, child, grandchild = family(tiers)
    assert stores(tiers.planned()) == [extent.id for extent in (parent, child, grandchild)]


def test_without_room_for_a_parent_the_child_waits() -> None:
    tiers = Tiers(disk_bytes=100)
    tiers.placement.pins.keep(tiers.on_disk(9))
    family(tiers)
    assert stores(tiers.planned()) == []


def test_a_parent_whose_write_failed_is_written_again_though_the_child_is_there() -> None:
    tiers = Tiers(disk_bytes=1000)
    parent, child, grandchild = family(tiers)
    moves = tiers.planned()
    tiers.end(moves[0], ok=False, now=1)
    tiers.end_all(now=1)
    assert [extent.disk for extent in (parent, child, grandchild)] == ["absent", "ready", "ready"]
    assert again(tiers, now=1 + STORE_BACKOFF_S) == [parent.id]


def test_what_is_forgotten_meanwhile_is_not_written() -> None:
    tiers = Tiers(disk_bytes=1000)
    extent = tiers.add(1, through=True)
    tiers.planned()
    fails(tiers, now=1)
    tiers.placement.forget(extent, "deleted")
    assert tiers.placement.retry_at == float("inf")
    assert again(tiers, now=1000) == []


def test_an_idle_server_wakes_up_to_write_what_failed() -> None:
    server = Lasting(disk_bytes=10_000, write_policy="write_through")
    server.faults.store = 1.0
    job = server.ask(words(40), max_tokens=4)
    assert not server.executor.files
    server.faults.store = 0.0
    server.sleep(server.now + 3 * STORE_BACKOFF_S)
    kept = sum(len(record.tokens) // 4 for record in server.executor.catalog.values())
    assert kept == 43
    assert server.known(server.text(job)) == 43


def test_an_idle_server_gives_up_in_the_end() -> None:
    server = Lasting(disk_bytes=10_000, write_policy="write_through")
    server.faults.store = 1.0
    server.ask(words(16), max_tokens=0)
    server.sleep(server.now + 100 * STORE_BACKOFF_S)
    tried = [move for step in server.steps for move in step.moves if isinstance(move, Store)]
    assert len(tried) == MAX_WRITES
    assert server.step().wake_at is None
