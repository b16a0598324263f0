"""Whichever is predicted to be faster: loading rows from disk, computing them again, or some of both at once."""

from __future__ import annotations

import pytest

from afterglow.plan.step import Run
from afterglow.plan.tiers.cost import PROBE_PART, PROBE_SHARE, Cost, Work
from tests.plan.fake_executor import pack
from tests.plan.server_kit import Server, words

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


# ---------------------------------------------------------------------------------- tiers that change their speed

CONVERSATIONS = 30


def converse(server: Server, number: int) -> int:
    """A conversation that goes to disk after its first turn. Its rows that the second turn found."""
    prompt = words(HISTORY, 20_000 + 100 * number)
    server.ask(prompt)
    to_disk(server)
    return sum(server.hits(server.ask([*prompt, 7])))


def probes(server: Server) -> list[float]:
    """How long each could take, at most."""
    return [load.most_s for load in server.loads() if load.most_s is not None]


def becomes(server: Server, load_seconds: float) -> None:
    server.faults.seconds = load_seconds / 4


def test_a_tier_that_becomes_fast_is_used_again_within_ten_conversations() -> None:
    server = taught(load_seconds=100.0)
    assert converse(server, 0) == 0
    becomes(server, 0.0004)
    hits = [converse(server, number) for number in range(1, CONVERSATIONS)]
    assert hits[9:] == [HISTORY] * (CONVERSATIONS - 10)
    assert len(probes(server)) <= 10


def test_a_tier_that_was_slow_for_long_is_used_again_within_ten_conversations() -> None:
    server = taught(load_seconds=100.0)
    assert not any(converse(server, number) for number in range(CONVERSATIONS))
    assert len(probes(server)) > 3
    becomes(server, 0.0004)
    hits = [converse(server, number) for number in range(CONVERSATIONS, 2 * CONVERSATIONS)]
    assert hits[9:] == [HISTORY] * (CONVERSATIONS - 9)


@pytest.mark.parametrize("load_seconds", [8.0, 100.0, 10_000.0])
def test_probes_of_a_tier_that_stays_slow_take_no_more_than_their_share(load_seconds: float) -> None:
    server = taught(load_seconds)
    begin, before = server.now, len(server.loads())
    assert not any(converse(server, number) for number in range(CONVERSATIONS))
    made = probes(server)
    assert len(made) > 3
    assert len(made) == len(server.loads()) - before
    assert sum(made) <= PROBE_SHARE * (server.now - begin)
    assert server.scheduler.stats().counters.probes == len(made)
    assert server.scheduler.stats().counters.failed_loads == 0


def test_a_probe_that_takes_longer_than_it_may_is_paid_for() -> None:
    """A layer may take as long as it likes: the tier cannot be asked again before that is its share of the time."""
    cost = Cost(layers=4)
    for rows in (100, 200, 400):
        cost.passed(Work(rows), rows / 100)
    for move in range(3):
        cost.started(move, 1000, now=0)
        cost.ended(move, 1000, 90.0, now=0)
    most = PROBE_PART * cost.compute(100, 0)
    assert cost.probe(100, 0, now=most / PROBE_SHARE - 0.1) is None
    assert cost.probe(100, 0, now=most / PROBE_SHARE + 0.1) == pytest.approx(most)
    cost.probed(7.0, now=1000)
    assert cost.probe(100, 0, now=1000 + 7 / PROBE_SHARE - 0.1) is None
    assert cost.probe(100, 0, now=1000 + 7 / PROBE_SHARE + 0.1) == pytest.approx(most)


def test_nobody_waits_for_a_probe() -> None:
    server = taught(load_seconds=100.0)
    becomes(server, 0.0004)
    server.now += 1000
    server.faults.delay = 10**6
    job = server.submit([*words(HISTORY, 9000), 7])
    for _ in range(4):
        server.step()
    assert server.ends[job] == "length"
    assert stages(server, job) == [(0, 0, HISTORY + 1)]
    assert len(probes(server)) == 1
    assert server.scheduler.stats().moves_in_flight == 1
    server.finish()


def test_a_job_that_comes_to_need_what_a_probe_loads_gets_all_of_it() -> None:
    server = taught(load_seconds=1.6)
    tail = server.scheduler.cache.index.match("", pack(words(HISTORY, 9000))).views[-1].extent
    server.scheduler.cache.placement.loading.probe(tail, 0.1, server.now)  # it takes 1.6 s
    job = server.ask([*words(HISTORY, 9000), 7])
    assert server.ends[job] == "length"
    assert server.hits(job)[2] > 0
    assert server.scheduler.stats().counters.failed_loads == 0


