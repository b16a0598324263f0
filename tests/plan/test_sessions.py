"""Conversations by name: one turn at a time, listed by tier, pinned, deleted, and remembered over a restart."""

from __future__ import annotations

import json

import pytest

from afterglow.plan.batching.compose import MAX_TRIED_JOBS
from afterglow.plan.step import Copy
from tests.plan.fake_executor import pack
from tests.plan.lasting_kit import Lasting
from tests.plan.server_kit import FOREVER, Server, jobs_of, words


def serving(**settings: object) -> Lasting:
    return Lasting(disk_bytes=100_000, **settings)


def order(server: Lasting) -> list[int]:
    """Jobs in the order in which they first came to the device."""
    return list(dict.fromkeys(job for step in server.steps for job in jobs_of(step)))


# ------------------------------------------------------------------------------------------------------- names


def test_a_turn_gives_its_conversation_a_name() -> None:
    server = serving()
    server.now = 100.0
    job = server.ask(words(20), max_tokens=5, session="s")
    state = server.session("s")
    assert (state.name, state.rows, state.pinned, state.expires) == ("s", 24, False, None)
    assert 100.0 < state.used <= server.now
    assert len(server.text(job)) == 25, "the last token has no row"
    assert server.scheduler.stats().sessions == 1


def test_turns_without_a_name_are_not_listed() -> None:
    server = serving()
    server.ask(words(20))
    assert server.names() == []


def test_the_last_used_comes_first() -> None:
    server = serving()
    for name in ("a", "b", "c", "a"):
        server.ask(words(20, 1000 * ord(name)), session=name)
    assert server.names() == ["a", "c", "b"]


def test_a_conversation_goes_on_under_its_name() -> None:
    server = serving()
    first = server.ask(words(20), max_tokens=5, session="s")
    server.ask([*server.text(first), *words(10, 1000)], max_tokens=3, session="s")
    assert server.names() == ["s"]
    assert server.session("s").rows == 25 + 10 + 3 - 1


def test_a_name_is_its_tenants() -> None:
    server = serving()
    server.ask(words(20), session="s", salt="a")
    server.ask(words(30), session="s", salt="b")
    assert (server.session("s", "a").rows, server.session("s", "b").rows) == (20, 30)
    assert server.names("") == []


def test_names_are_not_confused_whatever_is_in_them() -> None:
    server = serving()
    server.ask(words(20), session="b/c", salt="a")
    server.ask(words(30), session="c", salt="a/b")
    server.restart()
    assert (server.session("b/c", "a").rows, server.session("c", "a/b").rows) == (20, 30)


def test_a_turn_that_leaves_nothing_leaves_no_name() -> None:
    server = serving()
    server.ask(words(20), session="s", write=False)
    assert server.names() == []


def test_the_name_goes_with_the_last_row() -> None:
    server = Lasting(host_slots=8)  # no disk
    server.ask(words(16), session="old", max_tokens=0)
    server.ask(words(30, 1000), session="new", max_tokens=0)
    assert server.known(words(16)) == 0
    assert server.names() == ["new"]
    assert not server.scheduler.pin_session("", "old", True)
    assert not server.scheduler.forget_session("", "old")


def test_a_truncated_conversation_keeps_its_name() -> None:
    server = serving(max_model_len=64)
    turns = tuple(range(8, 61, 12))
    server.ask(words(56), session="s", salt="a", truncation=True, turns=turns[:4])
    job = server.ask(words(68), session="s", salt="a", truncation=True, turns=turns)
    assert server.admitted[job].dropped == 36
    assert server.names("a") == ["s"]


def test_a_reset_ends_the_names_of_its_tenant() -> None:
    server = serving()
    for tenant in ("a", "b"):
        server.ask(words(20), session="s", salt=tenant)
    server.scheduler.reset(server.now, "a")
    assert (server.names("a"), server.names("b")) == ([], ["s"])
    server.scheduler.reset(server.now)
    assert server.names("b") == []


def test_a_reset_while_the_last_rows_are_being_saved_leaves_no_name() -> None:
    server = serving()
    server.faults.lazy_saves = 1.0
    job = server.submit(words(20), max_tokens=6, session="s")
    while job not in server.ends:
        server.step()
    server.withheld = []
    server.step()
    server.scheduler.reset(server.now)
    server.deliver()
    server.finish()
    assert server.names() == []
    assert server.is_empty()


