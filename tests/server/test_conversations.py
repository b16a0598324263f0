"""The store behind `/v1/responses`: tenants, chains, time, size, damage."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from afterglow.errors import StoreError
from afterglow.store.database import conversations
from afterglow.store.database.conversations import FILE, Conversations, erase
from tests.damage import flip_text


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def kept(tmp_path: Path, clock: Clock) -> Iterator[Conversations]:
    store = Conversations(tmp_path, ttl_s=100, clock=clock)
    yield store
    store.close()


def add(store: Conversations, name: str, previous: str | None = None, tenant: str = "a", text: str = "") -> None:
    store.add(name, tenant, previous, "model", {"id": name}, [{"text": text or name}])


def said(store: Conversations, name: str, tenant: str = "a") -> list[str] | None:
    items = store.chain(name, tenant)
    return None if items is None else [item["text"] for item in items]


@pytest.mark.parametrize("folder", [True, False])
def test_a_chain_is_told_oldest_first_and_may_branch(tmp_path: Path, folder: bool) -> None:
    with closing(Conversations(tmp_path if folder else None)) as store:
        add(store, "r1")
        add(store, "r2", "r1")
        add(store, "r3", "r2")
        add(store, "other", "r1")
        assert said(store, "r3") == ["r1", "r2", "r3"]
        assert said(store, "other") == ["r1", "other"]
        found = store.get("r2", "a")
        assert found is not None
        assert (found.previous, found.root, found.model, found.body) == ("r1", "r1", "model", {"id": "r2"})
        assert store.count("a")[0] == 4


def test_another_tenants_ids_are_not_there(kept: Conversations) -> None:
    add(kept, "r1")
    assert kept.get("r1", "b") is None
    assert kept.chain("r1", "b") is None
    assert kept.delete("r1", "b") is False
    assert kept.count("b") == (0, 0)
    with pytest.raises(StoreError, match="not stored"):
        add(kept, "r2", "r1", tenant="b")
    assert kept.get("r1", "a") is not None


def test_an_id_is_given_once(kept: Conversations) -> None:
    add(kept, "r1")
    with pytest.raises(StoreError, match="UNIQUE"):
        add(kept, "r1", "r1")
    assert said(kept, "r1") == ["r1"]


def test_deleting_breaks_what_came_after(kept: Conversations) -> None:
    add(kept, "r1")
    add(kept, "r2", "r1")
    assert kept.delete("r1", "a")
    assert not kept.delete("r1", "a")
    assert kept.chain("r2", "a") is None
    assert kept.get("r2", "a") is not None
    assert kept.delete("r2", "a")
    assert kept.count("a") == (0, 0)


def test_a_conversation_expires_as_a_whole_after_its_last_turn(kept: Conversations, clock: Clock) -> None:
    add(kept, "r1")
    clock.now += 90
    add(kept, "r2", "r1")
    add(kept, "lone")
    clock.now += 90
    assert said(kept, "r2") == ["r1", "r2"]
    add(kept, "r3", "r2")
    clock.now += 50
    assert kept.get("lone", "a") is None
    assert kept.sweep() == 1
    assert said(kept, "r3") == ["r1", "r2", "r3"]
    clock.now += 50
    assert kept.get("r3", "a") is None
    assert kept.chain("r3", "a") is None
    with pytest.raises(StoreError, match="not stored"):
        add(kept, "r4", "r3")
    assert kept.sweep() == 3


def test_expired_ones_are_swept_as_time_goes_by(kept: Conversations, clock: Clock, tmp_path: Path) -> None:
    add(kept, "r1")
    clock.now += conversations.SWEEP_SECONDS + 1
    add(kept, "r2")
    with closing(sqlite3.connect(tmp_path / FILE)) as db:
        assert db.execute("SELECT id FROM responses").fetchall() == [("r2",)]


def test_they_survive_a_restart(tmp_path: Path, clock: Clock) -> None:
    for name, previous in (("r1", None), ("r2", "r1")):
        with closing(Conversations(tmp_path, clock=clock)) as store:
            add(store, name, previous, text="grüße \ud800" + name)
    with closing(Conversations(tmp_path, clock=clock)) as store:
        assert said(store, "r2") == ["grüße \ud800r1", "grüße \ud800r2"]


def test_the_size_is_bounded_and_the_longest_unused_go_first(tmp_path: Path, clock: Clock) -> None:
    with closing(Conversations(tmp_path, max_bytes=600_000, clock=clock)) as store:
        for number in range(12):
            clock.now += 1
            add(store, f"r{number}", text="x" * 50_000)
            if number == 8:
                clock.now += 1
                add(store, "again", "r2", text="x")  # r2 is in use again
        assert store.get("r0", "a") is None
        assert said(store, "again") is not None
        assert store.get("r11", "a") is not None
        with pytest.raises(StoreError, match="larger than 75000 bytes"):
            add(store, "huge", text="x" * 700_000)
        assert store.get("huge", "a") is None
        assert store.get("r11", "a") is not None
    assert (tmp_path / FILE).stat().st_size < 1_400_000


@pytest.mark.parametrize("damage", ["garbage", "truncated", "schema"])
def test_a_damaged_file_is_set_aside(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / FILE
    with closing(Conversations(tmp_path)) as store:
        for number in range(50):
            add(store, f"r{number}", text="x" * 3000)
    if damage == "garbage":
        path.write_bytes(b"no database at all" * 1000)
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:5000])
    else:
        with closing(sqlite3.connect(path)) as db:
            db.execute("PRAGMA user_version = 77")
    with caplog.at_level(logging.WARNING, "afterglow.store"), closing(Conversations(tmp_path)) as store:
        assert store.get("r49", "a") is None
        add(store, "new")
        assert store.get("new", "a") is not None
    assert f"{FILE} was damaged" in caplog.text
    assert (tmp_path / f"{FILE}.damaged").exists()
    with closing(Conversations(tmp_path)) as store:
        assert store.get("new", "a") is not None


def test_damage_while_running_costs_what_was_there(tmp_path: Path) -> None:
    with closing(Conversations(tmp_path)) as store:
        for number in range(200):
            add(store, f"r{number}", text="x" * 3000)
        store.close()
        store.__init__(tmp_path)  # type: ignore[misc] # SQLite holds none in memory now
        data = bytearray((tmp_path / FILE).read_bytes())
        data[8192:] = b"\xa5" * (len(data) - 8192)
        (tmp_path / FILE).write_bytes(data)
        assert store.chain("r150", "a") is None
        add(store, "new")
        assert said(store, "new") == ["new"]


def test_a_flipped_byte_costs_one_response(kept: Conversations, tmp_path: Path) -> None:
    add(kept, "r1")
    add(kept, "r2", "r1")
    with closing(sqlite3.connect(tmp_path / FILE)) as db:
        db.execute("UPDATE responses SET items = replace(items, 'r1', 'R1') WHERE id = 'r1'")
        db.commit()
    assert kept.get("r2", "a") is not None
    assert kept.chain("r2", "a") is None
    assert kept.get("r1", "a") is None


def test_a_circle_made_by_damage_ends(kept: Conversations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "MAX_DEPTH", 3)
    add(kept, "r1")
    for number in (2, 3, 4):
        add(kept, f"r{number}", f"r{number - 1}")
    assert said(kept, "r3") == ["r1", "r2", "r3"]
    assert kept.chain("r4", "a") is None


def test_a_folder_that_cannot_be_written_leaves_memory(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    with closing(Conversations(tmp_path)) as store:
        add(store, "r1")
        assert said(store, "r1") == ["r1"]


def test_several_threads(kept: Conversations) -> None:
    def work(number: int) -> None:
        previous = None
        for turn in range(20):
            name = f"{number}-{turn}"
            add(kept, name, previous)
            previous = name
        assert len(said(kept, f"{number}-19") or ()) == 20

    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert kept.count("a")[0] == 80


def test_closed_and_erased(kept: Conversations, tmp_path: Path) -> None:
    add(kept, "r1")
    kept.close()
    kept.close()
    with pytest.raises(StoreError, match="closed"):
        kept.get("r1", "a")
    erase(tmp_path)
    assert list(tmp_path.glob("*")) == []


PLACES = range(7)  # of one name in the file: in both tables, in their indices, and within texts


@pytest.mark.timeout(60)
@pytest.mark.parametrize("place", PLACES)
def test_an_id_that_is_damaged_does_not_stop_the_sweep(tmp_path: Path, clock: Clock, place: int) -> None:
    """The row is read, and not found to be deleted: once that went on for ever, at every start."""
    with closing(Conversations(tmp_path, ttl_s=100, clock=clock)) as store:
        add(store, "an-id-that-is-long", text="x")
    flip_text(tmp_path / FILE, b"an-id-that-is-long", place)
    clock.now += 200
    with closing(Conversations(tmp_path, ttl_s=100, clock=clock)) as store:
        add(store, "r2")
        assert said(store, "r2") == ["r2"]
        assert store.count("a")[0] == 1


@pytest.mark.timeout(60)
@pytest.mark.parametrize("place", PLACES)
def test_a_conversation_that_is_damaged_gives_its_room_back(tmp_path: Path, clock: Clock, place: int) -> None:
    with closing(Conversations(tmp_path, max_bytes=600_000, clock=clock)) as store:
        add(store, "first-of-all-conversations", text="x" * 50_000)
    flip_text(tmp_path / FILE, b"first-of-all-conversations", place)
    with closing(Conversations(tmp_path, max_bytes=600_000, clock=clock)) as store:
        for number in range(24):
            clock.now += 1
            add(store, f"r{number}", text="x" * 50_000)
        assert said(store, "r23") == ["x" * 50_000]
