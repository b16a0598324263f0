"""A directory belongs to one store and one run of its server; whatever is in the way, what can be copied into it is copied."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from afterglow.plan.prefix.published import Published
from afterglow.store.shared import directory_copy
from afterglow.store.shared.directory_names import STORE_ID
from afterglow.store.shared.lease import LEASE_S, Lease
from afterglow.store.shared.paths import Paths
from tests.store.bucket import Bucket
from tests.store.redis_server import RedisServer
from tests.store.test_directory import (  # noqa: F401
    MODEL,
    ONE,
    STORE,
    TAG,
    TWO,
    Side,
    bucket,
    copies_end,
    named_bucket,
    patience,
    server,
    short_rest,
)
from tests.waiting import wait_for

WHOLE = f"afterglow:whole:{TAG}/{MODEL}"


class BadBucket(Bucket):
    """A bucket some of whose objects cannot be read, or only when `goes_on` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.put(STORE_ID, STORE.encode())
        self.bad: set[str] = set()
        self.reads = 0
        self.goes_on = threading.Event()
        self.goes_on.set()

    def get(self, path: str, start: int, length: int) -> bytes:
        self.reads += 1
        assert self.goes_on.wait(20)
        if path in self.bad:
            raise PermissionError(path)
        return super().get(path, start, length)

    def fill(self, count: int) -> list[str]:
        """Put what lists extents; returns the paths."""
        paths = [Paths(MODEL).kid("12" * 20, Published(f"{number:040x}", 0, 130)) for number in range(count)]
        for path in paths:
            self.put(path, ONE.data)
        return paths


def test_two_stores_with_one_database_never_mix(server: RedisServer, bucket: Bucket) -> None:
    other = named_bucket("ef" * 16)
    bucket.put(ONE.path, ONE.data)
    other.put(TWO.path, TWO.data)
    a, b = Side(bucket, server.url), Side(other, server.url)
    a.know_all()
    assert b.find() is None, "it is not whole because the other is"
    b.know_all()
    assert (a.find(), b.find()) == ({"3": 128}, {"4": 192})
    b.objects.delete(ONE.path)
    assert a.find() == {"3": 128}


def test_a_store_has_one_id_which_its_first_server_writes(server: RedisServer) -> None:
    class Race(Bucket):
        """Another server is first."""

        def put(self, path: str, data: bytes, *, replace: bool = False) -> bool:
            super().put(path, STORE.encode())
            return super().put(path, data, replace=replace)

    for found in (Bucket(), Race()):
        a = Side(found, server.url)
        name = found.objects[STORE_ID].decode()
        b = Side(found, server.url)
        assert found.objects[STORE_ID].decode() == name
        a.know_all()
        with server.client as client:
            assert client.exists(f"afterglow:whole:{{{name}}}/{MODEL}")
        assert b.find() == {}
        a.objects.close()
        b.objects.close()


@pytest.mark.usefixtures("short_rest")
def test_while_the_id_is_not_known_lookups_are_listings(server: RedisServer) -> None:
    found = BadBucket()
    found.put(ONE.path, ONE.data)
    found.goes_on.clear()
    late = Side(found, server.url, identified=False)
    assert late.find() is None
    late.put(TWO)
    found.goes_on.set()
    late.know_all()
    wait_for(lambda: late.find() == {"3": 128, "4": 192})
    found.objects[STORE_ID] = b"garbage"
    bad = Side(found, server.url, identified=False)
    assert bad.find() is None
    wait_for(lambda: bad.counters.snapshot().failures)
    assert bad.find() is None
    assert bad.failures == 0, "it is the store's"


@pytest.mark.usefixtures("short_rest")
def test_one_that_comes_back_from_an_old_snapshot_is_copied_anew(server: RedisServer, bucket: Bucket) -> None:
    a = Side(bucket, server.url)
    a.know_all()
    a.put(ONE)
    with server.client as client:
        client.save()
    a.put(TWO)
    server.kill()
    server.start()
    with server.client as client:
        assert client.exists(WHOLE), "it has the snapshot"
    b = Side(bucket, server.url)
    assert b.find() is None
    b.know_all()
    assert b.find() == {"3": 128, "4": 192}


def test_one_that_evicts_is_told_of_and_copied_anew(
    server: RedisServer,
    bucket: Bucket,
    caplog: pytest.LogCaptureFixture,
) -> None:
    a = Side(bucket, server.url)
    with caplog.at_level(logging.WARNING), server.client as client:
        a.know_all()
        assert caplog.text == ""
        a.put(ONE)
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("maxmemory", 1)
        wait_for(lambda: client.dbsize() == 0)  # a call evicts for half a millisecond at most
        client.config_set("maxmemory", 1 << 30)
        a.know_all()
        assert caplog.text.count("maxmemory-policy allkeys-lru") == 1
        blocks = client.keys(f"afterglow:{TAG}/{MODEL}/block/*")
        client.delete(*blocks)
        assert a.find() == {}
        client.set(WHOLE, client.get(WHOLE).split()[0] + " 0", ex=1000)  # others have gone since
        wait_for(lambda: a.find() is not None and client.ttl(WHOLE) > 1000)
    assert a.find() == {"3": 128}


def test_objects_that_cannot_be_read_are_left_out(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_copy, "MAX_UNREAD", 2)
    found = BadBucket()
    found.put(ONE.path, ONE.data)
    found.bad = {*found.fill(2)}
    a = Side(found, server.url)
    a.know_all()
    assert a.find() == {"3": 128}
    assert a.failures == 0
    assert a.counters.snapshot().failures == {"denied": 2}


def test_a_store_that_fails_is_not_the_directorys_fault(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_copy, "MAX_UNREAD", 2)
    found = BadBucket()
    found.bad = {*found.fill(100)}
    a = Side(found, server.url)
    assert a.find() is None
    wait_for(lambda: a.counters.snapshot().failures)
    time.sleep(0.05)
    assert a.find() is None
    assert a.failures == 0
    assert found.reads < 20, "it is left alone for a while"
    with server.client as client:
        assert not client.exists(WHOLE)
        wait_for(lambda: not client.keys("afterglow:lease:*"))


def test_the_end_ends_a_copy(server: RedisServer) -> None:
    found = BadBucket()
    found.fill(200)
    a = Side(found, server.url)
    found.goes_on.clear()
    assert a.find() is None
    wait_for(lambda: found.reads > 1)
    a.objects.close()
    found.goes_on.set()
    copies_end()
    assert found.reads < 1 + 64


def test_a_lease_that_would_last_for_ever_ends(server: RedisServer) -> None:
    with server.client as client:
        for damage in (
            "SET afterglow:lease:x y",
            "SET afterglow:lease:x y EX 1000000",
            "HSET afterglow:lease:x no text",
        ):
            client.execute_command(*damage.split())
            lease = Lease(client, "x")
            assert not lease.take()
            assert not lease.renew()
            lease.give_back()
            assert 0 < client.pttl("afterglow:lease:x") <= 1000 * LEASE_S
            client.delete("afterglow:lease:x")
