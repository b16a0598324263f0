"""Rows are erased when no job has used them for as long as was asked for: when, and when not yet."""

from __future__ import annotations

import json

import pytest

from afterglow.plan.prefix.extent import Extent
from afterglow.plan.step import Drop, Store
from afterglow.plan.tiers.expiry import EXPIRY_RETRY_S, Expiry
from tests.plan.lasting_kit import Lasting
from tests.plan.server_kit import jobs_of, words
from tests.plan.tiers_kit import Tiers

TTL = 1000.0
TURNS = tuple(range(8, 61, 12))


def serving(**settings: object) -> Lasting:
    """Steps take no time to speak of."""
    server = Lasting(**{"disk_bytes": 100_000, **settings})
    server.row_seconds = 0.0
    return server


def later(server: Lasting, seconds: float) -> None:
    """Time passes, and the engine looks."""
    server.now += seconds
    server.step()
    server.finish()


# ------------------------------------------------------------------------------------------------------- when


def test_rows_are_kept_until_their_time_has_come_and_no_longer() -> None:
    server = serving()
    server.ask(words(40), max_tokens=9, ttl=TTL)
    later(server, TTL - 1)
    assert server.known(words(40)) == 40
    later(server, 2)
    assert server.known(words(40)) == 0
    assert server.is_empty()


def test_without_a_time_to_live_rows_are_kept_for_ever() -> None:
    server = serving()
    server.ask(words(40))
    later(server, 1e9)
    assert server.known(words(40)) == 40
    assert server.steps[-1].wake_at is None


def test_use_puts_it_off() -> None:
    server = serving()
    server.ask(words(40), max_tokens=0, ttl=TTL)
    for _ in range(3):
        later(server, TTL - 1)
        server.ask(words(41), max_tokens=0, ttl=TTL, write=False)
    later(server, TTL - 1)
    assert server.known(words(40)) == 40
    later(server, 2)
    assert server.is_empty()


def test_use_of_a_part_puts_off_that_part_only() -> None:
    server = serving()
    server.ask(words(16), max_tokens=0, ttl=TTL)
    server.ask(words(40), max_tokens=0, ttl=TTL)
    later(server, TTL / 2)
    server.ask([*words(16), 7], max_tokens=0, ttl=TTL, write=False)
    later(server, TTL / 2 + 1)
    assert server.known(words(40)) == 16


def test_the_longest_time_to_live_wins() -> None:
    server = serving()
    server.ask(words(40), max_tokens=0, ttl=TTL)
    server.ask(words(41), max_tokens=0, ttl=1.0, write=False)
    later(server, TTL - 1)
    assert server.known(words(40)) == 40
    later(server, 2)
    assert server.is_empty()


def test_who_asks_for_no_end_wins() -> None:
    server = serving()
    server.ask(words(40), max_tokens=0, ttl=1.0)
    server.ask(words(41), max_tokens=0, write=False)
    later(server, 1e9)
    assert server.known(words(40)) == 40


@pytest.mark.parametrize("where", ["device", "host", "disk", "all"])
def test_it_is_erased_in_all_tiers(where: str) -> None:
    server = serving(write_policy="write_through" if where == "all" else "write_back")
    server.ask(words(40), max_tokens=9, ttl=TTL)
    {"device": server.finish, "host": server.to_host, "disk": server.to_disk, "all": server.finish}[where]()
    stats = server.scheduler.stats()
    assert (stats.contexts > 0) == (where in ("device", "all"))
    assert (stats.host_slots > 0) == (where != "disk")
    assert bool(server.executor.files) == (where in ("disk", "all"))
    later(server, TTL + 1)
    assert server.is_empty()


def test_files_are_removed_in_the_step_in_which_rows_expire() -> None:
    server = serving(write_policy="write_through")
    server.ask(words(16), max_tokens=0, ttl=TTL)
    server.now += TTL + 1
    step = server.step()
    assert [type(move) for move in step.moves] == [Drop]
    assert len(step.frees) == 1


