"""Responses over two engines' files and one store: an id is known everywhere, and so is its deletion."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from afterglow.errors import StoreError
from afterglow.store.database.conversations import TTL_S, Conversations
from afterglow.store.shared import records, remote, shared_responses
from afterglow.store.shared.counters import SharedCounters
from afterglow.store.shared.objects import WRITE_S
from afterglow.store.shared.records import Records
from afterglow.store.shared.remote import Remote
from afterglow.store.shared.shared_responses import BATCH, CLEAN_S, SharedConversations
from tests.store.bucket import Bucket
from tests.waiting import wait_for


class Replica:
    """One engine's part: its own file, its own counters."""

    def __init__(self, folder: Path, bucket: Bucket, **more: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.counters = SharedCounters()
        self.records = Records(Remote(lambda: bucket), "digest", self.counters)
        self.kept = SharedConversations(folder, self.records, **more)

    def say(self, name: str, previous: str | None, tenant: str = "t") -> None:
        self.kept.add(name, tenant, previous, "m", {"id": name}, [{"text": f"in {name}"}])


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


@pytest.fixture
def a(tmp_path: Path, bucket: Bucket) -> Iterator[Replica]:
    replica = Replica(tmp_path / "a", bucket)
    yield replica
    replica.kept.close()


@pytest.fixture
def b(tmp_path: Path, bucket: Bucket) -> Iterator[Replica]:
    replica = Replica(tmp_path / "b", bucket)
    yield replica
    replica.kept.close()


@pytest.fixture
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never leave the store alone after failures."""
    monkeypatch.setattr(remote, "MAX_FAILURES", 1 << 30)


def texts(found: list[dict[str, Any]] | None) -> list[str]:
    assert found is not None
    return [item["text"] for item in found]


def test_a_conversation_changes_its_engine_every_turn(a: Replica, b: Replica) -> None:
    previous = None
    for turn in range(6):
        replica = (a, b)[turn % 2]
        if previous is not None:
            assert texts(replica.kept.chain(previous, "t")) == [f"in r{k}" for k in range(turn)]
        replica.say(f"r{turn}", previous)
        previous = f"r{turn}"
    found = a.kept.get("r5", "t")
    assert found is not None
    assert (found.previous, found.root, found.body) == ("r4", "r0", {"id": "r5"})


def test_a_long_conversation_comes_in_few_calls(a: Replica, b: Replica, bucket: Bucket) -> None:
    turns = 2 * BATCH + 5
    for turn in range(turns):
        a.say(f"r{turn}", f"r{turn - 1}" if turn else None)
    calls = bucket.calls
    assert len(texts(b.kept.chain(f"r{turns - 1}", "t"))) == turns
    assert bucket.calls - calls == turns + 1, "each response once, and a listing"
    calls = bucket.calls
    assert len(texts(b.kept.chain(f"r{turns - 1}", "t"))) == turns
    assert bucket.calls - calls == 1, "the listing of deletions"


def test_both_branches_are_kept_where_two_engines_answer_at_the_same_time(a: Replica, b: Replica) -> None:
    a.say("root", None)
    assert b.kept.chain("root", "t") is not None
    a.say("left", "root")
    b.say("right", "root")
    for replica in (a, b):
        assert texts(replica.kept.chain("left", "t")) == ["in root", "in left"]
        assert texts(replica.kept.chain("right", "t")) == ["in root", "in right"]


def test_a_deleted_response_is_gone_everywhere(a: Replica, b: Replica, bucket: Bucket) -> None:
    a.say("one", None)
    a.say("two", "one")
    assert b.kept.chain("two", "t") is not None  # b has copies
    assert b.kept.delete("one", "t")
    for replica in (a, b):
        assert replica.kept.get("one", "t") is None
        assert replica.kept.chain("two", "t") is None, "the response before it is gone"
        found = replica.kept.get("two", "t")
        assert found is not None
        assert not replica.kept.delete("one", "t")
    assert not [raw for raw in bucket.objects.values() if b"in one" in raw], "its text is gone"
    assert b.kept.delete("two", "t")
    assert a.kept.get("two", "t") is None


def test_an_engine_that_never_had_a_response_can_delete_it(a: Replica, b: Replica) -> None:
    a.say("one", None)
    assert b.kept.delete("one", "t")
    assert a.kept.get("one", "t") is None
    assert a.kept.chain("one", "t") is None


def test_tenants_never_meet(a: Replica, b: Replica, bucket: Bucket) -> None:
    a.say("one", None, "secret of a tenant")
    assert b.kept.get("one", "t") is None
    assert b.kept.chain("one", "t") is None
    assert not b.kept.delete("one", "t")
    assert b.kept.get("one", "secret of a tenant") is not None
    everything = b"".join([*bucket.objects.values(), *map(str.encode, bucket.objects)])
    assert b"secret of a tenant" not in everything


def test_what_is_damaged_or_lies_under_a_wrong_name_is_missing(a: Replica, b: Replica, bucket: Bucket) -> None:
    a.say("one", None)
    (path,) = bucket.objects
    sound = bucket.objects[path]
    for bad in (b"", sound[:-1], sound.replace(b"in one", b"in two"), b"garbage"):
        bucket.objects[path] = bad
        assert b.kept.chain("one", "t") is None
    assert b.counters.snapshot().bad_records == 4
    bucket.objects[path] = sound
    a.say("two", None)
    (other,) = set(bucket.objects) - {path}
    bucket.objects[path] = bucket.objects[other]
    assert b.kept.get("one", "t") is None
    bucket.objects[path] = sound
    assert b.kept.get("one", "t") is not None


@pytest.mark.usefixtures("no_rest")
def test_a_store_that_is_down_costs_no_local_turn(a: Replica, b: Replica, bucket: Bucket) -> None:
    a.say("one", None)
    bucket.down = True
    a.say("two", "one")
    assert texts(a.kept.chain("two", "t")) == ["in one", "in two"]
    with pytest.raises(StoreError):  # nothing says whether another server has it
        b.kept.chain("one", "t")
    assert a.counters.snapshot().failures == {"io": 2}
    a.kept.sweep()
    bucket.down = False
    assert b.kept.chain("two", "t") is None
    a.kept.sweep()
    assert texts(b.kept.chain("two", "t")) == ["in one", "in two"]


@pytest.mark.usefixtures("no_rest")
def test_a_turn_does_not_clean_the_store(tmp_path: Path, bucket: Bucket) -> None:
    now = [1000.0]
    replica = Replica(tmp_path / "c", bucket, clock=lambda: now[0])
    now[0] += CLEAN_S + 1
    replica.say("one", None)
    assert bucket.calls == 1, "it is written, no more"
    replica.kept.sweep()
    assert bucket.calls > 1
    replica.kept.close()


def test_a_store_that_cannot_be_listed_is_left_alone(a: Replica, bucket: Bucket) -> None:
    bucket.down = True
    for _ in range(remote.MAX_FAILURES):
        with pytest.raises(StoreError, match="down"):
            a.records.marks("kind", "owner")
    with pytest.raises(StoreError, match="left alone"):
        a.records.marks("kind", "owner")


HANGING_READS = """
import threading
from afterglow.errors import StoreError
from afterglow.store.shared import counters, records, remote
class Hanging:
    def get(self, *args):
        threading.Event().wait()
records.CALL_S = 0.1
try:
    records.Records(remote.Remote(Hanging), "digest", counters.SharedCounters()).get("kind", "owner", ["one", "two"])
except StoreError as error:
    print(error)
"""


def test_reads_that_hang_keep_no_process_from_its_end() -> None:
    ended = subprocess.run([sys.executable, "-c", HANGING_READS], capture_output=True, text=True, timeout=60)
    assert ended.stdout.startswith("reading a record: no answer")


@pytest.mark.usefixtures("no_rest")
def test_a_deletion_that_others_cannot_learn_of_is_not_confirmed(a: Replica, b: Replica, bucket: Bucket) -> None:
    a.say("one", None)
    assert b.kept.get("one", "t") is not None
    bucket.down = True
    with pytest.raises(StoreError):
        a.kept.delete("one", "t")
    bucket.down = False
    assert a.kept.delete("one", "t"), "the client tries again"
    assert a.kept.get("one", "t") is None
    assert b.kept.get("one", "t") is None


@pytest.mark.usefixtures("no_rest")
def test_a_response_that_was_deleted_before_it_could_be_written_stays_deleted(a: Replica, bucket: Bucket) -> None:
    bucket.down = True
    a.say("one", None)
    with pytest.raises(StoreError):
        a.kept.delete("one", "t")
    bucket.down = False
    a.kept.sweep()
    assert bucket.objects == {}


@pytest.mark.usefixtures("no_rest")
def test_a_write_that_was_given_up_brings_no_deleted_response_back(
    tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    at, arrives, put = Replica(tmp_path / "late", bucket, clock=lambda: now[0]), threading.Event(), bucket.put

    def hangs(path: str, data: bytes, *, replace: bool = False) -> bool:
        assert arrives.wait(60)
        return put(path, data, replace=replace)

    with monkeypatch.context() as patch:
        patch.setattr(bucket, "put", hangs)
        patch.setattr(records, "CALL_S", 0.5)
        at.say("secret", None)
    assert at.kept.delete("secret", "t")
    at.kept.sweep()
    arrives.set()
    wait_for(lambda: any(b"secret" in data for data in bucket.objects.values()))
    at.kept.sweep()
    assert not any(b"secret" in data for data in bucket.objects.values())
    now[0] += WRITE_S
    at.kept.sweep()
    calls = bucket.calls
    at.kept.sweep()
    assert (at.kept.unpublished.read(), bucket.calls) == ([], calls), "it is looked for no more"
    at.kept.close()


@pytest.mark.usefixtures("no_rest")
def test_a_response_that_has_left_its_servers_file_for_room_stays_in_the_store(
    tmp_path: Path, bucket: Bucket, b: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, put = Replica(tmp_path / "small", bucket, max_bytes=100_000), bucket.put

    def late(path: str, data: bytes, *, replace: bool = False) -> bool:
        put(path, data, replace=replace)
        raise ConnectionResetError("the answer is lost")

    with monkeypatch.context() as patch:
        patch.setattr(bucket, "put", late)
        at.say("first", None)
    for number in range(20):
        at.kept.add(f"later {number}", "t", None, "m", {"long": "x" * 10_000}, [])
    assert Conversations.get(at.kept, "first", "t") is None
    at.kept.sweep()
    assert texts(b.kept.chain("first", "t")) == ["in first"]
    at.kept.close()


LATE = """
import os, signal, sys
from pathlib import Path
from afterglow.store.shared import counters, records, remote, shared_responses
class Hanging:
    def __getattr__(self, name):
        if sys.argv[2] == "hangs":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ConnectionError("down")
far = records.Records(remote.Remote(Hanging), "digest", counters.SharedCounters())
kept = shared_responses.SharedConversations(Path(sys.argv[1]), far)
for name, previous in (("one", None), ("two", "one"), ("three", "two")):
    kept.add(name, "t", previous, "m", {"id": name}, [{"text": f"in {name}"}])
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("how", "known"), [("down", 3), ("hangs", 1)])
def test_what_could_not_be_written_is_written_after_a_kill(
    how: str, known: int, tmp_path: Path, b: Replica, bucket: Bucket
) -> None:
    """`hangs`: the process is killed while the first response is on its way to the store."""
    folder = tmp_path / "killed"
    folder.mkdir()
    ended = subprocess.run([sys.executable, "-c", LATE, str(folder), how], capture_output=True, timeout=60)
    assert ended.returncode == -9, ended.stderr
    again = Replica(folder, bucket)
    assert bucket.calls == 0, "a start waits for no store"
    bucket.down = True
    again.kept.sweep()
    bucket.down = False
    assert b.kept.chain("one", "t") is None
    again.kept.sweep()
    names = ["one", "two", "three"][:known]
    assert texts(b.kept.chain(names[-1], "t")) == [f"in {name}" for name in names]
    calls = bucket.calls
    again.kept.sweep()
    assert bucket.calls == calls, "each is written once"
    again.kept.close()


