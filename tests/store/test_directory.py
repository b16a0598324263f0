"""A directory in front of an object store: it answers listings, and whatever it does, nothing is lost but time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from afterglow.errors import ConfigError
from afterglow.store.shared import directory
from afterglow.store.shared.counters import SharedCounters
from afterglow.store.shared.directory import DirectoryObjects, check_directory
from tests.store.bucket import Bucket
from tests.store.redis_server import RedisServer
from tests.waiting import wait_for

MODEL = "ab" * 32
KEY = "12" * 20
FOLDER = f"{MODEL}/kids/12/{KEY}"
ONE, TWO = (f"{digit * 40}-0-64-0" for digit in "34")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    found = RedisServer(tmp_path)
    yield found
    found.kill()


class Side:
    """One server's view of a bucket through a directory."""

    made: ClassVar[list[Side]] = []

    def __init__(self, bucket: Bucket, url: str) -> None:
        self.made.append(self)
        self.bucket = bucket
        self.counters = SharedCounters()
        self.objects = DirectoryObjects(bucket, url, self.counters)

    def names(self, folder: str = FOLDER) -> list[str]:
        return [each.path for some in self.objects.list(folder) for each in some]

    def asked(self) -> bool:
        """Ask for a folder; tell whether the object store had to list it."""
        calls = self.bucket.calls
        self.names()
        return self.bucket.calls != calls

    @property
    def failures(self) -> int:
        return self.counters.snapshot().directory_failures

    def know_all(self) -> None:
        """Wait until the directory answers."""
        wait_for(lambda: not self.asked(), 20)


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    yield Bucket()
    while Side.made:
        Side.made.pop().objects.close()


@pytest.fixture
def short_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "REST_S", 0.05)


def test_what_was_there_before_the_directory_is_found_in_it(server: RedisServer, bucket: Bucket) -> None:
    bucket.put(f"{FOLDER}/{ONE}", b"")
    a, b = Side(bucket, server.url), Side(bucket, server.url)
    assert a.names() == [f"{FOLDER}/{ONE}"], "by a listing"
    a.know_all()
    assert b.names() == [f"{FOLDER}/{ONE}"]
    assert not b.asked()
    assert b.counters.snapshot().directory_lookups == 2
    assert b.names(f"{MODEL}/kids/13/{'13' * 20}") == []


def test_names_are_written_used_and_removed_through_it(server: RedisServer, bucket: Bucket) -> None:
    a, b = Side(bucket, server.url), Side(bucket, server.url)
    a.know_all()
    assert a.objects.put(f"{FOLDER}/{ONE}", b"")
    assert not b.objects.put(f"{FOLDER}/{ONE}", b"")
    b.objects.put(f"{FOLDER}/{TWO}", b"")
    a.objects.put(f"{FOLDER}/{ONE}", b"", replace=True)
    assert b.names() == [f"{FOLDER}/{ONE}", f"{FOLDER}/{TWO}"], "the last used first"
    (found,) = [each for some in b.objects.list(FOLDER) for each in some if each.path.endswith(ONE)]
    assert abs(found.modified - time.time()) < 60
    b.objects.delete(f"{FOLDER}/{ONE}")
    assert a.names() == [f"{FOLDER}/{TWO}"]
    assert not b.asked()
    with server.client as client:
        assert 0 < client.ttl(f"afterglow:{FOLDER}") <= directory.KEEP_S


def test_other_paths_are_the_object_stores_own(server: RedisServer, bucket: Bucket) -> None:
    a = Side(bucket, server.url)
    path = f"{MODEL}/extents/ab/abcd.safetensors"
    a.objects.put(path, b"1234")
    assert a.objects.get(path, 1, 2) == b"23"
    assert a.names(f"{MODEL}/extents") == [path]
    a.objects.delete(path)
    assert bucket.objects == {}
    with server.client as client:
        assert client.keys() == []


@pytest.mark.usefixtures("short_rest")
def test_a_directory_that_was_restarted_empty_is_filled_again(server: RedisServer, bucket: Bucket) -> None:
    a = Side(bucket, server.url)
    a.know_all()
    a.objects.put(f"{FOLDER}/{ONE}", b"")
    server.kill()
    assert a.names() == [f"{FOLDER}/{ONE}"], "by a listing"
    assert a.failures == 1
    a.objects.put(f"{FOLDER}/{TWO}", b"")
    server.start()
    time.sleep(0.06)
    assert set(a.names()) == {f"{FOLDER}/{ONE}", f"{FOLDER}/{TWO}"}
    a.know_all()
    assert set(a.names()) == {f"{FOLDER}/{ONE}", f"{FOLDER}/{TWO}"}


