"""The same scenes over a real server of each kind of store: moto's S3, Azurite, and fake-gcs-server (`store_servers`)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from urllib.parse import quote

import pytest

from afterglow.store.shared.objects import Listed, ObstoreObjects
from tests.engine.conftest import Handle
from tests.engine.store_servers import (
    AZURE_ACCOUNT,
    SERVERS,
    StoreServer,
    azure_signature,
    store_server,
)
from tests.engine.test_shared_s3 import published, rows_of
from tests.waiting import wait_for

pytest.importorskip("obstore")

Start = Callable[..., Handle]
Models = Callable[[str], Path]

_numbers = count()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine answers late."""
    monkeypatch.setattr("afterglow.store.shared.shared_store.LOOKUP_S", 20.0)


@pytest.fixture(scope="module", params=SERVERS)
def running(request: pytest.FixtureRequest) -> Iterator[StoreServer]:
    with store_server(request.param) as server:
        yield server


@pytest.fixture
def server(running: StoreServer, monkeypatch: pytest.MonkeyPatch) -> StoreServer:
    """A server that the environment leads to, with credentials, as its operator would."""
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    return running


@pytest.fixture
def bucket(server: StoreServer) -> str:
    """A bucket of this test's own."""
    name = f"afterglow-{next(_numbers)}"
    server.make(name)
    return name


@pytest.fixture
def url(server: StoreServer, bucket: str) -> str:
    return f"{server.scheme}://{bucket}/some/folder"


@pytest.fixture
def engine(start: Start, model_of: Models, tmp_path: Path) -> Callable[[str, str], Handle]:
    """Start an engine by name, over a store."""
    return lambda name, url: start(model_of("llama"), tmp_path / name, shared=url)


def rests(handle: Handle) -> bool:
    shared = handle.engine.parts.store.shared
    assert shared is not None
    return shared.stats().rests


def failures(handle: Handle) -> dict[str, int]:
    stats = handle.engine.stats().shared
    assert stats is not None
    return stats.failures


def right(handle: Handle, prompt: list[int], **options: object) -> int:
    """Ask, compare with computing all, and return how many rows came from the store."""
    done = handle.ask(prompt, max_tokens=4, **options)
    assert done.tokens == handle.ask(prompt, max_tokens=4, reuse=False).tokens
    return done.cached.shared


def converse(engines: list[Handle], seed: int) -> None:
    """Hold a conversation that changes its engine every turn, and finds all rows of the turns before."""
    text, previous = rows_of(seed, 150), 0
    for turn in range(4):
        handle = engines[turn % 2]
        done = handle.ask(text, max_tokens=20)
        assert done.tokens == handle.ask(text, max_tokens=20, reuse=False).tokens
        assert done.cached.total == previous, turn
        published(handle)
        previous = len(text) + len(done.tokens) - 1
        text = [*text, *done.tokens, *rows_of(seed + 10 + turn, 70)]


def extents(objects: ObstoreObjects) -> list[Listed]:
    return [each for some in objects.list("") for each in some if each.path.endswith(".safetensors")]


# ---- objects


def test_objects_are_written_once_read_by_ranges_listed_and_removed(url: str) -> None:
    objects = ObstoreObjects(url)
    names = [f"a/{number}" for number in range(5)]
    assert all(objects.put(name, b"0123456789") for name in names)
    assert objects.put("a/empty", b"")
    assert objects.put("aa/other", b"x")
    assert not objects.put(names[0], b"other")
    assert [objects.get(names[0], start, 4) for start in (0, 3, 8, 10, 50)] == [b"0123", b"3456", b"89", b"", b""]
    assert objects.get("a/empty", 0, 4) == b""
    assert objects.put(names[0], b"another one", replace=True)
    assert objects.get(names[0], 0, 100) == b"another one"
    found = [each for some in objects.list("a") for each in some]
    assert [(each.path, each.size) for each in found] == [
        (names[0], 11),
        *((name, 10) for name in names[1:]),
        ("a/empty", 0),
    ]
    assert all(abs(each.modified - datetime.now(UTC).timestamp()) < 60 for each in found)
    assert not [*objects.list("none")]
    objects.delete(names[0])
    objects.delete(names[0])
    with pytest.raises(FileNotFoundError):
        objects.get(names[0], 0, 4)
    assert [each.path for some in objects.list("a") for each in some] == [*names[1:], "a/empty"]


