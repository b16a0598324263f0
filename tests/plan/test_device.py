"""The device's budget, and the contexts kept in it: who is freed, who is found, who survives a step."""

from __future__ import annotations

import pytest

from afterglow.plan.options import Capacity, SchedulerOptions
from afterglow.plan.stats import Counters
from afterglow.plan.tiers.device import MAX_CANDIDATES, WHOLE, Context, Device, DeviceSegment
from tests.plan.fake_executor import pack
from tests.plan.tiers_kit import Tiers


@pytest.fixture
def device() -> Device:
    return Device(Capacity(device_rows=102, host_slots=0, max_extent_rows=16, block_rows=4), Counters())


@pytest.fixture
def sharing() -> Device:
    """100 rows in pages of 4."""
    capacity = Capacity(device_rows=100, host_slots=0, max_extent_rows=16, block_rows=4)
    return Device(capacity, Counters(), SchedulerOptions(shared_pages=True))


def running(device: Device, rows: int) -> DeviceSegment:
    """The segment of a running job."""
    segment = DeviceSegment()
    assert device.reserve(segment, rows)
    return segment


def fits(device: Device, rows: int, keep: Context | None = None) -> bool:
    return device.reserve(DeviceSegment(), rows, keep)


def keep(device: Device, rows: int) -> Context:
    """A context of so many rows, as a finished job leaves it."""
    return device.retain("", pack([1] * rows), rows, running(device, rows))


def test_the_budget_is_whole_blocks_and_holds(device: Device) -> None:
    assert device.budget == 100
    segment = running(device, 60)
    assert not fits(device, 41)
    assert fits(device, 40)
    assert device.used == 100
    device.release(segment)
    assert fits(device, 60)


def test_the_least_recently_used_context_is_freed_first(device: Device) -> None:
    first, second, third = keep(device, 30), keep(device, 30), keep(device, 40)
    device.copy_from(first)  # used again: now the most recent
    device.unpin()
    segment = running(device, 40)
    assert device.frees == [second.id, third.id]
    assert list(device.contexts) == [first.id]
    assert device.used == 70
    device.check([segment])


def test_no_more_contexts_are_freed_than_it_takes(device: Device) -> None:
    first, _ = keep(device, 50), keep(device, 50)
    assert fits(device, 50)
    assert device.frees == [first.id]


def test_nothing_is_freed_for_what_will_not_fit_anyway(device: Device) -> None:
    assert fits(device, 60)  # of a running job
    keep(device, 40)
    assert not fits(device, 41)
    assert device.frees == []
    assert device.used == 100


def test_the_context_that_a_job_goes_on_from_is_not_freed_for_it(device: Device) -> None:
    first, second = keep(device, 50), keep(device, 50)
    assert fits(device, 50, first)
    assert device.frees == [second.id]
    assert not fits(device, 50, first)


def test_a_context_being_copied_survives_the_step(device: Device) -> None:
    context = keep(device, 60)
    device.copy_from(context)
    assert not fits(device, 50), "its rows are read in this very step"
    device.free(context)
    assert device.frees == []
    assert device.unpin()
    assert device.frees == [context.id]
    assert device.used == 0
    assert not device.unpin()


def test_a_context_that_is_taken_over_stays_counted(device: Device) -> None:
    context = keep(device, 60)
    segment = device.take_over(context, 60, 40)
    assert segment is not None
    assert (device.used, device.frees, device.contexts) == (60, [], {})
    device.check([segment])


# ------------------------------------------------------------------------------------------ pages in common


def test_pages_that_segments_share_count_once(sharing: Device) -> None:
    first = running(sharing, 40)
    forks = [sharing.fork(first, 38, 44, None) for _ in range(5)]  # nine whole pages, and two of its own each
    made = [fork for fork in forks if fork is not None]
    assert len(made) == 5
    assert sharing.used == 40 + 5 * 8
    sharing.check([first, *made])
    sharing.release(first)
    assert sharing.used == 36 + 5 * 8, "others have its pages still, but for the last one"
    for fork in made:
        sharing.release(fork)
    assert sharing.used == 0