def test_a_whole_conversation_goes_at_once_however_long_it_is() -> None:
    server = serving()
    server.ask(words(300), max_tokens=9, ttl=TTL)
    assert server.scheduler.stats().extents > 15
    server.now += TTL + 1
    server.step()
    assert server.scheduler.stats().extents == 0


def test_a_cancelled_jobs_rows_expire_too() -> None:
    server = serving(prefill_chunk=8)
    server.submit(words(5, 7000), max_tokens=9, write=False)
    server.step()
    job = server.submit(words(40), ttl=TTL)
    server.step()
    server.cancel(job)
    server.finish()
    assert server.known(words(40)) == 8
    later(server, TTL + 1)
    assert server.is_empty()


def test_rows_that_survived_a_truncation_expire_too() -> None:
    server = serving(max_model_len=64)
    server.ask(words(56), ttl=TTL, truncation=True, turns=TURNS[:4])
    later(server, TTL / 2)
    server.ask(words(68), ttl=TTL, truncation=True, turns=TURNS)
    later(server, TTL / 2 + 1)
    assert 0 < server.scheduler.stats().extents < 5, "cut rows are gone, kept rows have been used again"
    later(server, TTL / 2)
    assert server.is_empty()


def test_only_what_has_expired_goes() -> None:
    server = serving()
    for i in range(5):
        server.ask(words(40, 1000 * i), max_tokens=0, ttl=TTL * (1 + i % 2))
    later(server, TTL + 1)
    assert [server.known(words(40, 1000 * i)) for i in range(5)] == [0, 40, 0, 40, 0]


def test_its_name_goes_with_it() -> None:
    server = serving()
    server.ask(words(40), ttl=TTL, session="s")
    later(server, TTL + 1)
    assert server.names() == []
    server.remember()
    assert server.notes.get("session", {}) == {}


def test_the_listing_says_when() -> None:
    server = serving()
    server.now = 50.0
    server.ask(words(40), ttl=TTL, session="s")
    expires = server.session("s").expires
    assert expires is not None
    assert 50 + TTL < expires < 51 + TTL
    server.scheduler.pin_session("", "s", True)
    assert server.session("s").expires is None
    server.scheduler.pin_session("", "s", False)
    assert server.session("s").expires == expires
    server.ask(words(41), session="s")
    assert server.session("s").expires is None, "it was used without an end"


# ---------------------------------------------------------------------------------------------------- not yet


def test_not_while_a_job_runs_on_it() -> None:
    server = serving()
    server.row_seconds = 10.0
    job = server.submit(words(40), max_tokens=30, ttl=5.0)
    while job not in server.ends:
        server.step()
        server.scheduler.check()
    assert server.now > 600
    server.finish()
    assert server.known(words(40)) == 40
    later(server, 5.0 + EXPIRY_RETRY_S)
    assert server.is_empty()


def test_not_while_a_reading_job_runs_on_it() -> None:
    server = serving()
    server.ask(words(40), max_tokens=0, ttl=5.0)
    server.row_seconds = 10.0
    job = server.submit(words(41), max_tokens=30, ttl=5.0, write=False)
    while job not in server.ends:
        server.step()
        assert server.known(words(40)) == 40
    later(server, EXPIRY_RETRY_S + 1)
    assert server.is_empty()


@pytest.mark.parametrize("where", ["device", "host", "disk"])
@pytest.mark.parametrize("policy", ["lookahead", "lru", "fifo", "lfu"])
def test_not_while_a_job_that_needs_it_is_queued(policy: str, where: str) -> None:
    server = serving(max_batch=1, policy=policy)
    server.ask(words(40), max_tokens=0, ttl=TTL)
    {"device": server.finish, "host": server.to_host, "disk": server.to_disk}[where]()
    server.submit(words(5, 7000), max_tokens=5, write=False)
    server.step()
    job = server.submit(words(41), max_tokens=0, write=False, ttl=TTL)
    server.now += TTL + 1
    server.step()
    server.now += EXPIRY_RETRY_S + 1
    server.step()
    assert job not in server.ends
    server.finish()
    assert sum(server.hits(job)) == 40


