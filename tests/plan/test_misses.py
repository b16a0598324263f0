"""Why prompt tokens had to be computed, and whether prefetches were of use: each reason is counted."""

from __future__ import annotations

from dataclasses import fields

import pytest

from afterglow.plan.prefix.ghosts import MAX_GHOSTS, MAX_NOTED, Ghosts
from afterglow.plan.prefix.index import NO_MATCH, Index
from afterglow.plan.stats import Counters
from afterglow.plan.tiers.loading import THRASH_S
from tests.plan.fake_executor import pack
from tests.plan.lasting_kit import Lasting
from tests.plan.server_kit import FOREVER, words
from tests.plan.tiers_kit import Tiers, make_extent

REASONS = ("cold", "evicted", "expired", "damaged", "deleted", "salt")


class Counting(Lasting):
    """A server that counts from where a test says."""

    def __init__(self, **more: object) -> None:
        super().__init__(**{"disk_bytes": 100_000, **more})
        self.before = Counters()

    def mark(self) -> None:
        self.before = self.scheduler.stats().counters

    def since(self, name: str) -> int:
        found = getattr(self.scheduler.stats().counters, name) - getattr(self.before, name)
        assert isinstance(found, int)
        return found

    def missed(self) -> dict[str, int]:
        """Tokens by reason; reasons without tokens are left out. The sum is right."""
        found = {reason: self.since(f"missed_{reason}") for reason in REASONS}
        hits = self.since("hit_device") + self.since("hit_host") + self.since("hit_disk")
        assert self.since("query_tokens") == hits + self.since("recomputed") + sum(found.values())
        return {reason: tokens for reason, tokens in found.items() if tokens}


def asked(server: Counting, prompt: list[int], **more: object) -> dict[str, int]:
    server.mark()
    server.ask(prompt, **more)  # type: ignore[arg-type]
    return server.missed()


# ------------------------------------------------------------------------------------------------- reasons


def restarted(server: Counting) -> None:
    """Everything to disk as far as there is room, the end of the plan, and another one."""
    server.flush()
    server.scheduler.give_up()
    server.notes["ghost"] = {
        key: value or "" for kind, key, value in server.scheduler.cache.take_notes(True) if kind == "ghost"
    }
    server.restart()


def test_what_had_no_room_on_disk_when_the_plan_ended_was_evicted() -> None:
    server = Counting(disk_bytes=450, host_slots=100)
    for number in range(3):  # of 400 bytes each
        server.ask([number] * 16, max_tokens=0)
    for _ in range(2):  # it is remembered over more than one restart
        restarted(server)
        assert asked(server, [2] * 20, max_tokens=0, write=False) == {"cold": 4}, "it is on disk"
    assert asked(server, [0] * 20, max_tokens=0, write=False) == {"evicted": 20}
    assert asked(server, [7] * 20, max_tokens=0, write=False) == {"cold": 20}


def test_what_was_wanted_in_memory_only_is_not_lost_for_want_of_room() -> None:
    server = Counting(disk_bytes=10_000, host_slots=100)
    server.ask([1] * 16, max_tokens=0, volatile=True)
    server.ask([2] * 16, max_tokens=0)
    server.flush()
    assert server.scheduler.give_up() == (0, 0, 0)
    assert server.scheduler.stats().counters.evicted_host == 0


def test_a_note_that_cannot_be_read_makes_misses_cold() -> None:
    ghosts = Ghosts()
    for text in ("", "[]", "7", "{", '{"evicted": 7}', '{"evicted": "abc", "strange": "00"}'):
        ghosts.recall({"last": text})
    assert ghosts.why("", pack(words(8)), NO_MATCH, Index()) == "cold"
    assert {text for _, text in Ghosts().take_notes()} == {None}


def test_many_ghosts_are_remembered_in_short_notes() -> None:
    ghosts = Ghosts()
    for number in range(MAX_NOTED + 100):
        ghosts.add(make_extent([number] * 4), "evicted")
    notes = {key: text for key, text in ghosts.take_notes() if text is not None}
    assert max(map(len, notes.values())) < 2048, "a small disk takes no longer ones"
    later = Ghosts()
    later.recall(notes)
    reasons = [later.why("", pack([number] * 4), NO_MATCH, Index()) for number in range(MAX_NOTED + 100)]
    assert reasons == ["cold"] * 100 + ["evicted"] * MAX_NOTED
    assert dict(later.take_notes()) == notes


