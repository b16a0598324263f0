"""The budget of a shared store, kept through a directory: one server counts for all, and whatever the directory does, the budget holds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from afterglow.plan.prefix.published import Published
from afterglow.plan.retention import shared_room
from afterglow.store.shared import budget, directory
from afterglow.store.shared.budget import Budget
from afterglow.store.shared.counters import SharedCounters
from afterglow.store.shared.directory import DirectoryObjects
from afterglow.store.shared.extent_publisher import ExtentPublisher, Publication
from afterglow.store.shared.lease import Lease
from afterglow.store.shared.ledger import LEADS_S
from afterglow.store.shared.paths import Paths
from afterglow.store.shared.remote import Remote
from tests.store.bucket import Bucket
from tests.store.redis_server import RedisServer
from tests.store.test_directory import MODEL, TAG, named_bucket
from tests.waiting import wait_for

SIZE, BYTES = 3200, 100
PATHS = Paths(MODEL)
LEASE = f"afterglow:lease:{TAG}/budget:{MODEL}"


class Writer:
    """A server that writes extents of 100 bytes; `counts`: listings of all objects that it made."""

    def __init__(self, bucket: Bucket, url: str) -> None:
        self.counters = SharedCounters()
        self._objects = DirectoryObjects(bucket, url, self.counters)
        self.remote = Remote(lambda: self._objects)
        self.budget = Budget(self.remote, PATHS, SIZE, self.counters)
        self.counts = 0
        self.counting: Callable[[], object] = lambda: None  # is called with each
        self._list = self._objects.list
        self._objects.list = self._listed  # type: ignore[method-assign]
        self._objects.identify()
        self.remote.call("opening", lambda objects: objects.put("opened", b"", replace=True), 5)

    def _listed(self, prefix: str) -> Iterator[list[object]]:
        if prefix == PATHS.extents:
            self.counts += 1
            self.counting()
        return self._list(prefix)  # type: ignore[return-value]

    def write(self, *numbers: int) -> int:
        """Write extents for which there is room; returns how many."""
        return sum(self._write(number) for number in numbers)

    def _write(self, number: int) -> bool:
        if not self.budget.make_room(BYTES):
            return False
        name = f"{number:040x}"
        for path, data in ((PATHS.extent(name), bytes(BYTES)), (PATHS.kid("12" * 20, Published(name, 0, 64)), b"")):
            self.remote.call("writing", lambda objects, p=path, d=data: objects.put(p, d), 5)  # type: ignore[misc]
        self.budget.wrote(BYTES)
        return True


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "CALL_S", 5.0)
    monkeypatch.setattr(directory, "LATE_S", 50.0)
    monkeypatch.setattr(budget, "POLL_S", 0.02)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    found = RedisServer(tmp_path)
    yield found
    found.kill()


@pytest.fixture
def bucket() -> Bucket:
    return named_bucket()


@pytest.fixture
def two(server: RedisServer, bucket: Bucket) -> Iterator[list[Writer]]:
    found = [Writer(bucket, server.url) for _ in range(2)]
    yield found
    for each in found:
        each.remote.close()


def there(bucket: Bucket) -> set[int]:
    return {int(path[-52:].split(".")[0], 16) for path in [*bucket.objects] if path.startswith(PATHS.extents)}


def test_one_counts_for_all(two: list[Writer], bucket: Bucket) -> None:
    a, b = two
    assert a.write(0) == b.write(1) == 1
    assert (a.counts, b.counts) == (1, 0), "the other goes by that"
    assert b.write(2) == 1
    assert (a.counts, b.counts, b.budget.used) == (1, 0, 300)
    assert a.write(3) == 1
    assert (a.counts, b.counts) == (2, 0), "both have written more than a sixteenth of the budget"
    assert b.budget.make_room(BYTES)
    assert (b.counts, b.budget.used) == (0, 400)


def test_the_budget_holds_and_the_last_used_stay(two: list[Writer], bucket: Bucket) -> None:
    for number in range(60):
        assert two[number % 2].write(number) == 1
        assert len(there(bucket)) * BYTES <= SIZE
    assert there(bucket) == {*range(60 - len(there(bucket)), 60)}
    assert len(there(bucket)) * BYTES > shared_room.LOW * SIZE - 3 * BYTES


def test_one_that_finds_no_room_waits_for_the_leader(two: list[Writer], server: RedisServer, bucket: Bucket) -> None:
    a, b = two
    assert a.write(*range(32)) == 32
    with server.client as client:
        lease = Lease(client, f"{TAG}/budget:{MODEL}", LEADS_S)
        assert lease.take()
        done: list[int] = []
        waiting = threading.Thread(target=lambda: done.append(b.write(100)))
        waiting.start()
        time.sleep(0.1)
        assert waiting.is_alive()
        assert len(there(bucket)) == 32, "nothing is removed by another"
        assert 0 < client.pttl(LEASE) <= 1000 * LEADS_S
        client.pexpire(LEASE, 1)  # the leader was killed
        waiting.join(20)
    assert done == [1]
    assert 100 in there(bucket)
    assert client.get(LEASE) is None, "it is given back"


def test_a_leader_that_has_lost_its_lease_removes_nothing(
    two: list[Writer], server: RedisServer, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _ = two
    assert a.write(*range(32)) == 32
    monkeypatch.setattr(budget, "WAIT_S", 0.0)
    with server.client as client:
        a.counting = lambda: client.set(LEASE, "another")
        assert a.write(100) == 0
        assert len(there(bucket)) == 32
        assert client.get(LEASE) == "another"


def test_while_another_counts_for_the_first_time_little_is_written(
    two: list[Writer], bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader whose listing hangs keeps its lease; the others would else publish without bound."""
    monkeypatch.setattr(budget, "WAIT_S", 0.0)  # 60 waits are over long before the listing's
    a, b = two
    goes_on = threading.Event()
    a.counting = lambda: goes_on.wait(20)
    leading = threading.Thread(target=lambda: a.write(100))
    leading.start()
    try:
        wait_for(lambda: a.counts)
        assert b.write(*range(60)) <= SIZE // shared_room.PARTS // BYTES + 1
    finally:
        goes_on.set()
        leading.join(20)
    assert b.write(60) == 1