@pytest.mark.parametrize("policy", ["lookahead", "lru"])
def test_not_while_the_last_of_a_long_queue_needs_it(policy: str) -> None:
    server = serving(max_batch=1, policy=policy)
    server.submit(words(5, 7000), max_tokens=40, write=False)
    server.step()
    for i in range(30):
        server.submit(words(5, 8000 + 10 * i), max_tokens=0, write=False)
    last = server.submit(words(41), max_tokens=0, write=False, ttl=TTL)
    urgent = server.submit(words(40), max_tokens=0, priority=-1, ttl=TTL)  # comes later, and is what that one needs
    while urgent not in server.ends:
        server.step()
    assert last not in server.ends
    server.now += TTL + 1
    server.finish()
    assert sum(server.hits(last)) == 40


def test_not_while_a_queued_job_needs_what_is_to_survive_its_truncation() -> None:
    server = serving(max_model_len=64, max_batch=1)
    server.ask(words(56), ttl=TTL, truncation=True, turns=TURNS[:4])
    server.submit(words(5, 7000), max_tokens=5, write=False)
    server.step()
    job = server.submit(words(68), ttl=TTL, truncation=True, turns=TURNS)
    server.now += TTL + 1
    server.finish()
    assert sum(server.hits(job)) == 20


def test_a_queued_job_that_does_not_read_needs_nothing() -> None:
    server = serving(max_batch=1)
    server.ask(words(40), max_tokens=0, ttl=TTL)
    server.submit(words(5, 7000), max_tokens=5, write=False)
    server.step()
    server.submit(words(41), max_tokens=0, write=False, read=False)
    server.now += TTL + 1
    server.step()
    assert server.known(words(40)) == 0
    server.finish()


def test_a_queued_job_of_another_tenant_needs_nothing() -> None:
    server = serving(max_batch=1)
    server.ask(words(40), max_tokens=0, ttl=TTL, salt="a")
    server.submit(words(5, 7000), max_tokens=5, write=False)
    server.step()
    server.submit(words(41), max_tokens=0, salt="b")
    server.now += TTL + 1
    server.step()
    assert server.known(words(40), "a") == 0
    server.finish()


def test_not_while_its_conversation_is_pinned() -> None:
    server = serving()
    server.ask(words(40), max_tokens=0, ttl=TTL, session="s")
    server.scheduler.pin_session("", "s", True)
    later(server, 5 * TTL)
    assert server.known(words(40)) == 40
    server.scheduler.pin_session("", "s", False)
    later(server, EXPIRY_RETRY_S + 1)
    assert server.is_empty()


def test_not_while_something_that_lives_longer_hangs_below_it() -> None:
    server = serving()
    server.ask(words(16), max_tokens=0, ttl=TTL)
    server.now += 1
    server.ask([*words(16), *words(16, 1000)], max_tokens=0)  # for ever
    server.ask([*words(16), *words(16, 2000)], max_tokens=0, ttl=3 * TTL)
    later(server, 2 * TTL)
    assert server.known([*words(16), *words(16, 1000)]) == 32
    later(server, 2 * TTL)
    assert server.known([*words(16), *words(16, 2000)]) == 16
    assert server.known([*words(16), *words(16, 1000)]) == 32


def test_a_parent_goes_with_its_last_child() -> None:
    server = serving()
    server.ask(words(16), max_tokens=0, ttl=TTL)
    later(server, TTL / 2)
    server.ask(words(32), max_tokens=0, ttl=1.0, read=False)  # its first rows are there already
    server.ask([*words(16), *words(16, 2000)], max_tokens=0, ttl=2 * TTL, read=False)
    used = server.now
    later(server, TTL)
    assert server.known([*words(16), *words(16, 2000)]) == 32, "the first rows have expired, and are still needed"
    server.sleep(until=used + 2 * TTL)
    assert server.is_empty()


def test_who_needs_it_no_more_has_not_made_it_live_longer() -> None:
    # It was looked at in vain; that is not a use, and the listing does not say so.
    server = serving()
    server.ask(words(40), max_tokens=0, ttl=TTL, session="s")
    expires = server.session("s").expires
    server.scheduler.pin_session("", "s", True)
    later(server, TTL + 1)
    server.scheduler.pin_session("", "s", False)
    assert server.session("s").expires == expires