# ------------------------------------------------------------------------------------------ one turn at a time


def test_the_next_turn_waits_until_the_one_before_has_ended() -> None:
    server = serving()
    first = server.submit(words(20), max_tokens=6, session="s")
    second = server.submit(words(20, 1000), max_tokens=2, session="s")
    while first not in server.ends:
        assert second not in jobs_of(server.step())
    assert jobs_of(server.step()) == [second]
    server.finish()


def test_turns_run_in_the_order_in_which_they_came() -> None:
    server = serving()
    jobs = [server.submit(words(10, 1000 * i), max_tokens=3, session="s") for i in range(4)]
    server.finish()
    assert order(server) == jobs


@pytest.mark.parametrize("more", [{"priority": -1}, {"tie": -1}])
def test_no_turn_overtakes_the_one_before_it(more: dict[str, int]) -> None:
    server = serving(max_batch=1)
    running = server.submit(words(10, 5000), max_tokens=3)
    server.step()
    first = server.submit(words(10), session="s")
    second = server.submit(words(10, 1000), session="s", **more)
    server.finish()
    assert order(server) == [running, first, second]


def test_an_urgent_turn_overtakes_other_conversations() -> None:
    server = serving(max_batch=1)
    running = server.submit(words(10, 5000), max_tokens=3)
    server.step()
    first = server.submit(words(10), session="s")
    second = server.submit(words(10, 1000), session="t", priority=-1)
    server.finish()
    assert order(server) == [running, second, first]


def test_other_conversations_pass_a_turn_that_waits_for_the_one_before() -> None:
    server = serving()
    first = server.submit(words(20), max_tokens=6, session="s")
    server.submit(words(20, 1000), session="s")
    other = server.submit(words(20, 2000), session="t")
    nameless = server.submit(words(20, 3000))
    assert jobs_of(server.step()) == [first, other, nameless]
    server.finish()


def test_many_waiting_turns_of_one_conversation_hold_nobody_else_up() -> None:
    server = serving()
    first = server.submit(words(20), max_tokens=40, session="s")
    for i in range(MAX_TRIED_JOBS + 5):
        server.submit(words(5, 1000 * (i + 1)), session="s")
    other = server.submit(words(20, 900), session="t")
    assert jobs_of(server.step()) == [first, other]
    server.finish()


def test_another_tenants_conversation_of_the_same_name_is_another_conversation() -> None:
    server = serving()
    jobs = [server.submit(words(20), max_tokens=6, session="s", salt=tenant) for tenant in ("a", "b")]
    assert jobs_of(server.step()) == jobs
    server.finish()


def test_a_turn_that_is_loading_keeps_the_next_one_waiting() -> None:
    server = serving()
    server.ask(words(30), max_tokens=0)
    server.restart()
    server.submit(words(5, 1000), max_tokens=30)
    server.step()
    server.faults.delay = 5
    first = server.submit([*words(30), 7], max_tokens=2, session="s")
    second = server.submit(words(5, 2000), session="s")
    while first not in server.ends:
        assert second not in jobs_of(server.step())
    server.finish()


def test_a_turn_that_was_sent_back_keeps_the_next_one_waiting() -> None:
    server = serving(device_rows=48)
    old = server.submit(words(12), max_tokens=30)
    young = server.submit(words(12, 1000), max_tokens=30, session="s")
    after = server.submit(words(3, 2000), session="s", priority=-1)
    while not server.scheduler.stats().counters.preemptions:
        assert after not in jobs_of(server.step())
    while young not in server.ends:
        assert after not in jobs_of(server.step())
    server.finish()
    assert server.ends[old] == server.ends[after] == "length"


def test_when_a_waiting_turn_is_cancelled_the_next_one_takes_its_turn() -> None:
    server = serving()
    first, second, third = (server.submit(words(10, 1000 * i), max_tokens=3, session="s") for i in range(3))
    server.step()
    server.cancel(second)
    server.finish()
    assert order(server) == [first, third]


def test_turns_of_a_truncated_conversation_run_one_after_the_other() -> None:
    # Its rows lie under a salt of their own, but it is the same conversation.
    server = serving(max_model_len=64)
    first = server.submit(words(20), max_tokens=6, session="s", salt="a")
    second = server.submit(words(68), session="s", salt="a", truncation=True, turns=tuple(range(8, 61, 12)))
    while first not in server.ends:
        assert second not in jobs_of(server.step())
    server.finish()
    assert server.admitted[second].dropped > 0


