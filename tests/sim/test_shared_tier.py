"""The simulated shared store: it keeps, removes and finds what the real one does."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import pytest

from afterglow.plan.prefix.published import Published, listed_under
from afterglow.plan.retention.shared_room import LOW, PARTS, SharedRoom
from afterglow.plan.step import ExtentId, ExtentRecord
from afterglow.sim.cluster.shared_tier import SharedTier
from afterglow.store.shared.budget import Budget
from afterglow.store.shared.counters import SharedCounters
from afterglow.store.shared.objects import Listed
from afterglow.store.shared.paths import Paths, extent_of
from afterglow.store.shared.remote import Remote

A, B, C = b"aaaa" * 10, b"bbbb" * 10, b"cccc" * 10


def record(name: str, tokens: bytes, size: int = 100, expires: float | None = None) -> ExtentRecord:
    found = ExtentRecord(name, None, 0, "", "exact", tokens, size, 0.0)
    return found if expires is None else ExtentRecord(name, None, 0, "", "exact", tokens, size, 0.0, expires=expires)


def found(store: SharedTier, tokens: bytes, now: float, known: int = 0) -> list[ExtentId]:
    return [each.published.id for each in store.find("", tokens, known, (), now)]


def test_what_is_on_its_way_is_not_found() -> None:
    store, room = SharedTier(1000), SharedRoom(1000)
    store.publish(record("a", A), b"", 1.0, room)
    store.publish(record("below a", B), A, 2.0, room)
    assert found(store, A + B, 0.5) == []
    assert found(store, A + B, 1.0) == ["a"]
    assert found(store, A + B, 2.0) == ["a", "below a"]
    assert found(store, A + B, 2.0, known=10) == ["below a"]
    assert found(store, A[:20] + C, 2.0) == ["a"], "a prompt may follow a part"


def test_rows_that_two_engines_cut_differently_are_there_twice() -> None:
    store, one, other = SharedTier(1000), SharedRoom(1000), SharedRoom(1000)
    store.publish(record("a", A), b"", 1.0, one)
    store.publish(record("below a", B), A, 1.0, one)
    store.publish(record("both", A + B, 150), b"", 2.0, other)
    assert found(store, A + B, 3.0) == ["both"], "the longest that ends within the prompt"
    assert store.used == 350
    store.publish(record("both", A + B, 150), b"", 4.0, one)
    assert found(store, A + B, 4.0) == ["both"]
    assert store.used == 350, "an object is written once"


def test_a_merged_extent_goes_in_place_of_its_parts() -> None:
    store, room = SharedTier(1000), SharedRoom(1000)
    store.publish(record("a", A), b"", 1.0, room)
    store.publish(record("below a", B), A, 1.0, room)
    store.publish(record("both", A + B, 150), b"", 2.0, room)
    for part in ("a", "below a"):
        store.replace(part, 2.0)
    assert found(store, A + B, 2.0) == ["both"]
    assert found(store, A + C, 2.0) == ["both"]
    assert store.used == 150


def test_an_extent_is_listed_where_it_leaves_its_engines_tree() -> None:
    store, room = SharedTier(1000), SharedRoom(1000)
    store.publish(record("a", A), b"", 1.0, room)
    store.publish(record("branch", A[:20] + C), b"", 1.0, room, fork=5)
    assert found(store, A[:20] + C, 2.0) == ["a", "branch"]


def test_the_least_recently_used_go_first_and_nothing_that_was_promised() -> None:
    store, room = SharedTier(300), SharedRoom(300)
    for at, (name, tokens) in enumerate((("a", A), ("b", B), ("c", C))):
        store.publish(record(name, tokens), b"", float(at), room)
    (b,) = store.find("", B, 0, (), 10.0)
    store.use(b, 10.0)
    store.promise("a")
    store.publish(record("d", b"dddd"), b"", 20.0, room)
    assert found(store, b"dddd", 20.0) == ["d"]
    assert [store.knows(name) for name in "abcd"] == [True, False, False, True], "down to nine tenths, as far as may be"
    store.release("a")
    store.publish(record("a", A), b"", 30.0, room)
    store.publish(record("e", b"eeee"), b"", 40.0, room)
    store.publish(record("f", b"ffff"), b"", 50.0, room)
    found(store, A, 60.0)
    assert [store.knows(name) for name in "adef"] == [False, False, True, True], "one that is published again is used"
    assert store.evicted == 4


def test_what_has_expired_is_not_found_and_goes_with_the_next_count() -> None:
    store, room = SharedTier(1600), SharedRoom(1600)
    store.publish(record("a", A, expires=10.0), b"", 0.0, room)
    store.publish(record("b", B), b"", 0.0, room)
    assert found(store, A, 9.0) == ["a"]
    assert found(store, A, 10.0) == []
    assert store.used == 200
    store.publish(record("c", C), b"", 11.0, room)
    assert found(store, C, 11.0) == ["c"]
    assert not store.knows("a")
    assert store.used == 200


class _Bucket:
    """Objects with their sizes and the times at which they were written, one after another."""

    def __init__(self) -> None:
        self.there: dict[str, tuple[int, float]] = {}
        self.writes = 0.0

    def put(self, path: str, data: bytes, *, replace: bool = False) -> bool:
        if path in self.there and not replace:
            return False
        self.writes += 1.0
        self.there[path] = (
            len(data),
            2e9 + self.writes,
        )  # not long ago for any clock: none is old for having no counterpart
        return True

    def get(self, path: str, start: int, length: int) -> bytes:
        raise FileNotFoundError(path)

    def list(self, prefix: str) -> Iterator[list[Listed]]:
        yield [Listed(path, size, at) for path, (size, at) in self.there.items() if path.startswith(prefix)]

    def delete(self, path: str) -> None:
        self.there.pop(path, None)


class _Server:
    """What publishes to a bucket as a server's thread does."""

    def __init__(self, bucket: _Bucket, size: int) -> None:
        self.remote = Remote(lambda: bucket)
        self.paths = Paths("model")
        self.budget = Budget(self.remote, self.paths, size, SharedCounters())

    def put(self, path: str, size: int, replace: bool = False) -> bool:
        return self.remote.call("writing", lambda objects: objects.put(path, bytes(size), replace=replace), 5)

    def publish(self, name: ExtentId, prefix: bytes, tokens: bytes, size: int) -> None:
        if not self.budget.make_room(size):
            return
        new = self.put(self.paths.extent(name), size)
        if new:
            self.budget.wrote(size)
        self.put(self.kid(name, prefix, tokens), 0, replace=not new)

    def kid(self, name: ExtentId, prefix: bytes, tokens: bytes) -> str:
        published = Published(name, len(prefix) // 4, len(tokens) // 4)
        return self.paths.kid(listed_under("", prefix + tokens[:4]), published)


@pytest.mark.parametrize("seed", range(3))
def test_servers_and_the_simulator_remove_the_same_extents(seed: int) -> None:
    """Two servers with a budget of their own view each; published once and again, used, and replaced."""
    rng, size = random.Random(seed), 16 * 100 * PARTS // 4
    bucket, tier = _Bucket(), SharedTier(size)
    servers, rooms = [_Server(bucket, size) for _ in range(2)], [SharedRoom(size) for _ in range(2)]
    known: dict[ExtentId, tuple[bytes, bytes, int]] = {}
    most = 0
    for at in range(1, 300):
        which, now = rng.randrange(2), float(at)
        kind = rng.choice(("new", "new", "again", "use", "replace"))
        if kind == "new" or not known:
            above = rng.choice([b"", *(prefix + tokens for prefix, tokens, _ in known.values())])
            name, tokens = f"{at:040x}", at.to_bytes(4, "little") * 5
            known[name] = above, tokens, rng.randrange(50, 400)
            kind = "new"
        else:
            name = rng.choice(sorted(known))
        prefix, tokens, length = known[name]
        path, kid = servers[0].paths.extent(name), servers[0].kid(name, prefix, tokens)
        if kind in ("new", "again"):
            servers[which].publish(name, prefix, tokens, length)
            tier.publish(record(name, tokens, length), prefix, now, rooms[which])
        elif kind == "use" and path in bucket.there:
            servers[which].put(kid, 0, replace=True)
            (each,) = (
                each for each in tier.find("", prefix + tokens, len(prefix) // 4, (), now) if each.published.id == name
            )
            tier.use(each, now)
        elif kind == "replace":
            for gone in (kid, path):
                servers[which].remote.call("deleting", partial(_delete, gone), 5)
            tier.replace(name, now)
        tier.find("", b"", 0, (), now)
        there = {extent_of(each) for each in bucket.there if "/extents/" in each}
        assert there == {name for name in known if tier.knows(name)}, f"after {at} changes"
        assert [server.budget.used for server in servers] == [room.used for room in rooms]
        most = max(most, tier.used)
    assert tier.evicted > 20
    assert LOW * size < most <= size + 2 * (size // PARTS)


def _delete(path: str, objects: object) -> None:
    assert isinstance(objects, _Bucket)
    objects.delete(path)
