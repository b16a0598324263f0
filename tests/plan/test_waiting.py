"""When a job waits for rows that another computes, or has computed and not yet saved."""

from __future__ import annotations

from unittest import mock

import pytest

from afterglow.plan.step import SaveDone
from tests import doors
from tests.plan.server_kit import Server, jobs_of, words

BLOCK = 64  # as in the engine

# --------------------------------------------------------------------------------- the same prefix in flight


def test_who_shares_a_prefix_being_computed_waits_and_then_reuses_it() -> None:
    server = Server(device_rows=4096, prefill_chunk=16, block=BLOCK)
    shared = words(200)
    first = server.submit([*shared, 1], max_tokens=2)
    second = server.submit([*shared, 2], max_tokens=2)
    assert jobs_of(server.step()) == [first]
    assert server.scheduler.stats().counters.waits_prefix == 1
    server.finish()
    assert server.computed(first) == 201 + 1
    assert server.computed(second) == 1 + 1
    assert sum(server.hits(second)) == 200


def test_less_than_a_block_is_not_waited_for() -> None:
    server = Server(device_rows=4096, block=BLOCK)
    shared = words(BLOCK - 1)
    first = server.submit([*shared, 1, 1], max_tokens=2)
    second = server.submit([*shared, 2, 2], max_tokens=2)
    assert jobs_of(server.step()) == [first, second]
    server.finish()
    assert server.hits(second) == (0, 0, 0)


def test_a_whole_block_is_waited_for() -> None:
    server = Server(device_rows=4096, block=BLOCK)
    shared = words(BLOCK)
    first = server.submit([*shared, 1, 1], max_tokens=2)
    second = server.submit([*shared, 2, 2], max_tokens=2)
    assert jobs_of(server.step()) == [first]
    server.finish()
    assert sum(server.hits(second)) == BLOCK


def test_what_completes_a_match_is_waited_for_however_short_it_is() -> None:
    server = Server(device_rows=4096, block=BLOCK)
    prompt = words(10)
    first, second = server.submit(prompt), server.submit(prompt)
    assert jobs_of(server.step()) == [first]
    server.finish()
    assert sum(server.hits(second)) == 9


def test_a_job_that_does_not_read_waits_for_nobody() -> None:
    server = Server(device_rows=4096, block=BLOCK)
    jobs = [server.submit(words(200), max_tokens=2, read=read) for read in (True, False)]
    assert jobs_of(server.step()) == jobs
    server.finish()
    assert server.hits(jobs[1]) == (0, 0, 0)
    assert server.scheduler.stats().counters.duplicates > 0


def test_who_waited_for_a_job_that_was_cancelled_computes_the_rest_itself() -> None:
    server = Server(device_rows=4096, prefill_chunk=16, max_batch=8, block=BLOCK)
    decoding = server.submit([5], max_tokens=50)  # keeps prefills small
    server.step()
    first, second = server.submit(words(200)), server.submit(words(200))
    for _ in range(5):
        assert second not in jobs_of(server.step())
    server.cancel(first)
    server.finish()
    assert sum(server.hits(second)) == 5 * 16
    assert server.computed(second) == 200 - 5 * 16
    assert server.ends[decoding] == "length"


# ------------------------------------------------------------------------- the next turn comes at once


def next_turn(server: Server, job: int) -> int:
    """The conversation goes on: all that was said, and something new."""
    return server.submit([*server.text(job), *words(5, 9000)], max_tokens=2)


@pytest.mark.parametrize("reply", [1, 2, 5, BLOCK, BLOCK + 7])
@pytest.mark.parametrize("prompt", [7, 3 * BLOCK])
def test_a_turn_that_follows_at_once_finds_all_of_the_turn_before(prompt: int, reply: int) -> None:
    """Before the last rows are saved, before even the step that releases the job's segment."""
    server = Server(device_rows=4096, block=BLOCK)
    server.faults.lazy_saves = 1.0  # nothing is saved before it must be
    first = server.submit(words(prompt), max_tokens=reply)
    while first not in server.ends:
        server.step()
    assert server.scheduler.stats().extents == 0, "no row can be matched yet"
    second = next_turn(server, first)
    server.withheld = []
    step = server.step()
    assert jobs_of(step) == [], "it waits for the tail"
    assert [release.job for release in step.releases] == [first]
    server.step()
    assert jobs_of(server.steps[-1]) == []
    server.deliver()
    server.finish()
    # All but the last generated token, which was never fed.
    assert server.hits(second) == (prompt + reply - 1, 0, 0)
    assert server.runs(second)[0].start == prompt + reply - 1