# ---------------------------------------------------------------------------------------------- cancelled turns


@pytest.mark.parametrize("steps", [0, 1, 3, 7])
@pytest.mark.parametrize("where", ["device", "host", "disk"])
def test_a_cancelled_turn_leaves_the_turn_before_whole(where: str, steps: int) -> None:
    server = serving(prefill_chunk=8, max_batch=2)
    first = server.ask(words(20), max_tokens=5, session="s")
    {"device": server.finish, "host": server.to_host, "disk": server.to_disk}[where]()
    server.submit(words(5, 7000), max_tokens=40)  # keeps prefills small
    turn = [*server.text(first), *words(30, 1000)]
    second = server.submit(turn, max_tokens=20, session="s")
    for _ in range(steps):
        server.step()
    server.cancel(second)
    server.finish()
    assert server.session("s").rows >= 24
    again = server.ask(turn, max_tokens=2, session="s")
    assert sum(server.hits(again)) >= 24
    assert server.ends[second] == "cancelled"


def test_a_turn_cancelled_within_a_step_leaves_the_turn_before_whole() -> None:
    server = serving()
    first = server.ask(words(20), max_tokens=5, session="s")
    turn = [*server.text(first), *words(30, 1000)]
    second = server.submit(turn, max_tokens=20, session="s")
    step, result = server.open()
    server.cancel(second)
    server.close(step, result)
    server.finish()
    assert sum(server.hits(server.ask(turn, session="s"))) >= 24


def test_a_turn_cancelled_in_the_queue_changes_nothing() -> None:
    server = serving(max_batch=1)
    first = server.ask(words(20), max_tokens=5, session="s")
    before = server.session("s")
    server.submit(words(5, 7000), max_tokens=9)
    server.step()
    second = server.submit([*server.text(first), *words(30, 1000)], session="s")
    new = server.submit(words(30, 2000), session="never ran")
    server.step()
    server.cancel(second)
    server.cancel(new)
    assert server.session("s") == before
    assert server.names() == ["s"]
    server.finish()


def test_a_turn_cancelled_while_what_survived_a_truncation_is_copied() -> None:
    server = serving(max_model_len=64)
    turns = tuple(range(8, 61, 12))
    server.ask(words(56), max_tokens=1, session="s", truncation=True, turns=turns[:4])
    server.faults.delay = 3
    job = server.submit(words(68), session="s", truncation=True, turns=turns)
    server.step()
    assert any(isinstance(move, Copy) for move in server.steps[-1].moves)
    server.cancel(job)
    server.finish()
    assert server.known(words(56)) == 56
    again = server.ask(words(68), session="s", truncation=True, turns=turns)
    assert sum(server.hits(again)) == 20


# ------------------------------------------------------------------------------------------------------ listing


def test_rows_are_listed_where_they_are_fastest_to_reach() -> None:
    server = serving()
    server.ask(words(24), max_tokens=0, session="s")

    def tiers() -> tuple[int, int, int]:
        state = server.session("s")
        return state.device, state.host, state.disk

    assert tiers() == (24, 0, 0)
    server.to_host()
    assert tiers() == (0, 24, 0)
    server.to_disk()
    assert tiers() == (0, 0, 24)
    server.faults.delay = FOREVER
    job = server.submit([*words(24), 7], session="s", max_tokens=0)
    server.submit(words(5, 7000))
    server.scheduler.schedule(server.now)  # its rows are on their way
    assert tiers() == (0, 0, 24)
    assert job not in server.ends


def test_a_conversation_may_lie_in_several_tiers() -> None:
    server = serving()
    server.ask(words(16), max_tokens=0, session="s")
    server.to_disk()
    server.ask([*words(16), *words(8, 1000)], max_tokens=0, session="s")
    server.to_host()
    server.scheduler.drop_clean_host()  # the new rows are in host only
    state = server.session("s")
    assert (state.device, state.host, state.disk) == (0, 8, 16)


def test_a_shared_prefix_is_listed_with_each_conversation() -> None:
    server = serving()
    for name, first in (("s", 1000), ("t", 2000)):
        server.ask(words(16), max_tokens=0)
        server.ask([*words(16), *words(8, first)], max_tokens=0, session=name)
    assert [sum((s.device, s.host, s.disk)) for s in server.scheduler.cache.sessions.listing("")] == [24, 24]


