"""After a restart an idle engine brings the most used extents back to host."""

from __future__ import annotations

import pytest

from afterglow.plan.step import BACKGROUND, Load, Step
from tests.plan.lasting_kit import Lasting
from tests.plan.server_kit import FOREVER, jobs_of, words


def serving(**settings: object) -> Lasting:
    return Lasting(**{"disk_bytes": 100_000, "warm_start": True, **settings})


def talk(server: Lasting, number: int, rows: int = 16, uses: int = 0) -> None:
    """A conversation, asked for so many times more."""
    server.ask(words(rows, 1000 * number), max_tokens=0)
    for _ in range(uses):
        server.ask([*words(rows, 1000 * number), 7], max_tokens=0, write=False)


def warmed(server: Lasting) -> list[int]:
    """The conversations whose extents were brought back, in order; each several times if it has several."""
    names = server.scheduler.cache.index.extents
    loads = [load for load in server.loads() if load.why == "warm start" and load.extent in names]
    return [int.from_bytes(names[load.extent].tokens[:4], "little") // 1000 for load in loads]


def first_rows(server: Lasting) -> list[int]:
    """Where the extents that were brought back begin in their conversations."""
    names = server.scheduler.cache.index.extents
    return [names[load.extent].first_row for load in server.loads()]


def used_slots(server: Lasting) -> int:
    return server.scheduler.stats().host_slots


def test_the_hottest_come_first() -> None:
    server = serving()
    for number, uses in ((1, 1), (2, 3), (3, 0), (4, 2)):
        talk(server, number, uses=uses)
    server.restart()
    server.finish()
    assert warmed(server) == [2, 4, 1, 3]


def test_of_those_used_equally_often_the_last_used_comes_first() -> None:
    server = serving()
    for number in (1, 2, 3):
        talk(server, number)
    server.restart()
    server.finish()
    assert warmed(server) == [3, 2, 1]


def test_rows_that_were_brought_back_are_found_in_host() -> None:
    server = serving()
    talk(server, 1, rows=40)
    server.restart()
    server.finish()
    assert server.hits(server.ask([*words(40, 1000), 7])) == (0, 40, 0)


def test_parents_come_before_their_children() -> None:
    server = serving()
    server.ask(words(40), max_tokens=30)  # the reply was written long after the prompt was used
    server.restart()
    server.finish()
    assert first_rows(server) == sorted(first_rows(server))
    assert len(first_rows(server)) > 3


def test_parents_come_even_if_others_were_used_after_them() -> None:
    server = serving(host_slots=20)
    job = server.submit(words(16), max_tokens=17)
    server.step()
    server.submit(words(16, 1000), max_tokens=0)  # used after the prompt, before the reply was complete
    server.finish()
    server.restart()
    server.finish()
    assert server.known(server.text(job)) == 32
    assert first_rows(server) == [0, 16], "half of host: not the other conversation and a reply without its prompt"


def test_at_most_half_of_host_is_filled() -> None:
    server = serving(host_slots=20)
    for number in range(8):
        talk(server, number)
    server.restart()
    server.finish()
    assert used_slots(server) == 8, "two extents of four blocks"


@pytest.mark.parametrize("host_slots", [0, 1, 3, 7, 8, 9, 30, 64])
def test_at_most_half_of_host_whatever_its_size(host_slots: int) -> None:
    server = serving()
    for number in range(10):
        talk(server, number, rows=10 + number, uses=number % 3)
    server.to_disk()
    server.capacity = type(server.capacity)(400, host_slots, 100_000, server.capacity.file_bytes, 16, 4)
    server.restart()
    server.finish()
    assert used_slots(server) <= host_slots // 2
    if host_slots >= 8:
        assert used_slots(server) > 0


def test_others_rows_count_and_are_never_evicted_for_it() -> None:
    server = serving(host_slots=20)
    for number in range(4):
        talk(server, number)
    server.restart()
    server.faults.delay = FOREVER  # the warm start comes to nothing for now
    job = server.submit(words(32, 9000), max_tokens=0)
    server.finish()
    assert server.ends[job] == "length"
    assert server.known(words(32, 9000)) == 32
    assert used_slots(server) <= 20 // 2
    assert server.scheduler.stats().counters.evicted_host == 0


def test_nothing_is_brought_back_while_a_job_waits_or_runs() -> None:
    server = serving()
    for number in range(4):
        talk(server, number)
    server.restart()
    job = server.submit(words(5, 9000), max_tokens=10)
    while job not in server.ends:
        server.step()
        assert server.loads() == []
    server.finish()
    assert len(server.loads()) == 4


def test_one_after_the_other() -> None:
    server = serving()
    for number in range(4):
        talk(server, number)
    server.restart()
    server.faults.delay = 3
    server.steps = []
    for _ in range(30):
        server.step()
        under_way = [p for p in server.executor.pending.values() if isinstance(p.move, Load)]
        assert len(under_way) <= 1
    assert len(warmed(server)) == 4
    assert {load.priority for load in server.loads()} == {BACKGROUND}


def test_it_goes_on_after_a_job() -> None:
    server = serving()
    for number in range(4):
        talk(server, number)
    server.restart()
    server.step()
    server.ask(words(5, 9000), write=False)
    server.finish()
    assert len(warmed(server)) == 4


def test_what_a_job_has_fetched_meanwhile_is_not_fetched_again() -> None:
    server = serving()
    for number in range(3):
        talk(server, number)
    server.restart()
    server.ask([*words(16, 2000), 7], write=False)
    server.finish()
    assert sorted(load.why for load in server.loads()) == ["demand", "warm start", "warm start"]
    assert 2 not in warmed(server)


def test_a_job_that_needs_what_is_on_its_way_does_not_wait_behind_others() -> None:
    server = serving()
    talk(server, 1)
    server.restart()
    server.faults.delay = FOREVER
    (load,) = server.step().moves
    job = server.submit([*words(16, 1000), 7])
    step = server.step()
    assert step.urged == (load.move,)
    assert (step.moves, jobs_of(step)) == ((), [job])
    server.finish()
    assert server.hits(job) == (0, 0, 16)


def test_beside_others_it_is_urged_too_and_once() -> None:
    server = serving()
    talk(server, 1)
    server.restart()
    server.faults.delay = FOREVER
    (load,) = server.step().moves
    server.submit(words(5, 9000), max_tokens=30)
    server.step()
    server.submit([*words(16, 1000), 7])
    assert server.step().urged == (load.move,)
    assert server.step().urged == ()
    server.finish()


@pytest.mark.parametrize("how", ["deleted", "expired", "reset", "damaged"])
def test_nothing_is_wasted_on_what_is_gone(how: str) -> None:
    server = serving()
    server.ask(words(30), max_tokens=0, session="s", ttl=1e6)
    talk(server, 5)
    gone = {extent.id for extent in server.scheduler.cache.index.extents.values() if extent.sessions}
    server.restart(after=2e6 if how == "expired" else 0)
    if how == "deleted":
        server.step()  # it is decided what to bring back
        server.scheduler.forget_session("", "s")
    elif how == "reset":
        server.scheduler.reset(server.now)
        gone |= set(server.executor.catalog)
    elif how == "damaged":
        server.executor.damaged = set(gone)
    server.finish()
    asked = {load.extent for load in server.loads()}
    if how == "damaged":
        assert len(asked & gone) == 1, "what hangs below a damaged extent is gone too"
    else:
        assert not asked & gone
    assert server.known(words(16, 5000)) == (0 if how == "reset" else 16)
    assert used_slots(server) == (0 if how == "reset" else 4)


def test_a_smaller_disk_comes_first() -> None:
    server = serving()
    for number in range(5):
        talk(server, number)
    server.restart(disk_bytes=1000)
    server.finish()
    assert warmed(server) == [4, 3]
    assert server.scheduler.stats().disk_bytes == 800
    assert len(server.loads()) == 2


def test_it_can_be_switched_off() -> None:
    server = serving(warm_start=False)
    talk(server, 1)
    server.restart()
    server.finish()
    assert server.loads() == []


def test_nothing_is_brought_back_while_shutting_down() -> None:
    server = serving()
    for number in range(3):
        talk(server, number)
    server.restart()
    server.scheduler.flush(server.now)
    steps: list[Step] = []
    while not server.scheduler.flushed:
        steps.append(server.step())
    assert not any(step.moves for step in steps)


def test_an_engine_that_was_never_stopped_warms_nothing() -> None:
    server = serving()
    for number in range(3):
        talk(server, number)
    server.to_disk()
    server.finish()
    assert server.loads() == []


def test_it_is_no_use_of_what_it_brings() -> None:
    server = serving()
    for number in range(3):
        talk(server, number)
    before = {e.id: (e.last_used, e.hits) for e in server.scheduler.cache.index.extents.values()}
    server.restart()
    server.finish()
    assert {e.id: (e.last_used, e.hits) for e in server.scheduler.cache.index.extents.values()} == before
    assert server.scheduler.cache.disk.take_touched() == []