def test_the_tail_is_waited_for_beside_others_that_decode() -> None:
    server = Server(device_rows=4096, block=BLOCK)
    server.faults.lazy_saves = 1.0
    other = server.submit(words(3, 7000), max_tokens=40)
    first = server.submit(words(7), max_tokens=5)
    while first not in server.ends:
        server.step()
    second = next_turn(server, first)
    server.finish()
    assert server.hits(second) == (7 + 5 - 1, 0, 0)
    assert server.ends[other] == "length"


def test_a_tail_that_could_not_be_saved_is_computed_again() -> None:
    server = Server(device_rows=4096, block=BLOCK)
    server.faults.lazy_saves = 1.0
    first = server.submit(words(100), max_tokens=5)
    while first not in server.ends:
        server.step()
    server.faults.save = 1.0
    second = next_turn(server, first)
    server.step()
    server.faults.save = 0.0
    server.finish()
    assert server.hits(second) == (0, 0, 0)


def test_saves_are_answered_in_any_grouping_and_order() -> None:
    server = Server(device_rows=400)
    server.withheld = []
    first = server.submit(words(20), max_tokens=9)
    while first not in server.ends:
        server.step()
    second = next_turn(server, first)
    server.step()
    ones = [
        SaveDone(item.draft, row, 1)
        for item in server.withheld
        if isinstance(item, SaveDone)
        for row in range(item.first_row, item.first_row + item.rows)
    ]
    server.withheld = list(reversed(ones))
    server.deliver()
    server.finish()
    assert server.hits(second) == (28, 0, 0)


# ------------------------------------------------------------------------------------ a device without memory


def step_with_memory_for(server: Server, runs: int) -> list[int]:
    """Carry out a step in which the device has memory for so many runs. Returns all its jobs."""
    with mock.patch.object(
        server.executor, "rng", mock.Mock(**{"random.return_value": 0.0, "randrange.return_value": runs})
    ):
        server.faults.exhausted = 1.0
        step = server.step()
        server.faults.exhausted = 0.0
    return jobs_of(step)


def test_who_had_no_memory_in_the_step_in_which_the_others_ended_goes_on() -> None:
    """Their memory is free by then."""
    server = Server(device_rows=4096)
    ending, other = server.submit(words(9), max_tokens=1), server.submit(words(9, 300), max_tokens=2)
    assert step_with_memory_for(server, 1) == [ending, other]
    server.finish()
    assert len(server.text(other)) == 9 + 2
    assert server.scheduler.stats().counters.preemptions == 1


def test_one_with_a_pass_of_its_own_ends_before_one_that_was_tried_beside_it() -> None:
    """It has kept its memory meanwhile."""
    server = Server(device_rows=4096)
    shared, selecting = (server.submit(words(9, 300 * i), max_tokens=3) for i in range(2))
    server.step()
    doors.jobs_of(server.scheduler)[selecting].approximate = True
    assert step_with_memory_for(server, 0) == [shared, selecting]
    while server.scheduler.unfinished:
        server.step()
    assert server.ends == {shared: "length", selecting: "no_memory"}


@pytest.mark.parametrize("beside", [0, 2])
def test_of_all_that_had_no_memory_the_one_that_was_tried_alone_ends(beside: int) -> None:
    server = Server(device_rows=4096)
    jobs = [server.submit(words(9, 300 * i), max_tokens=2) for i in range(1 + beside)]
    assert step_with_memory_for(server, 0) == jobs
    while server.scheduler.unfinished:
        server.step()
    assert server.ends == {jobs[0]: "no_memory"} | dict.fromkeys(jobs[1:], "length")