def test_of_writers_at_the_same_time_one_wins(url: str) -> None:
    objects = ObstoreObjects(url)
    for number in range(10):
        gate = threading.Barrier(4)

        def write(data: bytes, name: str = f"a/{number}", gate: threading.Barrier = gate) -> bool:
            gate.wait(20)
            return objects.put(name, data)

        texts = [bytes([65 + each]) * 5000 for each in range(4)]
        with ThreadPoolExecutor(4) as pool:
            won = [*pool.map(write, texts)]
        assert won.count(True) == 1
        assert objects.get(f"a/{number}", 0, 10_000) == texts[won.index(True)]


@pytest.mark.long
def test_a_listing_of_several_pages_has_all(url: str) -> None:
    """S3 lists 1,000 objects at a time, Azure 5,000."""
    objects = ObstoreObjects(url)
    names = [f"a/{number:05}" for number in range(5_100)]
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda name: objects.put(name, b""), names))
    assert [each.path for some in objects.list("a") for each in some] == names


# ---- engines


def test_a_conversation_that_changes_its_engine_is_computed_once(
    engine: Callable[[str, str], Handle], url: str
) -> None:
    engines = [engine(name, url) for name in "ab"]
    converse(engines, 1)
    for handle in engines:
        stats = handle.engine.stats().shared
        assert stats is not None
        assert stats.failures == {}
        assert stats.fetches > 0
    engines[1].engine.reset_cache()
    published(engines[1])


def test_damage_is_a_miss_and_mended(engine: Callable[[str, str], Handle], url: str) -> None:
    a, b, c = (engine(name, url) for name in "abc")
    prompt, objects = rows_of(40, 150), ObstoreObjects(url)
    right(a, prompt)
    published(a)
    for each in extents(objects):
        data = bytearray(objects.get(each.path, 0, each.size))
        data[5000] ^= 4
        objects.put(each.path, bytes(data), replace=True)
    assert right(b, prompt) == 0
    assert failures(b) == {"damage": 1}
    published(b)  # the damaged object was removed; the rows computed again are published in its place
    wait_for(lambda: c.ask([*prompt, 1]).cached.total)
    assert right(c, [*prompt, 2]) + c.ask([*prompt, 3]).cached.total > 0
    assert failures(c) == {}


def test_an_object_that_ends_early_or_is_gone_is_a_miss(engine: Callable[[str, str], Handle], url: str) -> None:
    a, b = engine("a", url), engine("b", url)
    objects = ObstoreObjects(url)
    prompts = [rows_of(41, 150), rows_of(42, 150)]
    for prompt in prompts:
        a.ask(prompt, max_tokens=1)
    published(a)
    short, gone = extents(objects)
    objects.put(short.path, objects.get(short.path, 0, 6000), replace=True)
    objects.delete(gone.path)
    assert [right(b, prompt) for prompt in prompts] == [0, 0]
    assert failures(b) == {"damage": 1, "missing": 1}


def test_a_bucket_that_is_not_there_is_told_and_no_fault_of_a_request(
    engine: Callable[[str, str], Handle], server: StoreServer, caplog: pytest.LogCaptureFixture
) -> None:
    a = engine("a", f"{server.scheme}://nothing-here/kv")
    for seed in range(4):
        right(a, rows_of(seed, 150))
    assert a.ask([*rows_of(0, 150), 1]).cached.total == 150, "what is here is found all the same"
    # It rests from the third failure on, which is logged, and then counted, a moment later.
    wait_for(lambda: rests(a) and failures(a).get("io", 0) >= 3)
    assert failures(a).keys() <= {"io", "refused"}, "none of a missing object"
    reasons = {"s3": "The specified bucket does not exist", "az": "The specified container does not exist", "gs": ""}
    (told,) = [each for each in caplog.messages if "is left alone for 30 s" in each]
    assert reasons[server.scheme] in told