def test_a_conversation_within_a_longer_one_is_listed_with_its_own_rows() -> None:
    server = serving()
    server.ask(words(40), max_tokens=0, session="long")
    server.ask(words(20), max_tokens=0, session="short")
    server.to_disk()
    assert [server.session(name).rows for name in ("long", "short")] == [40, 20]
    server.restart()
    assert [server.session(name).rows for name in ("long", "short")] == [40, 20]
    server.ask(words(30), max_tokens=0, session="short")
    assert [server.session(name).rows for name in ("long", "short")] == [40, 30]


# --------------------------------------------------------------------------------------------------- deletion


@pytest.mark.parametrize("where", ["device", "host", "disk", "all"])
def test_deleting_a_conversation_leaves_nothing_of_it_in_any_tier(where: str) -> None:
    server = serving(write_policy="write_through" if where == "all" else "write_back")
    first = server.ask(words(40), max_tokens=9, session="s")
    server.ask([*server.text(first), *words(20, 1000)], max_tokens=9, session="s")
    {"device": server.finish, "host": server.to_host, "disk": server.to_disk, "all": server.finish}[where]()
    assert not server.is_empty()
    assert server.scheduler.forget_session("", "s")
    server.finish()
    assert server.is_empty()
    assert server.names() == []


def test_a_shared_prefix_outlives_a_deleted_conversation() -> None:
    server = serving()
    system = words(32)
    server.ask(system, max_tokens=0)
    mine = server.ask([*system, *words(20, 1000)], max_tokens=5, session="mine")
    yours = server.ask([*system, *words(20, 2000)], max_tokens=5, session="yours")
    assert server.scheduler.forget_session("", "mine")
    server.finish()
    assert server.known(server.text(mine)) == 32
    assert server.known(server.text(yours)) == 32 + 24
    assert server.session("yours").rows == 32 + 24


def test_a_conversation_that_branched_off_keeps_what_it_is_made_of() -> None:
    server = serving()
    first = server.ask(words(30), max_tokens=5, session="mine")
    branch = server.ask([*words(20), *words(20, 2000)], max_tokens=5, session="yours")
    server.scheduler.forget_session("", "mine")
    server.finish()
    assert server.known(server.text(branch)) == 44
    assert server.known(server.text(first)) <= 30, "text after the branch is gone, as far as extents go"
    server.scheduler.forget_session("", "yours")
    server.finish()
    assert server.is_empty()


def test_rows_without_a_name_that_hang_below_keep_their_prefix() -> None:
    server = serving()
    server.ask(words(20), max_tokens=0, session="s")
    nameless = server.ask([*words(20), *words(20, 1000)], max_tokens=0)
    server.scheduler.forget_session("", "s")
    server.finish()
    assert server.known(server.text(nameless)) == 40


def test_what_a_running_job_goes_through_stays_until_it_has_ended() -> None:
    server = serving()
    first = server.ask(words(20), max_tokens=5, session="s")
    other = server.submit([*server.text(first), 7], max_tokens=8)
    server.step()
    assert server.scheduler.forget_session("", "s")
    server.finish()
    assert server.known(server.text(other)) == len(server.text(other)) - 1


def test_a_conversation_deleted_while_its_turn_runs_is_gone_when_the_turn_ends() -> None:
    server = serving()
    first = server.ask(words(20), max_tokens=5, session="s")
    second = server.submit([*server.text(first), *words(20, 1000)], max_tokens=9, session="s")
    for _ in range(3):
        server.step()
    assert server.scheduler.forget_session("", "s")
    assert server.names() == []
    server.finish()
    assert server.ends[second] == "length"
    assert server.names() == []
    assert server.is_empty()


def test_a_conversation_deleted_during_its_first_turn_is_gone_when_the_turn_ends() -> None:
    server = serving()
    job = server.submit(words(20), max_tokens=9, session="s")
    for _ in range(3):
        server.step()
    assert not server.scheduler.forget_session("", "t")
    assert server.scheduler.forget_session("", "s")
    server.finish()
    assert server.ends[job] == "length"
    assert server.names() == []
    assert server.is_empty()


def test_a_conversation_deleted_while_its_last_rows_are_being_saved_is_gone() -> None:
    server = serving()
    first = server.ask(words(20), max_tokens=5, session="s")
    server.faults.lazy_saves = 1.0
    second = server.submit([*server.text(first), *words(20, 1000)], max_tokens=9, session="s")
    while second not in server.ends:
        server.step()
    server.withheld = []
    server.step()
    assert server.scheduler.forget_session("", "s")
    server.deliver()
    server.finish()
    assert server.names() == []
    assert server.is_empty()


