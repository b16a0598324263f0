"""The disk tier: writes, removals for them, and failures. One rule a test.

Files are of 100 bytes a block; every extent here has one block unless it says otherwise.
"""

from __future__ import annotations

from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from afterglow.plan.prefix.extent import Extent
from afterglow.plan.step import Drop
from afterglow.plan.tiers.disk import MAX_STORE_FAILURES, STORE_BACKOFF_S
from tests.plan.tiers_kit import Tiers, drops, stores


def test_the_disk_holds_no_more_than_its_budget() -> None:
    tiers = Tiers(host_slots=8, disk_bytes=250)
    extents = [tiers.add(number, now=number) for number in range(1, 4)]
    for extent in extents:
        tiers.placement.disk.store(extent, now=9, why="evict")
    assert stores(tiers.planned()) == [extents[0].id, extents[1].id]
    assert tiers.placement.disk.used == 200


def test_what_is_larger_than_the_disk_is_not_stored_and_costs_nobody_a_file() -> None:
    tiers = Tiers(disk_bytes=250)
    tiers.on_disk(1)
    large = tiers.add(2, blocks=3)
    assert tiers.placement.disk.store(large, now=1, why="evict") == "never"
    assert tiers.planned() == []


def test_clean_copies_make_room_on_disk_before_anything_is_forgotten() -> None:
    tiers = Tiers(disk_bytes=200)
    cold = tiers.on_disk(1, now=1)  # the older one, but it has nothing besides its file
    clean = tiers.clean(2, now=2)
    new = tiers.add(3, now=3)
    assert tiers.placement.disk.store(new, now=3, why="evict") == "soon"
    assert drops(tiers.planned()) == [clean.id]
    assert (clean.host, clean.disk, clean.dead) == ("ready", "absent", False)
    assert not cold.dead
    tiers.end_all()
    assert tiers.placement.disk.store(new, now=3, why="evict") == "now"


def test_a_pinned_extent_keeps_its_file() -> None:
    tiers = Tiers(disk_bytes=200)
    clean, cold = tiers.clean(1), tiers.on_disk(2)
    tiers.placement.pin(clean)
    tiers.placement.pin(cold)
    assert tiers.placement.disk.store(tiers.add(3), now=3, why="evict") == "never"
    assert tiers.planned() == []


def test_only_leaves_that_nobody_uses_leave_the_disk() -> None:
    tiers = Tiers(disk_bytes=300)
    parent = tiers.on_disk(1, now=1)
    child = tiers.on_disk(2, now=3, below=parent)
    used = tiers.on_disk(3, now=2)
    used.ref_count += 1
    new = tiers.add(4, now=4)
    assert tiers.placement.disk.store(new, now=4, why="evict") == "soon"
    assert drops(tiers.planned()) == [child.id]
    assert child.dead
    assert [parent.dead, used.dead] == [False, False]
    tiers.end_all()


def test_bytes_of_a_dropped_file_count_until_it_is_gone() -> None:
    tiers = Tiers(disk_bytes=100)
    tiers.on_disk(1)
    new = tiers.add(2)
    assert tiers.placement.disk.store(new, now=1, why="evict") == "soon"
    (drop,) = tiers.planned()
    assert isinstance(drop, Drop)
    assert tiers.placement.relief
    assert tiers.placement.disk.store(new, now=1, why="evict") == "soon"
    assert tiers.planned() == [], "one drop is enough for it"
    tiers.end(drop)
    assert tiers.placement.disk.used == 0
    assert tiers.placement.disk.store(new, now=1, why="evict") == "now"


def test_a_file_is_not_written_while_one_of_the_same_name_is_being_dropped() -> None:
    tiers = Tiers(disk_bytes=1000)
    first = tiers.on_disk(1)
    tiers.placement.forget(first, "deleted")
    (drop,) = tiers.planned()
    again = tiers.add(1)
    assert again.id == first.id
    assert tiers.placement.disk.store(again, now=1, why="evict") == "soon"
    assert tiers.planned() == []
    tiers.end(drop)
    assert tiers.placement.disk.store(again, now=1, why="evict") == "now"
    tiers.end_all()
    assert again.disk == "ready"


def test_after_some_failures_the_disk_is_left_alone_for_a_while() -> None:
    tiers = Tiers(disk_bytes=1000)
    extent = tiers.add(1)
    for failure in range(MAX_STORE_FAILURES):
        assert tiers.placement.disk.store(extent, now=failure, why="evict") == "now"
        tiers.end(tiers.planned()[0], ok=False, now=10.0)
    assert tiers.placement.disk.store(extent, now=10.0 + STORE_BACKOFF_S - 0.1, why="evict") == "never"
    assert tiers.planned() == []
    assert tiers.placement.disk.store(extent, now=10.0 + STORE_BACKOFF_S, why="evict") == "now"
    # It tries once: a failure more, and it waits again.
    tiers.end(tiers.planned()[0], ok=False, now=50.0)
    assert tiers.placement.disk.store(extent, now=51.0, why="evict") == "never"