def test_every_reason_has_a_counter() -> None:
    assert [field.name for field in fields(Counters) if field.name.startswith("missed_")] == [
        f"missed_{reason}" for reason in REASONS
    ]


def test_what_was_never_seen_is_cold() -> None:
    assert asked(Counting(), words(20)) == {"cold": 20}


def test_of_what_is_cached_only_the_last_token_is_computed() -> None:
    server = Counting()
    server.ask(words(20))
    assert asked(server, words(20)) == {"cold": 1}


def test_only_what_comes_after_the_match_is_missed() -> None:
    server = Counting()
    server.ask(words(20))
    assert asked(server, [*words(20), *words(13, 1000)]) == {"cold": 13}


def test_another_way_to_go_on_is_cold() -> None:
    server = Counting()
    server.ask(words(20))
    assert asked(server, [*words(9), *words(11, 1000)]) == {"cold": 11}


def test_a_job_that_does_not_read_misses_everything() -> None:
    server = Counting()
    server.ask(words(20))
    assert asked(server, words(20), read=False) == {"cold": 20}


def test_what_made_room_in_host_was_evicted() -> None:
    server = Counting(host_slots=8, disk_bytes=0)
    server.ask(words(16), max_tokens=0)
    server.ask(words(30, 1000), max_tokens=0)
    assert asked(server, words(17), write=False) == {"evicted": 17}


def test_what_made_room_on_disk_was_evicted() -> None:
    server = Counting(host_slots=8, disk_bytes=800)
    for i in range(6):
        server.ask(words(16, 1000 * i), max_tokens=0)
    assert asked(server, [*words(16, 0), 7], write=False) == {"evicted": 17}


def test_what_made_room_for_its_tenants_quota_was_evicted() -> None:
    server = Counting(tenant_quota=400)
    server.ask(words(16), max_tokens=0, salt="a")
    server.ask(words(16, 1000), max_tokens=0, salt="a")
    assert asked(server, words(17), write=False, salt="a") == {"evicted": 17}


def test_what_hangs_below_an_evicted_extent_counts_with_it() -> None:
    server = Counting(host_slots=12, disk_bytes=0)
    server.ask(words(16), max_tokens=0)
    server.ask(words(30), max_tokens=0)
    server.ask(words(40, 1000), max_tokens=0)
    assert server.known(words(30)) == 0
    assert asked(server, words(30), write=False) == {"evicted": 30}


def test_a_tail_that_was_evicted() -> None:
    server = Counting(host_slots=13, disk_bytes=0)
    server.ask(words(16), max_tokens=0)
    server.ask(words(30), max_tokens=0)
    server.ask(words(16, 1000), max_tokens=0)
    assert server.known(words(30)) == 16
    assert asked(server, words(30), write=False) == {"evicted": 14}


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
def test_however_short_it_was(rows: int) -> None:
    server = Counting()
    server.ask(words(16), max_tokens=0)
    server.ask([*words(16), *words(rows, 1000)], max_tokens=0, session="s", ttl=10.0)
    server.now += 1e6
    server.step()
    server.finish()
    assert asked(server, [*words(16), *words(rows, 1000), *words(9, 2000)], write=False) == {"expired": rows + 9}


def test_what_had_expired() -> None:
    server = Counting()
    server.ask(words(20), max_tokens=0, ttl=10.0)
    server.now += 1000
    server.step()
    assert asked(server, words(21), write=False) == {"expired": 21}


def test_what_was_damaged() -> None:
    server = Counting()
    server.ask(words(20), max_tokens=0)
    server.restart()
    server.executor.damaged = set(server.executor.catalog)
    assert asked(server, words(21)) == {"damaged": 21}


def test_of_a_damaged_conversation_the_part_before_the_damage_is_no_miss() -> None:
    server = Counting()
    server.ask(words(30), max_tokens=0)
    server.restart()
    server.executor.damaged = {r.id for r in server.executor.catalog.values() if r.parent is not None}
    assert asked(server, words(31)) == {"damaged": 15}


def test_what_was_deleted_with_its_conversation() -> None:
    server = Counting()
    server.ask(words(20), max_tokens=0, session="s")
    server.scheduler.forget_session("", "s")
    assert asked(server, words(21), write=False) == {"deleted": 21}


def test_what_was_deleted_by_a_reset() -> None:
    server = Counting()
    server.ask(words(20), max_tokens=0)
    server.scheduler.reset(server.now)
    assert asked(server, words(21), write=False) == {"deleted": 21}


def test_what_another_tenant_has() -> None:
    server = Counting()
    server.ask(words(20), max_tokens=0, salt="a")
    assert asked(server, words(21), salt="b") == {"salt": 21}


