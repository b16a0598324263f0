"""Looking ahead: the worked example of the paper, the windows, and victims against a full scan of the queue."""

from __future__ import annotations

import random
from bisect import insort

import pytest

from afterglow.plan.batching.job import Job
from afterglow.plan.batching.queue import LookAhead
from afterglow.plan.prefix.extent import Extent
from afterglow.plan.prefix.truncation import Origin
from afterglow.plan.step import PREFETCH, JobSpec, Load
from afterglow.plan.tiers.policy import POLICIES
from tests.plan.fake_executor import pack
from tests.plan.server_kit import Server, words
from tests.plan.tiers_kit import BLOCK, Tiers, drops, stores

ROWS = 4 * BLOCK  # of every item here: one extent of four blocks, four slots, 400 bytes on disk


class Waiting:
    """Tiers, a queue, and look-ahead; conversation n has one extent whose tokens are all n."""

    def __init__(self, host_slots: int, disk_bytes: int) -> None:
        self.tiers = Tiers(host_slots, disk_bytes, policy="lookahead", max_model_len=ROWS)
        self.queue: list[Job] = []
        self.ahead = LookAhead(self.tiers.cache, self.queue, windows=True)
        self.extents: dict[int, Extent] = {}

    def cached(self, number: int, where: str) -> None:
        put = {"host": self.tiers.add, "disk": self.tiers.on_disk, "both": self.tiers.clean}[where]
        self.extents[number] = put(number, blocks=4)

    def submit(self, number: int) -> Job:
        spec = JobSpec(number, pack([number] * ROWS + [99]), 1)
        job = Job(spec, number, 0, bytearray(spec.prompt))
        self.join(job)
        return job

    def join(self, job: Job) -> None:
        insort(self.queue, job, key=lambda each: each.key)
        self.ahead.joined(job)

    def leave(self, job: Job) -> None:
        self.queue.remove(job)
        self.ahead.left(job)

    def names(self, ids: list[str]) -> list[int]:
        return [number for name in ids for number, extent in self.extents.items() if extent.id == name]


def test_figure_9_of_the_paper() -> None:
    # Job 1 runs, 2 to 9 wait. Host has room for two items and a buffer, and holds those of 2 and 4; the disk is full.
    world = Waiting(host_slots=12, disk_bytes=1600)
    for number in (2, 4):
        world.cached(number, "host")
    for number in (3, 5, 6, 9):
        world.cached(number, "disk")
    for number in range(2, 10):
        world.submit(number)
    ahead, placement, tiers = world.ahead, world.tiers.placement, world.tiers
    ahead.watch()
    assert (ahead.prefetch_window, ahead.eviction_window) == (2, 6)

    ahead.prefetch(now=1, reserve=0)
    placement.background(now=1, expected=0, waiter=ahead.fetched)
    moves = tiers.planned()
    loads = [move for move in moves if isinstance(move, Load)]
    assert world.names([move.extent for move in loads]) == [3]
    assert loads[0].priority == PREFETCH
    assert world.names(drops(moves)) == [9]  # the disk is full, and 9 is the last in the queue
    assert stores(moves) == []

    dropped = next(move for move in tiers.moves if move not in loads)
    tiers.end(dropped)
    placement.background(now=2, expected=0, waiter=ahead.fetched)
    assert world.names(stores(tiers.planned())) == [4]  # takes the place of 9
    tiers.end_all()
    state = {number: (extent.host, extent.disk) for number, extent in world.extents.items() if not extent.dead}
    assert state == {
        2: ("ready", "absent"),
        3: ("ready", "ready"),  # its file is a clean copy now, the first to go
        4: ("absent", "ready"),
        5: ("absent", "ready"),
        6: ("absent", "ready"),
    }


def test_windows_have_the_papers_lengths() -> None:
    world = Waiting(host_slots=40, disk_bytes=4000)
    world.ahead.watch()
    low = world.tiers.placement.host.low
    assert world.ahead.prefetch_window == (40 - low) // 4
    assert world.ahead.eviction_window == (40 - low) // 4 + 10
    world.ahead.finished(2 * ROWS)  # from now on the mean of what jobs leave behind
    assert world.ahead.item_rows == 2 * ROWS
    assert world.ahead.prefetch_window == (40 - low) // 8
    world.ahead.watch()
    assert world.tiers.placement.host.low == 10  # two items would be sixteen, but a quarter of the tier is the most


def test_what_a_cut_context_keeps_is_fetched_and_protected_too() -> None:
    world = Waiting(host_slots=40, disk_bytes=4000)
    world.cached(1, "disk")
    below = world.tiers.on_disk(2, blocks=4, below=world.extents[1])
    text = pack([1] * ROWS + [2] * ROWS)
    spec = JobSpec(7, pack([2] * 4 + [99]), 1, salt="~epoch")  # of what it was, the last four rows are left
    job = Job(spec, 7, 0, bytearray(spec.prompt))
    job.origin = Origin("", text, ((2 * ROWS - 4, 2 * ROWS),))
    world.join(job)
    assert job.path == (below,)
    world.ahead.watch()
    world.ahead.prefetch(now=1, reserve=0)
    (load,) = world.tiers.planned()
    assert isinstance(load, Load)
    assert load.extent == below.id
    assert world.ahead.coming(1) == 3, "its rows are copied, so that they take slots of their own"
    world.leave(job)
    assert below.rank is None


