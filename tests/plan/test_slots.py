"""The pool of free slots against a plain set."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afterglow.plan.tiers.moves import SlotPool, watermarks


def expected(free: set[int], count: int, after: int | None) -> tuple[int, ...] | None:
    """What `take` promises: right after `after`, else the lowest run that is long enough, else the lowest slots."""
    if count > len(free):
        return None
    starts = [slot for slot in sorted(free) if slot - 1 not in free]
    if after is not None:
        starts.insert(0, after + 1)
    for start in starts:
        if all(start + i in free for i in range(count)):
            return tuple(range(start, start + count))
    return tuple(sorted(free)[:count])


@settings(max_examples=100, deadline=None)
@given(total=st.integers(0, 24), data=st.data())
def test_slots_come_and_go_as_in_a_plain_set(total: int, data: st.DataObject) -> None:
    pool, free = SlotPool(total), set(range(total))
    taken: list[tuple[int, ...]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        if taken and data.draw(st.booleans()):
            slots = taken.pop(data.draw(st.integers(0, len(taken) - 1)))
            pool.give(slots)
            free |= set(slots)
        else:
            used = sorted(set(range(total)) - free)
            after = data.draw(st.none() | st.sampled_from(used)) if used else None
            count = data.draw(st.integers(0, 6))
            slots = pool.take(count, after)
            assert slots == expected(free, count, after)
            if slots is not None:
                taken.append(slots)
                free -= set(slots)
        assert pool.listing() == sorted(free)
        assert pool.free == len(free)
        pool.check()


def test_an_extent_that_grows_stays_in_one_run() -> None:
    pool = SlotPool(8)
    first = pool.take(2)
    other = pool.take(2)
    assert first is not None
    assert other is not None
    pool.give(first)  # a lower run is free, and yet the draft goes on where it is
    assert pool.take(2, after=other[-1]) == (4, 5)


def test_a_slot_given_back_twice_is_noticed() -> None:
    pool = SlotPool(4)
    slots = pool.take(2)
    assert slots is not None
    pool.give(slots)
    with pytest.raises(AssertionError, match="given back twice"):
        pool.give(slots)


@given(st.integers(0, 10_000))
def test_watermarks_fit_into_the_arena(slots: int) -> None:
    low, high = watermarks(slots)
    assert 0 <= low <= high <= slots
    assert 4 * low <= slots


def test_watermarks_are_5_and_10_percent() -> None:
    assert watermarks(1000) == (50, 100)
    assert watermarks(3) == (0, 0)
