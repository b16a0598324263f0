"""Whichever is predicted to be faster: loading what is on disk, computing it again, or some of both at once."""

from __future__ import annotations

import pytest
from server_kit import Server, words

from afterglow.plan.step import Run

HISTORY = 64  # rows: four extents of sixteen


def taught(load_seconds: float, row_seconds: float = 0.1, **settings: object) -> Server:
    """A server that has learned what loading an extent and computing a row take, with one history on disk."""
    server = Server(disk_bytes=100_000, **settings)
    server.row_seconds = row_seconds
    server.faults.seconds = load_seconds / 4  # a block
    for number in range(4):  # prefills of several lengths, then loads
        server.ask(words(10 + 9 * number, 1000 * (number + 1)))
    for number in range(4):
        to_disk(server)
        server.ask([*words(10 + 9 * number, 1000 * (number + 1)), 7])
    server.ask(words(HISTORY, 9000))
    to_disk(server)
    return server


def to_disk(server: Server) -> None:
    server.scheduler.drop_contexts()
    server.scheduler.flush(server.now)
    for _ in range(5):
        server.step()
    server.scheduler.drop_clean_host()
    server.step()


def stages(server: Server, job: int) -> list[tuple[int, int, int]]:
    """(rows gathered, first row computed, rows computed) of its prefill's runs."""
    runs: list[Run] = [run for run in server.runs(job) if run.start < HISTORY + 1]
    return [(sum(g.stop - g.start for g in run.gathers), run.start, len(run.tokens)) for run in runs]


def test_fast_loads_are_loaded() -> None:
    server = taught(load_seconds=0.01)
    job = server.ask([*words(HISTORY, 9000), 7])
    assert server.hits(job) == (0, 0, HISTORY)
    assert stages(server, job) == [(HISTORY, HISTORY, 1)]


def test_slow_loads_are_not_asked_for() -> None:
    server = taught(load_seconds=100.0)
    before = len(server.loads())
    job = server.ask([*words(HISTORY, 9000), 7])
    assert server.hits(job) == (0, 0, 0)
    assert len(server.loads()) == before
    assert server.computed(job) == HISTORY + 1
    assert server.scheduler.stats().counters.recomputed >= HISTORY


def test_the_head_is_recomputed_while_the_tail_is_loaded() -> None:
    server = taught(load_seconds=1.6)  # an extent takes as long either way: two of each are done in half the time
    job = server.ask([*words(HISTORY, 9000), 7])
    assert stages(server, job) == [(0, 0, HISTORY // 2), (HISTORY // 2, HISTORY, 1)]
    assert server.hits(job) == (0, 0, HISTORY // 2)
    assert server.text(job)[:-1] == [*words(HISTORY, 9000), 7]


def test_recomputed_rows_are_not_saved_twice() -> None:
    server = taught(load_seconds=1.6)
    before = server.scheduler.stats()
    server.ask([*words(HISTORY, 9000), 7, 8, 9])
    after = server.scheduler.stats()
    assert after.counters.duplicates == before.counters.duplicates
    assert after.extents == before.extents + 1
    saved = [save for step in server.steps[-12:] for run in step.runs for save in run.saves]
    assert min(save.job_row for save in saved) == HISTORY


def test_a_load_that_fails_behind_a_recomputed_head_costs_a_second_try() -> None:
    server = taught(load_seconds=1.6)
    server.executor.damaged |= set(server.executor.files)
    job = server.ask([*words(HISTORY, 9000), 7])
    assert server.ends[job] == "length"
    assert server.scheduler.stats().counters.failed_loads >= 1
    assert server.hits(job)[2] == 0


def test_what_is_in_host_is_used_whatever_the_disk_takes() -> None:
    server = taught(load_seconds=100.0)
    server.ask([*words(HISTORY, 9000), 7])
    server.scheduler.drop_contexts()
    fresh = words(30, 20_000)
    server.ask(fresh)
    server.scheduler.drop_contexts()
    job = server.ask([*fresh, 7])
    assert server.hits(job) == (0, 30, 0)


@pytest.mark.parametrize(("source", "hits"), [("load", HISTORY), ("recompute", 0)])
def test_both_pure_ways_can_be_asked_for(source: str, hits: int) -> None:
    server = taught(load_seconds=1.6, source=source)
    job = server.ask([*words(HISTORY, 9000), 7])
    assert sum(server.hits(job)) == hits
