"""Registered prefixes: who finds them, that they stay in every tier and over restarts, that budgets hold, and that
truncation leaves them alone."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from afterglow.errors import RequestError
from afterglow.plan.journal.replaying import RecordingScheduler, replay
from afterglow.plan.journal.step_digest import step_digest
from afterglow.plan.options import SchedulerOptions
from afterglow.plan.prefix.shared_prefixes import OPERATOR
from afterglow.plan.retention.registered import MAX_PREFIXES
from afterglow.plan.step import Copy, Store
from tests.plan.fake_executor import pack
from tests.plan.lasting_kit import Lasting
from tests.plan.prefix_kit import PROMPTS, Prompting, prompted
from tests.plan.server_kit import words

PROMPT = words(22, 1000)  # two extents of 16 and 6 rows, in blocks of 4


@pytest.fixture(autouse=True)
def _whose_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with prompted(monkeypatch):
        yield


def move_to(server: Prompting, where: str) -> None:
    {"device": server.finish, "host": server.to_host, "disk": server.to_disk, "restarted": server.restart}[where]()


# --------------------------------------------------------------------------------------------- who finds what


@pytest.mark.parametrize("where", ["device", "host", "disk", "restarted"])
def test_all_tenants_find_the_operators_prefix_and_nothing_else_of_each_other(where: str) -> None:
    server = Prompting()
    server.register(PROMPT)
    for salt in ("a", "b", ""):
        assert server.cached([*PROMPT, *words(20)], salt) == len(PROMPT)
        move_to(server, where)
    for salt in ("a", "b", ""):
        assert server.cached([*PROMPT, *words(20)], salt) == len(PROMPT) + 19
        assert server.cached([*PROMPT, *words(5), 7, 8], salt) == len(PROMPT) + 5


def test_its_rows_are_stored_once() -> None:
    server = Prompting(write_policy="write_through")
    server.register(PROMPT)
    for salt in ("a", "b", "c"):
        server.ask([*PROMPT, *words(10)], salt=salt)
    salts = [record.salt for record in server.executor.catalog.values() for _ in range(record.rows)]
    assert salts.count(OPERATOR) == len(PROMPT)
    assert salts.count("a") == salts.count("b") == 10


@pytest.mark.parametrize("rows", [1, 8, 16, 21])
def test_a_part_of_it_is_nobodys_hit_or_it_could_be_guessed_token_by_token(rows: int) -> None:
    server = Prompting()
    server.register(PROMPT)
    assert server.cached([*PROMPT[:rows], *words(20)], "a") == 0
    assert server.cached(PROMPT, "b") == 0  # its last token would be computed anyway


def test_a_tenants_prefix_is_the_tenants() -> None:
    server = Prompting()
    server.register(PROMPT, "a")
    assert server.cached([*PROMPT, *words(9)], "a") == len(PROMPT)
    assert server.cached([*PROMPT, *words(9)], "b") == 0
    assert server.cached([*PROMPT, *words(9)]) == 0


def test_a_tenants_prefix_goes_on_from_the_operators() -> None:
    server = Prompting()
    server.register(PROMPT)
    job = server.register([*PROMPT, *words(10)], "a")
    assert sum(server.hits(job)) == len(PROMPT)
    assert server.cached([*PROMPT, *words(10), 5], "a") == len(PROMPT) + 10
    assert server.cached([*PROMPT, *words(10), 5], "b") == len(PROMPT)
    server.restart()
    assert server.cached([*PROMPT, *words(10), 6], "a") == len(PROMPT) + 10


def test_of_two_that_fit_the_longer_one_counts() -> None:
    server = Prompting()
    server.register(PROMPT, name="short")
    job = server.register([*PROMPT, *words(8, 2000)], name="long")
    assert sum(server.hits(job)) == len(PROMPT)
    assert server.cached([*PROMPT, *words(8, 2000), 1], "a") == len(PROMPT) + 8
    assert server.cached([*PROMPT, *words(7, 2000), 1], "b") == len(PROMPT)


def test_jobs_of_two_tenants_read_it_together_and_nothing_else() -> None:
    long = words(80, 1000)
    server = Prompting(relay=True, block=16, device_rows=2000)
    server.register(long)
    prompts = [([*long, *words(70), 1], "a"), ([*long, *words(70), 2], "a"), ([*long, *words(70), 3], "b")]
    jobs = [server.submit(prompt, 20, salt=salt) for prompt, salt in prompts]
    server.finish()
    shares = [share for step in server.steps for share in step.shares if len(step.runs) == 3]
    assert {(share.jobs, share.start, share.stop) for share in shares} == {
        (tuple(jobs), 0, 80),
        (tuple(jobs[:2]), 80, 150),
    }


def test_what_was_cached_before_it_was_registered_is_computed_once_more_and_found_then() -> None:
    server = Prompting()
    server.ask([*PROMPT, *words(9)], salt="a")
    server.register(PROMPT)
    assert server.cached([*PROMPT, *words(9)], "a") == len(PROMPT)
    assert server.cached([*PROMPT, *words(9)], "a") == len(PROMPT) + 8


def test_a_job_that_runs_while_it_is_registered_harms_nothing() -> None:
    server = Prompting(prefill_chunk=8)
    server.submit([1, 2, 3], 60)  # beside it, prompts come in pieces
    server.step()
    PROMPTS.append(PROMPT)
    server.scheduler.register_prefix(OPERATOR, "prompt", pack(PROMPT), "", server.now)
    server.submit([*PROMPT, *words(9)], 4, salt="a")
    for _ in range(2):
        server.step()
    server.submit(PROMPT, 0, salt=OPERATOR)
    server.finish()
    assert server.cached([*PROMPT, *words(9), 5], "a") >= len(PROMPT)


# ---------------------------------------------------------------------------------------------- that it stays


def crowd(server: Prompting, count: int = 30) -> None:
    for number in range(count):
        server.ask(words(30, 10_000 + 100 * number), 5, salt="ab"[number % 2])


@pytest.mark.parametrize("disk_bytes", [0, 1500, 5000])
@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu", "lookahead"])
def test_no_eviction_takes_it(policy: str, disk_bytes: int) -> None:
    server = Prompting(host_slots=30, disk_bytes=disk_bytes, policy=policy)
    server.register(PROMPT)
    crowd(server)
    state = server.state()
    assert state.host == len(PROMPT)
    assert state.disk == (len(PROMPT) if disk_bytes else 0)
    assert server.cached([*PROMPT, *words(9)], "c") == len(PROMPT)
    assert server.scheduler.stats().counters.evicted > 0


def test_it_is_written_at_once_so_that_a_killed_process_leaves_it() -> None:
    server = Prompting(write_policy="write_back")
    server.register(PROMPT)
    assert sorted(record.rows for record in server.executor.catalog.values()) == [6, 16]


def test_a_restart_loads_it_and_computes_one_token() -> None:
    server = Prompting()
    server.register(PROMPT)
    server.restart()
    assert server.state().rows == len(PROMPT)
    assert server.state().about == "about it"
    crowd(server)  # it is kept before a request asks for it
    job = server.register(PROMPT)
    assert server.computed(job) == 1
    assert server.state().disk == len(PROMPT)


def test_it_outlives_its_time_to_live_and_conversations_that_are_deleted() -> None:
    server = Prompting(ttl=10.0)
    server.register(PROMPT)
    server.ask([*PROMPT, *words(9)], salt="a", session="talk", ttl=5.0)
    assert server.scheduler.forget_session("a", "talk")
    server.finish()
    server.sleep(server.now + 1000)
    assert server.cached([*PROMPT, *words(9)], "a") == len(PROMPT)


def test_resetting_leaves_it_and_deleting_lets_it_go() -> None:
    server = Prompting()
    server.register(PROMPT)
    server.ask([*PROMPT, *words(9)], salt="a")
    server.scheduler.reset(server.now)
    server.finish()
    assert server.cached([*PROMPT, *words(9)], "a") == len(PROMPT)
    assert server.scheduler.forget_prefix(OPERATOR, "prompt")
    assert not server.scheduler.forget_prefix(OPERATOR, "prompt")
    server.nothing_left_behind()
    assert server.is_empty()


def test_after_a_change_the_old_one_and_what_hung_below_it_are_found_by_nobody_and_go() -> None:
    server = Prompting(host_slots=30, disk_bytes=3000)
    server.register(PROMPT)
    server.ask([*PROMPT, *words(9)], salt="a")
    server.restart()
    new = words(22, 2000)
    server.register(new)
    assert server.cached([*PROMPT, *words(9)], "a") == 0
    assert server.cached([*new, *words(9)], "a") == len(new)
    crowd(server, 60)
    old = {pack(PROMPT[:16]), pack(PROMPT[16:])}
    assert not any(e.tokens in old and e.salt == OPERATOR for e in server.scheduler.cache.index.extents.values())
    assert server.cached([*new, 5, 6], "b") == len(new)


def test_what_is_damaged_on_disk_is_computed_by_whoever_needs_it_and_kept_again() -> None:
    server = Prompting()
    server.register(PROMPT)
    server.restart()
    server.executor.damaged |= {r.id for r in server.executor.catalog.values() if r.rows == 6}
    first = server.ask([*PROMPT, *words(9)], salt="a")
    assert sum(server.hits(first)) == 16
    assert server.state().host == server.state().disk == len(PROMPT)
    assert server.cached([*PROMPT, *words(9)], "b") == len(PROMPT)
    assert server.cached([*PROMPT, *words(9), 4], "a") == len(PROMPT) + 9


def test_without_its_rows_a_restart_remembers_what_was_said_about_it() -> None:
    server = Prompting()
    server.register(PROMPT, "a")
    server.flush()
    server.executor.files.clear()
    server.executor.catalog.clear()
    server.restart()
    assert (server.state("a").rows, server.state("a").about) == (0, "about it")
    server.register(PROMPT, "a")
    assert server.state("a").host == len(PROMPT)


# ----------------------------------------------------------------------------------------------- on the device


def test_where_there_is_room_beside_the_longest_context_it_stays_on_the_device() -> None:
    server = Prompting(device_rows=200, max_model_len=100)
    server.register(PROMPT)
    crowd(server)
    assert server.state().device == len(PROMPT)
    assert server.hits(server.ask([*PROMPT, *words(70)], salt="a")) == (len(PROMPT), 0, 0)
    server.ask(words(95), 5, salt="b")  # the longest context
    assert server.state().device == len(PROMPT)


def test_where_there_is_not_it_comes_from_host_and_nobody_waits_for_ever() -> None:
    server = Prompting(device_rows=100, max_model_len=100)
    server.register(PROMPT)
    server.ask(words(95), 5, salt="b")
    crowd(server)
    assert server.hits(server.ask([*PROMPT, *words(70)], salt="a")) == (0, len(PROMPT), 0)


def test_of_contexts_that_are_no_more_kept_the_device_frees_itself() -> None:
    server = Prompting(device_rows=200, max_model_len=100)
    server.register(PROMPT)
    server.scheduler.forget_prefix(OPERATOR, "prompt")
    crowd(server)
    assert server.scheduler.cache.device.contexts
    assert not any(context.salt == OPERATOR for context in server.scheduler.cache.device.contexts.values())


# ------------------------------------------------------------------------------------------------------ budgets


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"host_slots": 10}, "--host-cache"),
        ({"disk_bytes": 900}, "--disk-cache"),
        ({"tenant_quota": 900}, "--tenant-quota"),
    ],
)
def test_one_that_is_too_large_is_refused_by_name(settings: dict[str, int], named: str) -> None:
    server = Prompting(**settings)
    with pytest.raises(RequestError, match=f"22 tokens.*{named}"):
        server.register(PROMPT, "a")
    assert "a" not in server.scheduler.cache.registered.listing()
    server.register(PROMPT[:12], "a")
    with pytest.raises(RequestError, match=named):
        server.register(words(16, 3000), "a", name="another")


def test_the_operators_is_on_nobodys_quota() -> None:
    server = Prompting(tenant_quota=400)
    server.register(PROMPT)
    assert server.cached([*PROMPT, *words(9)], "a") == len(PROMPT)
    assert server.cached([*PROMPT, *words(9)], "a") == len(PROMPT) + 8


def test_so_many_and_no_more() -> None:
    server = Prompting()
    for number in range(MAX_PREFIXES):
        server.register(words(5, 3000 + 10 * number), "a", name=str(number))
    with pytest.raises(RequestError, match=f"{MAX_PREFIXES} prefixes"):
        server.register(words(5), "a", name="one more")
    server.register(words(6, 3000), "a", name="0")  # in place of another
    server.register(words(5), "b")


def test_after_a_restart_with_less_room_it_is_not_kept_and_refused() -> None:
    server = Prompting()
    server.register(PROMPT)
    server.restart(disk_bytes=900)
    assert server.state().rows == 0
    with pytest.raises(RequestError, match="--disk-cache"):
        server.register(PROMPT)
    crowd(server)


# --------------------------------------------------------------------------------------------------- truncation


def talk(turns: int) -> list[int]:
    return [*PROMPT, *words(12 * turns, 5000)]


@pytest.mark.parametrize("policy", ["oldest", "oldest_tokens", "sinks_and_recent"])
@pytest.mark.parametrize("salt", [OPERATOR, "a"])
def test_truncation_leaves_it_and_does_not_copy_it(policy: str, salt: str) -> None:
    server = Prompting(max_model_len=64, truncation_policy=policy, truncation_ratio=0.2)
    server.register(PROMPT, salt)
    marks = (10, *(len(PROMPT) + 12 * n for n in range(1, 8)))  # the first one is wrong: nothing of the prompt may go
    long = talk(1)
    for turn in range(1, 6):
        long = talk(turn)
        rows = len(long)
        job = server.ask(long, 2, salt="a", truncation=True, turns=tuple(m for m in marks if m < rows))
        assert server.specs[job].prompt.startswith(pack(PROMPT))
        if turn > 1:
            assert sum(server.hits(job)) >= len(PROMPT)
    assert server.scheduler.stats().counters.truncations > 0
    copied = [move for step in server.steps for move in step.moves if isinstance(move, Copy)]
    stored = [e for e in server.scheduler.cache.index.extents.values() if e.kind == "session"]
    assert copied
    assert stored
    assert all(extent.first_row >= len(PROMPT) for extent in stored)
    server.restart()
    job = server.ask([*long, 1, 2], 1, salt="a", truncation=True, turns=tuple(m for m in marks if m < len(long)))
    assert sum(server.hits(job)) > len(PROMPT)


def test_a_list_of_tokens_cannot_discard_it() -> None:
    server = Prompting()
    server.register(PROMPT)
    server.ask(talk(2), salt="a")
    with pytest.raises(RequestError):
        server.submit(talk(2), salt="a", truncation=True, discard=((5, 30),))
    server.submit(talk(2), salt="a", truncation=True, discard=((len(PROMPT), 30),))
    server.finish()


# ------------------------------------------------------------------------------------------------- altogether


def test_a_journal_has_what_was_registered() -> None:
    lines: list[str] = []

    class Journaled(Prompting):
        def make(self) -> RecordingScheduler:
            return RecordingScheduler(self.capacity, SchedulerOptions(**self.settings), lines.append)

    server = Journaled(relay=True)
    server.register(PROMPT)
    server.ask([*PROMPT, *words(9)], 3, salt="a")
    server.scheduler.forget_prefix(OPERATOR, "prompt")
    server.ask([*PROMPT, *words(9)], 3, salt="a")
    replayed = list(replay(lines))
    assert len(replayed) == len(server.steps)
    assert all(step_digest(step) == recorded for step, recorded in replayed)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_every_row_is_the_right_one(seed: int) -> None:
    """The executor checks each row that a job gets against whose it should be."""
    rng = random.Random(seed)
    server = Prompting(
        host_slots=rng.choice((40, 120)),
        disk_bytes=rng.choice((0, 4000, 100_000)),
        device_rows=rng.choice((150, 400)),
        max_model_len=120,
        policy=rng.choice(("lru", "lookahead")),
        prefill_chunk=rng.choice((0, 8, 64)),
        tenant_quota=rng.choice((None, 6000)),
        relay=True,
    )
    prompts = [PROMPT, [*PROMPT, *words(5, 2000)], words(17, 3000)]
    for number, prompt in enumerate(prompts[: rng.randint(1, 3)]):
        server.register(prompt, name=str(number))
    if rng.random() < 0.5:
        server.register(words(13, 4000), "a")
        prompts.append(words(13, 4000))
    server.faults.load = server.faults.store = server.faults.save = rng.choice((0.0, 0.1))
    server.faults.delay = rng.randint(0, 3)
    texts = {salt: [list(prompt) for prompt in prompts] for salt in ("a", "b")}
    for _ in range(40):
        salt = rng.choice("ab")
        text = rng.choice(texts[salt])
        job = server.submit([*text, *words(rng.randint(1, 12), 100 * rng.randint(1, 3))], rng.randint(0, 4), salt=salt)
        for _ in range(rng.randint(0, 6)):
            server.step()
        if rng.random() < 0.1:
            server.cancel(job)
        if rng.random() < 0.1:
            server.finish()
            texts[salt].append(server.text(job)[:60])
        if rng.random() < 0.05 and server.capacity.disk_bytes:
            server.faults.load = server.faults.store = server.faults.save = 0.0
            server.restart()
    server.faults.load = server.faults.store = server.faults.save = 0.0
    server.finish()
    for prompt in prompts[:1]:
        server.ask([*prompt, 9], salt="b")
        assert server.cached([*prompt, 8], "b") == len(prompt)


def test_without_any_nothing_has_changed() -> None:
    server = Lasting(disk_bytes=100_000, source="load")
    server.ask(words(40), salt="a")
    assert server.hits(server.ask(words(40), salt="b")) == (0, 0, 0)
    assert server.scheduler.cache.registered.listing() == {}
    assert not any(isinstance(move, Store) for step in server.steps for move in step.moves)