def test_only_failures_in_a_row_count() -> None:
    tiers = Tiers(disk_bytes=1000)
    for number in range(1, 5):
        for ok in [False] * (MAX_STORE_FAILURES - 1) + [True]:
            extent = tiers.add(number) if not tiers.index.extents else next(iter(tiers.index.extents.values()))
            assert tiers.placement.disk.store(extent, now=1.0, why="evict") == "now"
            tiers.end(tiers.planned()[0], ok=ok, now=1.0)
        tiers.placement.forget(extent, "deleted")
        tiers.end_all()


def test_while_the_disk_is_left_alone_evictions_forget() -> None:
    tiers = Tiers(host_slots=1, disk_bytes=1000)
    extent = tiers.add(1)
    for _ in range(MAX_STORE_FAILURES):
        tiers.placement.disk.store(extent, now=0, why="evict")
        tiers.end(tiers.planned()[0], ok=False, now=0)
    assert tiers.placement.host.take_slots(1, now=1) == (0,)
    assert extent.dead


# ------------------------------------------------------------------------------------------------- whole tiers


def test_a_flush_writes_what_is_only_in_host_the_most_recently_used_first() -> None:
    tiers = Tiers(disk_bytes=1000)
    head = tiers.add(1, now=5)
    tail = tiers.add(2, now=5, below=head)
    young, clean, old = tiers.add(3, now=9), tiers.clean(4, now=7), tiers.add(5, now=1)
    assert not tiers.placement.write_back.flush(now=10)
    assert stores(tiers.planned()) == [young.id, head.id, tail.id, old.id]
    tiers.end_all()
    assert tiers.placement.write_back.flush(now=10)
    assert clean.disk == "ready"
    assert all(extent.host == "ready" for extent in (head, tail, young, old))


def test_a_flush_keeps_the_most_recently_used_where_the_disk_is_small() -> None:
    tiers = Tiers(disk_bytes=300)
    cold_old, cold_young = tiers.on_disk(1, now=1), tiers.on_disk(2, now=8)
    host = {now: tiers.add(10 + now, now=now) for now in (3, 5, 9)}
    for _ in range(5):
        tiers.placement.write_back.flush(now=10)
        tiers.end_all()
    assert tiers.placement.write_back.flush(now=10)
    assert cold_old.dead, "older than what took its place"
    on_disk = [extent for extent in tiers.index.extents.values() if extent.disk == "ready"]
    assert set(on_disk) == {cold_young, host[9], host[5]}


def test_a_flush_makes_room_whatever_the_policy_and_the_tier() -> None:
    # First in, first out would show the old files that were used last before those that no job uses any more.
    tiers = Tiers(disk_bytes=200, policy="fifo")
    used, unused = tiers.on_disk(1, now=1), tiers.clean(2, now=2)
    tiers.placement.touch(used, now=9)
    fresh = tiers.add(3, now=8)
    for _ in range(3):
        tiers.placement.write_back.flush(now=10)
        tiers.end_all()
    assert tiers.placement.write_back.flush(now=10)
    assert unused.dead
    assert [used.disk, fresh.disk] == ["ready", "ready"]


def test_what_a_stored_extent_hangs_below_is_stored_too() -> None:
    # A prefix in constant use is never a victim; killed, the server would find files that nothing can be matched with.
    tiers = Tiers(host_slots=4, disk_bytes=1000)
    head = tiers.add(1, now=9)
    middle = tiers.add(2, now=8, below=head)
    tail = tiers.add(3, now=1, below=middle)
    tiers.placement.host.evict(2, now=10)
    assert stores(tiers.planned()) == [tail.id, middle.id, head.id]
    tiers.end_all()
    assert [extent.host for extent in (head, middle, tail)] == ["ready", "ready", "absent"]
    assert [extent.disk for extent in (head, middle, tail)] == ["ready", "ready", "ready"]


def test_a_flush_writes_a_head_rather_than_keep_its_tail() -> None:
    # The tail was evicted first; after a restart it could not be matched without the head.
    tiers = Tiers(disk_bytes=200)
    head = tiers.add(1, now=5)
    middle = tiers.on_disk(2, now=5, below=head)
    tail = tiers.on_disk(3, now=5, below=middle)
    assert not tiers.placement.write_back.flush(now=6)
    tiers.end_all()
    assert tail.dead
    tiers.placement.write_back.flush(now=6)
    tiers.end_all()
    assert tiers.placement.write_back.flush(now=6)
    assert [head.disk, middle.disk] == ["ready", "ready"]