def test_what_others_have_deleted_is_not_written_again(a: Replica, b: Replica, bucket: Bucket) -> None:
    """A process that was killed when the store had a response, but before that was noted, writes it again."""
    a.say("one", None)
    a.kept.unpublished.add("one", "t")
    assert b.kept.delete("one", "t")
    there = {*bucket.objects}
    a.kept.sweep()
    assert {*bucket.objects} == there
    assert a.kept.get("one", "t") is None


def test_so_many_are_kept_that_could_not_be_written(
    a: Replica, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_responses, "MAX_UNPUBLISHED", 2)
    bucket.down = True
    for name in ("one", "two", "three"):
        a.say(name, None)
    assert [name for name, _ in a.kept.unpublished.read()] == ["two", "three"]


def test_an_id_that_is_no_text_is_unknown(a: Replica) -> None:
    assert a.kept.chain("\ud800", "t") is None
    assert not a.kept.delete("\ud800", "t")


def test_what_has_expired_is_not_brought_back_and_leaves_the_store(tmp_path: Path, bucket: Bucket) -> None:
    now = [1000.0]
    a, b = (Replica(tmp_path / name, bucket, ttl_s=100.0, clock=lambda: now[0]) for name in "ab")
    a.say("one", None)
    now[0] += 101
    assert b.kept.chain("one", "t") is None
    assert bucket.objects
    now[0] += CLEAN_S
    bucket.modified = dict.fromkeys(bucket.modified, time.time() - TTL_S - 1)
    b.kept.sweep()
    assert bucket.objects == {}
    for replica in (a, b):
        replica.kept.close()
