"""Host slots: who goes, who stays, and when room counts as free. One rule a test.

Files are of 100 bytes a block; every extent here has one block unless it says otherwise.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from afterglow.plan.prefix.extent import Extent
from afterglow.plan.step import Load, Move, Store
from tests.plan.tiers_kit import Tiers, drops, stores

# ------------------------------------------------------------------------------------------------ the host tier


def test_a_slot_is_taken_only_once() -> None:
    tiers = Tiers(host_slots=4)
    extents = [tiers.add(number) for number in range(1, 5)]
    for extent in extents:
        tiers.placement.pin(extent)
    assert sorted(slot for extent in extents for slot in extent.slots) == [0, 1, 2, 3]
    assert tiers.placement.host.take_slots(1, 0) is None
    tiers.check()


def test_without_a_disk_the_least_recently_used_extent_is_forgotten() -> None:
    tiers = Tiers(host_slots=3)
    old, middle, young = tiers.add(1, now=1), tiers.add(2, now=2), tiers.add(3, now=3)
    tiers.placement.touch(old, now=4)
    slots = tiers.placement.host.take_slots(1, now=5)
    assert slots is not None
    assert middle.dead
    assert [old.dead, young.dead] == [False, False]
    assert tiers.planned() == []
    assert tiers.counters.evicted_host == tiers.counters.dropped == 1
    tiers.placement.host.pool.give(slots)
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
    assert other.dead, "the oldest without children"
    tiers.add(5, now=11)
    assert child.dead
    assert not parent.dead
    tiers.add(6, now=12)
    assert parent.dead, "now it is a leaf, and the oldest"


def test_without_a_disk_what_a_job_goes_through_stays() -> None:
    tiers = Tiers(host_slots=2)
    used, young = tiers.add(1, now=1), tiers.add(2, now=2)
    used.ref_count += 1
    tiers.add(3, now=3)
    assert young.dead
    assert not used.dead
    assert tiers.placement.host.take_slots(2, now=4) is None


def test_a_conversation_is_forgotten_from_its_tail() -> None:
    tiers = Tiers(host_slots=3)
    head = tiers.add(1)
    middle = tiers.add(2, below=head)
    tail = tiers.add(3, below=middle)
    tiers.placement.host.take_slots(1, now=1)
    assert [extent.dead for extent in (head, middle, tail)] == [False, False, True]
    tiers.placement.host.take_slots(2, now=1)
    assert [extent.dead for extent in (head, middle, tail)] == [True, True, True]


def test_pinned_extents_stay_in_host() -> None:
    for disk_bytes in (0, 1000):
        tiers = Tiers(host_slots=2, disk_bytes=disk_bytes)
        pinned, other = tiers.add(1, now=1), tiers.add(2, now=2)
        tiers.placement.pin(pinned)
        tiers.placement.host.evict(2, now=3)
        tiers.end_all()
        assert pinned.host == "ready"
        assert other.host == "absent"
        tiers.placement.unpin(pinned)
        tiers.placement.host.evict(2, now=4)
        tiers.end_all()
        assert pinned.host == "absent"


def test_an_extent_that_is_on_disk_too_leaves_host_at_once() -> None:
    tiers = Tiers(host_slots=1, disk_bytes=1000)
    extent = tiers.clean(1)
    assert tiers.placement.host.take_slots(1, now=1) == (0,)
    assert tiers.planned() == []
    assert (extent.host, extent.disk, extent.dead) == ("absent", "ready", False)


def test_an_eviction_to_disk_writes_first_and_frees_then() -> None:
    tiers = Tiers(host_slots=1, disk_bytes=1000)
    extent = tiers.add(1)
    assert tiers.placement.host.take_slots(1, now=1) is None
    assert tiers.placement.relief
    (store,) = tiers.planned()
    assert isinstance(store, Store)
    assert (store.record, store.slots, store.why) == (extent.record(), extent.slots, "evict")
    assert (extent.host, extent.disk, tiers.placement.host.pool.free) == ("ready", "writing", 0)
    assert tiers.placement.host.take_slots(1, now=2) is None
    assert tiers.planned() == [], "it is under way"
    tiers.end(store)
    assert (extent.host, extent.disk, tiers.placement.host.pool.free) == ("absent", "ready", 1)
    assert not tiers.placement.relief


def test_what_is_being_written_is_looked_at_by_no_further_eviction() -> None:
    tiers = Tiers(host_slots=4, disk_bytes=1000)
    extents = [tiers.add(number, now=number) for number in range(1, 5)]
    candidates = tiers.placement.candidates.host
    for count in range(1, 5):
        tiers.placement.host.evict(count, now=5)
        assert candidates.members() == extents[count:]
    for i, store in enumerate(tiers.planned()):
        tiers.end(store, ok=i == 3)
    assert candidates.members() == extents[:3], "the last one has left, and the others may be tried again"


def test_who_is_pinned_while_being_evicted_stays_and_has_a_file() -> None:
    tiers = Tiers(host_slots=1, disk_bytes=1000)
    extent = tiers.add(1)
    tiers.placement.host.evict(1, now=1)
    tiers.placement.pin(extent)
    assert not tiers.placement.relief
    tiers.end(tiers.planned()[0])
    assert (extent.host, extent.disk) == ("ready", "ready")


def test_an_extent_that_could_not_be_stored_stays_in_host() -> None:
    tiers = Tiers(host_slots=1, disk_bytes=1000)
    extent = tiers.add(1)
    tiers.placement.host.evict(1, now=1)
    tiers.end(tiers.planned()[0], ok=False)
    assert (extent.host, extent.disk, tiers.placement.disk.used) == ("ready", "absent", 0)
    assert tiers.counters.store_failures == 1


def test_a_clean_copy_goes_before_its_turn_when_rows_would_be_lost() -> None:
    # Writing a dirty extent takes longer than a step; the rows of the step cannot wait for it.
    tiers = Tiers(host_slots=2, disk_bytes=1000)
    dirty, clean = tiers.add(1, now=1), tiers.clean(2, now=2)
    assert tiers.placement.host.take_slots(1, now=3) is None, "it was the dirty one's turn"
    assert tiers.placement.host.urge_slots(1, now=3) == (1,)
    assert (dirty.host, clean.host, clean.disk) == ("ready", "absent", "ready")


def test_pinned_clean_copies_do_not_go_before_their_turn() -> None:
    tiers = Tiers(host_slots=2, disk_bytes=1000)
    tiers.add(1, now=1)
    clean = tiers.clean(2, now=2)
    tiers.placement.pin(clean)
    assert tiers.placement.host.urge_slots(1, now=3) is None
    assert clean.host == "ready"


def test_the_background_keeps_slots_free() -> None:
    tiers = Tiers(host_slots=40)
    for number in range(1, 41):
        tiers.add(number, now=number)
    low, high = tiers.placement.host.low, tiers.placement.host.high
    assert (low, high) == (4, 8)
    tiers.placement.background(now=50, expected=0)
    assert tiers.placement.host.pool.free == high
    tiers.placement.host.take_slots(high - low, now=51)
    tiers.placement.background(now=51, expected=0)
    assert tiers.placement.host.pool.free == low, "not before the lower mark is passed"
    tiers.placement.background(now=51, expected=10)
    assert tiers.placement.host.pool.free == 10, "or as many as are going to be needed"
    tiers.placement.background(now=51, expected=1000)
    assert tiers.placement.host.pool.free == 20, "at most half of all for rows to come"


def test_evictions_under_way_count_as_room() -> None:
    tiers = Tiers(host_slots=4, disk_bytes=1000)
    for number in range(1, 5):
        tiers.add(number, now=number)
    tiers.placement.host.evict(2, now=9)
    tiers.placement.host.evict(2, now=9)
    assert len(stores(tiers.planned())) == 2


def test_victims_that_wait_for_room_on_disk_each_ask_for_their_own() -> None:
    tiers = Tiers(host_slots=4, disk_bytes=600)
    for number in range(1, 7):
        tiers.on_disk(number, now=number)
    for number in range(11, 15):
        tiers.add(number, now=number)
    tiers.placement.host.evict(3, now=20)
    assert len(drops(tiers.planned())) == 3, "in one go, not one after the other"
    for move in list(tiers.moves):
        tiers.end(move, now=21)
    tiers.placement.host.evict(3, now=21)
    assert len(stores(tiers.planned())) == 3


# ------------------------------------------------------------------------------------------------------- loads


def test_a_load_takes_slots_at_once_and_is_ready_when_it_is_done() -> None:
    tiers = Tiers(host_slots=2, disk_bytes=1000)
    extent = tiers.on_disk(1, blocks=2)
    assert tiers.placement.loading.load(extent, now=1)
    (load,) = tiers.planned()
    assert isinstance(load, Load)
    assert (load.extent, load.rows, load.slots) == (extent.id, 8, (0, 1))
    assert (extent.host, extent.load) == ("loading", load.move)
    assert tiers.placement.host.take_slots(1, now=1) is None
    tiers.end(load)
    assert (extent.host, extent.disk, extent.load) == ("ready", "ready", None)


def test_without_slots_there_is_no_load() -> None:
    tiers = Tiers(host_slots=1, disk_bytes=1000)
    tiers.placement.pin(tiers.add(1))
    extent = tiers.on_disk(2)
    assert not tiers.placement.loading.load(extent, now=1)
    assert not tiers.placement.relief
    assert (extent.host, tiers.planned()) == ("absent", [])


def test_slots_of_a_timed_out_load_are_nobodys_until_it_has_ended() -> None:
    tiers = Tiers(host_slots=2, disk_bytes=1000)
    extent = tiers.on_disk(1, blocks=2)
    tiers.placement.loading.load(extent, now=1)
    (load,) = tiers.planned()
    tiers.end(load, ok=False, busy=True)
    assert extent.dead
    assert tiers.placement.host.pool.free == 0, "the read may still write into them"
    assert tiers.placement.host.take_slots(1, now=2) is None
    tiers.moves.append(load)
    tiers.end(load, ok=False, busy=True)
    assert tiers.placement.host.pool.free == 0
    tiers.moves.append(load)
    tiers.end(load, ok=False)
    assert tiers.placement.host.pool.free == 2
    tiers.moves.append(load)
    tiers.end(load, ok=False)
    assert tiers.placement.host.pool.free == 2, "whatever else holds"


def test_a_damaged_extent_takes_along_what_hangs_below_it() -> None:
    tiers = Tiers(disk_bytes=1000)
    head = tiers.clean(1)
    bad = tiers.on_disk(2, below=head)
    tail = tiers.add(3, below=bad)
    leaf = tiers.on_disk(4, below=tail)
    context, good = tiers.context(head, bad, tail), tiers.context(head)
    tiers.placement.loading.load(bad, now=1)
    (load,) = tiers.planned()
    tiers.end(load, ok=False)
    assert [extent.dead for extent in (head, bad, tail, leaf)] == [False, True, True, True]
    assert list(tiers.index.extents) == [head.id]
    assert tiers.placement.host.pool.free == tiers.placement.host.pool.total - 1
    assert sorted(drops(tiers.planned())) == sorted([bad.id, leaf.id])
    assert tiers.device.frees == [context.id]
    assert list(tiers.device.contexts) == [good.id]
    assert tiers.counters.damaged == 1
    assert tiers.counters.dropped == 3


def test_a_dead_extent_keeps_its_slots_while_somebody_reads_them() -> None:
    tiers = Tiers(host_slots=1)
    extent = tiers.add(1)
    tiers.placement.pin(extent)
    tiers.placement.forget(extent, "deleted")
    tiers.check()
    assert extent.slots == (0,)
    tiers.placement.unpin(extent)
    assert tiers.placement.host.pool.free == 1
    tiers.check()


def test_a_dead_extent_keeps_its_slots_and_its_name_while_a_move_is_under_way() -> None:
    tiers = Tiers(host_slots=2, disk_bytes=1000)
    loading, storing = tiers.on_disk(1), tiers.add(2)
    tiers.placement.loading.load(loading, now=1)
    tiers.placement.disk.store(storing, now=1, why="evict")
    load, store = tiers.planned()
    tiers.placement.forget(loading, "deleted")
    tiers.placement.forget(storing, "deleted")
    tiers.check()
    assert tiers.placement.host.pool.free == 0
    tiers.end(load)
    tiers.end(store)
    assert tiers.placement.host.pool.free == 2
    assert drops(tiers.planned()) == [loading.id, storing.id], "their files are of no use"
    assert tiers.placement.disk.used == 200
    tiers.end_all()
    assert tiers.placement.disk.used == 0


# -------------------------------------------------------------------------------------------------- everything

ACTIONS = ["add", "below", "load", "pin", "unpin", "touch", "store", "flush", "forget", "evict", "end", "fail", "hang"]


@settings(max_examples=120, deadline=None)
@given(
    actions=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 5)), max_size=50),
    host_slots=st.integers(1, 6),
    disk_bytes=st.sampled_from([0, 350, 10_000]),
)
def test_budgets_hold_and_pins_protect_whatever_is_asked(
    actions: list[tuple[str, int]], host_slots: int, disk_bytes: int
) -> None:
    tiers = Tiers(host_slots, disk_bytes)
    placement = tiers.placement
    pinned: list[tuple[Extent, tuple[int, ...]]] = []
    hung: list[Move] = []
    for now, (what, which) in enumerate(actions, 1):
        extents = list(tiers.index.extents.values())
        some = extents[which % len(extents)] if extents else None
        if what in ("add", "below"):
            slots = placement.host.urge_slots(1, now)  # which may cost the parent its life
            parent = some if what == "below" and some is not None and not some.dead else None
            if slots is not None:
                placement.add(tiers.insert(now, 1, parent, now), slots, which == 0, now)
        elif what == "unpin" and pinned:
            placement.unpin(pinned.pop()[0])
        elif what in ("end", "fail", "hang") and tiers.moves:
            move = tiers.moves[which % len(tiers.moves)]
            busy = what == "hang" and isinstance(move, Load)
            tiers.end(move, ok=what == "end" or not isinstance(move, Load | Store), busy=busy, now=now)
            hung += [move] * busy
        elif what == "evict":
            placement.host.evict(which, now)
        elif what == "flush":
            placement.write_back.flush(now)
        elif some is not None and what == "forget":
            placement.forget(some, "deleted")
        elif some is not None and what == "touch":
            placement.touch(some, now)
        elif some is not None and what == "load" and some.host == "absent":
            placement.loading.load(some, now)
        elif some is not None and some.host == "ready":
            if what == "pin":
                placement.pin(some)
                pinned.append((some, some.slots))
            elif what == "store" and some.disk == "absent":
                placement.disk.store(some, now, "evict")
        tiers.planned()
        tiers.check()
        assert placement.disk.used <= disk_bytes
        assert all(extent.slots == slots for extent, slots in pinned)
    for extent, _ in pinned:
        placement.unpin(extent)
    tiers.end_all()
    tiers.moves += hung
    tiers.end_all()
    placement.forget_all()
    tiers.end_all()
    assert placement.host.pool.free == host_slots, "nothing is lost"
    assert placement.disk.used == 0