def test_a_turn_that_waits_while_its_conversation_is_deleted_leaves_nothing() -> None:
    server = serving(max_batch=1)
    first = server.ask(words(20), max_tokens=5, session="s")
    server.submit(words(5, 7000), max_tokens=5, write=False)
    server.step()
    second = server.submit([*server.text(first), 7], max_tokens=5, session="s")
    server.step()
    assert server.scheduler.forget_session("", "s")
    server.finish()
    assert server.ends[second] == "length"
    assert server.hits(second) == (0, 0, 0)
    assert server.is_empty()


def test_after_a_deletion_the_name_can_be_used_anew() -> None:
    server = serving()
    server.ask(words(20), max_tokens=5, session="s")
    server.scheduler.forget_session("", "s")
    job = server.ask(words(20), max_tokens=2, session="s")
    assert server.hits(job) == (0, 0, 0)
    assert server.session("s").rows == 21


def test_a_conversation_is_deleted_once() -> None:
    server = serving()
    server.ask(words(20), session="s")
    assert server.scheduler.forget_session("", "s")
    assert not server.scheduler.forget_session("", "s")
    assert not server.scheduler.forget_session("", "unknown")


def test_nobody_deletes_another_tenants_conversation() -> None:
    server = serving()
    job = server.ask(words(20), session="s", salt="a")
    assert not server.scheduler.forget_session("b", "s")
    assert not server.scheduler.forget_session("", "s")
    assert server.known(server.text(job), "a") == 20


def test_deleting_a_conversation_leaves_the_same_text_of_another_tenant() -> None:
    server = serving()
    for tenant in ("a", "b"):
        server.ask(words(20), session="s", salt=tenant)
    server.scheduler.forget_session("a", "s")
    server.finish()
    assert (server.known(words(20), "a"), server.known(words(20), "b")) == (0, 20)


def test_a_truncated_conversation_is_deleted_with_what_came_before_the_truncation() -> None:
    server = serving(max_model_len=64)
    turns = tuple(range(8, 61, 12))
    server.ask(words(56), session="s", truncation=True, turns=turns[:4])
    server.ask(words(68), session="s", truncation=True, turns=turns)
    assert server.scheduler.forget_session("", "s")
    server.finish()
    assert server.is_empty()


def test_a_deleted_conversation_does_not_come_back_after_a_restart() -> None:
    server = serving()
    server.ask(words(20), session="s")
    server.remember()
    server.scheduler.forget_session("", "s")
    server.restart()
    assert server.names() == []
    assert server.is_empty()
    assert server.notes.get("session", {}) == {}


def test_a_pinned_conversation_can_be_deleted() -> None:
    server = serving()
    server.ask(words(20), session="s")
    server.scheduler.pin_session("", "s", True)
    server.scheduler.forget_session("", "s")
    server.finish()
    assert server.is_empty()


# ------------------------------------------------------------------------------------------------------- pins


def fill(server: Lasting, conversations: int = 6) -> None:
    """Others come, more than there is room for."""
    for i in range(conversations):
        server.ask(words(16, 50_000 + 1000 * i), max_tokens=0)


def test_a_pinned_conversation_stays_in_host_where_there_is_no_disk() -> None:
    server = Lasting(host_slots=16)
    server.ask(words(30), max_tokens=0, session="s")
    assert server.scheduler.pin_session("", "s", True)
    fill(server)
    assert server.known(words(30)) == 30
    assert server.scheduler.stats().counters.evicted_host > 0, "others had to go"


def test_without_a_pin_it_goes() -> None:
    server = Lasting(host_slots=16)
    server.ask(words(30), max_tokens=0, session="s")
    fill(server)
    assert server.known(words(30)) == 0


@pytest.mark.parametrize("policy", ["lookahead", "lru", "fifo", "lfu"])
def test_a_pinned_conversation_stays_on_disk(policy: str) -> None:
    server = Lasting(host_slots=8, disk_bytes=1500, policy=policy)
    server.ask(words(30), max_tokens=0, session="s")
    server.scheduler.pin_session("", "s", True)
    fill(server, 12)
    server.to_host()
    assert server.known(words(30)) == 30
    assert server.session("s").disk == 30, "it may leave host as long as the disk has it"
    assert server.scheduler.stats().counters.evicted_disk > 0


