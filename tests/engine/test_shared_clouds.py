"""`gs://` and `az://`: the clients of both, with what the environment says, at a server in memory that answers as the services do.

`test_shared_stores` has the same over servers that others wrote, where they are installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from afterglow.store.shared.objects import ObstoreObjects
from tests.engine.cloud_server import CONTAINER, PAGE, CloudServer, cloud_server
from tests.engine.conftest import Handle
from tests.engine.test_shared_s3 import STATUSES, answering, cannot_be_used, limit, published, rows_of
from tests.waiting import wait_for

pytest.importorskip("obstore")

SIGNED = {"gs": "Bearer token", "az": "SharedKey account:"}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine answers late."""
    monkeypatch.setattr("afterglow.store.shared.shared_store.LOOKUP_S", 20.0)


@pytest.fixture
def point(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Point the environment at a server, with credentials, as its operator would."""

    def to(url: str) -> None:
        for name, value in (
            ("GOOGLE_BASE_URL", url),
            ("GOOGLE_BEARER_TOKEN", "token"),
            ("GOOGLE_ALLOW_HTTP", "true"),
            ("AZURE_STORAGE_ACCOUNT_NAME", "account"),
            ("AZURE_STORAGE_ACCOUNT_KEY", "a2V5"),
            ("AZURE_STORAGE_ENDPOINT", url),
            ("AZURE_ALLOW_HTTP", "true"),
        ):
            monkeypatch.setenv(name, value)

    return to


@pytest.fixture
def cloud(point: Callable[[str], None]) -> Iterator[CloudServer]:
    """A server that the environment leads to."""
    with cloud_server() as server:
        point(server.url)
        yield server


@pytest.mark.parametrize("scheme", SIGNED)
def test_objects_are_written_once_read_by_ranges_listed_in_pages_and_removed(cloud: CloudServer, scheme: str) -> None:
    objects = ObstoreObjects(f"{scheme}://{CONTAINER}/some/folder")
    names = [f"a/{number}" for number in range(2 * PAGE + 1)]
    assert all(objects.put(name, b"0123456789") for name in names)
    assert not objects.put(names[0], b"other")
    assert [objects.get(names[0], start, 4) for start in (0, 3, 8, 10, 50)] == [b"0123", b"3456", b"89", b"", b""]
    assert objects.put(names[0], b"another one", replace=True)
    found = [each for some in objects.list("a") for each in some]
    assert [each.path for each in found] == names
    assert [each.size for each in found] == [11, *([10] * 2 * PAGE)]
    assert {each.modified for each in found} == {1767323045.0}
    objects.delete(names[0])
    objects.delete(names[0])
    with pytest.raises(FileNotFoundError):
        objects.get(names[0], 0, 4)
    assert set(cloud.objects) == {f"some/folder/{name}" for name in names[1:]}
    assert all(each.startswith(SIGNED[scheme]) for each in cloud.signed)


@pytest.mark.parametrize("scheme", SIGNED)
def test_engines_share_a_container(
    start: Callable[..., Handle], model_of: Callable[[str], Path], tmp_path: Path, cloud: CloudServer, scheme: str
) -> None:
    engines = [start(model_of("llama"), tmp_path / name, shared=f"{scheme}://{CONTAINER}/kv") for name in "ab"]
    text, previous = rows_of(1, 150), 0
    for turn in range(3):
        handle = engines[turn % 2]
        done = handle.ask(text, max_tokens=20)
        assert done.tokens == handle.ask(text, max_tokens=20, reuse=False).tokens
        assert done.cached.total == previous, turn
        published(handle)
        previous = len(text) + len(done.tokens) - 1
        text = [*text, *done.tokens, *rows_of(10 + turn, 70)]
    for handle in engines:
        stats = handle.engine.stats().shared
        assert stats is not None
        assert stats.failures == {}
        assert stats.fetches > 0


@pytest.mark.parametrize("scheme", SIGNED)
def test_wrong_credentials_are_counted_as_such(
    start: Callable[..., Handle], model_of: Callable[[str], Path], tmp_path: Path, cloud: CloudServer, scheme: str
) -> None:
    cloud.status = 403
    handle = start(model_of("llama"), tmp_path / "a", shared=f"{scheme}://{CONTAINER}/kv")
    prompt = rows_of(0, 150)
    assert handle.ask(prompt, max_tokens=4).tokens == handle.ask(prompt, max_tokens=4, reuse=False).tokens
    shared = handle.engine.parts.store.shared
    assert shared is not None
    wait_for(lambda: "denied" in shared.stats().failures)


@pytest.mark.parametrize("scheme", SIGNED)
@pytest.mark.parametrize(("status", "kind"), STATUSES)
def test_a_container_that_cannot_be_used_is_no_fault_of_a_request(
    start: Callable[..., Handle],
    model_of: Callable[[str], Path],
    tmp_path: Path,
    point: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    scheme: str,
    status: int | None,
    kind: str,
) -> None:
    limit(monkeypatch, kind)
    with answering(status) as url:
        point(url)
        cannot_be_used(start(model_of("llama"), tmp_path / "a", shared=f"{scheme}://{CONTAINER}/kv"), kind)


@pytest.mark.parametrize("scheme", SIGNED)
def test_a_server_that_fails_is_not_taken_for_an_object_that_ends_early(
    point: Callable[[str], None], scheme: str
) -> None:
    with answering(500) as url:
        point(url)
        objects = ObstoreObjects(f"{scheme}://orange/kv")
        with pytest.raises(Exception, match=r"Error performing"):
            objects.get("digest/extents/ab/abcd.safetensors", 0, 100)
