"""Full disks and small budgets: a start that cannot write loses nothing, and a budget holds while the store runs."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from contextlib import closing
from math import inf

import numpy as np
import pytest

from afterglow.config import CacheConfig, EngineConfig
from afterglow.engine import setup, sizes
from afterglow.errors import ConfigError, DamageError, StoreError
from afterglow.plan.step import Drop, Store, Use
from afterglow.store.database import connection, recovery, rows
from afterglow.store.database.catalog import Catalog, CatalogShares
from afterglow.store.database.conversations import Conversations
from afterglow.store.extents.disk_tier import DiskTier
from afterglow.store.moving.move_work import copy_rows
from afterglow.store.moving.task import Abandoned
from afterglow.store.places import bytes_below
from tests import doors
from tests.store.store_kit import ALIGNED, Kit, arena_of, extent_name, record
from tests.store.test_store_faults import tmpfs

MiB = 1024**2


# ------------------------------------------------------------------------------------------- given-up tasks


def given_up(*_):
    raise Abandoned("given up")


def test_a_given_up_write_leaves_the_slots_alone(tmp_path):
    arena = arena_of(ALIGNED, 4)
    before = arena.view.copy()
    tier = DiskTier(tmp_path, ALIGNED, "d")
    with pytest.raises(Abandoned):
        tier.write(record(1, 100), arena, (0, 1), given_up)
    assert np.array_equal(arena.view, before)
    assert list(tmp_path.rglob("*.safetensors")) == []


def test_a_given_up_copy_leaves_the_slots_alone():
    arena = arena_of(ALIGNED, 4)
    before = arena.view.copy()
    with pytest.raises(Abandoned):
        copy_rows(arena, [((0,), 0, 40)], (2,), 40, given_up)
    assert np.array_equal(arena.view, before)


@pytest.mark.parametrize("name", ["open", "mkdir"])
def test_a_store_that_hangs_before_it_writes_does_not_touch_its_slots_later(tmp_path, monkeypatch, name):
    gate, hung = threading.Event(), threading.Event()
    real = getattr(os, name)

    def hangs(*args, **more):
        hung.set()
        gate.wait(20)
        return real(*args, **more)

    with Kit(tmp_path) as kit:
        monkeypatch.setattr(os, name, hangs)
        kit.store.start([Store(1, record(1, 100), (0, 1))])
        assert hung.wait(20)
        doors.give_up_what_runs(doors.mover_of(kit.store))
        done = collect(kit, 1)
        assert [(one.ok, one.slots_busy) for one in done] == [(False, True)]
        kit.store.arena.view[:, :, :2] = 0x5A  # the new owner's rows
        gate.set()
        collect(kit, 1)
        monkeypatch.undo()
        assert (kit.store.arena.view[:, :, :2] == 0x5A).all()


def collect(kit, count):
    found = []
    deadline = time.monotonic() + 20
    while len(found) < count and time.monotonic() < deadline:
        found += kit.store.finished()
        time.sleep(0.01)
    assert len(found) == count
    return found


# --------------------------------------------------------------------------------------- a start that fails


def filled(folder, count=4):
    with Kit(folder) as kit:
        for n in range(count):
            assert kit.put(n, 64, (n,), last_used=float(n + 1)).ok
        kit.store.note("session", [("a", "one")])
        return kit.path


def sqlite_error(code, text="no luck"):
    error = sqlite3.OperationalError(text)
    error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize(
    "code",
    [sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_READONLY],
)
@pytest.mark.parametrize("where", [(connection, "connect"), (rows, "read_rows")], ids=["connect", "read_rows"])
def test_an_error_that_may_pass_costs_nothing(tmp_path, monkeypatch, code, where):
    path = filled(tmp_path)

    def fails(*_args, **_more):
        raise sqlite_error(code)

    with monkeypatch.context() as patch:
        patch.setattr(*where, fails)
        with pytest.raises(StoreError, match="no luck") as caught, Kit(tmp_path):
            pass
        assert not isinstance(caught.value, DamageError)
    assert list(path.glob("*.damaged")) == []
    with Kit(tmp_path) as kit:
        assert len(kit.store.records()) == 4
        assert kit.store.notes("session") == {"a": "one"}
        assert kit.store.stats().catalog_rebuilds == 0


@pytest.mark.parametrize("asked", [True, False])
def test_a_start_on_a_full_disk_loses_nothing(tmp_path, monkeypatch, asked):
    """Really full: not a byte is left, not even for SQLite's files."""
    small = tmp_path / "small"
    config = EngineConfig(cache=CacheConfig(disk_cache=MiB, cache_dir=small if asked else None))
    monkeypatch.setattr(setup, "default_cache_dir", lambda: small)

    def start():
        notes = {}

        def store(namespace):
            notes["kit"] = namespace
            return catalog_of(namespace) if namespace is not None else None

        return setup.open_store("m", "5eed" * 16, ALIGNED, store, config)

    def catalog_of(namespace):
        opened = recovery.open_catalog(namespace.catalog, DiskTier(namespace.extents, ALIGNED, "5eed" * 16))
        opened.catalog.close()
        return opened

    with tmpfs(small, "2m"):
        path = filled(small)
        filler = small / "filler"
        with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        if asked:
            with pytest.raises(ConfigError, match="cannot be used"):
                start()
        else:
            assert start() == (None, None)
        assert list(path.glob("*.damaged")) == []
        filler.unlink()
        opened, namespace = start()
        namespace.close()
        assert (len(opened.records), opened.rebuilt) == (4, 0)


