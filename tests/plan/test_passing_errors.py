"""Loads that fail although the file may be sound: its rows are a miss for now, and it is tried again later."""

from __future__ import annotations

import pytest

from afterglow.plan.tiers.loading import LOAD_RETRY_LATE_S, LOAD_RETRY_S, MAX_LOAD_FAILURES
from tests.plan.lasting_kit import Lasting
from tests.plan.server_kit import words


def on_disk(**more: object) -> Lasting:
    """A conversation of 48 rows, in three extents on disk and nowhere else."""
    server = Lasting(**{"disk_bytes": 10_000, "source": "load", **more})
    server.ask(words(48), max_tokens=0, session="s")
    server.to_disk()
    server.faults.busy = 0.0
    return server


def fail(server: Lasting, why: str, prompt: int = 49) -> int:
    """A job whose loads all fail; none of its rows stays on the device."""
    server.faults.load, server.faults.why = 1.0, why
    job = server.ask(words(prompt), write=False)
    server.faults.load = 0.0
    server.scheduler.drop_contexts()
    server.finish()
    return job


@pytest.mark.parametrize(("why", "pause"), [("io", LOAD_RETRY_S), ("timeout", LOAD_RETRY_LATE_S)])
def test_an_error_that_may_pass_costs_a_miss_and_no_extent(why: str, pause: float) -> None:
    server = on_disk()
    before = dict(server.executor.catalog)
    job = fail(server, why)
    assert server.hits(job) == (0, 0, 0)
    counters = server.scheduler.stats().counters
    assert counters.failed_loads == 1
    assert counters.damaged == 0
    assert server.executor.catalog == before, "the files stay, and their rows"
    assert server.names() == ["s"]
    server.now += pause
    job = server.ask(words(49), write=False)
    assert server.hits(job) == (0, 0, 48), "it has passed"


def test_what_has_just_failed_is_not_tried_at_once() -> None:
    server = on_disk()
    fail(server, "timeout")
    tried = len(server.loads())
    job = server.ask(words(49), write=False)
    assert len(server.loads()) == tried
    assert server.hits(job) == (0, 0, 0)


def test_only_the_rows_that_did_not_come_are_computed() -> None:
    server = on_disk()
    middle = next(record for record in server.executor.catalog.values() if record.tokens[:4] == bytes([116, 0, 0, 0]))
    executor, ended = server.executor, server.executor._end

    def end(number: int) -> None:
        move = executor.pending[number].move
        server.faults.load = float(getattr(move, "extent", None) == middle.id)
        ended(number)

    server.faults.why = "io"
    executor._end = end  # type: ignore[method-assign]
    job = server.ask(words(49), write=False)
    assert server.hits(job) == (0, 32, 0)  # which the first attempt has brought to host
    assert server.computed(job) >= 16 + 1


def test_an_error_that_does_not_pass_costs_the_extent() -> None:
    server = on_disk()
    for _ in range(MAX_LOAD_FAILURES - 1):
        fail(server, "io")
        server.now += LOAD_RETRY_S
    assert len(server.executor.catalog) == 3
    fail(server, "io")
    assert server.scheduler.stats().counters.damaged >= 1
    assert server.known(words(48)) == 0
    assert not server.executor.catalog
    server.ask(words(48), max_tokens=0)
    assert server.known(words(48)) == 48, "lost rows have been computed, and kept again"


def test_a_load_that_succeeds_makes_up_for_those_that_failed() -> None:
    server = on_disk()
    for _ in range(2 * MAX_LOAD_FAILURES):
        fail(server, "io")
        server.now += LOAD_RETRY_S
        assert server.hits(server.ask(words(49), write=False)) == (0, 0, 48)
        server.to_disk()


def test_loads_that_nobody_tried_do_not_count() -> None:
    server = on_disk()
    for _ in range(2 * MAX_LOAD_FAILURES):
        fail(server, "refused")
        server.now += LOAD_RETRY_S
    assert server.hits(server.ask(words(49), write=False)) == (0, 0, 48)


@pytest.mark.parametrize("why", ["damage", "missing"])
def test_damage_does_not_pass(why: str) -> None:
    server = on_disk()
    fail(server, why)
    assert server.known(words(48)) == 0
    assert not server.executor.catalog


def test_nothing_is_fetched_ahead_that_has_just_failed() -> None:
    server = on_disk(policy="lookahead", max_batch=1)
    fail(server, "timeout")
    tried = len(server.loads())
    server.submit(words(8, 1000), max_tokens=12)
    job = server.submit(words(49), write=False)
    server.finish()
    assert len(server.loads()) == tried
    assert server.hits(job) == (0, 0, 0)


def test_a_truncated_conversation_does_not_wait_for_what_has_just_failed() -> None:
    server = on_disk(max_model_len=64)
    fail(server, "timeout")
    tried = len(server.loads())
    prompt = [*words(48), *words(24, 1000)]
    job = server.ask(prompt, truncation=True, turns=(8, 20, 32, 48))
    assert len(server.loads()) == tried
    assert server.hits(job) == (0, 0, 0)
    assert len(server.executor.catalog) >= 3
