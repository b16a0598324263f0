"""A directory in front of an object store: it answers a prompt in one call, and whatever it does, nothing is lost but time."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import pytest

from afterglow.errors import ConfigError
from afterglow.plan.prefix.block_keys import block_keys, lead_to
from afterglow.plan.prefix.index import extent_id
from afterglow.plan.prefix.published import Published
from afterglow.store.extents.layout import KVLayout
from afterglow.store.shared import directory, directory_changes
from afterglow.store.shared.counters import SharedCounters
from afterglow.store.shared.directory import DirectoryObjects, Question, check_directory
from afterglow.store.shared.directory_names import KEEP_S, STORE_ID
from afterglow.store.shared.finder import Finder, Prompt, SharedExtent
from afterglow.store.shared.lease import LEASE_S, Lease
from afterglow.store.shared.paths import Paths
from afterglow.store.shared.remote import Remote
from tests import doors
from tests.store.bucket import Bucket
from tests.store.redis_server import RedisServer
from tests.waiting import wait_for

MODEL, STORE = "ab" * 32, "cd" * 16
TAG = f"{{{STORE}}}"
TOKENS = np.arange(300, dtype=np.uint32).tobytes()
KEYS = block_keys("salt", TOKENS)


class Entry(NamedTuple):
    """An extent of rows [first, end) of TOKENS, and how it is listed."""

    digit: str
    first: int
    end: int
    parent: Entry | None = None
    expires: int = 0

    @property
    def path(self) -> str:
        return Paths(MODEL).kid("12" * 20, self.published)

    @property
    def published(self) -> Published:
        return Published(self.digit * 40, self.first, self.end - self.first, self.expires)

    @property
    def data(self) -> bytes:
        parent = None if self.parent is None else self.parent.published.id
        return str(lead_to(self.published, parent, block_keys("salt", TOKENS[: 4 * self.end]))).encode()


ONE, TWO = Entry("3", 0, 130), Entry("4", 0, 200)
ALL = Question(0, KEYS, 1)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    found = RedisServer(tmp_path)
    yield found
    found.kill()


def named_bucket(store: str = STORE) -> Bucket:
    """Make a bucket with an id."""
    found = Bucket()
    found.put(STORE_ID, store.encode())
    return found


class Side:
    """One server's view of a bucket through a directory."""

    made: ClassVar[list[Side]] = []

    def __init__(self, bucket: Bucket, url: str, identified: bool = True) -> None:
        self.made.append(self)
        self.bucket = bucket
        self.counters = SharedCounters()
        self.objects = DirectoryObjects(bucket, url, self.counters)
        if identified:
            self.objects.identify()

    def put(self, entry: Entry) -> None:
        self.objects.put(entry.path, entry.data)

    def find(self, question: Question = ALL) -> dict[str, int] | None:
        """Find what is known: the digits of extents, and how many rows agree; None: the directory does not answer."""
        found = self.objects.find(MODEL, question)
        return None if found is None else {each.listed.path.rsplit("/", 1)[-1][0]: each.agrees for each in found}

    @property
    def failures(self) -> int:
        return self.counters.snapshot().directory_failures

    def know_all(self) -> None:
        """Wait until the directory answers, and the copy has ended: it gives its lease back after that."""
        wait_for(lambda: self.find() is not None, 20)
        copies_end()


def copies_end() -> None:
    """Wait until nothing is done in the background."""
    wait_for(lambda: not [each for each in threading.enumerate() if each.name == "afterglow-directory"])


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    yield named_bucket()
    while Side.made:
        Side.made.pop().objects.close()
    copies_end()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has much to do answers late, which is another test's."""
    monkeypatch.setattr(directory, "CALL_S", 5.0)
    monkeypatch.setattr(directory, "LATE_S", 50.0)


@pytest.fixture
def little_patience(patience: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "CALL_S", 0.1)


@pytest.fixture
def short_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "REST_S", 0.05)


def test_what_was_there_before_the_directory_is_found_in_it(server: RedisServer, bucket: Bucket) -> None:
    bucket.put(ONE.path, ONE.data)
    bucket.put(f"{ONE.path}0", b"")  # of a server that wrote no leads
    bucket.put(Entry("5", 0, 100, None, int(time.time()) - 1).path, ONE.data)  # expired
    a, b = Side(bucket, server.url), Side(bucket, server.url)
    assert a.find() is None
    a.know_all()
    assert b.find() == {"3": 128}
    calls = bucket.calls
    assert b.find(Question(0, block_keys("another", TOKENS), 1)) == {}
    assert bucket.calls == calls
    assert b.counters.snapshot().directory_lookups == 2


