"""The shared tier over HTTP: servers that answer as S3 does on a bad day. `test_shared_stores` has servers of real stores."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from afterglow.store.shared.objects import ObstoreObjects
from tests.engine.conftest import VOCAB, Handle
from tests.waiting import wait_for

pytest.importorskip("obstore")

Start = Callable[..., Handle]
Models = Callable[[str], Path]

BUCKET = "afterglow-kv"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Point the environment at an S3 server."""

    def point(endpoint: str) -> None:
        monkeypatch.setenv("AWS_ENDPOINT", endpoint)
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")

    return point


def rows_of(seed: int, rows: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(rows)]


def published(handle: Handle) -> None:
    handle.engine.settle()
    shared = handle.engine.parts.store.shared
    assert shared is not None
    assert shared.rest(20.0)


@contextmanager
def answering(status: int | None) -> Iterator[str]:
    """Run a server that answers all requests with a status; None: that does not answer. Yields its URL."""
    free = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if status is None:
                free.wait(60)
                return
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_HEAD = do_PUT = do_POST = answer

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        free.set()
        server.shutdown()
        thread.join()
        server.server_close()


def cannot_be_used(handle: Handle, kind: str) -> None:
    """Requests go on over a store that cannot be used, and its failures are counted; closes the engine."""
    for seed in range(4):
        prompt = rows_of(seed, 150)
        done = handle.ask(prompt, max_tokens=4)
        assert done.tokens == handle.ask(prompt, max_tokens=4, reuse=False).tokens
    assert handle.ask([*rows_of(0, 150), 1]).cached.total == 150, "what is here is found all the same"
    shared = handle.engine.parts.store.shared
    assert shared is not None
    wait_for(lambda: kind in shared.stats().failures)
    handle.engine.close()


def limit(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Give calls that do not come back little time, and all others enough: what is answered late counts as a timeout."""
    seconds = 0.3 if kind == "timeout" else 20.0
    monkeypatch.setattr("afterglow.store.shared.shared_store.LOOKUP_S", seconds)
    monkeypatch.setattr("afterglow.store.shared.extent_publisher.PUT_S", seconds)


STATUSES = [(500, "io"), (403, "denied"), (404, "io"), (None, "timeout"), (200, "io")]


@pytest.mark.parametrize(("status", "kind"), STATUSES)
def test_a_bucket_that_cannot_be_used_is_no_fault_of_a_request(
    start: Start,
    model_of: Models,
    tmp_path: Path,
    s3: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    status: int | None,
    kind: str,
) -> None:
    limit(monkeypatch, kind)
    with answering(status) as url:
        s3(url)
        cannot_be_used(start(model_of("llama"), tmp_path / "a", shared=f"s3://{BUCKET}"), kind)


def test_a_server_that_fails_is_not_taken_for_an_object_that_ends_early(s3: Callable[[str], None]) -> None:
    """Such objects are removed; errors of a bucket with this name have the word "range" in them."""
    with answering(500) as url:
        s3(url)
        objects = ObstoreObjects("s3://orange/kv")
        with pytest.raises(Exception, match=r"Error performing"):
            objects.get("digest/extents/ab/abcd.safetensors", 0, 100)


def test_an_object_that_ends_early_gives_no_more_bytes_than_it_has(tmp_path: Path) -> None:
    objects = ObstoreObjects(f"file://{tmp_path}/orange")
    objects.put("a/b", b"abc")
    assert [objects.get("a/b", start, 5) for start in (0, 2, 3, 50)] == [b"abc", b"c", b"", b""]
    with pytest.raises(FileNotFoundError):
        objects.get("a/c", 0, 5)


def test_no_server_at_all(start: Start, model_of: Models, tmp_path: Path, s3: Callable[[str], None]) -> None:
    with answering(500) as url:
        pass  # nothing listens there any more
    s3(url)
    a = start(model_of("llama"), tmp_path / "a", shared=f"s3://{BUCKET}")
    prompt = rows_of(0, 150)
    assert a.ask(prompt, max_tokens=4).tokens == a.ask(prompt, max_tokens=4, reuse=False).tokens
    shared = a.engine.parts.store.shared
    assert shared is not None
    wait_for(lambda: shared.stats().failures)