def test_nothing_is_evicted_for_a_probe() -> None:
    server = taught(load_seconds=100.0)
    placement = server.scheduler.cache.placement
    tail = server.scheduler.cache.index.match("", pack(words(HISTORY, 9000))).views[-1].extent
    taken = placement.host.pool.take(placement.host.pool.free - 3)
    assert taken is not None
    placement.loading.probe(tail, 0.1, server.now)
    assert not placement.has_moves
    placement.host.pool.give(taken[:1])
    placement.loading.probe(tail, 0.1, server.now)
    assert placement.has_moves
    placement.host.pool.give(taken[1:])
    server.finish()


def test_a_tier_that_changes_back_and_forth_is_followed() -> None:
    server = taught(load_seconds=0.01)
    numbers = iter(range(1000))
    for _ in range(3):
        becomes(server, 0.01)
        assert [converse(server, next(numbers)) for _ in range(10)][9] == HISTORY
        becomes(server, 100.0)
        assert [converse(server, next(numbers)) for _ in range(3)][1:] == [0, 0]  # the first one cannot know


def in_host(server: Server, number: int, length: int = 256) -> int:
    """A conversation whose rows lie in host when its second turn comes. Those that the second turn used."""
    prompt = words(length, 40_000 + 1000 * number)
    for stop in (64, 128, length):  # turns: an extent each
        server.ask(prompt[:stop])
    server.scheduler.drop_contexts()
    return server.hits(server.ask([*prompt, 7, 8, 9]))[1]


def with_rows_in_host(gather_seconds: float) -> Server:
    server = Server(device_rows=2000, host_slots=600, disk_bytes=10**7, block=16)
    server.row_seconds = 0.1
    server.gather_seconds = 1e-4
    for number in range(3):  # loads, so that they can be compared with computing
        prompt = words(256, 1000 * number)
        server.ask(prompt)
        to_disk(server)
        server.ask([*prompt, 7])
    assert [in_host(server, number) for number in range(8)] == [256] * 8
    server.gather_seconds = gather_seconds
    return server


def test_host_that_becomes_slow_is_left_after_one_conversation() -> None:
    server = with_rows_in_host(gather_seconds=10.0)
    used = [in_host(server, number) for number in range(10, 30)]
    assert used[0] == 256, "the first one cannot know"
    assert max(used[1:]) <= 128
    assert sum(used[1:]) < 0.1 * 256 * len(used), "it is tried now and then"


def test_host_that_becomes_fast_again_is_used_again() -> None:
    """Nothing would be gathered, and so nothing learned, for ever."""
    server = with_rows_in_host(gather_seconds=0.2)
    for number in range(10, 14):
        in_host(server, number)
    server.gather_seconds = 1e-4
    server.now += 1e6
    assert in_host(server, 14) == 0, "it is tried for a share of what prefills take, and the job would wait"
    used = [in_host(server, number) for number in range(15, 40)]
    first = used.index(64)
    assert used == [0] * first + [64] + [256] * (len(used) - first - 1)


def test_trying_host_that_stays_slow_takes_no_more_than_its_share() -> None:
    server = with_rows_in_host(gather_seconds=0.2)
    in_host(server, 10)
    began, tried = server.now, 0
    for number in range(11, 60):
        tried += in_host(server, number)
    assert tried >= 3 * 64
    assert tried * (server.gather_seconds - server.row_seconds) <= 1.5 * PROBE_SHARE * (server.now - began)


def test_old_measurements_count_less_than_new_ones() -> None:
    def learned(pause: float) -> float:
        cost = Cost(layers=4)
        for move in range(40):
            cost.started(move, 1000, now=move)
            cost.ended(move, 1000, 1.0, now=move)
        cost.started(99, 1000, now=40 + pause)
        cost.ended(99, 1000, 1.5, now=40 + pause)
        return cost.read(1000)

    assert learned(0) < 1.2
    assert learned(3600) > 1.4


NEW = 20  # rows of a prompt that selects from its history


def selects(server: Server, history: list[int], retention: float = 0.25) -> bool:
    """Tell whether a job that may select from its history does."""
    job = server.ask([*history, *words(NEW, 77_000)], selects=True, retention=retention)
    assert server.ends[job] == "length"
    (admit,) = [run.admit for run in server.runs(job) if run.admit is not None]
    return bool(admit.selectable)


def knows_selecting(server: Server, seconds: float) -> None:
    """Let the server learn what a pass takes that selects."""
    for _ in range(3):
        server.scheduler.cache.cost.selected(NEW, HISTORY, seconds)


def test_rows_are_selected_where_reading_all_takes_longer() -> None:
    server = taught(load_seconds=1.6)
    knows_selecting(server, 3.0)  # the new rows alone: 2 s
    assert selects(server, words(HISTORY, 9000))


def test_nothing_is_selected_before_reading_can_be_compared_with_computing() -> None:
    """Else an engine whose prompts all select would select for ever: it would never learn what reading takes."""
    server = Server(disk_bytes=100_000)
    server.row_seconds, server.faults.seconds = 0.1, 1.6 / 4
    found = []
    for number in range(8):
        server.ask(words(HISTORY, 9000 * (number + 1)))
        to_disk(server)
        found.append(selects(server, words(HISTORY, 9000 * (number + 1))))
    assert not found[0]
    assert found[-1]


