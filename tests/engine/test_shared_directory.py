"""Two engines over one store and a directory (a real Redis server): the same rows are found, whatever the directory does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from afterglow.config import CacheConfig
from afterglow.errors import ConfigError
from afterglow.store.shared import directory, shared_store
from afterglow.store.shared.counters import SharedStats
from afterglow.store.shared.directory import DirectoryObjects
from tests.engine.conftest import Handle
from tests.engine.test_shared_tier import Cluster, failures, published, rows_of, same
from tests.store.redis_server import RedisServer
from tests.waiting import wait_for

pytest.importorskip("obstore")

Start = Callable[..., Handle]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    found = RedisServer(tmp_path)
    yield found
    found.kill()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has much to do answers late, which is another test's."""
    monkeypatch.setattr(directory, "CALL_S", 5.0)
    monkeypatch.setattr(directory, "LATE_S", 50.0)
    monkeypatch.setattr(shared_store, "LOOKUP_S", 20.0)


@pytest.fixture
def cluster(start: Start, model_of: Callable[[str], Path], tmp_path: Path) -> Cluster:
    return Cluster(start, model_of("llama"), tmp_path)


@pytest.fixture
def two(cluster: Cluster, server: RedisServer) -> list[Handle]:
    return engines(cluster, server)


def engines(cluster: Cluster, server: RedisServer, **options: object) -> list[Handle]:
    """Start two engines over a directory that has all extents."""
    found = [cluster.engine(name, shared_directory=server.url, **options) for name in "ab"]
    with server.client as client:
        wait_for(lambda: client.keys("afterglow:whole:*"))
    return found


def stats(handle: Handle) -> SharedStats:
    found = handle.engine.stats().shared
    assert found is not None
    return found


def converse(two: list[Handle], seed: int, turns: int = 4, finds_all: bool = True) -> None:
    """Hold a conversation that changes its engine every turn. `finds_all`: nothing but the last row of each reply is computed again."""
    text, previous = rows_of(seed, 150), 0
    for turn in range(turns):
        handle = two[turn % 2]
        done = handle.ask(text, max_tokens=20)
        same(done, handle, text)
        published(handle)
        assert done.cached.total == previous or not turn or not finds_all, turn
        previous = len(text) + len(done.tokens) - 1
        text = [*text, *done.tokens, *rows_of(seed + turn + 1, 70)]


def recovered(two: list[Handle], server: RedisServer) -> None:
    """Wait until both engines go by the directory again, and nothing is being copied."""
    seeds = iter(range(10_000, 20_000))

    def answers(handle: Handle) -> bool:
        before = stats(handle).directory_lookups
        handle.ask(rows_of(next(seeds), 70))
        return stats(handle).directory_lookups > before

    with server.client as client:
        wait_for(lambda: all(answers(each) for each in two) and not client.keys("afterglow:lease:*"))


def test_a_conversation_that_changes_its_engine_is_found_through_the_directory(two: list[Handle]) -> None:
    before = [stats(each).directory_lookups for each in two]
    converse(two, 1)
    for handle, lookups in zip(two, before, strict=True):
        assert stats(handle).directory_lookups > lookups
        assert stats(handle).directory_failures == 0
        assert failures(handle) == {}