def test_whatever_the_directory_does_the_budget_holds(
    two: list[Writer], server: RedisServer, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "REST_S", 0.05)
    a, b = two
    assert a.write(*range(20)) == 20
    server.kill()
    counts = a.counts + b.counts
    assert a.write(*range(20, 40)) == b.write(*range(40, 45)) + 15 == 20
    assert a.counts + b.counts > counts, "each counts for itself"
    assert len(there(bucket)) * BYTES <= SIZE * 18 / 16
    server.start()
    time.sleep(0.06)
    assert b.write(*range(50, 70)) == 20
    assert len(there(bucket)) * BYTES <= SIZE
    with server.client as client:
        wait_for(lambda: client.exists(f"afterglow:used:{TAG}/{MODEL}"))
        client.flushall()
        assert a.write(*range(70, 90)) == 20
        assert len(there(bucket)) * BYTES <= SIZE
        client.set(f"afterglow:used:{TAG}/{MODEL}", "no hash")
        assert b.write(*range(90, 110)) == 20
    assert len(there(bucket)) * BYTES <= SIZE * 18 / 16


@pytest.mark.parametrize(
    "damage",
    [
        {"there": "nan"},
        {"there": "x"},
        {"at": "inf"},
        {"written": "1e999"},
        {"before": "-1"},
        {"written": "\x00"},
        {"there": ""},
    ],
    ids=str,
)
def test_damaged_bytes_are_counted_again(
    two: list[Writer], server: RedisServer, bucket: Bucket, damage: dict[str, str]
) -> None:
    a, b = two
    assert a.write(*range(10)) == 10
    key, counts = f"afterglow:used:{TAG}/{MODEL}", a.counts
    with server.client as client:
        client.hset(key, mapping=damage)
        assert b.write(11) == 1
        assert b.counts == 1
        assert b.budget.used == 1100
        assert a.write(12) == 1
        assert (a.counts, a.budget.used) == (counts, 1200)
        assert b.counters.snapshot().directory_failures == 1


def test_a_server_with_an_old_snapshot_is_not_believed(
    two: list[Writer], server: RedisServer, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "REST_S", 0.05)
    a, b = two
    assert a.write(*range(10)) == 10
    with server.client as client:
        client.save()
    assert a.write(*range(10, 32)) == 22
    server.kill()
    server.start()
    time.sleep(0.06)
    assert b.write(32) == 1
    assert len(there(bucket)) * BYTES <= shared_room.LOW * SIZE + BYTES
    assert b.budget.used == len(there(bucket)) * BYTES


def test_what_a_client_deletes_does_not_wait_for_room(
    two: list[Writer], server: RedisServer, bucket: Bucket, tmp_path: Path
) -> None:
    """The store is full, and another server, which is slow, makes room: each publication waits for it."""
    a, b = two
    assert a.write(*range(32)) == 32
    file = tmp_path / "file"
    file.write_bytes(bytes(BYTES))
    publisher = ExtentPublisher(b.remote, PATHS, b.budget, b.counters)
    with server.client as client:
        assert Lease(client, f"{TAG}/budget:{MODEL}", LEADS_S).take()
        for number in range(100, 104):
            publisher.publish(Publication(Published(f"{number:040x}", 0, 64), "12" * 20, file))
        wait_for(lambda: publisher.pending == 4 and b.budget.used == SIZE)
        publisher.delete(f"{3:040x}")
        publisher.delete(f"{5:040x}", first=False)
        publisher.delete(f"{100:040x}")  # which waits for room itself
        wait_for(lambda: 3 not in there(bucket))
        assert publisher.pending == 4 + 2 + 1
        assert 5 in there(bucket)
        client.delete(LEASE)
        assert publisher.rest(20)
    assert {101, 102, 103} <= there(bucket)
    assert not {3, 5, 100} & there(bucket)
    publisher.close(0)