def test_windows_shrink_if_what_is_queued_for_is_larger_than_what_has_finished() -> None:
    world = Waiting(host_slots=40, disk_bytes=4000)
    world.ahead.finished(ROWS // 2)
    world.ahead.watch()
    low = world.tiers.placement.host.low
    assert world.ahead.prefetch_window == (40 - low) // 2
    world.cached(1, "disk")
    first = world.submit(1)
    world.submit(9)  # which waits for nothing that is known
    assert world.ahead.prefetch_window == (40 - low) // 4
    assert world.ahead.eviction_window == (40 - low) // 4 + 10
    world.leave(first)
    assert world.ahead.prefetch_window == (40 - low) // 2


def test_a_shared_extent_has_the_rank_of_its_first_job() -> None:
    world = Waiting(host_slots=40, disk_bytes=0)
    world.cached(1, "host")
    first, second = world.submit(1), None
    spec = JobSpec(7, pack([1] * ROWS + [5]), 1)
    second = Job(spec, 7, 0, bytearray(spec.prompt))
    world.join(second)
    extent = world.extents[1]
    assert extent.rank == first.key
    world.leave(first)
    assert extent.rank == second.key
    world.leave(second)
    assert extent.rank is None
    world.ahead.check()


def test_what_is_waited_for_is_evicted_last_and_from_the_tail_of_the_queue() -> None:
    world = Waiting(host_slots=40, disk_bytes=8000)
    for number in (1, 2, 3, 4, 5):
        world.cached(number, "both")
    world.tiers.placement.touch(world.extents[5], now=9)  # the last used, but no job waits for it
    for number in (2, 1, 4):
        world.submit(number)
    order = []
    for free in range(24, 44, 4):
        world.tiers.placement.host.evict(free, now=10)
        order += [n for n, extent in world.extents.items() if extent.host == "absent" and n not in order]
    assert order == [3, 5, 4, 2, 1]  # equal priorities and steps: by number


def test_nothing_goes_for_a_job_that_an_earlier_one_waits_for() -> None:
    world = Waiting(host_slots=8, disk_bytes=8000)
    world.cached(1, "both")
    world.cached(2, "both")
    world.cached(3, "disk")
    jobs = {number: world.submit(number) for number in (1, 2, 3)}
    assert not world.tiers.placement.loading.prefetch(world.extents[3], 1, jobs[3].key)
    assert world.tiers.placement.loading.load(world.extents[3], 1, None), "unless no turn is given"


@pytest.mark.parametrize("seed", range(20))
def test_victims_are_those_of_a_full_scan(seed: int) -> None:
    rng = random.Random(seed)
    world = Waiting(host_slots=400, disk_bytes=10**6)
    for number in range(1, 30):
        world.cached(number, "both")
        world.tiers.placement.touch(world.extents[number], now=rng.randint(1, 9))
    for number in rng.sample(range(1, 30), 15):
        world.submit(number)
    queue = list(world.queue)
    for job in rng.sample(queue, 5):
        world.leave(job)
    position = {job.spec.job: place for place, job in enumerate(world.queue)}

    def scan(number: int) -> tuple[float, ...]:
        extent = world.extents[number]
        if number not in position:
            return (0, extent.last_used, extent.serial)
        return (1, -position[number], 0)

    expected = sorted(world.extents, key=scan)
    pool = world.tiers.placement.host.pool
    found: list[int] = []
    while pool.free < pool.total:
        world.tiers.placement.host.evict(pool.free + 1, now=10)
        found += [n for n, extent in world.extents.items() if extent.host == "absent" and n not in found]
    assert found == expected


def test_every_policy_has_a_row() -> None:
    assert set(POLICIES) == {"lookahead", "lru", "fifo", "lfu"}
    assert [name for name, row in POLICIES.items() if row.looks_ahead] == ["lookahead"]


# --------------------------------------------------------------------------------------------- a whole scheduler


def conversations(count: int, **settings: object) -> Server:
    """A server that has had one turn of each of `count` conversations, whose KV the host cannot hold."""
    server = Server(policy="lookahead", host_slots=24, disk_bytes=10_000, device_rows=40, max_batch=1, **settings)
    for number in range(count):
        server.ask(words(15, 1000 * number + 100))
    return server


def test_the_next_turns_are_found_in_host() -> None:
    server = conversations(12)
    stored = server.scheduler.stats()
    assert stored.counters.stores > 0
    for number in range(12):
        server.submit([*words(15, 1000 * number + 100), 7], max_tokens=8)
    server.finish()
    told = [server.hits(job) for job in range(13, 25)]
    assert all(sum(hits) == 15 for hits in told), "nothing was prefilled twice"
    assert sum(disk for _, _, disk in told) <= 2 * 15, "but for those whose turn came at once"
    counters = server.scheduler.stats().counters
    assert counters.prefetches_useful >= 6
    assert counters.prefetches_wasted == 0


def test_without_a_queue_nothing_is_prefetched() -> None:
    server = conversations(12)
    server.ask([*words(15, 100), 7])
    assert server.scheduler.stats().counters.prefetches == 0