# ----------------------------------------------------------------------------------------------------- waking up


def test_an_idle_engine_is_told_when_to_look_again() -> None:
    server = serving()
    server.ask(words(40), max_tokens=0, ttl=TTL)
    used = server.now
    server.sleep(until=used + TTL - 1)
    assert server.known(words(40)) == 40
    server.sleep(until=used + TTL)
    assert server.is_empty()


def test_it_is_not_told_to_look_when_nothing_can_expire() -> None:
    server = serving()
    server.ask(words(40), max_tokens=0)
    assert server.step().wake_at is None


def test_it_is_told_the_first_of_several_times() -> None:
    server = serving()
    for i in (3, 1, 2):
        server.ask(words(16, 1000 * i), max_tokens=0, ttl=i * TTL)
    step = server.step()
    assert step.wake_at is not None
    assert server.now < step.wake_at < server.now + TTL
    server.sleep(until=server.now + TTL)
    assert [server.known(words(16, 1000 * i)) for i in (1, 2, 3)] == [0, 16, 16]


def test_it_never_sleeps_past_what_is_put_off() -> None:
    server = serving()
    for _ in range(5):
        server.ask(words(40), max_tokens=0, ttl=TTL)
        server.sleep(until=server.now + TTL / 2)
    used = server.now - TTL / 2
    server.sleep(until=used + TTL - 1)
    assert server.known(words(40)) == 40
    server.sleep(until=used + TTL + 1)
    assert server.is_empty()


def test_an_extent_is_looked_at_once_however_often_it_is_used() -> None:
    gone: list[Extent] = []
    expiry = Expiry(lambda extent, why: gone.append(extent))
    extent = Tiers().insert(1, blocks=1, below=None, now=0.0)
    for use in range(50):
        expiry.expire(extent, use + TTL)
    assert len(expiry) == 1
    expiry.sweep(49 + TTL, tuple)
    assert len(expiry) == 0
    assert gone == [extent]


def test_it_is_not_woken_for_each_use() -> None:
    server = serving()
    for _ in range(50):
        server.ask(words(40), max_tokens=0, ttl=TTL)
    before = len(server.steps)
    server.sleep(until=server.now + TTL + 1)
    assert server.is_empty()
    assert len(server.steps) - before < 15


def test_it_looks_again_now_and_then_at_what_is_still_needed() -> None:
    server = serving()
    server.ask(words(40), max_tokens=0, ttl=TTL, session="s")
    server.scheduler.pin_session("", "s", True)
    before = len(server.steps)
    server.sleep(until=server.now + TTL + 10 * EXPIRY_RETRY_S)
    assert server.known(words(40)) == 40
    assert len(server.steps) - before < 20
    server.scheduler.pin_session("", "s", False)
    server.sleep(until=server.now + EXPIRY_RETRY_S)
    assert server.is_empty()


def test_what_was_deleted_wakes_nobody_for_ever() -> None:
    server = serving()
    server.ask(words(40), max_tokens=0, ttl=TTL)
    server.scheduler.reset(server.now)
    server.sleep(until=server.now + TTL + 1)
    assert server.step().wake_at is None


# ------------------------------------------------------------------------------------------------ over a restart


def test_a_conversation_expires_after_a_restart_when_it_would_have() -> None:
    server = serving()
    server.ask(words(40), max_tokens=5, ttl=TTL, session="s")
    expires = server.session("s").expires
    assert expires is not None
    server.restart(after=TTL / 2)
    assert server.session("s").expires == expires
    server.sleep(until=expires - 1)
    assert server.known(words(40)) == 40
    server.sleep(until=expires + 1)
    assert server.is_empty()
    assert server.names() == []


def test_what_expired_while_nothing_ran_is_erased_in_the_first_step() -> None:
    server = serving()
    server.ask(words(40), max_tokens=5, ttl=TTL, session="s")
    server.restart(after=TTL)
    server.step()
    server.finish()
    assert server.is_empty()