def test_a_pinned_conversation_is_flushed_and_never_makes_room() -> None:
    server = Lasting(disk_bytes=1000)
    server.ask(words(30), max_tokens=0, session="s")
    server.scheduler.pin_session("", "s", True)
    fill(server)
    server.to_disk()
    assert server.session("s").disk == 30
    assert server.scheduler.stats().disk_bytes == 800, "another one fits beside it"
    fill(server)
    server.to_disk()
    assert server.session("s").disk == 30


def test_where_only_pinned_conversations_are_left_new_rows_are_not_kept() -> None:
    server = Lasting(host_slots=16)
    server.ask(words(44), max_tokens=0, session="s")
    server.scheduler.pin_session("", "s", True)
    job = server.ask(words(30, 5000), max_tokens=3)
    assert server.ends[job] == "length"
    assert server.known(words(44)) == 44
    assert server.scheduler.stats().counters.rows_unsaved > 0


def test_a_pin_ends() -> None:
    server = Lasting(host_slots=16)
    server.ask(words(30), max_tokens=0, session="s")
    server.scheduler.pin_session("", "s", True)
    fill(server)
    assert server.scheduler.pin_session("", "s", False)
    fill(server)
    assert server.known(words(30)) == 0


def test_pinning_twice_is_pinning_once() -> None:
    server = Lasting(host_slots=16)
    server.ask(words(30), max_tokens=0, session="s")
    for pinned in (True, True, False, False):
        assert server.scheduler.pin_session("", "s", pinned)
    fill(server)
    assert server.known(words(30)) == 0


def test_a_pinned_conversations_next_turn_is_pinned_too() -> None:
    server = Lasting(host_slots=20)
    server.ask(words(16), max_tokens=0, session="s")
    server.scheduler.pin_session("", "s", True)
    server.ask(words(30), max_tokens=0, session="s")
    fill(server)
    assert server.known(words(30)) == 30


def test_what_two_conversations_have_pinned_stays_as_long_as_one_has() -> None:
    server = Lasting(host_slots=24)
    server.ask(words(16), max_tokens=0)
    server.ask([*words(16), *words(8, 1000)], max_tokens=0, session="s")
    server.ask([*words(16), *words(8, 2000)], max_tokens=0, session="t")
    for name in ("s", "t"):
        server.scheduler.pin_session("", name, True)
    server.scheduler.pin_session("", "s", False)
    fill(server, 8)
    assert server.known([*words(16), *words(8, 1000)]) == 16
    assert server.known([*words(16), *words(8, 2000)]) == 24


def test_only_its_tenant_can_pin_a_conversation() -> None:
    server = Lasting(host_slots=16)
    server.ask(words(30), max_tokens=0, session="s", salt="a")
    assert not server.scheduler.pin_session("b", "s", True)
    assert not server.scheduler.pin_session("a", "unknown", True)
    assert not server.session("s", "a").pinned
    fill(server)
    assert server.known(words(30), "a") == 0


def test_a_pin_outlives_a_reset_of_another_tenant_only() -> None:
    server = Lasting(host_slots=16)
    server.ask(words(30), max_tokens=0, session="s", salt="a")
    server.scheduler.pin_session("a", "s", True)
    server.scheduler.reset(server.now, "b")
    assert server.session("s", "a").pinned
    server.scheduler.reset(server.now, "a")
    server.finish()
    assert server.is_empty()


# -------------------------------------------------------------------------------------------- over a restart


def test_names_outlive_a_restart() -> None:
    server = serving()
    server.ask(words(20), max_tokens=5, session="s", salt="a")
    server.ask(words(30), max_tokens=5, session="t", salt="a")
    server.scheduler.pin_session("a", "s", True)
    before = server.scheduler.cache.sessions.listing("a")
    server.restart()
    after = server.scheduler.cache.sessions.listing("a")
    for old, new in zip(before, after, strict=True):
        assert (new.name, new.rows, new.used, new.pinned) == (old.name, old.rows, old.used, old.pinned)
        assert (new.device, new.host, new.disk) == (0, 0, old.rows)
        assert new.expires is None
    assert server.names("b") == []


def test_names_outlive_a_second_restart() -> None:
    server = serving()
    server.ask(words(20), session="s")
    server.restart()
    server.restart()
    assert server.names() == ["s"]