def test_a_prompt_is_one_question_however_long_it_is(server: RedisServer, bucket: Bucket) -> None:
    a = Side(bucket, server.url)
    a.know_all()
    a.put(ONE)
    a.put(TWO)
    short = Entry("5", 200, 230, TWO)
    a.put(short)
    last = Entry("6", 230, 300, short)
    a.put(last)
    with server.client as client:
        client.config_resetstat()
        assert a.find() == {"3": 128, "4": 192, "5": 192, "6": 256}
        assert client.info("commandstats")["cmdstat_eval"]["calls"] == 1


def test_a_long_prompt_takes_one_call_unless_much_is_read(
    server: RedisServer, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same is found in one call, or in some that are short."""
    a = Side(bucket, server.url)
    a.know_all()
    tokens = np.arange(64 * 40, dtype=np.uint32).tobytes()
    keys, before, ends = block_keys("salt", tokens), None, [0, 130, 150, 170, 700, 764, 1300, 1310, 1400, 2000, 2400]
    for number, (first, end) in enumerate(pairwise(ends)):
        published = Published(f"{number:x}" * 40, first, end - first)
        a.objects.put(
            Paths(MODEL).kid("12" * 20, published),
            str(lead_to(published, before, block_keys("salt", tokens[: 4 * end]))).encode(),
        )
        before = published.id
    questions = [Question(0, keys, 1), Question(5, keys[5:], 1), Question(30, keys[30:], 3), Question(0, keys[:1], 0)]
    questions += [Question(0, [*keys[:20], *(f"{each:032x}" for each in range(21))], patience) for patience in (1, 30)]
    found = [a.find(each) for each in questions]
    assert found[0] is not None
    assert len(found[0]) == len(ends) - 1

    def calls() -> int:
        """Count the calls since the last count."""
        with server.client as client:
            stats = client.info("commandstats")
            client.config_resetstat()
        return int(stats.get("cmdstat_eval", {"calls": 0})["calls"])

    calls()
    assert [a.find(each) for each in questions] == found
    assert calls() == len(questions)
    monkeypatch.setattr(directory, "MAX_ASKED", 16)
    assert a.find(questions[0]) == found[0]
    assert calls() == 3
    monkeypatch.setattr(directory, "MAX_READ", 2)  # ids: a call is over sooner, and no block is left out
    assert [a.find(each) for each in questions] == found
    assert calls() > 3 * 3
    monkeypatch.setattr(directory, "CALL_S", 0.0)
    some = a.find(questions[0])
    assert some
    assert some.keys() < found[0].keys(), "a lookup ends in time"
    assert all(agrees <= found[0][digit] for digit, agrees in some.items())
    assert calls() == 1


def test_what_is_deleted_leaves_nothing(server: RedisServer, bucket: Bucket) -> None:
    a = Side(bucket, server.url)
    a.know_all()
    for entry in (ONE, TWO, Entry("5", 0, 140, None, int(time.time()) + 3600)):
        a.put(entry)
    with server.client as client:
        a.objects.delete(TWO.path)
        assert a.find() == {"3": 128, "5": 128}
        a.objects.delete(ONE.path)
        a.objects.delete(Paths(MODEL).extent("5" * 40))
        assert client.keys() == [f"afterglow:whole:{TAG}/{MODEL}"]
        a.put(Entry("5", 0, 140, None, int(time.time()) + 3600))
        for key in client.keys("afterglow:*/block/*"):
            assert client.ttl(key) <= 3700, "it goes with the last extent that it leads to"


def test_an_extent_within_a_block_is_found_with_those_behind_it(
    server: RedisServer, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that thousands of short extents follow tells of the last ones: the others come as parents."""
    a = Side(bucket, server.url)
    a.know_all()
    monkeypatch.setattr(directory, "MAX_FOUND", 1)
    short = Entry("5", 70, 90, Entry("4", 0, 70))
    for entry in (Entry("4", 0, 70), short, Entry("6", 70, 95), Entry("7", 90, 300, short)):
        a.put(entry)
    assert a.find() == {"6": 64, "7": 256, "5": 0, "4": 0}
    assert a.find(Question(2, KEYS[2:], 1)) == {"7": 256}, "what comes before the question is known"


def test_a_way_that_ends_is_followed_no_further(server: RedisServer, bucket: Bucket) -> None:
    a = Side(bucket, server.url)
    a.know_all()
    a.put(Entry("3", 192, 300))
    assert a.find() == {}
    assert a.find(Question(0, KEYS, 3)) == {}
    assert a.find(Question(0, KEYS, 4)) == {"3": 256}, "the first 192 rows are the server's own"


def test_entries_are_written_used_and_removed_through_it(server: RedisServer, bucket: Bucket) -> None:
    a, b = Side(bucket, server.url), Side(bucket, server.url)
    a.know_all()
    a.put(ONE)
    a.put(TWO)
    time.sleep(1.1)
    assert a.objects.put(ONE.path, ONE.data, replace=True)
    found = b.objects.find(MODEL, ALL)
    assert found is not None
    one, two = found
    assert (one.listed.path, two.listed.path) == (ONE.path, TWO.path)
    assert one.listed.modified > two.listed.modified > time.time() - 60
    b.objects.delete(ONE.path)
    assert a.find() == {"4": 192}
    b.objects.delete(Paths(MODEL).extent(TWO.published.id))
    assert a.find() == {}
    with server.client as client:
        assert client.keys("afterglow:*extent*") == []
        assert client.zcard(f"afterglow:{TAG}/{MODEL}/block/{KEYS[1]}") == 0, (
            "names of what has gone go when they are found"
        )
        assert 0 < client.ttl(f"afterglow:whole:{TAG}/{MODEL}") <= 2 * directory.WHOLE_S


def test_entries_end_with_their_extents(server: RedisServer, bucket: Bucket) -> None:
    a = Side(bucket, server.url)
    a.know_all()
    for entry in (
        Entry("3", 0, 130, None, int(time.time()) + 3600),
        TWO,
        Entry("5", 0, 140, None, int(time.time()) - 1),
    ):
        a.put(entry)
    assert a.find() == {"3": 128, "4": 192}
    with server.client as client:
        lives = {digit: client.ttl(f"afterglow:{TAG}/{MODEL}/extent/{digit * 40}") for digit in "345"}
        assert 3500 < lives["3"] <= 3600
        assert 3600 < lives["4"] <= KEEP_S
        assert lives["5"] == -2
        assert client.ttl(f"afterglow:{TAG}/{MODEL}/block/{KEYS[2]}") > 3600
        a.put(ONE)  # another server keeps it for longer
        a.put(Entry("3", 0, 130, None, int(time.time()) + 3600))
        assert client.ttl(f"afterglow:{TAG}/{MODEL}/extent/{'3' * 40}") > 3600
        client.pexpire(f"afterglow:{TAG}/{MODEL}/extent/{'4' * 40}", 1)
        time.sleep(0.01)
    assert a.find() == {"3": 128}


def test_other_paths_are_the_object_stores_own(server: RedisServer, bucket: Bucket) -> None:
    a = Side(bucket, server.url)
    path = f"{MODEL}/ids/responses/abcd"
    a.objects.put(path, b"1234")
    assert a.objects.get(path, 1, 2) == b"23"
    assert [each.path for some in a.objects.list(f"{MODEL}/ids") for each in some] == [path]
    a.objects.delete(path)
    assert bucket.objects.keys() == {STORE_ID}
    with server.client as client:
        assert client.keys() == []


@pytest.mark.usefixtures("short_rest")
def test_a_directory_that_was_restarted_empty_is_filled_again(server: RedisServer, bucket: Bucket) -> None:
    a = Side(bucket, server.url)
    a.know_all()
    a.put(ONE)
    server.kill()
    killed = time.monotonic()
    assert a.find() is None
    a.put(TWO)
    asked = a.failures
    assert 1 <= asked <= 2 + (time.monotonic() - killed) / directory.REST_S, "again after each rest"
    server.start()
    wait_for(lambda: not doors.waiting_changes(a.objects))  # it was asked while it started, perhaps
    a.know_all()
    failures = a.failures
    assert a.find() == {"3": 128, "4": 192}
    with server.client as client:
        client.flushall()
        assert a.find() is None
        a.know_all()
        assert a.find() == {"3": 128, "4": 192}
        assert a.failures == failures


@pytest.mark.usefixtures("short_rest", "little_patience")
def test_changes_that_it_missed_are_made_later(server: RedisServer, bucket: Bucket) -> None:
    """It did not answer for a while, and still has all that it had: what was written and removed meanwhile follows."""
    a, b = Side(bucket, server.url), Side(bucket, server.url)
    a.know_all()
    a.put(TWO)
    server.pause()
    for number in range(20):
        a.objects.delete(Paths(MODEL).extent(f"{number:040x}"))
    a.objects.delete(TWO.path)
    a.put(ONE)
    server.pause(False)
    calls = bucket.calls
    wait_for(lambda: b.find() == {"3": 128})
    assert bucket.calls == calls, "nothing is copied"


@pytest.mark.usefixtures("short_rest", "little_patience")
def test_more_changes_than_wait_are_copied_later(
    server: RedisServer, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_changes, "MAX_CHANGES", 2)
    a, b = Side(bucket, server.url), Side(bucket, server.url)
    a.know_all()
    server.pause()
    for number in range(2):
        a.objects.delete(Paths(MODEL).extent(f"{number:040x}"))
    a.put(ONE)
    server.pause(False)
    wait_for(lambda: a.find() == {"3": 128})
    wait_for(lambda: b.find() == {"3": 128})  # it has little patience, too


@pytest.mark.usefixtures("short_rest")
def test_what_it_refuses_keeps_nothing_back(server: RedisServer, bucket: Bucket) -> None:
    """A server without memory takes no entry, and is asked all the same."""
    a = Side(bucket, server.url)
    a.know_all()
    a.put(ONE)
    with server.client as client:
        client.config_set("maxmemory", 1)
        a.put(TWO)
        client.config_set("maxmemory", 0)
        assert a.failures
        wait_for(lambda: a.find() == {"3": 128, "4": 192})


def test_a_resolver_that_hangs_holds_up_neither_the_store_nor_lookups(
    server: RedisServer, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "CALL_S", 0.05)
    monkeypatch.setattr(directory, "LATE_S", 0.1)
    goes_on, asked = threading.Event(), []

    def hangs(*args: object, **options: object) -> list[object]:
        asked.append(args)
        goes_on.wait(20)
        raise socket.gaierror("no such name")

    a = Side(bucket, server.url.replace("127.0.0.1", "cache.example"))
    monkeypatch.setattr(socket, "getaddrinfo", hangs)
    try:
        a.objects.put(ONE.path, ONE.data)
        wait_for(lambda: asked)
        for number in range(30):
            a.objects.put(f"{ONE.path[:-1]}{number}", ONE.data)
            time.sleep(0.01)
        wait_for(a.objects.rests, message="the call is late")
        assert not goes_on.is_set()
        assert a.find() is None
        assert len(asked) == 1, "one call waits"
        assert a.failures == 1
    finally:
        goes_on.set()


def test_extents_that_are_gone_take_no_places(server: RedisServer, bucket: Bucket) -> None:
    """Those that a prompt may follow a part of, which a server without the directory removed."""
    a = Side(bucket, server.url)
    a.know_all()
    ghosts = [Entry(digit, 0, end) for digit, end in zip("56789", (290, 295, 298, 299, 300), strict=True)]
    for each in ghosts:
        a.put(each)
    remote = Remote(lambda: a.objects)
    remote.call("opening", lambda objects: objects.put("opened", b""), 20)
    tokens = np.concatenate([np.frombuffer(TOKENS[: 4 * 190], np.uint32), np.full(10, 7, np.uint32)]).tobytes()
    live = Published(extent_id(MODEL, "salt", b"", tokens), 0, 200)
    a.objects.put(Paths(MODEL).kid("12" * 20, live), str(lead_to(live, None, block_keys("salt", tokens))).encode())

    class Heads(Finder):
        """Reads the tokens of the one that is there."""

        def _tokens(self, published: Published, salt: str, own: bytes, end: float) -> bytes | None:
            return tokens if published == live else super()._tokens(published, salt, own, end)

    found: list[SharedExtent] = []
    finder = Heads(remote, Paths(MODEL), KVLayout(1, 1, 8, "F32"), MODEL)
    finder.find(Prompt("salt", TOKENS), 20, found.append)
    assert [each.published for each in found] == [live]
    wait_for(lambda: a.find() == {live.id[0]: 128}, message="the directory forgets them")
    remote.close()


def test_a_daily_copy_reads_what_is_missing_alone(server: RedisServer, bucket: Bucket) -> None:
    a = Side(bucket, server.url)
    a.know_all()
    a.put(ONE)
    bucket.put(TWO.path, TWO.data)
    calls = bucket.calls
    with server.client as client:
        client.expire(f"afterglow:whole:{TAG}/{MODEL}", directory.WHOLE_S - 1)
        assert a.find() == {"3": 128}, "it answers meanwhile"
        wait_for(lambda: client.ttl(f"afterglow:whole:{TAG}/{MODEL}") > directory.WHOLE_S)
    assert a.find() == {"3": 128, "4": 192}
    assert bucket.calls - calls == 2, "a listing, and a read"


def test_a_copy_that_was_asked_for_before_another_ended_lists_nothing(
    server: RedisServer, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put(ONE.path, ONE.data)
    a, b = Side(bucket, server.url), Side(bucket, server.url)
    take, calls = Lease.take, []

    def late(lease: Lease) -> bool:
        """The other one is faster."""
        monkeypatch.setattr(Lease, "take", take)
        wait_for(lambda: a.find() is not None)
        with server.client as client:
            wait_for(lambda: not client.keys("afterglow:lease:*"))
        calls.append(bucket.calls)
        return take(lease)

    monkeypatch.setattr(Lease, "take", late)
    assert b.find() is None
    wait_for(lambda: calls)
    b.know_all()
    assert b.find() == {"3": 128}
    assert calls == [bucket.calls]


def test_one_that_hangs_is_left_alone(server: RedisServer, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    Side(bucket, server.url).know_all()
    monkeypatch.setattr(directory, "CALL_S", 0.1)
    a = Side(bucket, server.url)
    server.pause()
    try:
        for _ in range(5):
            assert a.find() is None
        assert a.failures == 1, "it was asked once"
    finally:
        server.pause(False)


def test_wrong_credentials_are_counted_and_never_shown(
    tmp_path: Path, bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    server = RedisServer(tmp_path, "right")
    try:
        bucket.put(ONE.path, ONE.data)
        bad = Side(bucket, server.url_with("a-secret-word"))
        assert bad.find() is None
        assert bad.failures == 1
        assert "left alone" in caplog.text
        assert "a-secret-word" not in caplog.text
        good = Side(bucket, server.url)
        good.know_all()
        assert good.find() == {"3": 128}
        assert good.failures == 0
    finally:
        server.kill()


def test_garbage_in_it_is_no_extent(server: RedisServer, bucket: Bucket) -> None:
    a = Side(bucket, server.url)
    a.know_all()
    a.put(ONE)
    block, entry = f"afterglow:{TAG}/{MODEL}/block/{KEYS[1]}", f"afterglow:{TAG}/{MODEL}/extent/"
    with server.client as client:
        right = client.get(f"{entry}{'3' * 40}")
        garbage = (
            "",
            "garbage",
            f"../../{right}",
            f"{right}0 ",
            right.replace("12/", "1x/"),
            "\x00",
            right[:-20],
            "-1-1-1 ab ",
        )
        for number, each in enumerate(garbage):
            client.set(f"{entry}{number}", each)
            client.zadd(block, {str(number): 1.0})
        client.set(f"{entry}a", right.replace(" - ", " a "))  # its own parent
        client.zadd(block, {"a": 1.0, "there is none": 1.0})
        assert a.find() == {"3": 128}
        client.set(f"{entry}bytes", b"\xff\xfe")
        client.zadd(block, {"bytes": 1.0})
        assert a.find() == {"3": 128}
        client.delete(block)
        client.set(block, "no set at all")
        assert a.find(Question(0, KEYS, 2)) == {"3": 128}, "there is another block"
        assert not client.exists(block)
        client.delete(f"{entry}{'3' * 40}")
        client.hset(f"{entry}{'3' * 40}", "no", "text")
        assert a.find(Question(0, KEYS, 2)) == {}
        client.delete(f"afterglow:whole:{TAG}/{MODEL}")
        client.hset(f"afterglow:whole:{TAG}/{MODEL}", "no", "text")
        assert a.find() is None
        a.know_all()
        assert a.find() == {"3": 128}, "copied anew"
    assert a.failures == 0


def test_only_the_holder_of_the_lease_copies(server: RedisServer, bucket: Bucket) -> None:
    a = Side(bucket, server.url)
    with server.client as client:
        client.set(f"afterglow:lease:{TAG}/{MODEL}", "another server", ex=60)
        assert a.find() is None
        time.sleep(0.2)
        assert a.find() is None
        assert client.get(f"afterglow:whole:{TAG}/{MODEL}") is None
        client.delete(f"afterglow:lease:{TAG}/{MODEL}")
        a.know_all()
        wait_for(lambda: client.get(f"afterglow:lease:{TAG}/{MODEL}") is None, message="it is given back")


def test_a_lease_is_held_by_one_and_kept_by_its_holder_alone(server: RedisServer) -> None:
    with server.client as client:
        a, b = Lease(client, "x"), Lease(client, "x")
        assert a.take()
        assert not b.take()
        assert not b.renew()
        b.give_back()
        assert a.renew()
        assert 0 < client.pttl("afterglow:lease:x") <= 1000 * LEASE_S
        client.delete("afterglow:lease:x")  # it has run out
        assert b.take()
        assert not a.renew()
        a.give_back()
        assert b.renew()
        b.give_back()
        assert a.take()


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
        "redis://host:6379/0?socket_timeout=abc",
        "redis://host/0?db=x",
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