def test_a_context_whose_pages_others_have_is_not_freed_for_nothing(sharing: Device) -> None:
    context = keep(sharing, 60)
    fork = sharing.fork(context.segment, 60, 80, context)
    assert fork is not None
    assert sharing.used == 80
    assert not fits(sharing, 24), "without the context 80 rows are used as well"
    assert sharing.frees == []
    assert fits(sharing, 20)


def test_contexts_that_share_pages_are_freed_together(sharing: Device) -> None:
    first = keep(sharing, 60)
    fork = sharing.fork(first.segment, 60, 80, first)
    assert fork is not None
    second = sharing.retain("", pack([1] * 80), 80, fork)
    third = keep(sharing, 20)
    assert fits(sharing, 24)
    assert sharing.frees == [first.id, second.id]
    assert list(sharing.contexts) == [third.id]
    assert sharing.used == 44


def test_a_context_that_would_give_nothing_stays(sharing: Device) -> None:
    """All its pages are a running job's as well; the next context gives what is needed."""
    shared = keep(sharing, 40)
    fork = sharing.fork(shared.segment, 40, 60, shared)
    assert fork is not None
    other = keep(sharing, 40)
    assert fits(sharing, 20)
    assert sharing.frees == [other.id]
    assert list(sharing.contexts) == [shared.id]


def test_a_context_is_trimmed_to_its_rows(sharing: Device) -> None:
    context = sharing.retain("", pack([1] * 10), 10, running(sharing, 40))
    assert sharing.used == 12
    segment = sharing.take_over(context, 9, 24)
    assert segment is not None
    assert (sharing.used, segment.capacity) == (24, 24)
    sharing.check([segment])


def test_taking_over_leaves_others_their_pages(sharing: Device) -> None:
    """The job writes into the page with row 10, which a fork has too: it gets another one."""
    context = keep(sharing, 40)
    fork = sharing.fork(context.segment, 40, 40, context)
    assert fork is not None
    assert sharing.used == 40
    segment = sharing.take_over(context, 10, 20)
    assert segment is not None
    assert sharing.used == 40 + 12
    assert fork.pages[:2] == segment.pages[:2]
    assert not set(fork.pages) & set(segment.pages[2:])
    sharing.check([segment, fork])
    full = keep(sharing, 48)
    assert sharing.take_over(full, 10, 52) is None, "there is no room for four rows more"
    assert list(sharing.contexts) == [full.id]


@pytest.fixture
def windows() -> Device:
    """100 rows of four layers in pages of 4; three layers hold the last 20 rows at most."""
    sizes = {"layers": 4, "window_layers": 3, "window_rows": 20, "window_stride": 4}
    capacity = Capacity(device_rows=100, host_slots=0, max_extent_rows=16, block_rows=4, **sizes)
    return Device(capacity, Counters(), SchedulerOptions(shared_pages=True, sliding_window=8))


