"""Rows that come from disk: who waits for them, where they are told to have been, and when they do not come."""

from __future__ import annotations

import pytest

from afterglow.plan.step import Release, Store
from tests.plan.server_kit import FOREVER, Server, jobs_of, tokens_of, words

# ------------------------------------------------------------------------------------- from disk


def restarted(prompt: int = 30) -> Server:
    """A server that has one conversation, of so many rows, on disk."""
    server = Server(disk_bytes=10_000)
    server.ask(words(prompt), max_tokens=0)
    server.restart()
    return server


def test_an_idle_engine_runs_a_job_while_its_rows_are_still_being_loaded() -> None:
    server = restarted()
    server.faults.delay = FOREVER  # until the job needs them
    job = server.submit([*words(30), 7])
    step = server.step()
    assert jobs_of(step) == [job]
    assert step.runs[0].admit is not None
    assert [gather.move for gather in step.runs[0].gathers] == [move.move for move in step.moves]
    server.finish()
    assert server.hits(job) == (0, 0, 30)


def test_a_loading_job_does_not_join_while_others_decode() -> None:
    server = restarted()
    decoding = server.submit(words(5, 1000), max_tokens=20)
    server.step()
    server.faults.delay = 6
    loading = server.submit([*words(30), 7], max_tokens=2)
    for _ in range(7):
        assert jobs_of(server.step()) == [decoding], "the decode does not wait for the disk"
        assert len(server.loads()) == 2
    assert server.scheduler.stats().loading == 1
    assert jobs_of(server.step()) == [decoding, loading]
    assert server.scheduler.stats().loading == 0
    server.finish()
    assert server.hits(loading) == (0, 0, 30)


def test_a_loading_job_holds_nobody_up_who_needs_no_load() -> None:
    server = restarted()
    decoding = server.submit(words(5, 1000), max_tokens=20)
    server.step()
    server.faults.delay = FOREVER
    loading = server.submit([*words(30), 7], max_tokens=2)
    other = server.submit(words(5, 2000), max_tokens=2)
    assert jobs_of(server.step()) == [decoding, other]
    server.finish()  # when the others are gone, it does not wait for all of its load any more
    assert server.hits(loading) == (0, 0, 30)


def test_no_more_jobs_load_than_there_are_seats() -> None:
    server = Server(disk_bytes=10_000, max_batch=2)
    for i in range(3):
        server.ask(words(10, 1000 * i), max_tokens=0)
    server.restart()
    server.submit(words(5, 9000), max_tokens=20)
    server.step()
    server.faults.delay = 5
    jobs = [server.submit([*words(10, 1000 * i), 7]) for i in range(3)]
    server.step()
    assert (server.scheduler.stats().loading, len(server.loads())) == (1, 1)
    server.finish()
    assert [server.hits(job) for job in jobs] == [(0, 0, 10)] * 3


def test_what_two_jobs_wait_for_is_loaded_once() -> None:
    server = restarted()
    server.submit(words(5, 1000), max_tokens=20)
    server.step()
    server.faults.delay = 3
    jobs = [server.submit([*words(30), i, i], max_tokens=2) for i in (1, 2)]
    server.finish()
    assert len(server.loads()) == 2  # extents of 16 and 14 rows
    assert [server.hits(job) for job in jobs] == [(0, 0, 30), (0, 0, 30)]


def test_rows_are_told_where_they_were_when_the_job_was_scheduled() -> None:
    server = restarted()
    first = server.ask([*words(20), 7], max_tokens=4)
    assert server.hits(first) == (0, 0, 20)
    server.scheduler.drop_contexts()
    second = server.ask([*words(20), 7, 8])
    assert server.hits(second) == (0, 21, 0), "loaded, they are in host too; and the new row beside them"
    third = server.ask([*words(20), 7, 8, 9])
    assert server.hits(third) == (22, 0, 0)
    counters = server.scheduler.stats().counters
    assert (counters.hit_device, counters.hit_host, counters.hit_disk) == (22, 21, 20)
    assert counters.query_tokens == 21 + 22 + 23