def test_a_few_equal_tokens_are_not_what_another_tenant_has() -> None:
    server = Counting()
    server.ask(words(20), max_tokens=0, salt="a")
    assert asked(server, [*words(3), *words(9, 1000)], salt="b") == {"cold": 12}


def test_what_became_of_its_own_rows_goes_before_what_others_have() -> None:
    server = Counting()
    for tenant in ("a", "b"):
        server.ask(words(20), max_tokens=0, salt=tenant)
    server.scheduler.reset(server.now, "b")
    assert asked(server, words(21), salt="b") == {"deleted": 21}


def test_a_tenants_own_truncated_conversations_are_not_another_tenants() -> None:
    index = Index()
    index.insert(make_extent(words(8), salt="a~b"), b"")
    assert not index.elsewhere("a", pack(words(8)), 4, 64)
    assert not index.elsewhere("a~c", pack(words(8)), 4, 64)
    assert index.elsewhere("b", pack(words(8)), 4, 64)


def test_nobody_waits_or_hits_because_another_tenant_has_it() -> None:
    # It is counted, and that is all: the caller is told the same as of a cold prompt.
    server = Counting()
    server.ask(words(20), max_tokens=0, salt="a")
    cold, other = server.ask(words(21, 1000), salt="b"), server.ask(words(21), salt="b")
    assert server.hits(cold) == server.hits(other)
    assert len(server.runs(cold)) == len(server.runs(other))


def test_what_comes_back_is_forgotten_as_a_miss() -> None:
    server = Counting()
    server.ask(words(20), max_tokens=0)
    server.scheduler.reset(server.now)
    server.ask(words(20), max_tokens=0)
    assert asked(server, words(21)) == {"cold": 1}


def test_misses_are_counted_once_even_of_a_job_that_comes_twice() -> None:
    server = Counting(device_rows=48)
    server.submit(words(12), max_tokens=30)
    server.submit(words(12, 1000), max_tokens=30)
    server.finish()
    assert server.since("preemptions") == 1
    assert (server.since("missed_cold"), server.since("query_tokens")) == (24, 24)


def test_ghosts_are_bounded_and_the_oldest_go_first() -> None:
    ghosts = Ghosts()
    for i in range(MAX_GHOSTS + 10):
        ghosts.add(make_extent([i, 1, 2, 3]), "evicted")
    index = Index()
    assert ghosts.why("", pack([9, 1, 2, 3, 4]), NO_MATCH, index) == "cold"
    assert ghosts.why("", pack([10, 1, 2, 3, 4]), NO_MATCH, index) == "evicted"
    assert ghosts.why("other", pack([10, 1, 2, 3, 4]), NO_MATCH, index) == "cold"


def test_the_last_reason_counts() -> None:
    ghosts = Ghosts()
    ghosts.add(make_extent([1, 2, 3, 4]), "evicted")
    ghosts.add(make_extent([1, 2, 3, 4]), "expired")
    assert ghosts.why("", pack([1, 2, 3, 4, 5]), NO_MATCH, Index()) == "expired"


# --------------------------------------------------------------------------------------------------- recomputed


def test_cached_rows_that_are_computed_again_are_no_misses() -> None:
    server = Counting(source="recompute")
    server.ask(words(20), max_tokens=0)
    server.restart()
    assert asked(server, [*words(20), *words(5, 1000)]) == {"cold": 5}
    assert server.since("recomputed") == 20


def test_rows_that_found_no_slots_are_no_misses() -> None:
    server = Counting(host_slots=4, disk_bytes=10_000)
    server.ask(words(16), max_tokens=0)
    server.restart()
    server.withheld = []  # so that the slots of the running job stay what they are
    server.submit(words(16, 2000), max_tokens=30)
    server.step()
    server.mark()
    job = server.submit([*words(16), *words(5, 1000)])
    while job not in server.ends:
        server.step()
    assert server.since("cut_loads") == 1
    assert server.since("recomputed") == 16
    assert server.missed() == {"cold": 5}
    server.deliver()
    server.finish()


# ------------------------------------------------------------------------------------------------------ thrash


@pytest.mark.parametrize(("after", "thrashed"), [(1.0, 1), (THRASH_S - 1, 1), (THRASH_S + 1, 0)])
def test_what_is_wanted_soon_after_it_was_evicted_thrashes(after: float, thrashed: int) -> None:
    tiers = Tiers(disk_bytes=1000)
    extent = tiers.clean(1, now=5)
    tiers.placement.host.evict(8, now=100)
    assert extent.host == "absent"
    before = tiers.counters.thrashed
    tiers.placement.loading.load(extent, now=100 + after)
    assert tiers.counters.thrashed - before == thrashed


