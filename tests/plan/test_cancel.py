"""A job may be cancelled at any time: one event, and nothing is left behind."""

from __future__ import annotations

import pytest

from afterglow.plan.step import Emitted, Event, Release
from tests.plan.server_kit import FOREVER, Server, jobs_of, words


def told(job: int) -> list[Event]:
    return [Emitted(job, None, "cancelled")]


def test_unknown_jobs_and_those_that_have_ended_are_no_matter() -> None:
    server = Server()
    job = server.ask(words(5))
    assert server.cancel(job) == []
    assert server.cancel(99) == []
    assert server.scheduler.stats().counters.cancelled == 0


def test_a_waiting_job() -> None:
    server = Server(max_batch=1)
    running = server.submit(words(5), max_tokens=5)
    server.step()
    waiting = server.submit(words(5, 1000))
    server.step()
    assert server.cancel(waiting) == told(waiting)
    assert server.cancel(waiting) == []
    server.finish()
    assert server.runs(waiting) == []
    assert server.ends[running] == "length"
    server.nothing_left_behind()


@pytest.mark.parametrize("delay", [0, 3])
def test_a_loading_job(delay: int) -> None:
    server = Server(disk_bytes=10_000)
    server.ask(words(30), max_tokens=0)
    server.restart()
    running = server.submit(words(5, 1000), max_tokens=20)
    server.step()
    server.faults.delay = delay
    loading = server.submit([*words(30), 7])
    server.step()
    assert server.scheduler.stats().loading == 1
    assert server.cancel(loading) == told(loading)
    assert server.cancel(loading) == []
    server.finish()
    assert server.runs(loading) == []
    assert server.ends[running] == "length"
    assert server.hits(server.ask([*words(30), 7])) == (0, 30, 0), "its loads went on, and are of use to others"
    server.nothing_left_behind()


def test_a_prefilling_job_between_steps() -> None:
    server = Server(prefill_chunk=8)
    decoding = server.submit(words(5), max_tokens=20)
    server.step()
    job = server.submit(words(40, 1000))
    server.step()
    server.step()
    assert server.cancel(job) == told(job)
    step = server.step()
    assert jobs_of(step) == [decoding]
    assert [release.job for release in step.releases] == [job]
    server.finish()
    # Its computed rows are of use to others.
    assert sum(server.hits(server.ask(words(40, 1000)))) == 16
    server.nothing_left_behind()


def test_a_decoding_job_between_steps() -> None:
    server = Server()
    job = server.submit(words(10), max_tokens=20)
    for _ in range(4):
        server.step()
    assert server.cancel(job) == told(job)
    server.finish()
    assert len(server.made[job]) == 4
    assert sum(server.hits(server.ask(server.text(job)))) == 10 + 4 - 1
    server.nothing_left_behind()


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_job_whose_step_is_open_is_told_with_its_commit(steps: int) -> None:
    """While it prefills (0), on its last piece of prompt (1), while it decodes (3)."""
    server = Server(prefill_chunk=8)
    other = server.submit(words(5), max_tokens=20)
    server.step()
    job = server.submit(words(16, 1000), max_tokens=20)
    for _ in range(steps):
        server.step()
    step, result = server.open()
    assert job in jobs_of(step)
    assert server.cancel(job) == []
    assert server.cancel(job) == []
    made = len(server.made[job])
    events = server.close(step, result)
    assert [event for event in events if isinstance(event, Emitted) and event.job == job] == told(job)
    assert len(server.made[job]) == made, "a token that comes too late is not told"
    assert [release.job for release in server.step().releases] == [job]
    server.finish()
    assert server.ends[other] == "length"
    server.nothing_left_behind()


def test_a_job_whose_step_is_open_and_fails() -> None:
    server = Server(disk_bytes=10_000)
    server.ask(words(30), max_tokens=0)
    server.restart()
    server.faults.load, server.faults.delay = 1.0, FOREVER
    job = server.submit([*words(30), 7])
    step, result = server.open()
    assert list(result.failed) == [job]
    assert server.cancel(job) == []
    assert server.close(step, result) == told(job)
    assert server.step().releases == (Release(job, None, 0),)
    server.nothing_left_behind()


def test_a_job_that_was_sent_back() -> None:
    server = Server(device_rows=48)
    old = server.submit(words(12), max_tokens=30)
    young = server.submit(words(12, 1000), max_tokens=30)
    while not server.scheduler.stats().counters.preemptions:
        server.step()
    assert server.scheduler.stats().waiting == 1
    assert server.cancel(young) == told(young)
    server.finish()
    assert server.ends[old] == "length"
    assert 0 < len(server.made[young]) < 30
    server.nothing_left_behind()


def test_a_job_whose_rows_are_still_being_saved() -> None:
    server = Server()
    server.faults.lazy_saves = 1.0
    job = server.submit(words(20), max_tokens=20)
    for _ in range(5):
        server.step()
    assert server.cancel(job) == told(job)
    assert server.scheduler.stats().saves_in_flight == 3
    server.finish()
    assert sum(server.hits(server.ask(server.text(job)))) == 20 + 5 - 1
    server.nothing_left_behind()


def test_who_waits_for_a_seat_gets_it() -> None:
    server = Server(max_batch=1)
    job = server.submit(words(5), max_tokens=100)
    waiting = server.submit(words(5, 1000), max_tokens=2)
    server.step()
    server.cancel(job)
    assert jobs_of(server.step()) == [waiting]
    server.finish()
