"""Two engines over one store and a directory (a real Redis server): the same rows are found, whatever the directory does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from afterglow.config import CacheConfig
from afterglow.errors import ConfigError
from afterglow.store.shared import directory
from afterglow.store.shared.counters import SharedStats
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


@pytest.fixture
def two(start: Start, model_of: Callable[[str], Path], tmp_path: Path, server: RedisServer) -> list[Handle]:
    cluster = Cluster(start, model_of("llama"), tmp_path)
    found = [cluster.engine(name, shared_directory=server.url) for name in "ab"]
    for seed, handle in enumerate(found):
        handle.ask(rows_of(900 + seed, 70))  # the lookup that has the listings copied
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


def test_it_may_be_killed_restarted_and_stopped_at_any_time(
    two: list[Handle], server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "REST_S", 0.2)
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
    assert all(stats(each).directory_failures > 0 for each in two)
    assert all(failures(each) == {} for each in two), "those of the object store"


def test_a_directory_that_lies_costs_time_alone(two: list[Handle], server: RedisServer) -> None:
    a, b = two
    mine, others = rows_of(500, 200), rows_of(600, 200)
    for prompt in (mine, others):
        a.ask(prompt)
    published(a)
    with server.client as client:
        keys = client.keys("afterglow:*/kids/*")
        names = {name for key in keys for name in client.zrange(key, 0, -1)}
        assert len(keys) >= 4
        for key in keys:  # every name under every key but its own
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
