"""Names of conversations in a store: whose are listed, and whose go with a reset. Engines are stand-ins."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from afterglow.errors import RequestError, StoreError
from afterglow.request import Request, SamplingParams
from afterglow.server.blocking import FILES
from afterglow.server.shared_names import SharedNames
from afterglow.store.shared import remote
from afterglow.store.shared.counters import SharedCounters
from afterglow.store.shared.notices import SKEW_S, Notices
from afterglow.store.shared.records import Records
from afterglow.store.shared.remote import Remote
from tests.store.bucket import Bucket
from tests.waiting import wait_for, wait_for_threads

WRITERS = "afterglow-apart"  # threads that write the names
SALTS = ("", "/own", "one/", "one/own", "two/")


class Ids:
    """A server's part of what is shared, without an engine."""

    def __init__(self, bucket: Bucket, folder: Path) -> None:
        folder.mkdir()
        self.records = Records(Remote(lambda: bucket), "digest", SharedCounters())
        self.notices = Notices(self.records, folder)

        self.asked: list[list[tuple[str, str]]] = []

    def pin(self, sessions: list[tuple[str, str]], pinned: bool = True) -> dict[tuple[str, str], str]:
        self.asked.append(sessions)
        return {session: "no room" for session in sessions if session[1] == "large"}

    def forget_session(self, owner: str, name: str) -> None: ...


class Prompts:
    """Registered prompts of a server that has none."""

    def reset_of(self, whose: str | None) -> None: ...


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


@pytest.fixture
def two(bucket: Bucket, tmp_path: Path) -> list[SharedNames]:
    found = []
    for name in "ab":
        parts: list[Any] = [Ids(bucket, tmp_path / name), None, Prompts(), None]
        found.append(SharedNames(*parts))
    return found


def names(at: SharedNames, salt: str) -> list[str]:
    return [each.name for each in at.sessions(salt, [])]


def use(at: SharedNames, *salts: str) -> None:
    for salt in salts:
        at.used(cast(Any, Request("x", [1], SamplingParams(), salt=salt, session_id=f"of {salt}")), 10)


@pytest.mark.parametrize(
    ("whose", "left"),
    [
        ({"salt": ""}, {"/own", "one/", "one/own", "two/"}),
        ({"salt": "/own"}, {"", "one/", "one/own", "two/"}),
        ({"tenant": "one"}, {"", "/own", "two/"}),
        ({}, set()),
    ],
)
def test_a_reset_takes_the_names_of_those_whose_it_is(
    two: list[SharedNames], whose: dict[str, str], left: set[str]
) -> None:
    a, b = two
    use(a, *SALTS)
    wait_for(lambda: all(names(b, salt) == [f"of {salt}"] for salt in SALTS))
    b.reset(**whose)
    for each in two:
        assert {salt for salt in SALTS if names(each, salt)} == left


def test_a_name_is_written_once_in_a_while_and_again_after_it_was_deleted(
    two: list[SharedNames], bucket: Bucket
) -> None:
    a, b = two
    use(a, "one/")
    wait_for(lambda: names(b, "one/"))
    calls = bucket.calls
    use(a, "one/")
    assert bucket.calls == calls
    assert a.forget_session("one/", "of one/", here=True)
    assert not b.forget_session("one/", "of one/", here=False)
    assert not b.pin_session("one/", "of one/", True, here=False)
    use(a, "one/")
    wait_for(lambda: names(b, "one/"))


@pytest.mark.parametrize("reset", [False, True])
def test_a_name_that_is_deleted_before_it_is_written_does_not_come_back(
    two: list[SharedNames], monkeypatch: pytest.MonkeyPatch, reset: bool
) -> None:
    (a, b), put, goes_on = two, Records.put, threading.Event()

    def late(*args: Any) -> None:
        if threading.current_thread().name == WRITERS:
            assert goes_on.wait(20)
        put(*args)

    monkeypatch.setattr(Records, "put", late)
    use(a, "one/")
    if reset:
        a.reset(tenant="one")
    else:
        assert a.forget_session("one/", "of one/", here=True)
    goes_on.set()
    wait_for_threads(WRITERS)
    assert names(b, "one/") == []


def test_requests_without_a_trace_leave_no_name(two: list[SharedNames], bucket: Bucket) -> None:
    for more in ({"session_id": None}, {"volatile": True}, {"reuse": False}):
        fields: dict[str, Any] = {"session_id": "secret", **more}
        two[0].used(Request("x", [1], SamplingParams(), **fields), 10)
    assert bucket.calls == 0


