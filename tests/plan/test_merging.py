"""Short turns grow together: how many rows, blocks and files they take, who may go on reading, and what crashes leave."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from afterglow.plan.journal.replaying import RecordingScheduler, replay
from afterglow.plan.journal.step_digest import step_digest
from afterglow.plan.options import MERGED_ROWS, Capacity, SchedulerOptions
from afterglow.plan.scheduler import Scheduler
from afterglow.plan.step import Copy, Drop, ExtentRecord, Move, Store
from tests import doors
from tests.plan.fake_executor import pack
from tests.plan.lasting_kit import Lasting
from tests.plan.server_kit import Server, words

FILES = tuple(1000 * blocks for blocks in range(1, 17))


class Real(Server):
    """Blocks and extents have the sizes that they have in an engine."""

    def __init__(self, **more: object) -> None:
        super().__init__(**{"block": 64, "host_slots": 400, "device_rows": 8192, **more})

    def make(self) -> Scheduler:
        capacity = self.capacity
        self.capacity = Capacity(capacity.device_rows, capacity.host_slots, capacity.disk_bytes, FILES)
        self.executor.capacity = self.capacity
        return super().make()


def converse(server: Server, turns: int, prompt: int = 40, reply: int = 20, **more: object) -> list[int]:
    """So many turns, each resending all before it. Returns the text."""
    text: list[int] = []
    for turn in range(turns):
        text = [*text, *words(prompt, 1000 * (turn + 1))]
        text = list(server.text(server.ask(text, max_tokens=reply, **more)))
    return text


def extents(server: Server) -> list[int]:
    """Rows of each, in order."""
    return [e.rows for e in sorted(server.scheduler.cache.index.extents.values(), key=lambda e: e.first_row)]


def copied(server: Server) -> int:
    return sum(move.rows for step in server.steps for move in step.moves if isinstance(move, Copy))


def flush(server: Server) -> None:
    server.scheduler.flush(server.now)
    for _ in range(100):
        server.step()
        if server.scheduler.flushed:
            return
    raise AssertionError("it is never flushed")


# ------------------------------------------------------------------------------------------------ how much it takes


@pytest.mark.parametrize("write_policy", ["write_back", "write_through", "write_through_selective"])
@pytest.mark.parametrize("policy", ["lru", "lookahead"])
def test_twenty_short_turns_are_four_extents(write_policy: str, policy: str) -> None:
    server = Real(disk_bytes=10**6, write_policy=write_policy, policy=policy)
    text = converse(server, 20)
    assert extents(server) == [299, 300, 300, 300]
    assert server.scheduler.stats().host_slots * 64 <= 1.2 * len(text)
    assert len(server.executor.files) <= 4
    flush(server)
    assert len(server.executor.files) == 4
    assert sum(len(rows) for rows in server.executor.files.values()) == len(text) - 1
    assert server.scheduler.stats().disk_bytes == sum(FILES[4] for _ in range(4))


@pytest.mark.parametrize("turns", range(1, 24))
def test_after_any_number_of_turns_little_more_is_held_than_there_are_rows(turns: int) -> None:
    server = Real()
    text = converse(server, turns)
    blocks = -(-len(text) // 64)
    assert server.scheduler.stats().host_slots <= max(1.2 * blocks, blocks + 1)
    assert len(extents(server)) <= max(1, -(-len(text) // 300))


@pytest.mark.parametrize(
    ("prompt", "reply", "times"), [(40, 20, 3.0), (1, 1, 15), (3, 2, 13), (100, 100, 2), (200, 90, 1)]
)
def test_rows_are_copied_a_few_times(prompt: int, reply: int, times: float) -> None:
    server = Real()
    text = converse(server, min(600 // (prompt + reply), 90), prompt, reply)
    assert copied(server) <= times * len(text)
    assert server.scheduler.stats().counters.merged_rows == copied(server)


def test_a_reply_and_its_prompt_are_one_file() -> None:
    server = Real(disk_bytes=10**6)
    text = converse(server, 1)
    flush(server)
    assert [len(rows) for rows in server.executor.files.values()] == [len(text) - 1]


def test_long_turns_are_left_alone() -> None:
    server = Real()
    converse(server, 3, prompt=MERGED_ROWS, reply=MERGED_ROWS + 1)
    assert copied(server) == 0


def test_nothing_is_merged_where_it_is_switched_off() -> None:
    server = Real(small_rows=0)
    converse(server, 5)
    assert (copied(server), len(extents(server))) == (0, 10)


# ------------------------------------------------------------------------------------------------- the same answers


@pytest.mark.parametrize("where", ["device", "host", "disk", "restart"])
def test_what_was_merged_is_found_in_every_tier(where: str) -> None:
    server = Real(disk_bytes=10**6)
    text = converse(server, 7)
    if where != "device":
        server.scheduler.drop_contexts()
    if where in ("disk", "restart"):
        flush(server)
        server.scheduler.drop_clean_host()
        server.step()
    if where == "restart":
        server.restart()
    job = server.ask([*text, 7])
    assert sum(server.hits(job)) == len(text) - 1
    assert server.hits(job)[{"device": 0, "host": 1}.get(where, 2)] == len(text) - 1


def test_what_was_merged_has_the_name_that_it_would_have_had_in_one_turn() -> None:
    """Jobs that compute the same tokens at once find them, and on disk there is one file."""
    server = Real(disk_bytes=10**6)
    text = converse(server, 2)
    other = Real(disk_bytes=10**6)
    other.ask([*text[:-1], 7], max_tokens=0)
    other.ask(text[:-1], max_tokens=0)
    (merged,) = server.scheduler.cache.index.extents.values()
    fresh = Real(disk_bytes=10**6)
    fresh.ask(text[:-1], max_tokens=0)
    (whole,) = fresh.scheduler.cache.index.extents.values()
    assert (merged.id, merged.tokens, merged.parent) == (whole.id, whole.tokens, whole.parent)


# ---------------------------------------------------------------------------------------------- who is left alone


def test_what_two_conversations_share_is_not_merged() -> None:
    server = Real()
    system = words(50, 7)
    server.ask(system, max_tokens=0)
    for number in (1, 2):
        server.ask([*system, *words(30, 1000 * number)], max_tokens=5)
    shared = server.scheduler.cache.index.match("", pack(system))
    assert len(shared.views) == 1
    # The first conversation had taken the prefix for its own; the second hangs below the middle of that.
    assert extents(server) == [84, 34]
    job = server.ask([*system, *words(30, 2000), 9])
    assert sum(server.hits(job)) == 80


def test_a_registered_prefix_is_not_merged() -> None:
    server = Real()
    server.scheduler.register_prefix("", "system", pack(words(50, 7)), "", 0.0)
    server.ask(words(50, 7), max_tokens=0)
    server.ask([*words(50, 7), *words(40, 1000)], max_tokens=20)
    assert extents(server) == [50, 59]


def test_rows_of_different_lifetimes_are_kept_apart() -> None:
    server = Real()
    server.ask(words(40, 7), max_tokens=0)
    server.ask([*words(40, 7), *words(40, 1000)], max_tokens=0, ttl=50.0)
    assert extents(server) == [40, 40]
    server.now += 100
    server.step()
    assert extents(server) == [40]


def test_rows_that_are_to_stay_in_memory_get_no_file_by_a_merge() -> None:
    server = Real(disk_bytes=10**6, write_policy="write_through")
    converse(server, 3, volatile=True)
    assert len(extents(server)) == 1
    assert not any(isinstance(move, Store) for step in server.steps for move in step.moves)


def test_a_merged_extent_expires_with_its_last_turn() -> None:
    server = Real(disk_bytes=10**6)
    server.row_seconds = 0.001
    converse(server, 3, ttl=50.0)
    assert len(extents(server)) == 1
    server.now += 49
    server.step()
    assert len(extents(server)) == 1
    server.now += 3
    server.step()
    assert extents(server) == []


def test_a_conversation_keeps_its_name_and_its_pin() -> None:
    server = Real(disk_bytes=10**6)
    text = converse(server, 2, session="s")
    assert server.scheduler.pin_session("", "s", True)
    text = list(server.text(server.ask([*text, *words(40, 5000)], max_tokens=20, session="s")))
    (state,) = server.scheduler.cache.sessions.listing("")
    assert (state.name, state.rows, state.pinned) == ("s", len(text) - 1, True)
    (extent,) = server.scheduler.cache.index.extents.values()
    assert extent.pin_count == 1
    server.restart()
    (state,) = server.scheduler.cache.sessions.listing("")
    assert (state.rows, state.pinned) == (len(text) - 1, True)
    assert server.scheduler.forget_session("", "s")
    assert extents(server) == []


# ----------------------------------------------------------------------------------- what comes while rows are copied


def copying(server: Server, **more: object) -> list[int]:
    """A conversation whose second turn has just ended; its copy is under way."""
    text = converse(server, 1, **more)
    prompt = [*text, *words(40, 9000)]
    job = server.submit(prompt, max_tokens=20, **more)
    server.faults.delay = 10**6
    while job not in server.ends:
        server.step()
    for _ in range(3):
        server.step()
    assert any(isinstance(p.move, Copy) for p in server.executor.pending.values())
    return list(server.text(job))


def test_the_next_turn_may_come_while_rows_are_copied() -> None:
    server = Real(disk_bytes=10**6)
    text = copying(server)
    job = server.submit([*text, *words(30, 20_000)], max_tokens=5)
    server.step()
    for pending in server.executor.pending.values():
        pending.ticks = 0
    server.step()
    assert job not in server.ends
    assert extents(server) == [len(text) - 1, 31]
    server.finish()
    assert sum(server.hits(job)) == len(text) - 1
    assert len(extents(server)) == 1


def hurry(server: Server, moves: Callable[[Move], bool], steps: int = 4) -> None:
    """Let these moves end at once, the others wait."""
    for _ in range(steps):
        for pending in server.executor.pending.values():
            if moves(pending.move):
                pending.ticks = 0
        server.step()


def two_merges(server: Server) -> tuple[int, Copy, Copy]:
    """A conversation whose third turn has ended: the second of two copies under way begins below what the first one replaces."""
    text = copying(server)
    hurry(server, lambda move: not isinstance(move, Copy))
    server.faults.store = 1.0  # the third turn gets no files of its own
    job = server.submit([*text, *words(40, 20_000)], max_tokens=20)
    while job not in server.ends:
        hurry(server, lambda move: not isinstance(move, Copy), 1)
    for _ in range(8):  # until it is given up
        server.now += 100.0
        hurry(server, lambda move: not isinstance(move, Copy))
    server.faults.store = 0.0
    upper, lower = (p.move for p in server.executor.pending.values() if isinstance(p.move, Copy))
    assert isinstance(upper, Copy)
    assert isinstance(lower, Copy)
    return job, upper, lower


def found_after_a_restart(server: Server, job: int) -> bool:
    server.faults.delay = 0
    hurry(server, lambda move: True)
    server.finish()
    text = server.text(job)
    server.restart()
    return server.scheduler.cache.index.match("", pack(text)).rows == len(text) - 1


@pytest.mark.parametrize("write_policy", ["write_back", "write_through"])
@pytest.mark.parametrize("upper_first", [True, False])
def test_of_two_merges_at_a_time_a_restart_finds_both(write_policy: str, upper_first: bool) -> None:
    server = Real(disk_bytes=10**6, write_policy=write_policy)
    job, upper, lower = two_merges(server)
    hurry(server, lambda move: move is (upper if upper_first else lower) or isinstance(move, Store))
    assert found_after_a_restart(server, job)


def test_a_merge_that_was_written_below_what_another_one_has_replaced_is_given_up() -> None:
    server = Real(disk_bytes=10**6, write_policy="write_through")
    job, _, lower = two_merges(server)
    hurry(server, lambda move: move is lower)
    written = [p.move for p in server.executor.pending.values() if isinstance(p.move, Store)]
    hurry(server, lambda move: move not in written)
    assert found_after_a_restart(server, job)


def test_a_fork_that_comes_while_rows_are_copied_ends_the_merge() -> None:
    server = Real()
    text = copying(server)
    job = server.ask([*text[:70], *words(30, 20_000)], max_tokens=5)
    assert sum(server.hits(job)) == 70
    server.finish()
    again = server.ask([*text, 7])
    assert sum(server.hits(again)) == len(text) - 1


@pytest.mark.parametrize("how", ["reset", "session"])
def test_what_is_forgotten_while_it_is_copied_is_gone(how: str) -> None:
    server = Real(disk_bytes=10**6, write_policy="write_through")
    text = copying(server, session="s")
    if how == "reset":
        server.scheduler.reset(server.now)
    else:
        assert server.scheduler.forget_session("", "s")
    server.ask(words(60, 30_000), salt="b")  # others take the slots
    server.finish()
    assert server.scheduler.cache.index.match("", pack(text)).rows == 0
    assert len(server.executor.files) == 1
    server.nothing_left_behind()


@pytest.mark.parametrize("fault", ["store", "host"])
def test_a_merge_that_fails_costs_nothing(fault: str) -> None:
    server = Real(disk_bytes=10**6, **({"host_slots": 8} if fault == "host" else {}))
    if fault == "store":
        server.faults.store = 1.0  # of copies and of files
    text = converse(server, 4)
    server.faults.store = 0.0
    assert sum(server.hits(server.ask([*text, 7]))) == len(text) - 1
    server.nothing_left_behind()


def test_a_replay_takes_the_same_steps() -> None:
    lines: list[str] = []

    class Recorded(Real):
        def make(self) -> Scheduler:
            super().make()
            return RecordingScheduler(self.capacity, SchedulerOptions(**self.settings), lines.append)

    server = Recorded(disk_bytes=10**6, write_policy="write_through")
    converse(server, 4)
    assert copied(server)
    assert [step_digest(step) for step, _ in replay(lines)] == [digest for _, digest in replay(lines)]


# --------------------------------------------------------------------------------------------------------- crashes


@pytest.mark.parametrize("write_policy", ["write_back", "write_through"])
def test_after_a_crash_at_any_step_no_row_that_had_a_file_is_gone(write_policy: str) -> None:
    """After each step: what a new process would find on disk. The old files go when the new one is written, not before."""
    server = Real(disk_bytes=10**6, write_policy=write_policy)
    text = converse(server, 2)
    flush(server)
    doors.end_flush(server.scheduler)
    known = 0
    server.faults.delay = 2
    job = server.submit([*text, *words(40, 9000)], max_tokens=20)
    seen = set()
    for _ in range(200):
        server.step()
        files = frozenset(server.executor.files)
        if files not in seen:
            seen.add(files)
            after = Lasting(disk_bytes=10**6)
            after.capacity = server.capacity
            after.scheduler = Scheduler(server.capacity, SchedulerOptions(digest="m"))
            after.scheduler.restore(list(server.executor.catalog.values()), server.now)
            after.scheduler.check()
            rows = after.scheduler.cache.index.match("", pack(server.text(job))).rows
            assert rows >= max(known, len(text) - 1)
            known = rows
    assert len(seen) > 2
    assert known == len(server.text(job)) - 1
    assert len(server.executor.files) == 1


def test_old_files_go_after_the_new_one_is_written() -> None:
    server = Real(disk_bytes=10**6, write_policy="write_through")
    converse(server, 6)
    written: list[ExtentRecord] = []
    drops = 0
    for step in server.steps:
        for move in step.moves:
            if isinstance(move, Drop):
                (tokens,) = [record.tokens for record in written if record.id == move.extent]
                assert any(tokens in record.tokens and len(record.tokens) > len(tokens) for record in written)
                drops += 1
            elif isinstance(move, Store):
                written.append(move.record)
    assert drops > 10