def test_a_rebuild_that_fails_leaves_the_old_catalog(tmp_path, monkeypatch):
    path = filled(tmp_path) / "catalog.sqlite"
    path.write_bytes(b"no database" * 1000)

    def full(*_args, **_more):
        raise sqlite_error(sqlite3.SQLITE_FULL)

    with monkeypatch.context() as patch:
        patch.setattr(recovery, "insert", full)
        with pytest.raises(StoreError, match="cannot be rebuilt"), Kit(tmp_path):
            pass
    assert path.read_bytes() == b"no database" * 1000
    assert [file.name for file in path.parent.glob("catalog.sqlite*")] == ["catalog.sqlite"]
    with Kit(tmp_path) as kit:
        assert len(kit.store.records()) == 4


# ------------------------------------------------------------------------------- what the start finds counts


def test_extents_that_are_gone_at_the_start_are_counted(tmp_path):
    filled(tmp_path)
    with Kit(tmp_path) as kit:
        files = [kit.file(n) for n in (0, 2)]
    for file in files:
        file.unlink()
    with Kit(tmp_path) as kit:
        assert len(kit.store.records()) == 2
        assert kit.store.stats().errors == {"missing": 2}
    with Kit(tmp_path) as kit:
        assert kit.store.stats().errors == {}


def test_a_rebuilt_catalog_and_damaged_rows_are_counted(tmp_path):
    path = filled(tmp_path)
    with closing(sqlite3.connect(path / "catalog.sqlite")) as db:
        db.execute("UPDATE extents SET salt = 'other' WHERE id = ?", [extent_name(1)])
        db.commit()
    with Kit(tmp_path) as kit:
        assert kit.store.stats().errors == {"damage": 1}
    (path / "catalog.sqlite").write_bytes(b"no database" * 1000)
    with Kit(tmp_path) as kit:
        assert kit.store.stats().damage == 1
        assert kit.store.stats().catalog_rebuilds == 1


# ----------------------------------------------------------------------------------------------- the budget