def test_one_prompt_can_be_found_in_three_places() -> None:
    server = restarted(prompt=16)
    server.ask([*words(16), *words(8, 1000)], max_tokens=0)
    assert server.hits(2) == (0, 0, 16)
    server.restart()
    server.ask([*words(16), 1], max_tokens=0)  # brings the first extent to the device
    assert server.hits(3) == (0, 0, 16)
    job = server.ask([*words(16), *words(8, 1000), 7])
    assert server.hits(job) == (16, 0, 8)


def test_a_job_whose_load_fails_is_sent_back_and_ends_right() -> None:
    server = restarted()
    server.faults.delay = FOREVER
    job = server.submit([*words(30), 7], max_tokens=3)
    server.executor.damaged = {record.id for record in server.executor.catalog.values() if record.parent is not None}
    step, result = server.open()
    assert jobs_of(step) == [job]
    assert list(result.failed) == [job]
    assert server.close(step, result) == [], "nothing is told of what came to nothing"
    server.finish()
    # The extent of the first 16 rows had come; the match ends before the one that had not.
    assert server.hits(job) == (0, 16, 0)
    assert server.runs(job)[1].start == 16
    assert (Release(job, None, 0),) in [step.releases for step in server.steps]
    counters = server.scheduler.stats().counters
    assert (counters.failed_loads, counters.damaged, counters.dropped) == (1, 1, 1)


def test_a_failed_load_is_not_met_again_before_its_completion_comes() -> None:
    server = restarted()
    server.faults.delay = FOREVER
    job = server.submit([*words(30), 7], max_tokens=3)
    server.executor.damaged = set(server.executor.catalog)
    server.withheld = []
    server.step()
    assert len(server.withheld) > 0
    assert [run.start for run in server.step().runs] == [0]
    assert len(server.loads()) == 2
    server.deliver()
    server.finish()
    assert server.hits(job) == (0, 0, 0)


@pytest.mark.parametrize("busy", [0.0, 1.0])
def test_loads_that_always_fail_cost_no_answer(busy: float) -> None:
    server = restarted()
    server.faults.load, server.faults.busy = 1.0, busy
    jobs = [server.submit([*words(30), i, i], max_tokens=3) for i in range(3)]
    server.finish()
    assert [server.hits(job)[2] for job in jobs] == [0, 0, 0]
    assert sum(server.hits(jobs[1])) == 30, "the first has computed them anew"
    assert server.scheduler.stats().counters.damaged == 1
    server.nothing_left_behind()


def test_rows_that_find_no_slots_are_computed() -> None:
    server = Server(host_slots=4, disk_bytes=10_000)
    server.ask(words(16), max_tokens=0)
    server.restart()
    server.withheld = []  # so that the slots of the running job stay what they are
    running = server.submit(words(16, 2000), max_tokens=30)
    server.step()
    job = server.submit([*words(16), 7])
    assert jobs_of(server.step()) == [running, job]
    server.deliver()
    server.finish()
    assert server.hits(job) == (0, 0, 0)
    assert server.computed(job) == 17
    assert server.scheduler.stats().counters.cut_loads == 1


def test_rows_for_which_slots_are_being_freed_are_waited_for() -> None:
    server = Server(host_slots=4, disk_bytes=10_000)
    server.ask(words(16), max_tokens=0)
    server.restart()
    server.faults.delay = 3
    other = server.submit(words(16, 2000), max_tokens=0)
    while other not in server.ends:
        server.step()
    job = server.submit([*words(16), 7])
    server.step()
    (store,) = server.executor.pending.values()
    assert isinstance(store.move, Store)
    while len(server.executor.files) < 2:
        assert jobs_of(server.step()) == []
        assert server.loads() == []
    server.finish()
    assert server.hits(job) == (0, 0, 16)


def test_moves_and_tokens_do_not_depend_on_each_other() -> None:
    """A Store that never ends holds no job up."""
    server = Server(disk_bytes=10_000, write_policy="write_through")
    server.faults.delay = FOREVER
    first = server.submit(words(20), max_tokens=3)
    while first not in server.ends:
        server.step()
    second = server.submit(server.text(first), max_tokens=3)
    events = []
    while second not in server.ends:
        step, result = server.open()
        events += server.close(step, result)
    assert len(tokens_of(events)) == 3
    assert any(isinstance(move, Store) for step in server.steps for move in step.moves)
    assert server.executor.files == {}
