"""Host slots and disk bytes: who goes, who stays, and when room counts as free. One rule a test.

Files are of 100 bytes a block, every extent here has one block unless it says otherwise.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers_kit import Tiers, drops, loads, stores

from afterglow.plan.placement import MAX_STORE_FAILURES, STORE_BACKOFF_S
from afterglow.plan.step import Drop, Load, Store

# ------------------------------------------------------------------------------------------------ the host tier


def test_a_slot_is_taken_only_once() -> None:
    tiers = Tiers(host_slots=4)
    extents = [tiers.add(number) for number in range(1, 5)]
    for extent in extents:
        tiers.placement.pin(extent)
    assert sorted(slot for extent in extents for slot in extent.slots) == [0, 1, 2, 3]
    assert tiers.placement.take_slots(1, 0) is None
    tiers.check()


def test_without_a_disk_the_least_recently_used_extent_is_forgotten() -> None:
    tiers = Tiers(host_slots=3)
    old, middle, young = tiers.add(1, now=1), tiers.add(2, now=2), tiers.add(3, now=3)
    tiers.placement.touch(old, now=4)
    slots = tiers.placement.take_slots(1, now=5)
    assert slots is not None
    assert middle.dead
    assert not (old.dead or young.dead)
    assert tiers.planned() == []
    assert tiers.counters.evicted_host == tiers.counters.dropped == 1
    tiers.placement.pool.give(slots)
    tiers.check()


def test_fifo_forgets_the_oldest_extent() -> None:
    tiers = Tiers(host_slots=2, policy="fifo")
    old, young = tiers.add(1, now=1), tiers.add(2, now=2)
    tiers.placement.touch(old, now=4)
    tiers.add(3, now=5)
    assert old.dead
    assert not young.dead


def test_without_a_disk_parents_stay_as_long_as_they_have_children() -> None:
    tiers = Tiers(host_slots=3)
    parent = tiers.add(1, now=1)
    child = tiers.add(2, now=9, below=parent)
    other = tiers.add(3, now=8)
    tiers.add(4, now=10)
    assert other.dead, "the oldest of those with nothing below them"
    tiers.add(5, now=11)
    assert child.dead
    assert not parent.dead
    tiers.add(6, now=12)
    assert parent.dead, "now it is a leaf, and the oldest"


def test_without_a_disk_what_a_job_goes_through_stays() -> None:
    tiers = Tiers(host_slots=2)
    used, young = tiers.add(1, now=1), tiers.add(2, now=2)
    used.users += 1
    tiers.add(3, now=3)
    assert young.dead
    assert not used.dead
    assert tiers.placement.take_slots(2, now=4) is None


def test_a_conversation_is_forgotten_from_its_tail() -> None:
    tiers = Tiers(host_slots=3)
    head = tiers.add(1)
    middle = tiers.add(2, below=head)
    tail = tiers.add(3, below=middle)
    tiers.placement.take_slots(1, now=1)
    assert [extent.dead for extent in (head, middle, tail)] == [False, False, True]
    tiers.placement.take_slots(2, now=1)
    assert [extent.dead for extent in (head, middle, tail)] == [True, True, True]


def test_pinned_extents_stay_in_host() -> None:
    for disk_bytes in (0, 1000):
        tiers = Tiers(host_slots=2, disk_bytes=disk_bytes)
        pinned, other = tiers.add(1, now=1), tiers.add(2, now=2)
        tiers.placement.pin(pinned)
        tiers.placement.evict(2, now=3)
        tiers.end_all()
        assert pinned.host == "ready"
        assert other.host == "absent"
        tiers.placement.unpin(pinned)
        tiers.placement.evict(2, now=4)
        tiers.end_all()
        assert pinned.host == "absent"


def test_an_extent_that_is_on_disk_too_leaves_host_at_once() -> None:
    tiers = Tiers(host_slots=1, disk_bytes=1000)
    extent = tiers.clean(1)
    assert tiers.placement.take_slots(1, now=1) == (0,)
    assert tiers.planned() == []
    assert (extent.host, extent.disk, extent.dead) == ("absent", "ready", False)


def test_an_eviction_to_disk_writes_first_and_frees_then() -> None:
    tiers = Tiers(host_slots=1, disk_bytes=1000)
    extent = tiers.add(1)
    assert tiers.placement.take_slots(1, now=1) is None
    assert tiers.placement.relief
    (store,) = tiers.planned()
    assert isinstance(store, Store)
    assert (store.record, store.slots, store.why) == (extent.record(), extent.slots, "evict")
    assert (extent.host, extent.disk, tiers.placement.pool.free) == ("ready", "writing", 0)
    assert tiers.placement.take_slots(1, now=2) is None
    assert tiers.planned() == [], "it is under way"
    tiers.end(store)
    assert (extent.host, extent.disk, tiers.placement.pool.free) == ("absent", "ready", 1)
    assert not tiers.placement.relief


def test_who_is_pinned_while_being_evicted_stays_and_has_a_file() -> None:
    tiers = Tiers(host_slots=1, disk_bytes=1000)
    extent = tiers.add(1)
    tiers.placement.evict(1, now=1)
    tiers.placement.pin(extent)
    assert not tiers.placement.relief
    tiers.end(tiers.planned()[0])
    assert (extent.host, extent.disk) == ("ready", "ready")


def test_an_extent_that_could_not_be_stored_stays_in_host() -> None:
    tiers = Tiers(host_slots=1, disk_bytes=1000)
    extent = tiers.add(1)
    tiers.placement.evict(1, now=1)
    tiers.end(tiers.planned()[0], ok=False)
    assert (extent.host, extent.disk, tiers.placement.disk_used) == ("ready", "absent", 0)
    assert tiers.counters.store_failures == 1


def test_a_clean_copy_goes_before_its_turn_when_rows_would_be_lost() -> None:
    # Writing a dirty extent takes longer than a step; the rows of the step cannot wait for it.
    tiers = Tiers(host_slots=2, disk_bytes=1000)
    dirty, clean = tiers.add(1, now=1), tiers.clean(2, now=2)
    assert tiers.placement.take_slots(1, now=3) is None, "it was the dirty one's turn"
    assert tiers.placement.urge_slots(1, now=3) == (1,)
    assert (dirty.host, clean.host, clean.disk) == ("ready", "absent", "ready")


def test_pinned_clean_copies_do_not_go_before_their_turn() -> None:
    tiers = Tiers(host_slots=2, disk_bytes=1000)
    tiers.add(1, now=1)
    clean = tiers.clean(2, now=2)
    tiers.placement.pin(clean)
    assert tiers.placement.urge_slots(1, now=3) is None
    assert clean.host == "ready"


def test_the_background_keeps_slots_free() -> None:
    tiers = Tiers(host_slots=40)
    for number in range(1, 41):
        tiers.add(number, now=number)
    low, high = tiers.placement.low, tiers.placement.high
    assert (low, high) == (4, 8)
    tiers.placement.background(now=50, expected=0)
    assert tiers.placement.pool.free == high
    tiers.placement.take_slots(high - low, now=51)
    tiers.placement.background(now=51, expected=0)
    assert tiers.placement.pool.free == low, "not before the lower mark is passed"
    tiers.placement.background(now=51, expected=10)
    assert tiers.placement.pool.free == high + 10
    tiers.placement.background(now=51, expected=1000)
    assert tiers.placement.pool.free == high + 20, "at most half of all for what is to come"


def test_evictions_under_way_count_as_room() -> None:
    tiers = Tiers(host_slots=4, disk_bytes=1000)
    for number in range(1, 5):
        tiers.add(number, now=number)
    tiers.placement.evict(2, now=9)
    tiers.placement.evict(2, now=9)
    assert len(stores(tiers.planned())) == 2


# ------------------------------------------------------------------------------------------------------- loads


def test_a_load_takes_slots_at_once_and_is_ready_when_it_is_done() -> None:
    tiers = Tiers(host_slots=2, disk_bytes=1000)
    extent = tiers.on_disk(1, blocks=2)
    assert tiers.placement.load(extent, now=1)
    (load,) = tiers.planned()
    assert isinstance(load, Load)
    assert (load.extent, load.rows, load.slots) == (extent.id, 8, (0, 1))
    assert (extent.host, extent.load) == ("loading", load.move)
    assert tiers.placement.take_slots(1, now=1) is None
    tiers.end(load)
    assert (extent.host, extent.disk, extent.load) == ("ready", "ready", None)


def test_without_slots_there_is_no_load() -> None:
    tiers = Tiers(host_slots=1, disk_bytes=1000)
    tiers.placement.pin(tiers.add(1))
    extent = tiers.on_disk(2)
    assert not tiers.placement.load(extent, now=1)
    assert not tiers.placement.relief
    assert (extent.host, tiers.planned()) == ("absent", [])


def test_slots_of_a_timed_out_load_are_nobodys_until_it_has_ended() -> None:
    tiers = Tiers(host_slots=2, disk_bytes=1000)
    extent = tiers.on_disk(1, blocks=2)
    tiers.placement.load(extent, now=1)
    (load,) = tiers.planned()
    tiers.end(load, ok=False, busy=True)
    assert extent.dead
    assert tiers.placement.pool.free == 0, "the read may still write into them"
    assert tiers.placement.take_slots(1, now=2) is None
    tiers.moves.append(load)
    tiers.end(load, ok=False, busy=True)
    assert tiers.placement.pool.free == 0
    tiers.moves.append(load)
    tiers.end(load, ok=False)
    assert tiers.placement.pool.free == 2
    tiers.moves.append(load)
    tiers.end(load, ok=False)
    assert tiers.placement.pool.free == 2, "whatever else is said of it"


def test_a_damaged_extent_takes_along_what_hangs_below_it() -> None:
    tiers = Tiers(disk_bytes=1000)
    head = tiers.clean(1)
    bad = tiers.on_disk(2, below=head)
    tail = tiers.add(3, below=bad)
    leaf = tiers.on_disk(4, below=tail)
    context, good = tiers.context(head, bad, tail), tiers.context(head)
    tiers.placement.load(bad, now=1)
    (load,) = tiers.planned()
    tiers.end(load, ok=False)
    assert [extent.dead for extent in (head, bad, tail, leaf)] == [False, True, True, True]
    assert list(tiers.index.extents) == [head.id]
    assert tiers.placement.pool.free == tiers.placement.pool.total - 1
    assert sorted(drops(tiers.planned())) == sorted([bad.id, leaf.id])
    assert tiers.device.frees == [context.id]
    assert list(tiers.device.contexts) == [good.id]
    assert tiers.counters.damaged == 1
    assert tiers.counters.dropped == 3


def test_a_dead_extent_keeps_its_slots_while_somebody_reads_them() -> None:
    tiers = Tiers(host_slots=1)
    extent = tiers.add(1)
    tiers.placement.pin(extent)
    tiers.placement.forget(extent)
    tiers.check()
    assert extent.slots == (0,)
    tiers.placement.unpin(extent)
    assert tiers.placement.pool.free == 1
    tiers.check()


def test_a_dead_extent_keeps_its_slots_and_its_name_while_a_move_is_under_way() -> None:
    tiers = Tiers(host_slots=2, disk_bytes=1000)
    loading, storing = tiers.on_disk(1), tiers.add(2)
    tiers.placement.load(loading, now=1)
    tiers.placement.store(storing, now=1, why="evict")
    load, store = tiers.planned()
    tiers.placement.forget(loading)
    tiers.placement.forget(storing)
    tiers.check()
    assert tiers.placement.pool.free == 0
    tiers.end(load)
    tiers.end(store)
    assert tiers.placement.pool.free == 2
    assert drops(tiers.planned()) == [loading.id, storing.id], "their files are of no use"
    assert tiers.placement.disk_used == 200
    tiers.end_all()
    assert tiers.placement.disk_used == 0


# --------------------------------------------------------------------------------------------------- the disk


def test_the_disk_holds_no_more_than_its_budget() -> None:
    tiers = Tiers(host_slots=8, disk_bytes=250)
    extents = [tiers.add(number, now=number) for number in range(1, 4)]
    for extent in extents:
        tiers.placement.store(extent, now=9, why="evict")
    assert stores(tiers.planned()) == [extents[0].id, extents[1].id]
    assert tiers.placement.disk_used == 200


def test_what_is_larger_than_the_disk_is_not_stored_and_costs_nobody_a_file() -> None:
    tiers = Tiers(disk_bytes=250)
    tiers.on_disk(1)
    large = tiers.add(2, blocks=3)
    assert tiers.placement.store(large, now=1, why="evict") == "never"
    assert tiers.planned() == []


def test_clean_copies_make_room_on_disk_before_anything_is_forgotten() -> None:
    tiers = Tiers(disk_bytes=200)
    cold = tiers.on_disk(1, now=1)  # the older one, but its file is all there is of it
    clean = tiers.clean(2, now=2)
    new = tiers.add(3, now=3)
    assert tiers.placement.store(new, now=3, why="evict") == "soon"
    assert drops(tiers.planned()) == [clean.id]
    assert (clean.host, clean.disk, clean.dead) == ("ready", "absent", False)
    assert not cold.dead
    tiers.end_all()
    assert tiers.placement.store(new, now=3, why="evict") == "now"


def test_a_pinned_extent_keeps_its_file() -> None:
    tiers = Tiers(disk_bytes=200)
    clean, cold = tiers.clean(1), tiers.on_disk(2)
    tiers.placement.pin(clean)
    tiers.placement.pin(cold)
    assert tiers.placement.store(tiers.add(3), now=3, why="evict") == "never"
    assert tiers.planned() == []


def test_only_leaves_that_nobody_uses_leave_the_disk() -> None:
    tiers = Tiers(disk_bytes=300)
    parent = tiers.on_disk(1, now=1)
    child = tiers.on_disk(2, now=3, below=parent)
    used = tiers.on_disk(3, now=2)
    used.users += 1
    new = tiers.add(4, now=4)
    assert tiers.placement.store(new, now=4, why="evict") == "soon"
    assert drops(tiers.planned()) == [child.id]
    assert child.dead
    assert not (parent.dead or used.dead)
    tiers.end_all()


def test_bytes_of_a_dropped_file_count_until_it_is_gone() -> None:
    tiers = Tiers(disk_bytes=100)
    tiers.on_disk(1)
    new = tiers.add(2)
    assert tiers.placement.store(new, now=1, why="evict") == "soon"
    (drop,) = tiers.planned()
    assert isinstance(drop, Drop)
    assert tiers.placement.relief
    assert tiers.placement.store(new, now=1, why="evict") == "soon"
    assert tiers.planned() == [], "one drop is enough for it"
    tiers.end(drop)
    assert tiers.placement.disk_used == 0
    assert tiers.placement.store(new, now=1, why="evict") == "now"


def test_a_file_is_not_written_while_one_of_the_same_name_is_being_dropped() -> None:
    tiers = Tiers(disk_bytes=1000)
    first = tiers.on_disk(1)
    tiers.placement.forget(first)
    (drop,) = tiers.planned()
    again = tiers.add(1)
    assert again.id == first.id
    assert tiers.placement.store(again, now=1, why="evict") == "soon"
    assert tiers.planned() == []
    tiers.end(drop)
    assert tiers.placement.store(again, now=1, why="evict") == "now"
    tiers.end_all()
    assert again.disk == "ready"


def test_after_some_failures_the_disk_is_left_alone_for_a_while() -> None:
    tiers = Tiers(disk_bytes=1000)
    extent = tiers.add(1)
    for failure in range(MAX_STORE_FAILURES):
        assert tiers.placement.store(extent, now=failure, why="evict") == "now"
        tiers.end(tiers.planned()[0], ok=False, now=10.0)
    assert tiers.placement.store(extent, now=10.0 + STORE_BACKOFF_S - 0.1, why="evict") == "never"
    assert tiers.planned() == []
    assert tiers.placement.store(extent, now=10.0 + STORE_BACKOFF_S, why="evict") == "now"
    # It tries once: a failure more, and it waits again.
    tiers.end(tiers.planned()[0], ok=False, now=50.0)
    assert tiers.placement.store(extent, now=51.0, why="evict") == "never"


def test_only_failures_in_a_row_count() -> None:
    tiers = Tiers(disk_bytes=1000)
    for number in range(1, 5):
        for ok in [False] * (MAX_STORE_FAILURES - 1) + [True]:
            extent = tiers.add(number) if not tiers.index.extents else next(iter(tiers.index.extents.values()))
            assert tiers.placement.store(extent, now=1.0, why="evict") == "now"
            tiers.end(tiers.planned()[0], ok=ok, now=1.0)
        tiers.placement.forget(extent)
        tiers.end_all()


def test_while_the_disk_is_left_alone_evictions_forget() -> None:
    tiers = Tiers(host_slots=1, disk_bytes=1000)
    extent = tiers.add(1)
    for _ in range(MAX_STORE_FAILURES):
        tiers.placement.store(extent, now=0, why="evict")
        tiers.end(tiers.planned()[0], ok=False, now=0)
    assert tiers.placement.take_slots(1, now=1) == (0,)
    assert extent.dead


# ------------------------------------------------------------------------------------------------- whole tiers


def test_a_flush_writes_what_is_only_in_host_the_most_recently_used_first() -> None:
    tiers = Tiers(disk_bytes=1000)
    head = tiers.add(1, now=5)
    tail = tiers.add(2, now=5, below=head)
    young, clean, old = tiers.add(3, now=9), tiers.clean(4, now=7), tiers.add(5, now=1)
    assert not tiers.placement.flush(now=10)
    assert stores(tiers.planned()) == [young.id, head.id, tail.id, old.id]
    tiers.end_all()
    assert tiers.placement.flush(now=10)
    assert clean.disk == "ready"
    assert all(extent.host == "ready" for extent in (head, tail, young, old))


def test_a_flush_keeps_the_most_recently_used_where_the_disk_is_small() -> None:
    tiers = Tiers(disk_bytes=300)
    cold_old, cold_young = tiers.on_disk(1, now=1), tiers.on_disk(2, now=8)
    host = {now: tiers.add(10 + now, now=now) for now in (3, 5, 9)}
    for _ in range(5):
        tiers.placement.flush(now=10)
        tiers.end_all()
    assert tiers.placement.flush(now=10)
    assert cold_old.dead, "older than what took its place"
    on_disk = [extent for extent in tiers.index.extents.values() if extent.disk == "ready"]
    assert set(on_disk) == {cold_young, host[9], host[5]}


def test_a_flush_does_not_drop_clean_copies() -> None:
    # At shutdown only the disk survives: a copy in host is no reason to remove the file.
    tiers = Tiers(disk_bytes=100)
    clean, old = tiers.clean(1, now=2), tiers.add(2, now=1)
    assert tiers.placement.flush(now=3)
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
    used.users += 1
    tail = tiers.clean(3, below=used)
    other = tiers.on_disk(4)
    tiers.placement.forget_all()
    tiers.end_all()
    assert [extent.dead for extent in (head, used, tail, other)] == [False, False, True, True]
    assert tiers.placement.disk_used == 0


def test_uses_are_told_once_and_only_of_what_is_on_disk() -> None:
    tiers = Tiers(disk_bytes=1000)
    clean, dirty, lost = tiers.clean(1), tiers.add(2), tiers.clean(3)
    for extent in (clean, dirty, lost):
        tiers.placement.touch(extent, now=7)
    tiers.placement.forget(lost)
    assert tiers.placement.take_touched() == [(clean.id, 7, 1)]
    assert tiers.placement.take_touched() == []


@pytest.mark.parametrize("disk_bytes", [0, 350, 10_000])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_budgets_hold_whatever_is_asked(disk_bytes: int, data: st.DataObject) -> None:
    tiers = Tiers(host_slots=data.draw(st.integers(1, 6)), disk_bytes=disk_bytes)
    pinned = []
    for now in range(1, data.draw(st.integers(1, 40))):
        extents = list(tiers.index.extents.values())
        some = data.draw(st.sampled_from(extents)) if extents else None
        what = data.draw(st.sampled_from(["add", "load", "pin", "unpin", "touch", "store", "flush", "forget", "end"]))
        if what == "add" and tiers.placement.urge_slots(1, now) is not None:
            below = some if some is not None and not some.dead and data.draw(st.booleans()) else None
            tiers.placement.pool.give((0,)) if False else None
        if some is not None and what == "load" and some.host == "absent":
            tiers.placement.load(some, now)
        tiers.planned()
        tiers.check()
        assert tiers.placement.disk_used <= disk_bytes