def test_after_a_restart_a_conversation_can_be_deleted() -> None:
    server = serving()
    server.ask(words(20), max_tokens=5, session="s")
    server.restart()
    assert server.scheduler.forget_session("", "s")
    server.finish()
    assert server.is_empty()


def test_pins_outlive_a_restart() -> None:
    server = Lasting(host_slots=8, disk_bytes=1500)
    server.ask(words(30), max_tokens=0, session="s")
    server.scheduler.pin_session("", "s", True)
    server.restart()
    fill(server, 12)
    assert server.known(words(30)) == 30
    server.scheduler.pin_session("", "s", False)
    fill(server, 12)
    assert server.known(words(30)) == 0


def test_pins_outlive_a_restart_with_a_smaller_disk() -> None:
    server = Lasting(disk_bytes=2000)
    server.ask(words(30), max_tokens=0, session="s")
    server.scheduler.pin_session("", "s", True)
    fill(server, 3)  # all used later
    server.restart(disk_bytes=1000)
    server.finish()
    assert server.known(words(30)) == 30
    assert server.scheduler.stats().disk_bytes <= 1000


def test_a_pin_that_has_ended_does_not_come_back() -> None:
    server = Lasting(host_slots=8, disk_bytes=1500)
    server.ask(words(30), max_tokens=0, session="s")
    for pinned in (True, False):
        server.scheduler.pin_session("", "s", pinned)
        server.remember()
    server.restart()
    assert not server.session("s").pinned


def test_only_what_has_changed_is_noted() -> None:
    server = serving()
    server.ask(words(20), session="s")
    server.ask(words(20, 1000), session="t")
    assert len(server.scheduler.cache.take_notes()) == 2
    assert server.scheduler.cache.take_notes() == []
    server.scheduler.pin_session("", "t", True)
    assert len(server.scheduler.cache.take_notes()) == 1


def test_notes_that_cannot_be_read_cost_a_name_and_no_more() -> None:
    server = serving()
    job = server.ask(words(20), max_tokens=3, session="s", ttl=1000.0)
    server.remember()
    (good,) = server.notes["session"].values()
    facts = json.loads(good)
    bad = ["", "{", "[]", "7", "null", '"s"', json.dumps(facts[:-1]), json.dumps([*facts, 1])]
    bad += [json.dumps([*facts[:i], {"no": 1}, *facts[i + 1 :]]) for i in range(len(facts))]
    bad += [json.dumps([*facts[:i], None, *facts[i + 1 :]]) for i in range(len(facts)) if i != 3]
    bad += [json.dumps([*facts[:3], "soon", *facts[4:]]), json.dumps([7, *facts[1:]]), json.dumps([*facts[:-1], [[]]])]
    server.notes["session"] |= {f"bad {i}": text for i, text in enumerate(bad)}
    server.restart()
    assert server.names() == ["s"]
    assert server.known(server.text(job)) == 22


def test_the_plain_server_of_these_tests_starts_again_as_the_engine_does() -> None:
    """Extents first, then what they are called."""
    server = Server(disk_bytes=100_000)
    server.ask(words(20), session="s")
    server.restart()
    assert [state.name for state in server.scheduler.cache.sessions.listing("")] == ["s"]


def test_a_conversation_whose_rows_were_lost_is_not_listed_after_a_restart() -> None:
    server = Lasting(disk_bytes=400)
    server.ask(words(30), max_tokens=0, session="old")  # 400 bytes, which the next one takes
    server.ask(words(16, 1000), max_tokens=0, session="new")
    server.restart()
    kept = sum(len(record.tokens) // 4 for record in server.executor.catalog.values())
    assert kept == 16
    assert server.names() == ["new"]


def test_a_truncated_conversation_outlives_a_restart_whole() -> None:
    server = serving(max_model_len=64)
    turns = tuple(range(8, 61, 12))
    server.ask(words(56), session="s", truncation=True, turns=turns[:4])
    server.ask(words(68), session="s", truncation=True, turns=turns)
    server.restart()
    server.scheduler.forget_session("", "s")
    server.finish()
    assert server.is_empty()


def test_names_hold_the_text_of_nobody() -> None:
    # Notes go to the catalog: names of extents, never tokens.
    server = serving()
    server.ask(words(20), session="s")
    ((kind, key, value),) = server.scheduler.cache.take_notes()
    assert (kind, value is not None) == ("session", True)
    assert pack(words(20)).hex() not in f"{key}{value}"