@pytest.mark.parametrize("session", ["s", None])
def test_without_a_time_to_live_rows_live_on_after_a_restart(session: str | None) -> None:
    server = serving()
    server.ask(words(40), session=session)
    server.restart(after=1e9)
    later(server, 1e9)
    assert server.known(words(40)) == 40
    server.ask(words(41), max_tokens=0, ttl=1.0, write=False)
    later(server, 2)
    assert server.known(words(40)) == 40, "who asks for no end wins, over a restart too"


@pytest.mark.parametrize("session", ["s", None])
def test_where_nobody_has_named_an_end_the_settings_do(session: str | None) -> None:
    server = serving()
    server.ask(words(40), max_tokens=0, session=session)
    used = server.now
    server.restart(after=TTL / 2, ttl=TTL)
    server.sleep(until=used + TTL - 1)
    assert server.known(words(40)) == 40
    server.sleep(until=used + TTL + 1)
    assert server.is_empty()


def test_notes_of_before_extents_kept_their_ends_are_believed() -> None:
    server = serving()
    server.ask(words(40), max_tokens=0, session="s")
    server.flush()
    server.remember()
    (key, note) = server.notes["session"].popitem()
    tenant, name, used, pinned, extents = json.loads(note)
    server.notes["session"][key] = json.dumps([tenant, name, used, pinned, dict.fromkeys(extents, used + TTL)])
    server.restart()
    expires = server.session("s").expires
    assert expires is not None
    assert abs(expires - used - TTL) < 1
    server.sleep(until=expires + 1)
    assert server.is_empty()


def test_the_longest_time_to_live_wins_over_a_restart() -> None:
    server = serving()
    server.ask(words(40), max_tokens=0, ttl=TTL, session="s")
    server.ask(words(50), max_tokens=0, ttl=1.0, session="s")
    server.restart(after=TTL - 10)
    server.step()
    assert server.known(words(50)) == 40
    later(server, 11)
    assert server.is_empty()


def test_a_pinned_conversation_does_not_expire_after_a_restart() -> None:
    server = serving()
    server.ask(words(40), max_tokens=0, ttl=TTL, session="s")
    server.scheduler.pin_session("", "s", True)
    server.restart(after=TTL + 1)
    later(server, EXPIRY_RETRY_S + 1)
    assert server.known(words(40)) == 40


@pytest.mark.parametrize("settings", [{}, {"ttl": TTL / 100}, {"ttl": 100 * TTL}])
def test_rows_without_a_name_live_as_long_as_was_asked_for_after_a_restart(settings: dict[str, float]) -> None:
    server = serving()
    server.ask(words(40), max_tokens=0, ttl=TTL)
    used = server.now
    server.restart(after=TTL / 2, **settings)
    server.sleep(until=used + TTL - 1)
    assert server.known(words(40)) == 40
    server.sleep(until=used + TTL + 1)
    assert server.is_empty()


def test_what_has_been_put_off_once_it_was_on_disk_is_known_after_a_restart() -> None:
    server = serving(write_policy="write_through")
    server.ask(words(40), max_tokens=0, ttl=TTL)
    server.note_uses()
    server.now += TTL / 2
    server.ask(words(41), max_tokens=0, ttl=TTL, write=False)
    used = server.now
    server.note_uses()
    server.restart(after=TTL / 2 + 1)
    later(server, 1)
    assert server.known(words(40)) == 40
    server.sleep(until=used + TTL + 1)
    assert server.is_empty()


def test_what_is_put_off_while_it_is_being_written_is_noted_when_it_is_there() -> None:
    server = serving(write_policy="write_through")
    server.faults.delay = 5
    server.submit(words(16), max_tokens=0, ttl=TTL)
    for _ in range(50):
        if any(isinstance(move, Store) for move in server.step().moves):
            break
    (extent,) = server.scheduler.cache.index.extents.values()
    server.scheduler.cache.placement.touch(extent, server.now, 9 * TTL)
    assert server.scheduler.cache.disk.take_touched() == [], "there is no row yet"
    server.finish()
    (use,) = server.scheduler.cache.disk.take_touched()
    assert use.expires == extent.expires > 8 * TTL


