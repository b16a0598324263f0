"""Eviction orders, and the ranking that finds victims without scanning."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from afterglow.plan.prefix.extent import Extent, ExtentMark
from afterglow.plan.tiers.policy import POLICIES, Order, Ranking
from tests import doors
from tests.plan.tiers_kit import make_extent


def extent(serial: int, *, first_row: int = 0, created_at: float = 0.0, used: float = 0.0) -> Extent:
    made = make_extent([serial], [0] * first_row, serial=serial, now=created_at)
    made.last_used = used
    return made


def order_of(policy: str) -> Callable[[Extent], Order]:
    return lambda item: POLICIES[policy].order(item, item.mark is not None)


def victims(policy: str, extents: list[Extent]) -> list[int]:
    return [item.serial for item in sorted(extents, key=order_of(policy))]


def test_lru_takes_what_was_not_used_for_longest() -> None:
    assert victims(
        "lru", [extent(1, created_at=9, used=1), extent(2, created_at=1, used=9), extent(3, created_at=5, used=5)]
    ) == [
        1,
        3,
        2,
    ]


def test_fifo_takes_what_is_oldest_however_often_it_was_used() -> None:
    assert victims(
        "fifo", [extent(1, created_at=9, used=1), extent(2, created_at=1, used=9), extent(3, created_at=5, used=5)]
    ) == [
        2,
        3,
        1,
    ]


def test_of_equals_the_tail_of_the_conversation_goes_first() -> None:
    # A job touches its whole path at once; without its head the tail could not be matched, so the head stays longest.
    chain = [extent(1, first_row=0), extent(2, first_row=64), extent(3, first_row=128)]
    for policy in POLICIES:
        assert victims(policy, chain) == [3, 2, 1]


def test_the_last_word_is_the_serial_number() -> None:
    for policy in POLICIES:
        assert victims(policy, [extent(2), extent(1)]) == [1, 2]


def test_what_is_marked_goes_last_but_before_what_a_job_waits_for() -> None:
    marked, waited = extent(1, created_at=1, used=1), extent(2, created_at=2, used=2)
    marked.mark = ExtentMark(1.0, 300.0, border=True)
    waited.waiting = ((0, 0, 0, 0),)
    others = [extent(3, created_at=3, used=3), extent(4, created_at=4, used=4)]
    for policy in ("lru", "fifo", "lfu"):
        assert victims(policy, [marked, waited, *others]) == [2, 3, 4, 1]
    assert victims("lookahead", [marked, waited, *others]) == [3, 4, 1, 2]


ACTIONS = st.tuples(
    st.sampled_from(["add", "fill", "remove", "use", "mark", "visit", "take"]), st.integers(0, 7), st.integers(0, 5)
)  # what, to which extent, and when (or how many)


@settings(max_examples=150, deadline=None)
@given(actions=st.lists(ACTIONS, max_size=120), policy=st.sampled_from(sorted(POLICIES)))
def test_a_ranking_is_what_sorting_everything_would_give(actions: list[tuple[str, int, int]], policy: str) -> None:
    extents = [extent(i, first_row=i % 3, created_at=float(i % 4)) for i in range(8)]
    ranking = Ranking(POLICIES[policy], lambda _: True)
    members: set[int] = set()

    def in_order() -> list[Extent]:
        return sorted((extents[i] for i in members), key=order_of(policy))

    for what, which, number in actions:
        if what == "add":
            ranking.set(extents[which], True)
            members.add(which)
        elif what == "fill":
            come = [item for item in extents[which:] if item.serial not in members]
            ranking.fill(come)
            members.update(item.serial for item in come)
        elif what == "remove":
            ranking.set(extents[which], False)
            members.discard(which)
        elif what == "use":
            extents[which].last_used = float(number)
            ranking.update(extents[which])
        elif what == "mark":
            extents[which].mark = ExtentMark(0.0, 1.0, border=False) if number % 2 else None
            ranking.update(extents[which])
        else:
            expected = in_order()[: number + 1]
            shown: list[Extent] = []

            def look(item: Extent, take: bool = what == "take", most: int = number + 1) -> bool:
                shown.append(item)  # noqa: B023
                if take:  # as evictions do
                    ranking.set(item, False)
                    members.discard(item.serial)
                return len(shown) < most  # noqa: B023

            ranking.visit(look)
            assert shown == expected
        assert ranking.members() == in_order()
        assert len(ranking) == len(members)
        assert [item in ranking for item in extents] == [i in members for i in range(8)]


def test_outdated_entries_do_not_pile_up() -> None:
    ranking = Ranking(POLICIES["lru"], lambda _: True)
    one = extent(1)
    ranking.set(one, True)
    for tick in range(10_000):
        one.last_used = float(tick)
        ranking.update(one)
    assert len(doors.heap_of(ranking)) < 100
    assert ranking.members() == [one]


def test_many_at_once_have_no_entries_of_their_own() -> None:
    ranking = Ranking(POLICIES["lookahead"], lambda _: True)
    extents = [extent(i, first_row=i % 5, used=float(i % 7)) for i in range(500)]
    ranking.fill(extents)
    assert len(doors.heap_of(ranking)) == 0
    for item in extents[:100]:
        item.last_used = 9.0
        ranking.update(item)
    for item in extents[100:200]:
        ranking.set(item, False)
    assert len(doors.heap_of(ranking)) == 100, "those whose order has changed"
    assert ranking.members() == sorted(extents[:100] + extents[200:], key=order_of("lookahead"))
    seen: list[Extent] = []

    def look(item: Extent) -> bool:
        seen.append(item)
        return True

    ranking.visit(look)
    assert seen == ranking.members()


def test_who_has_left_the_line_is_not_held_for_ever() -> None:
    ranking = Ranking(POLICIES["lru"], lambda _: True)
    extents = [extent(i) for i in range(500)]
    ranking.fill(extents)
    for item in extents[1:]:
        ranking.set(item, False)
    extents[0].last_used = 1.0
    ranking.update(extents[0])
    assert len(doors.line_of(ranking)) + len(doors.heap_of(ranking)) <= 2
    assert ranking.members() == extents[:1]


def test_who_is_put_back_while_shown_is_shown_once() -> None:
    # An eviction may take an extent out and put it back at once (its file is dropped, its slots stay).
    ranking = Ranking(POLICIES["lru"], lambda _: True)
    extents = [extent(1), extent(2)]
    for item in extents:
        ranking.set(item, True)
    shown: list[int] = []

    def look(item: Extent) -> bool:
        ranking.set(item, False)
        ranking.set(item, True)
        shown.append(item.serial)
        return True

    ranking.visit(look)
    assert shown == [1, 2]
    assert ranking.members() == extents