def test_where_layers_hold_the_last_rows_the_others_pages_are_shared(windows: Device) -> None:
    """40 rows in one layer and 20 in three are as much as 25 in all. Each fork has two pages in one layer, and 20 rows in three."""
    first = running(windows, 40)
    assert windows.used == 25
    made = [windows.fork(first, 38, 44, None) for _ in range(3)]
    forks = [fork for fork in made if fork is not None]
    assert len(forks) == 3
    assert windows.used == 25 + 3 * (8 + 60) // 4
    windows.check([first, *forks])
    assert windows.fork(first, 38, 76, None) is None, (
        "24 rows of all layers are left: 96 of one, and this takes 40 + 60"
    )
    windows.release(first)
    assert windows.used == -(-(36 + 3 * (8 + 60)) // 4)
    for fork in forks:
        windows.release(fork)
    assert windows.used == 0


def test_a_context_gives_its_last_rows_though_its_pages_are_others(windows: Device) -> None:
    context = keep(windows, 40)
    fork = windows.fork(context.segment, 40, 60, context)
    assert fork is not None
    assert windows.used == (60 + 2 * 60) // 4
    assert fits(windows, 160)
    assert windows.frees == []
    windows.release(fork)
    assert fits(windows, 60)
    assert windows.frees == [context.id]


def test_a_context_vanishes_with_any_of_its_extents() -> None:
    tiers = Tiers()
    head = tiers.add(1)
    tail = tiers.add(2, below=head)
    both, first = tiers.context(head, tail), tiers.context(head)
    tiers.device.forget(tail)
    assert list(tiers.device.contexts) == [first.id]
    assert tiers.device.frees == [both.id]
    assert list(head.contexts) == [first.id]
    tiers.check()


# ---------------------------------------------------------------------------------- which context is the best


def best(tiers: Tiers, tokens: list[int]) -> tuple[Context | None, int]:
    return tiers.device.best(pack(tokens), tiers.index.match("", pack(tokens)))


def test_the_best_context_has_most_of_the_match() -> None:
    tiers = Tiers()
    head = tiers.add(1)
    tail = tiers.add(2, below=head)
    long = tiers.context(head, tail)
    short = tiers.context(head)  # more recent, but shorter
    assert best(tiers, [1] * 4 + [2] * 4 + [3]) == (long, 8)
    assert best(tiers, [1] * 4 + [2] * 2 + [3]) == (long, 6)
    assert best(tiers, [1] * 4 + [3]) == (short, 4), "the more recent of equals"
    assert best(tiers, [3]) == (None, 0)


def test_rows_of_a_context_count_only_as_far_as_the_index_knows_them() -> None:
    tiers = Tiers()
    head = tiers.add(1)
    context = tiers.context(head)
    context.tokens += pack([5] * 4)  # not saved (yet): no job may match them
    context.rows += 4
    assert best(tiers, [1] * 4 + [5] * 4) == (context, 4)


def test_a_doomed_context_is_nobodys_best() -> None:
    tiers = Tiers()
    head = tiers.add(1)
    context = tiers.context(head)
    tiers.device.copy_from(context)
    tiers.device.free(context)
    assert best(tiers, [1] * 4) == (None, 0)


def test_only_some_of_the_contexts_of_a_popular_prefix_are_looked_at() -> None:
    tiers = Tiers()
    head = tiers.add(1, blocks=1)
    whole = tiers.context(head)
    for _ in range(MAX_CANDIDATES - 1):
        tiers.context(head).rows = 1
    assert best(tiers, [1] * 4) == (whole, 4)
    tiers.device.budget += 100
    tiers.context(head).rows = 1
    assert best(tiers, [1] * 4)[1] == 1, "the older ones are not looked at"


def test_rows_that_layers_with_a_window_lack_are_no_ones_to_go_on_from() -> None:
    tiers = Tiers(sliding_window=3)
    head = tiers.add(1)
    tail = tiers.add(2, below=head)
    context = tiers.context(head, tail)
    context.lacks = tiers.device.lacking(WHOLE, 2, 6)  # gathered for a query in row 6, which sees rows 4, 5 and 6
    assert context.lacks == (2, 4)
    assert best(tiers, [1] * 4 + [2] * 4 + [3]) == (context, 8)
    assert best(tiers, [1] * 4 + [2] * 2 + [3]) == (context, 6), "a query in row 6 sees rows 4 to 6"
    assert best(tiers, [1] * 4 + [2] + [3]) == (context, 2), "one in row 5 sees row 3"
    assert best(tiers, [1] * 2 + [3]) == (context, 2)
    assert tiers.device.lacking(context.lacks, 8, 12) == (2, 10)
    assert tiers.device.lacking(context.lacks, 8, 10) == (2, 4), "all that was gathered is seen"
    assert context.lacks.below(2) == WHOLE