def test_where_the_store_fails_each_server_goes_by_what_it_knows(
    two: list[SharedNames], bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "MAX_FAILURES", 1 << 30)
    a, b = two
    bucket.down = True
    use(a, "one/")
    wait_for(lambda: bucket.calls)  # a thread of its own tries to write the name, and fails
    assert names(b, "one/") == []
    assert a.prompts("one/", []) == []
    assert a.forget_session("one/", "of one/", here=True)
    for asks in (b.forget_session, partial(b.pin_session, pinned=True), b.forget_prompt):
        with pytest.raises(RequestError, match="does not answer") as error:
            asks("one/", "of one/", here=False)
        assert error.value.status == 503
    assert a.pin_session("one/", "of one/", True, here=True)
    bucket.down = False
    a.look()
    assert names(b, "one/") == []
    use(a, "one/")
    wait_for(lambda: names(b, "one/"))


def test_a_pinned_conversation_can_be_unpinned_when_its_name_has_expired(two: list[SharedNames]) -> None:
    a, b = two
    assert a.pin_session("one/", "old", True, here=True)
    b.look()
    assert b.pin_session("one/", "old", False, here=False)
    b.look()
    assert not b.pin_session("one/", "old", False, here=False)


def test_a_late_deletion_leaves_the_name_of_a_conversation_that_was_begun_since(
    two: list[SharedNames], bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "MAX_FAILURES", 1 << 30)
    a, b = two
    bucket.down = True
    assert a.forget_session("one/", "of one/", here=True)
    bucket.down = False
    now = time.time()
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now + 2 * SKEW_S)
        use(b, "one/")
        wait_for_threads(WRITERS)
        a.look()
        assert names(b, "one/") == ["of one/"]


class Replies:
    """The texts of replies in a server's own file, which is full."""

    def __init__(self) -> None:
        self.full = True
        self.forgotten: list[str] = []

    def salts(self) -> list[str]:
        if self.full:
            raise StoreError("the disk is full")
        return ["one/"]

    def forget(self, salts: list[str], name: str) -> None:
        self.forgotten.append(name)


@pytest.mark.parametrize("denied", [False, True])
def test_a_deletion_that_cannot_be_done_here_yet_is_done_later(
    two: list[SharedNames], bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, denied: bool
) -> None:
    replies, memory = Replies(), SimpleNamespace(forget=lambda *args: None)
    engine = SimpleNamespace(conversations=SimpleNamespace(replies=replies))
    parts: list[Any] = [Ids(bucket, tmp_path / "c"), engine, Prompts(), SimpleNamespace(replies=memory)]
    at = SharedNames(*parts)
    at.start(lambda: None)
    at.close()
    at.look()
    assert two[0].forget_session("one/", "secret", here=True)
    with pytest.raises(StoreError):
        at.look()
    replies.full = False
    if denied:  # and what this server has to tell does not keep it from hearing

        def delete(path: str) -> None:
            raise PermissionError("denied")

        monkeypatch.setattr(bucket, "delete", delete)
        assert at.forget_session("one/", "other", here=True)
        assert two[0].pin_session("one/", "theirs", True, here=True)
        with pytest.raises(StoreError):
            at.look()
        assert [name for _, name in parts[0].asked[-1]] == ["theirs"]
    else:
        at.look()
    assert replies.forgotten == ["secret"]


def test_a_store_whose_clock_is_ahead_keeps_no_name_over_a_reset(two: list[SharedNames], bucket: Bucket) -> None:
    a, b = two
    use(a, "one/")
    wait_for(lambda: names(b, "one/"))
    bucket.modified = {path: at + 60 for path, at in bucket.modified.items()}
    b.reset(tenant="one")
    assert names(a, "one/") == []


def test_a_look_asks_the_engine_once_for_all_pins(two: list[SharedNames], bucket: Bucket, tmp_path: Path) -> None:
    parts: list[Any] = [ids := Ids(bucket, tmp_path / "c"), None, Prompts(), None]
    at = SharedNames(*parts)
    for name in ("large", "other", "third"):
        assert two[0].pin_session("one/", name, True, here=True)
    at.look()
    at.look()
    assert [sorted(name for _, name in asked) for asked in ids.asked] == [
        ["large", "other", "third"],
        ["other", "third"],
    ]


def test_a_slow_store_takes_no_place_of_the_file_of_responses(
    two: list[SharedNames], bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(bucket, "put", lambda *args, **more: answers.wait(20))
    use(two[0], *(f"{number}/" for number in range(100)))
    done = threading.Event()
    try:
        FILES.start(done.set)
        assert done.wait(20)
    finally:
        answers.set()