def test_rows_that_two_have_computed_at_once_live_as_long_as_either_wants() -> None:
    server = serving()
    server.ask(words(16), max_tokens=0, ttl=1.0)
    server.ask(words(16), max_tokens=0, ttl=TTL, read=False)
    later(server, TTL - 1)
    assert server.known(words(16)) == 16
    later(server, 2)
    assert server.is_empty()


def test_use_after_a_restart_puts_it_off() -> None:
    server = serving()
    server.ask(words(40), max_tokens=0, ttl=TTL, session="s")
    server.restart(after=TTL - 10)
    server.ask(words(41), max_tokens=0, ttl=TTL, write=False)
    later(server, TTL / 2)
    assert server.known(words(40)) == 40
    later(server, TTL / 2 + 1)
    assert server.is_empty()


def test_a_job_that_comes_first_after_a_restart_still_finds_what_it_needs() -> None:
    server = serving()
    server.ask(words(40), max_tokens=0, ttl=TTL, session="s")
    server.restart(after=TTL + 1)
    job = server.submit(words(41), session="s", ttl=TTL)
    assert jobs_of(server.step()) == [job]
    server.finish()
    assert server.hits(job) == (0, 0, 40)


# -------------------------------------------------------------------------------------------------- in memory only


def volatile(**more: object) -> Lasting:
    server = serving(**more)
    server.ask(words(40), max_tokens=5, ttl=TTL, volatile=True)
    return server


@pytest.mark.parametrize("write_policy", ["write_back", "write_through", "write_through_selective"])
def test_what_is_wanted_in_memory_only_is_never_written(write_policy: str) -> None:
    server = volatile(write_policy=write_policy)
    for _ in range(3):
        server.ask(words(41), max_tokens=0, ttl=TTL, volatile=True)
    assert sum(server.hits(server.ask(words(41), max_tokens=0, ttl=TTL, volatile=True))) == 40
    server.restart()
    server.step()
    assert server.is_empty()
    assert not any(isinstance(move, Store) for step in server.steps for move in step.moves)


def test_it_leaves_host_for_good_where_room_is_short() -> None:
    server = volatile(host_slots=24)
    for i in range(1, 6):
        server.ask(words(40, 1000 * i), max_tokens=0)
    server.scheduler.drop_contexts()
    server.finish()
    assert server.known(words(40)) == 0
    assert server.known(words(40, 1000)) == 40, "which went to disk"


def test_it_does_not_push_anything_off_a_full_disk() -> None:
    server = serving(disk_bytes=1000, write_policy="write_through")
    server.ask(words(32), max_tokens=0)
    server.ask(words(40, 1000), max_tokens=0, ttl=TTL, volatile=True)
    server.restart()
    server.step()
    assert (server.known(words(32)), server.known(words(40, 1000))) == (32, 0)


@pytest.mark.parametrize("write_policy", ["write_back", "write_through"])
@pytest.mark.parametrize("how", ["used", "gone on from", "computed", "pinned"])
def test_whoever_needs_it_over_a_restart_gets_it_written(how: str, write_policy: str) -> None:
    server = serving(write_policy=write_policy)
    server.ask(words(40), max_tokens=0, ttl=TTL, volatile=True, session="s")
    if how == "pinned":
        server.scheduler.pin_session("", "s", True)
    elif how == "computed":
        server.ask(words(40), max_tokens=0, read=False)
    else:
        server.ask(words(41 if how == "used" else 60), max_tokens=0, write=how != "used")
    server.restart()
    assert server.known(words(40)) == 40


def test_what_survives_a_truncation_is_not_written_either() -> None:
    server = serving(max_model_len=64)
    server.ask(words(56), ttl=TTL, truncation=True, turns=TURNS[:4], volatile=True)
    job = server.ask(words(68), ttl=TTL, truncation=True, turns=TURNS, volatile=True)
    assert sum(server.hits(job)) > 0
    server.restart()
    server.step()
    assert server.is_empty()