@pytest.mark.usefixtures("short_rest")
def test_names_that_it_missed_are_copied_later(server: RedisServer, bucket: Bucket) -> None:
    """It did not answer for a while, and still has all that it had: what was written meanwhile is not in it."""
    a, b = Side(bucket, server.url), Side(bucket, server.url)
    a.know_all()
    server.pause()
    a.objects.put(f"{FOLDER}/{ONE}", b"")
    server.pause(False)
    time.sleep(0.06)
    assert a.names() == [f"{FOLDER}/{ONE}"], "by a listing: this server knows what is missing"
    a.objects.put(f"{FOLDER}/{TWO}", b"")
    a.know_all()
    assert set(b.names()) == {f"{FOLDER}/{ONE}", f"{FOLDER}/{TWO}"}
    assert not b.asked()


def test_one_that_hangs_is_left_alone(server: RedisServer, bucket: Bucket) -> None:
    a = Side(bucket, server.url)
    a.know_all()
    bucket.put(f"{FOLDER}/{ONE}", b"")
    server.pause()
    try:
        for _ in range(5):
            assert a.names() == [f"{FOLDER}/{ONE}"]
        assert a.failures == 1, "it was asked once"
    finally:
        server.pause(False)


def test_wrong_credentials_are_counted_and_never_shown(
    tmp_path: Path, bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    server = RedisServer(tmp_path, "right")
    try:
        bucket.put(f"{FOLDER}/{ONE}", b"")
        bad = Side(bucket, server.url_with("a-secret-word"))
        assert bad.names() == [f"{FOLDER}/{ONE}"]
        assert bad.failures == 1
        assert "left alone" in caplog.text
        assert "a-secret-word" not in caplog.text
        good = Side(bucket, server.url)
        good.know_all()
        assert good.names() == [f"{FOLDER}/{ONE}"]
        assert good.failures == 0
    finally:
        server.kill()


@pytest.mark.usefixtures("short_rest")
def test_garbage_in_it_is_no_name(server: RedisServer, bucket: Bucket) -> None:
    a = Side(bucket, server.url)
    a.know_all()
    a.objects.put(f"{FOLDER}/{ONE}", b"")
    with server.client as client:
        garbage = ("", "garbage", f"../../{TWO}", f"{TWO}/{TWO}", "\x00", f"{TWO}-")
        client.zadd(f"afterglow:{FOLDER}", dict.fromkeys(garbage, 1.0))
        assert a.names() == [f"{FOLDER}/{ONE}"]
        client.delete(f"afterglow:{FOLDER}")
        client.set(f"afterglow:{FOLDER}", "no set at all")
        assert a.names() == [f"{FOLDER}/{ONE}"], "by a listing"
        assert a.failures == 1


def test_only_the_holder_of_the_lease_copies(server: RedisServer, bucket: Bucket) -> None:
    a = Side(bucket, server.url)
    with server.client as client:
        client.set(f"afterglow:lease:{MODEL}", "another server", ex=60)
        a.names()
        time.sleep(0.2)
        assert a.asked()
        assert client.get(f"afterglow:whole:{MODEL}") is None
        client.delete(f"afterglow:lease:{MODEL}")
        a.know_all()
        wait_for(lambda: client.get(f"afterglow:lease:{MODEL}") is None, message="it is given back")
        assert 0 < client.ttl(f"afterglow:whole:{MODEL}") <= directory.WHOLE_S


@pytest.mark.parametrize(
    "url",
    [
        "redis://",
        "http://host:1",
        "host:6379",
        "unix://",
        "rediss:///0",
        "redis://user:se/cret@host",  # a port "se" for the library, which would name it
        "redis://host:se",
        "redis://host/se",
        "redis://[host",
    ],
)
def test_a_url_that_names_no_directory_is_refused_without_showing_it(url: str) -> None:
    pytest.importorskip("redis")
    with pytest.raises(ConfigError, match="--shared-directory") as error:
        check_directory(url)
    for part in ("6379", "user", "'se'"):
        assert part not in str(error.value).replace("host:6379", "")
    for right in ("redis://:password@host:6379/0", "redis://host", "rediss://[::1]:1/", "unix:///run/redis.sock?db=1"):
        check_directory(right)