def test_what_went_before_its_turn_was_evicted_then_and_not_when_it_was_last_used() -> None:
    tiers = Tiers(host_slots=2, disk_bytes=1000)
    tiers.add(1, now=1)
    clean = tiers.clean(2, now=2)
    slots = tiers.placement.host.urge_slots(1, now=1000)
    assert slots is not None
    assert clean.host == "absent"
    tiers.placement.host.pool.give(slots)
    tiers.placement.loading.load(clean, now=1001)
    assert tiers.counters.thrashed == 1


def test_what_was_never_evicted_does_not_thrash() -> None:
    server = Counting()
    server.ask(words(16), max_tokens=0)
    server.restart()
    server.ask(words(17))
    server.to_disk()  # an operator's wish is no eviction
    server.ask(words(17))
    assert (server.since("loads"), server.since("thrashed")) == (2, 0)


# ---------------------------------------------------------------------------------------------------- prefetches


def waiting(delay: int = 0, **settings: object) -> tuple[Counting, int]:
    """A job runs; another one, whose conversation is on disk, waits for its turn, and is fetched for."""
    server = Counting(policy="lookahead", max_batch=1, **settings)
    server.ask(words(16), max_tokens=0, session="s")
    server.to_disk()
    server.submit(words(5, 7000), max_tokens=5, write=False)
    server.step()
    server.faults.delay = delay
    job = server.submit(words(17), max_tokens=0, write=False)
    server.mark()
    server.step()
    assert server.since("prefetches") == 1
    return server, job


def useful_late_wasted(server: Counting) -> tuple[int, int, int]:
    return server.since("prefetches_useful"), server.since("prefetches_late"), server.since("prefetches_wasted")


def test_a_prefetch_that_came_in_time_was_useful() -> None:
    server, job = waiting()
    server.finish()
    assert server.hits(job) == (0, 16, 0), "it was in host when the job's turn came"
    assert useful_late_wasted(server) == (1, 0, 0)


def test_a_prefetch_that_did_not_come_in_time_is_late_and_urged() -> None:
    server, job = waiting(delay=FOREVER)
    server.finish()
    assert server.hits(job) == (0, 0, 16)
    assert useful_late_wasted(server) == (0, 1, 0)
    (load,) = server.loads()
    assert [step.urged for step in server.steps if step.urged] == [(load.move,)]


def test_a_prefetch_is_counted_once_however_many_jobs_it_was_for() -> None:
    server, _ = waiting()
    server.submit([*words(16), 8], max_tokens=0, write=False)
    server.finish()
    assert useful_late_wasted(server) == (1, 0, 0)


def test_a_prefetch_that_was_evicted_before_its_job_came_is_wasted() -> None:
    server, job = waiting(host_slots=8)
    server.cancel(job)
    server.finish()
    for i in range(4):
        server.ask(words(16, 1000 * (i + 2)), max_tokens=0)
    assert useful_late_wasted(server) == (0, 0, 1)


@pytest.mark.parametrize("how", ["deleted", "reset", "dropped from host"])
def test_a_prefetch_of_what_has_gone_before_its_job_came_is_wasted(how: str) -> None:
    server, job = waiting()
    server.step()
    server.cancel(job)
    server.finish()
    if how == "deleted":
        server.scheduler.forget_session("", "s")
    elif how == "reset":
        server.scheduler.reset(server.now)
    else:
        server.scheduler.drop_clean_host()
    assert useful_late_wasted(server) == (0, 0, 1)
    server.ask(words(17), write=False)
    assert useful_late_wasted(server) == (0, 0, 1), "and is not of use when it is fetched again"


def test_a_prefetch_that_failed_is_wasted() -> None:
    server, job = waiting(delay=1)
    server.executor.damaged = set(server.executor.files)
    server.finish()
    assert server.hits(job) == (0, 0, 0)
    assert useful_late_wasted(server) == (0, 0, 1)


def test_what_is_fetched_on_demand_is_no_prefetch() -> None:
    server = Counting(policy="lookahead")
    server.ask(words(16), max_tokens=0)
    server.to_disk()
    server.ask(words(17))
    assert (server.since("loads"), server.since("prefetches")) == (1, 0)
    assert useful_late_wasted(server) == (0, 0, 0)
