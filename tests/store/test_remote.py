"""A store that fails: its URL is refused by name, and the reason why it is left alone is logged once."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from afterglow.errors import ConfigError, RefusedError, StoreError
from afterglow.store.faults import kind_of
from afterglow.store.shared.budget import Budget
from afterglow.store.shared.counters import SharedCounters
from afterglow.store.shared.objects import Objects, ObstoreObjects, check_url
from afterglow.store.shared.paths import Paths
from afterglow.store.shared.remote import MAX_ASIDE, MAX_FAILURES, REST_S, Remote
from tests.store.bucket import Bucket
from tests.waiting import wait_for


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("ftp://host/x", "write file:///folder, s3://bucket/folder, gs://bucket/folder or az://container/folder"),
        ("/folder", "write file:///folder, "),
        ("", "write file:///folder, "),
        ("s3://[bucket", "write file:///folder, "),
        ("file://folder/below", "names no folder; write file:///folder/"),
        ("file:///", "names no folder; write file:///folder/"),
        ("s3:///folder", "names no bucket; write s3://bucket/folder"),
        ("az://", "names no container; write az://container/folder"),
    ],
)
def test_a_url_that_names_no_store_is_refused_with_what_to_write(url: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_url(url)
    assert f"--shared {url!r} " in str(error.value)
    assert remedy in str(error.value)


def test_the_reason_of_a_rest_is_logged_once_until_the_store_answers(caplog: pytest.LogCaptureFixture) -> None:
    now, bucket = 0.0, Bucket()
    remote = Remote(lambda: bucket, lambda: now)

    def remove() -> None:
        remote.call("removing", lambda objects: objects.delete("a"), 20)

    def fail_until_it_rests() -> None:
        bucket.down = True
        for _ in range(MAX_FAILURES):
            with pytest.raises(StoreError, match="removing: down"):
                remove()
        with pytest.raises(RefusedError):
            remove()

    told = f"the shared store fails, and is left alone for {REST_S:g} s at a time: removing: down"
    fail_until_it_rests()
    assert caplog.messages == [told]
    now += REST_S
    fail_until_it_rests()
    assert caplog.messages == [told], "an outage is told once"
    now, bucket.down = now + REST_S, False
    remove()
    fail_until_it_rests()
    assert caplog.messages == [told, told]
    remote.close()


def test_a_store_that_cannot_be_listed_is_left_alone() -> None:
    bucket = Bucket()
    bucket.down = True
    remote = Remote(lambda: bucket)
    budget = Budget(remote, Paths("digest"), 100, SharedCounters())
    for _ in range(MAX_FAILURES):
        with pytest.raises(StoreError, match="counting extents: down"):
            budget.make_room(1)
    assert remote.rests
    remote.close()


def test_a_folder_is_its_servers_alone_and_keeps_nothing_of_killed_writers(tmp_path: Path) -> None:
    """A killed writer leaves a file with a number behind its name, which listings of a folder leave out."""
    pytest.importorskip("obstore")
    folder = tmp_path / "on a share" / "afterglow"
    objects = ObstoreObjects(folder.as_uri())
    assert folder.stat().st_mode & 0o777 == 0o700
    objects.put("digest/extents/ab/abcd.safetensors", b"rows")
    old, young, text = (
        folder / "digest" / each for each in ("extents/ab/abcd.safetensors#1", "extents/young#12", "ids/r/x#3")
    )
    others = folder / "other" / "issue#42"
    for each in (old, young, text, others):
        each.parent.mkdir(parents=True, exist_ok=True)
        each.write_bytes(b"left")
    for each in (old, text, others):
        os.utime(each, (0, 0))
    assert [each.path for some in objects.list("digest") for each in some] == ["digest/extents/ab/abcd.safetensors"]
    remote = Remote(lambda: objects)
    assert Budget(remote, Paths("digest"), 100, SharedCounters()).make_room(1)
    assert [each.exists() for each in (old, young, text, others)] == [False, True, False, True]
    assert objects.get("digest/extents/ab/abcd.safetensors", 0, 9) == b"rows"
    remote.close()


@pytest.mark.parametrize("code", ["NoSuchBucket", "ContainerNotFound"])
def test_a_missing_bucket_is_no_missing_object(code: str) -> None:
    """As `obstore` says it: the same class as for an object, and the store's own words on the lines below."""

    def missing(_: Objects) -> None:
        raise FileNotFoundError(
            "Object at location x/a not found: Error performing GET http://h/b/x/a in 1ms - Server returned non-2xx status code: 404 Not "
            f'Found: <?xml version="1.0"?>\n<Error><Code>{code}</Code><Message>It does not exist</Message></Error>\n\nDebug source:'
        )

    remote = Remote(Bucket)
    reason = "reading: Server returned non-2xx status code: 404 Not Found: It does not exist"
    for _ in range(MAX_FAILURES):
        with pytest.raises(StoreError) as error:
            remote.call("reading", missing, 20)
        assert str(error.value) == reason
        assert kind_of(error.value) == "io"
    assert remote.rests
    remote.close()