def test_all_rows_are_read_where_selecting_takes_longer() -> None:
    server = taught(load_seconds=0.01)
    knows_selecting(server, 3.0)
    assert not selects(server, words(HISTORY, 9000))


def test_a_share_that_saves_little_is_not_selected() -> None:
    server = taught(load_seconds=1.6)
    knows_selecting(server, 2.1)
    assert selects(server, words(HISTORY, 9000), 0.25)
    to_disk(server)
    assert not selects(server, words(HISTORY, 9000), 0.95)


def test_rows_in_memory_are_used_as_they_are() -> None:
    server = taught(load_seconds=100.0)
    fresh = words(60, 20_000)
    server.ask(fresh)
    assert not selects(server, fresh), "in device memory"
    server.scheduler.drop_contexts()
    assert not selects(server, fresh), "in host memory"


def test_loading_can_be_asked_for_where_rows_are_selected() -> None:
    server = taught(load_seconds=0.01, source="load")
    knows_selecting(server, 3.0)
    assert selects(server, words(HISTORY, 9000))


def test_the_bytes_that_selecting_reads_are_learned() -> None:
    """Selected rows lie in chunks, which are read whole: a quarter of the rows may take all bytes."""
    server = taught(load_seconds=1.6)
    cost = server.scheduler.cache.cost
    server.executor.selecting_seconds = 2.1
    assert cost.selected_part(0.25) == 0.25
    server.executor.selecting_bytes = 4 * server.scheduler.cache.capacity.file_bytes[-1]  # all four extents
    server.executor.selecting_waits = 4 * 1.6
    found = []
    for _ in range(6):
        found.append(selects(server, words(HISTORY, 9000)))
        to_disk(server)
    assert found[0]
    assert not found[-1], "it reads as much as a load"
    assert cost.selected_part(0.25) > 0.5


def test_what_selecting_waits_for_is_learned() -> None:
    """Reads and computing overlap by part only: each layer is read when it is known which of its rows are important."""
    server = taught(load_seconds=1.6)
    server.executor.selecting_seconds = 3.0
    server.executor.selecting_bytes = server.scheduler.cache.capacity.file_bytes[-1]  # a quarter
    server.executor.selecting_waits = 0.4
    found = []
    for _ in range(6):
        found.append(selects(server, words(HISTORY, 9000)))
        to_disk(server)
    assert all(found), "3.4 s; half loaded and half computed would be 5.2 s"
    server.executor.selecting_waits = 5.0
    for _ in range(6):
        found.append(selects(server, words(HISTORY, 9000)))
        to_disk(server)
    assert not found[-1], "8 s"


def test_what_selecting_takes_is_learned() -> None:
    server = taught(load_seconds=0.01)
    server.executor.selecting_seconds = 5.0
    found = []
    for _ in range(5):
        found.append(selects(server, words(HISTORY, 9000)))
        to_disk(server)
    assert found == [True, True, True, False, False], "it has to be tried to be known"
    assert server.scheduler.cache.cost.select(NEW, HISTORY) == pytest.approx(5.0, rel=0.01)


def test_selecting_that_was_slow_once_is_tried_again() -> None:
    """Else a few slow reads would decide for ever: what selecting takes is seen only where a job selects."""
    server = taught(load_seconds=1.6)
    server.executor.selecting_seconds = 3.0
    server.executor.selecting_bytes = server.scheduler.cache.capacity.file_bytes[-1]
    server.executor.selecting_waits = 8.0

    def turns(count: int, pause: float = 0.0) -> list[bool]:
        found = []
        for _ in range(count):
            server.now += pause
            found.append(selects(server, words(HISTORY, 9000)))
            to_disk(server)
        return found

    assert turns(6)[-1] is False, "11 s; half loaded and half computed are 5.2 s"
    server.executor.selecting_waits = 0.1
    assert not any(turns(2, pause=3600.0)), "the time between jobs does not count"
    assert all(turns(60)[-10:])


def test_jobs_that_come_together_do_not_all_try_to_select() -> None:
    """The share is one try's: the first one's pass has not ended when the others begin."""
    server = taught(load_seconds=0.01)
    server.executor.selecting_seconds = 5.0
    while selects(server, words(HISTORY, 9000)):
        to_disk(server)
    to_disk(server)
    server.scheduler.cache.cost.worked(1000.0)  # far more than a try needs
    jobs = [
        server.submit([*words(HISTORY, 9000), *words(NEW, 77_000 + number)], selects=True, retention=0.25)
        for number in range(3)
    ]
    server.finish()
    admits = [run.admit for job in jobs for run in server.runs(job) if run.admit is not None]
    assert [bool(admit.selectable) for admit in admits] == [True, False, False]