def test_a_server_that_is_killed_and_comes_back_empty(
    engine: Callable[[str, str], Handle],
    server: StoreServer,
    bucket: str,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("afterglow.store.shared.remote.REST_S", 0.2)
    engines = [engine(name, url) for name in "ab"]
    converse(engines, 100)
    assert all(failures(each) == {} for each in engines)
    server.kill()
    for turn in range(8):
        assert right(engines[turn % 2], rows_of(200 + turn // 2, 150)) == 0
    assert all(failures(each).get("io", 0) > 0 for each in engines)
    server.start()
    for turn in range(4):  # there is no bucket
        right(engines[turn % 2], rows_of(300 + turn, 150))
    server.make(bucket)
    for handle in engines:
        shared = handle.engine.parts.store.shared
        assert shared is not None
        wait_for(lambda shared=shared: not shared.stats().rests)
        published(handle)
    a, b = engines
    seeds = iter(range(400, 10_000))

    def found() -> bool:
        prompt = rows_of(next(seeds), 150)
        right(a, prompt)
        published(a)
        return right(b, [*prompt, 1]) > 0

    wait_for(found)
    converse(engines, 50)


# ---- Azure alone: the one that looks at credentials

on_azure = pytest.mark.parametrize("running", ["az"], indirect=True)


@on_azure
def test_a_wrong_key_is_told_and_no_fault_of_a_request(
    engine: Callable[[str, str], Handle],
    server: StoreServer,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    a = engine("a", url)
    for seed in range(4):
        right(a, rows_of(seed, 150))
    wait_for(lambda: rests(a) and failures(a).get("denied", 0) >= 3)
    assert any("left alone" in each and "authenticate" in each for each in caplog.messages)


@on_azure
def test_without_a_key_the_machine_is_asked_for_one(
    engine: Callable[[str, str], Handle], server: StoreServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Azure's service for that, which has none to give here."""
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    a = engine("a", url)
    for seed in range(4):
        right(a, rows_of(seed, 150))
    wait_for(lambda: rests(a))
    assert failures(a).keys() <= {"io", "denied", "refused", "timeout"}


@on_azure
def test_the_emulator_by_the_variable_for_it(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its account and key are those of every Azurite, which this one does not have: a signature that it refuses has come to it."""
    for name in server.environment:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
    monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", server.url)
    with pytest.raises(Exception, match=rf"{server.url}/devstoreaccount1/kv/folder/a"):
        ObstoreObjects("az://kv/folder").get("a", 0, 4)


@on_azure
def test_a_signature_that_grants_access_to_one_container(
    server: StoreServer, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shared access signature, as an operator gives who is not to have the account's key."""
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    end, version = f"{datetime.now(UTC) + timedelta(hours=1):%Y-%m-%dT%H:%M:%SZ}", "2020-10-02"
    where = f"/blob/{AZURE_ACCOUNT}/{bucket}"
    text = "\n".join(["racwdl", "", end, where, "", "", "https,http", version, "c", *[""] * 6])
    token = f"sp=racwdl&se={quote(end)}&spr=https,http&sv={version}&sr=c&sig={quote(azure_signature(text), safe='')}"
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", token)
    objects = ObstoreObjects(f"az://{bucket}/kv")
    assert objects.put("a/b", b"0123456789")
    assert not objects.put("a/b", b"other")
    assert objects.get("a/b", 3, 4) == b"3456"
    assert [each.path for some in objects.list("a") for each in some] == ["a/b"]
    objects.delete("a/b")
    with pytest.raises(FileNotFoundError):
        objects.get("a/b", 0, 4)