@pytest.mark.parametrize(
    ("scheme", "what"),
    [
        *((scheme, what) for scheme in ("az", "s3", "gs") for what in ("refused", "http")),
        ("az", "credentials"),
        ("s3", "credentials"),  # for Google's, no variable leads away from the machine's own address
    ],
)
def test_what_a_user_can_mend_is_in_the_reason(scheme: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `obstore`'s own errors: it says no more than that a request could not be sent, or built, and its own words are far below."""
    pytest.importorskip("obstore")
    with socket.socket() as probe:  # it does not listen, and keeps the port from all others
        probe.bind(("127.0.0.1", 0))
        _check_reason(scheme, what, f"127.0.0.1:{probe.getsockname()[1]}", monkeypatch)


def _check_reason(scheme: str, what: str, nowhere: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AZURE_STORAGE_ACCOUNT_NAME": "account",
        "AZURE_STORAGE_ENDPOINT": f"http://{nowhere}/account",
        "AZURE_MSI_ENDPOINT": f"http://{nowhere}/identity",
        "AWS_ENDPOINT": f"http://{nowhere}",
        "AWS_REGION": "us-east-1",
        "AWS_METADATA_ENDPOINT": f"http://{nowhere}",
        "GOOGLE_BASE_URL": f"http://{nowhere}",
        "GOOGLE_BEARER_TOKEN": "token",
        **(
            {} if what == "http" else dict.fromkeys(("AZURE_ALLOW_HTTP", "AWS_ALLOW_HTTP", "GOOGLE_ALLOW_HTTP"), "true")
        ),
        **({} if what == "credentials" else dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "key")),
        **({} if what == "credentials" else {"AZURE_STORAGE_ACCOUNT_KEY": "a2V5"}),
    }.items():
        monkeypatch.setenv(name, value)
    remote = Remote(lambda: ObstoreObjects(f"{scheme}://bucket/folder"))
    with pytest.raises(StoreError) as error:
        remote.call("reading", lambda objects: objects.get("a", 0, 4), 20)
    assert (
        str(error.value)
        == {
            "refused": "reading: HTTP error: error sending request: Connection refused",
            "http": "reading: an http:// endpoint needs AWS_ALLOW_HTTP, GOOGLE_ALLOW_HTTP or AZURE_ALLOW_HTTP=true",
            "credentials": f"reading: asking {nowhere} for credentials: HTTP error: error sending request: Connection refused",
        }[what]
    )
    remote.close()


def test_a_call_aside_says_nothing_about_the_store() -> None:
    """Neither does it make good for failures of the store, nor count as one, and one that hangs is left behind."""
    bucket = Bucket()
    bucket.down = True
    remote = Remote(lambda: bucket)
    gate, hanging = threading.Event(), threading.Semaphore(0)

    def hangs() -> None:
        hanging.release()
        gate.wait()

    def hang() -> bool:
        """Make one more call that hangs; tell whether it was taken: places of calls that have ended become free a moment later."""
        assert remote.aside(hangs, 0.0) is None
        return hanging.acquire(timeout=0.1)

    try:
        for _ in range(MAX_FAILURES):
            with pytest.raises(StoreError):
                remote.call("listing", lambda objects: [*objects.list("")], 5)
            if not remote.rests:
                assert remote.aside(lambda: 1, 5) == 1
        assert remote.rests
        assert remote.aside(lambda: 1 // 0, 5) is None
        for _ in range(MAX_ASIDE):
            wait_for(hang)
        assert remote.aside(lambda: 1, 5) is None, "too many hang"
        assert remote.hung == 0
        gate.set()
        wait_for(lambda: remote.aside(lambda: 1, 5) == 1)
    finally:
        gate.set()
        remote.close()
