"""Who comes first: priority, then arrival; and jobs that arrive together with equal cache keys side by side."""

from __future__ import annotations

import pytest

from tests.plan.server_kit import Server, jobs_of, words


def busy(**settings: object) -> Server:
    """A server whose only seat is taken for a while."""
    server = Server(**{"max_batch": 1, "disk_bytes": 100_000, **settings})
    server.submit(words(5, 90_000), max_tokens=4, write=False)
    server.step()
    return server


def order(server: Server, jobs: list[int]) -> list[int]:
    """The jobs in the order in which they came to the device, when all have ended."""
    server.finish()
    came = dict.fromkeys(job for step in server.steps for job in jobs_of(step))
    return [job for job in came if job in jobs]


def test_the_lower_number_goes_first() -> None:
    server = busy()
    late, normal, urgent = (server.submit(words(5, 5000 + 1000 * i), priority=i) for i in (1, 0, -1))
    assert order(server, [late, normal, urgent]) == [urgent, normal, late]


def test_equal_priorities_go_by_arrival() -> None:
    server = busy()
    jobs = [server.submit(words(5, 1000 * i), priority=3) for i in range(5)]
    assert order(server, jobs) == jobs


def test_an_urgent_job_does_not_take_the_place_of_one_that_runs() -> None:
    server = busy()
    urgent = server.submit(words(5), priority=-100)
    assert jobs_of(server.step()) == [1]
    server.finish()
    assert server.scheduler.stats().counters.preemptions == 0
    assert server.ends[urgent] == "length"


def test_an_urgent_job_gets_the_first_prompt_tokens_of_a_step() -> None:
    server = Server(prefill_chunk=8)
    server.submit(words(5, 90_000), max_tokens=20)
    server.step()
    slow, urgent = server.submit(words(8, 1000)), server.submit(words(8, 2000), priority=-1)
    assert jobs_of(server.step()) == [1, urgent]
    assert jobs_of(server.step()) == [1, slow]
    server.finish()


def test_when_room_runs_out_the_least_urgent_is_sent_back_even_if_it_came_first() -> None:
    server = Server(device_rows=48)
    first = server.submit(words(12), max_tokens=30, priority=1)
    second = server.submit(words(12, 1000), max_tokens=30)
    server.finish()
    assert server.scheduler.stats().counters.preemptions == 1
    came = [run.job for step in server.steps for run in step.runs if run.admit is not None]
    assert came == [second, first, first]


def test_the_urgent_ones_rows_are_fetched_first() -> None:
    server = busy(policy="lookahead")
    for i in (1, 2):
        server.ask(words(16, 1000 * i), max_tokens=0)
    server.restart()
    server.ask(words(16, 3000))  # now it is known how long a job is, and how many may be fetched for
    names = {record.tokens: record.id for record in server.executor.catalog.values()}
    server.submit(words(5, 90_000), max_tokens=4, write=False)
    server.step()
    slow = server.submit(words(17, 1000), write=False)
    urgent = server.submit(words(17, 2000), write=False, priority=-1)
    server.step()
    wanted = [names[server.specs[job].prompt[:-4]] for job in (urgent, slow)]
    assert [load.extent for load in server.loads()] == wanted
    server.finish()


# ---------------------------------------------------------------------------------------------------- cache keys


def test_jobs_of_one_cache_key_that_arrive_together_go_side_by_side() -> None:
    server = busy()
    names = ["b1", "a1", "b2", "a2"]
    jobs = {name: server.submit(words(5, 1000 * i), tie=ord(name[0])) for i, name in enumerate(names)}
    found = order(server, list(jobs.values()))
    assert found == [jobs[name] for name in ("a1", "a2", "b1", "b2")]


def test_among_equal_keys_arrival_decides() -> None:
    server = busy()
    jobs = [server.submit(words(5, 1000 * i), tie=7) for i in range(4)]
    assert order(server, jobs) == jobs


def test_a_key_does_not_let_a_job_overtake_those_that_came_in_an_earlier_step() -> None:
    server = busy()
    first = server.submit(words(5, 1000), tie=9)
    server.step()
    second = server.submit(words(5, 2000), tie=1)
    assert order(server, [first, second]) == [first, second]


def test_priority_goes_before_the_key() -> None:
    server = busy()
    slow, urgent = server.submit(words(5, 1000), tie=1), server.submit(words(5, 2000), tie=9, priority=-1)
    assert order(server, [slow, urgent]) == [urgent, slow]


@pytest.mark.parametrize("tied", [False, True])
def test_side_by_side_they_use_what_is_in_a_tier_too_small_for_both(tied: bool) -> None:
    """What keys are for: two prefixes take turns on a device that holds one."""
    server = Server(max_batch=1, device_rows=60, host_slots=12)
    prefix = {"a": words(28, 1000), "b": words(28, 2000)}
    server.submit(words(5, 90_000), max_tokens=2, write=False)
    server.step()
    names = ["a", "b"] * 3
    ties = [ord(name) if tied else 0 for name in names]
    jobs = [server.submit([*prefix[name], 10 + i], 0, tie=ties[i]) for i, name in enumerate(names)]
    server.finish()
    computed = sum(server.computed(job) for job in jobs)
    assert (computed < 2 * 28 + 3 * 6) == tied


def test_a_job_that_was_sent_back_keeps_its_place() -> None:
    server = Server(device_rows=48)
    server.submit(words(12), max_tokens=30)
    young = server.submit(words(12, 1000), max_tokens=30, tie=9)
    while not server.scheduler.stats().counters.preemptions:
        server.step()
    late = server.submit(words(3, 2000), tie=1)
    server.finish()
    came = [run.job for step in server.steps for run in step.runs if run.admit is not None]
    assert came[-2:] == [young, late]