def test_a_prompt_is_one_round_trip(two: list[Handle], server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no listing: of a cold prompt, of one of many extents, and of one that goes on in the middle of another."""
    a, b = two
    long = rows_of(800, 100)
    for turn in range(4):
        done = a.ask(long, max_tokens=20)
        published(a)
        long = [*long, *done.tokens, *rows_of(801 + turn, 80)]
    other = rows_of(805, 300)
    a.ask(other, max_tokens=1)
    published(a)
    listings: list[str] = []
    lists = DirectoryObjects.list
    monkeypatch.setattr(DirectoryObjects, "list", lambda *args: listings.append(args[1]) or lists(*args))
    with server.client as client, client.monitor() as monitor:
        sent = (each["command"] for each in monitor.listen() if each["client_type"] != "lua")
        client.ping()
        while next(sent) != "PING":  # what the client says first
            pass
        for prompt, shared in (
            (rows_of(810, 400), 0),
            (long, len(long) - 81),
            ([*other[:200], *rows_of(811, 90)], 200),
        ):
            done = b.ask(prompt)
            assert shared <= done.cached.total <= shared + 3, "a small vocabulary: prompts may begin alike"
            published(b)
            client.ping()
            commands = [*iter(lambda: next(sent), "PING")]
            publishes = (
                "-- KEYS: the extent's  ARGV: prefix, id",
                "afterglow:used:",
                "afterglow:lease:budget:",
                "HELLO",  # its connection's first words; servers before Redis 7.2 do not know the second
                "CLIENT SETINFO",
            )
            others = [each for each in commands if not any(part in each for part in publishes)]
            assert len(others) == 1, others
            assert "-- KEYS: whole" in others[0]
            assert not [each for each in listings if "/kids/" in each]


@pytest.mark.parametrize("same", [2, 130])
def test_a_prompt_that_leaves_another_within_a_block_is_found(two: list[Handle], same: int) -> None:
    """Its own rows hang below the other's, of which no block of 64 tokens tells that both agree, or only the first ones."""
    a, b = two
    other = rows_of(830, 300)
    mine = [*other[:same], (other[same] + 1) % 16, *rows_of(831, 150)]
    for prompt in (other, mine):
        a.ask(prompt, max_tokens=1)
        published(a)
    assert b.ask([*mine, *rows_of(832, 40)]).cached.shared == len(mine)
    assert failures(b) == {}


def test_rows_that_expire_leave_the_directory(cluster: Cluster, server: RedisServer) -> None:
    a, b = engines(cluster, server, ttl=3600.0)
    prompt = rows_of(820, 200)
    with server.client as client:
        a.ask(prompt)
        published(a)
        entries = client.keys("afterglow:*/extent/*")
        assert entries
        for each in entries:
            assert 0 < client.ttl(each) <= 3601
        client.delete(*entries)
    done = b.ask(prompt)
    assert done.cached.shared == 0
    same(done, b, prompt)


def test_it_may_be_killed_restarted_and_stopped_at_any_time(
    cluster: Cluster, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "CALL_S", 0.5)
    monkeypatch.setattr(directory, "REST_S", 0.2)
    two = engines(cluster, server)
    server.kill()
    converse(two, 100, finds_all=False)  # a name that one engine could not write may be missing for the other
    server.start()  # empty
    converse(two, 200, finds_all=False)
    recovered(two, server)
    converse(two, 250)
    server.pause()
    try:
        converse(two, 300, finds_all=False)
    finally:
        server.pause(False)
    recovered(two, server)
    converse(two, 400)
    with server.client as client:
        client.flushall()
    converse(two, 500, finds_all=False)
    recovered(two, server)
    converse(two, 600)
    assert all(stats(each).directory_failures > 0 for each in two)
    assert all(failures(each) == {} for each in two), "those of the object store"


def test_a_directory_that_lies_costs_time_alone(two: list[Handle], server: RedisServer) -> None:
    a, b = two
    mine, others = rows_of(500, 200), rows_of(600, 200)
    for prompt in (mine, others):
        a.ask(prompt)
    published(a)
    with server.client as client:
        keys = client.keys("afterglow:*/block/*")
        names = {name for key in keys for name in client.zrange(key, 0, -1)}
        assert len(keys) >= 6
        for key in keys:  # every extent under every key but its own
            right = set(client.zrange(key, 0, -1))
            client.delete(key)
            client.zadd(key, dict.fromkeys(names - right, 1.0))
    for prompt in (mine, others):
        done = b.ask([*prompt, *rows_of(700, 10)])
        same(done, b, [*prompt, *rows_of(700, 10)])
        assert done.cached.shared == 0


def test_it_needs_a_shared_store_and_a_url() -> None:
    with pytest.raises(ConfigError, match="--shared"):
        CacheConfig(shared_directory="redis://localhost:6379/0")