def test_a_flush_drops_no_parent_of_what_was_used_later() -> None:
    tiers = Tiers(host_slots=8, disk_bytes=300)
    parent = tiers.on_disk(1, now=1)
    child = tiers.on_disk(2, now=9, below=parent)
    other = tiers.on_disk(3, now=4)
    fresh = tiers.add(4, now=5)
    for _ in range(3):
        tiers.placement.write_back.flush(now=10)
        tiers.end_all(now=10)
    assert [extent.dead for extent in (parent, child, other)] == [False, False, True]
    assert fresh.disk == "ready"


def test_a_flush_writes_no_child_without_its_parent() -> None:
    tiers = Tiers(host_slots=8, disk_bytes=200)
    on_disk = tiers.on_disk(9, now=20)
    parent = tiers.add(1, now=1, blocks=2)
    child = tiers.add(2, now=9, below=parent)
    for _ in range(3):
        tiers.placement.write_back.flush(now=10)
        tiers.end_all(now=10)
    assert [extent.disk for extent in (on_disk, parent, child)] == ["ready", "absent", "absent"]


NODE = st.tuples(st.integers(0, 20), st.integers(1, 3), st.integers(0, 9), st.booleans())


@settings(max_examples=200, deadline=None)
@given(nodes=st.lists(NODE, min_size=1, max_size=9), disk_blocks=st.integers(1, 12))
def test_a_flush_keeps_what_was_used_last_with_all_that_it_needs(
    nodes: list[tuple[int, int, int, bool]], disk_blocks: int
) -> None:
    """Whatever hangs below whatever, and lies where: nothing is on disk afterwards that a restart could not find."""
    total = sum(blocks for _, blocks, _, stored in nodes if stored)
    tiers = Tiers(host_slots=40, disk_bytes=100 * max(disk_blocks, total))
    extents: list[Extent] = []
    for number, (where, blocks, used, stored) in enumerate(nodes):
        below = extents[where % (len(extents) + 1) - 1] if where % (len(extents) + 1) else None
        stored = stored and (below is None or below.disk == "ready")
        make = tiers.on_disk if stored else tiers.add
        extents.append(make(number, now=used + number / 100, blocks=blocks, below=below))
    for _ in range(2 * len(nodes) + 2):
        tiers.placement.write_back.flush(now=10)
        tiers.end_all(now=10)
    for extent in tiers.index.extents.values():
        above = tiers.index.extents.get(extent.parent) if extent.parent is not None else None
        assert extent.disk == "absent" or above is None or above.disk == "ready"
    last = max(extents, key=lambda e: e.last_used)
    path = [last]
    while path[-1].parent is not None:
        path.append(next(e for e in extents if e.id == path[-1].parent))
    if sum(extent.file_bytes for extent in path) <= tiers.capacity.disk_bytes:
        assert all(extent.disk == "ready" and not extent.dead for extent in path)


def test_a_flush_does_not_drop_clean_copies() -> None:
    # At shutdown only the disk survives: a copy in host is no reason to remove the file.
    tiers = Tiers(disk_bytes=100)
    clean, old = tiers.clean(1, now=2), tiers.add(2, now=1)
    assert tiers.placement.write_back.flush(now=3)
    assert (clean.disk, old.disk) == ("ready", "absent")
    assert tiers.moves == []


def test_clean_copies_can_be_dropped_from_host() -> None:
    tiers = Tiers(disk_bytes=1000)
    clean, dirty, pinned = tiers.clean(1), tiers.add(2), tiers.clean(3)
    tiers.placement.pin(pinned)
    tiers.placement.drop_clean()
    assert [extent.host for extent in (clean, dirty, pinned)] == ["absent", "ready", "ready"]
    tiers.check()


def test_forgetting_all_spares_what_is_in_use() -> None:
    tiers = Tiers(disk_bytes=1000)
    head = tiers.add(1)
    used = tiers.add(2, below=head)
    used.ref_count += 1
    tail = tiers.clean(3, below=used)
    other = tiers.on_disk(4)
    tiers.placement.forget_all()
    tiers.end_all()
    assert [extent.dead for extent in (head, used, tail, other)] == [False, False, True, True]
    assert tiers.placement.disk.used == 0


def test_uses_are_told_once_and_only_of_what_is_on_disk() -> None:
    tiers = Tiers(disk_bytes=1000)
    clean, dirty, lost = tiers.clean(1), tiers.add(2), tiers.clean(3)
    for extent in (clean, dirty, lost):
        tiers.placement.touch(extent, now=7)
    tiers.placement.forget(lost, "deleted")
    assert tiers.placement.disk.take_touched() == [(clean.id, 7, 1, inf)]
    assert tiers.placement.disk.take_touched() == []