def test_a_small_budget_holds_for_the_whole_folder(tmp_path):
    """Extents come and go, all are used, notes and conversations are kept without end: 16 MiB are never exceeded."""
    budget = 16 * MiB
    with Kit(tmp_path, shares=CatalogShares.of(budget)) as kit:
        extents_bytes = sizes.extent_bytes(budget, kit.namespace, ALIGNED)
        assert extents_bytes > budget // 2
        most = extents_bytes // ALIGNED.file_bytes(64)
        largest = 0
        with closing(setup.open_conversations(budget, kit.namespace, kit.store)) as talk:
            for n in range(most + most // 4):
                if n >= most:
                    assert kit.move(Drop(10**6 + n, extent_name(n - most))).ok
                assert kit.put(n, 64, (n % 64,)).ok
                kit.store.touch([Use(extent_name(m), float(n), n, inf) for m in range(max(0, n - most + 1), n + 1)])
                kit.store.note("session", [(f"{n}-{k}", "x" * 5000) for k in range(10)])
                kit.store.note("epoch", [(f"{n}", "x" * 40_000)])
                if n % 4 == 0:
                    talk.add(f"r{n}", "t", None, "m", {}, [{"text": "x" * (100 if n % 3 else 60_000)}])
                if n % 8 == 0:
                    largest = max(largest, bytes_below(kit.path))
            path = kit.path
        kit.store.close()
    assert max(largest, bytes_below(path)) <= budget
    with Kit(tmp_path, shares=CatalogShares.of(budget)) as kit:
        assert len(kit.store.records()) == most
        assert 0 < sum(map(len, kit.store.notes("session").values())) < CatalogShares.of(budget).note_bytes


def test_a_budget_that_has_no_room_for_an_extent_is_refused(tmp_path):
    with Kit(tmp_path) as kit:
        with pytest.raises(ConfigError, match=r"^--disk-cache 1 B has no room for 64 tokens"):
            sizes.extent_bytes(1, kit.namespace, ALIGNED)
        least = next(size for size in range(0, 16 * MiB, 64 << 10) if has_room(size, kit.namespace))
        assert sizes.extent_bytes(least, kit.namespace, ALIGNED) >= ALIGNED.file_bytes(64)
        (kit.path / "catalog.sqlite.damaged").write_bytes(bytes(least))
        assert sizes.extent_bytes(least, kit.namespace, ALIGNED) == 0, "damage is no reason to refuse a start"


def has_room(size, namespace):
    try:
        return sizes.extent_bytes(size, namespace, ALIGNED) > 0
    except ConfigError:
        return False


def test_relics_count(tmp_path):
    with Kit(tmp_path) as kit:
        before = sizes.extent_bytes(16 * MiB, kit.namespace, ALIGNED)
        (kit.path / "catalog.sqlite.damaged").write_bytes(bytes(MiB))
        (kit.path / "conversations.sqlite.damaged").write_bytes(bytes(MiB))
        assert sizes.extent_bytes(16 * MiB, kit.namespace, ALIGNED) < before - 1.5 * MiB


def test_a_note_that_is_too_long_is_not_kept_nor_what_it_replaces(tmp_path, caplog):
    with Kit(tmp_path) as kit:
        kit.store.note("session", [("a", "one"), ("b", "two")])
    with Kit(tmp_path) as kit:
        kit.store.note("session", [("a", "x" * 70_000)])
    with Kit(tmp_path) as kit:
        assert kit.store.notes("session") == {"b": "two"}
    assert "too long" in caplog.text


def test_the_oldest_notes_make_room(tmp_path):
    book = Catalog(tmp_path / "catalog.sqlite", CatalogShares(note_bytes=100_000))
    book.load()
    for n in range(40):
        book.note("session" if n % 2 else "epoch", [(f"{n:02}", "x" * 5000)])
        book.remove([])
    book.close()
    book = Catalog(tmp_path / "catalog.sqlite", CatalogShares(note_bytes=100_000))
    book.load()
    left = sorted([*book.notes("session"), *book.notes("epoch")])
    book.close()
    assert left == [f"{n:02}" for n in range(40 - len(left), 40)]
    assert 5 < len(left) < 20


def test_dropped_conversations_do_not_swell_the_log(tmp_path):
    with closing(Conversations(tmp_path, max_bytes=MiB)) as talk:
        largest = 0
        for root in range(6):
            for n in range(12):
                name = f"r{root}-{n}"
                talk.add(name, "t", f"r{root}-{n - 1}" if n else None, "m", {}, [{"text": "x" * 60_000}])
                largest = max(largest, bytes_below(tmp_path))
        assert talk.get("r5-11", "t") is not None
        assert talk.chain("r0-1", "t") is None
    assert largest <= MiB * 21 // 16
