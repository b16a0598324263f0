"""Real faults under a whole store: each move reports its fault, and reads return the bytes that were written."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import errno
import os
import pathlib
import shutil
import sqlite3
import threading

import numpy as np
import pytest

from afterglow.errors import StoreError
from afterglow.plan.step import Drop, Load, MoveDone
from afterglow.store import admin
from afterglow.store.database import rows as catalog_rows
from afterglow.store.extents import pieces
from afterglow.store.extents.head import peek_rows
from afterglow.store.namespace.namespace import Namespace
from tests import doors
from tests.damage import flip_text
from tests.store.store_kit import ALIGNED, DIGEST, Kit, contents, extent_name, limit_reads, name_of, patch_reads
from tests.store.test_extent_format import MADE, with_metadata
from tests.waiting import wait_for

_libc = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
MS_RDONLY, MS_REMOUNT, MNT_DETACH = 1, 32, 2


@contextlib.contextmanager
def tmpfs(folder, size):
    """A small file system at `folder`; skips where mounting is not allowed.

    Yields a function that remounts it read-only.
    """
    folder.mkdir(exist_ok=True)
    path = os.fsencode(folder)
    if _libc.mount(b"tmpfs", path, b"tmpfs", 0, f"size={size}".encode()) != 0:
        pytest.skip(f"cannot mount a tmpfs here: {os.strerror(ctypes.get_errno())}")
    try:
        yield lambda: _libc.mount(b"tmpfs", path, b"tmpfs", MS_REMOUNT | MS_RDONLY, f"size={size}".encode())
    finally:
        _libc.umount2(path, MNT_DETACH)


# --------------------------------------------------------------------------------------- damaged files


@pytest.mark.parametrize("harm", ["flip", "truncate", "empty", "delete", "swap"])
def test_a_damaged_extent_is_a_miss_and_leaves(tmp_path, harm):
    with Kit(tmp_path) as kit:
        kit.put(1, 100, (0, 1))
        kit.put(2, 100, (2, 3))
        file = kit.file(1)
        if harm == "flip":
            raw = bytearray(file.read_bytes())
            raw[-5000] ^= 1
            file.write_bytes(raw)
        elif harm == "truncate":
            os.truncate(file, file.stat().st_size - 4096)
        elif harm == "empty":
            os.truncate(file, 0)
        elif harm == "delete":
            file.unlink()
        else:
            shutil.copy(kit.file(2), file)
        done = kit.get(1, 100, (8, 9))
        assert not done.ok
        assert not done.slots_busy
        assert extent_name(1)[:16] in done.error
        assert kit.store.stats().errors == {"missing" if harm == "delete" else "damage": 1}
        assert not file.exists()
        assert kit.store.stats().disk_bytes == ALIGNED.file_bytes(100)
        assert not kit.get(1, 100, (8, 9)).ok
        assert kit.get(2, 100, (8, 9)).ok
        assert kit.put(1, 100, (0, 1)).ok
        assert kit.get(1, 100, (8, 9)).ok
    with Kit(tmp_path) as kit:
        assert len(kit.store.records()) == 2


def test_layers_before_the_damage_arrive(tmp_path, monkeypatch):
    limit_reads(monkeypatch, 1)
    with Kit(tmp_path) as kit:
        kit.put(1, 64, (0,))
        raw = bytearray(kit.file(1).read_bytes())
        raw[-1] ^= 1  # the last layer's values
        kit.file(1).write_bytes(raw)
        kit.store.start([Load(5, extent_name(1), 64, (1,))])
        assert not kit.store.wait_layer(5, 1, 10)
        assert not kit.settle()[0].ok


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOMEM])
def test_a_read_error_is_a_miss_that_may_pass(tmp_path, monkeypatch, number):
    with Kit(tmp_path) as kit:
        kit.put(1, 64, (0,))
        with monkeypatch.context() as patch:
            patch_reads(patch, lambda _: _raise(number))
            assert not kit.get(1, 64, (1,)).ok
        assert kit.store.stats().errors == {"io": 1}
        assert kit.get(1, 64, (1,)).ok


def _raise(number):
    def call(*_args, **_more):
        raise OSError(number, os.strerror(number))

    return call


# ---------------------------------------------------------------------------- full and read-only disks


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_a_failed_write_leaves_no_trace(tmp_path, monkeypatch, number):
    with Kit(tmp_path) as kit:
        kit.put(1, 64, (0,))
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", _raise(number))
            done = kit.put(2, 64, (1,))
        assert not done.ok
        assert os.strerror(number) in done.error
        assert not kit.file(2).exists()
        assert [p.name for p in kit.path.rglob("extents/*/*")] == [kit.file(1).name]
        assert kit.store.stats().disk_bytes == ALIGNED.file_bytes(64)
        assert kit.put(2, 64, (1,)).ok


def test_a_disk_that_is_really_full(tmp_path):
    with tmpfs(tmp_path / "small", "300k"), Kit(tmp_path / "small") as kit:
        wanted = {n: contents(kit.store.arena, (n,), 64) for n in range(30)}
        done = [kit.put(n, 64, (n,)) for n in range(30)]
        stored = [n for n in range(30) if done[n].ok]
        assert 0 < len(stored) < 30
        assert list(kit.path.glob("extents/*/.tmp-*")) == []
        assert kit.store.stats().errors.keys() <= {"no_space", "io"}
        for n in stored:
            assert kit.get(n, 64, (50,)).ok
            assert np.array_equal(contents(kit.store.arena, (50,), 64), wanted[n])
        room = [kit.move(Drop(1000 + n, extent_name(n))) for n in stored[:4]]
        if all(one.ok for one in room):
            assert kit.put(99, 64, (40,)).ok


def test_a_read_only_disk_can_be_looked_at_but_not_served(tmp_path):
    with tmpfs(tmp_path / "small", "4m") as turn_read_only:
        with Kit(tmp_path / "small") as kit:
            kit.put(1, 64, (0,))
            path = kit.path
        if turn_read_only() != 0:
            pytest.skip("cannot remount")
        with pytest.raises(StoreError, match="Read-only file system"):
            Namespace.open(tmp_path / "small", "m", DIGEST, ALIGNED)
        with pytest.raises(StoreError, match="Read-only file system"):
            Namespace.open(tmp_path / "small" / "new", "m", DIGEST, ALIGNED)
        assert admin.check(path, name_of=name_of).problems == []
        assert admin.stats(path).extents == 1
        with pytest.raises(StoreError, match="Read-only file system"):
            admin.clear(path)


# --------------------------------------------------------------------------------------------- hanging


class Gate(threading.Event):
    """Calls hang at it; `reached`: one does."""

    def __init__(self):
        super().__init__()
        self.reached = threading.Event()

    def wait(self, timeout=None):
        self.reached.set()
        return super().wait(timeout)


def _give_up(kit, gate):
    """Have the move that hangs at a gate count as one that has made no progress for too long."""
    assert gate.reached.wait(20)
    doors.give_up_what_runs(doors.mover_of(kit.store))


def test_a_read_that_hangs_is_a_miss_and_its_slots_stay_busy(tmp_path, monkeypatch):
    gate = Gate()
    with Kit(tmp_path) as kit:
        kit.put(1, 64, (0,))
        kit.put(2, 64, (1,))
        hang = {"on": True}

        def hanging(real):
            def call(*args):
                if hang["on"]:
                    hang["on"] = False
                    gate.wait(20)
                return real(*args)

            return call

        patch_reads(monkeypatch, hanging)
        kit.store.start([Load(50, extent_name(1), 64, (5,))])
        _give_up(kit, gate)
        wait_for(lambda: not kit.store.is_under_way(50))
        assert not kit.store.wait_layer(50, 0, 0)
        kit.store.start([Load(51, extent_name(2), 64, (6,))])
        assert kit.store.wait_layer(51, 1, 10)
        done = _collect(kit, 2)
        assert MoveDone(50, False, error="time-out", slots_busy=True, why="timeout") in done
        assert kit.store.stats().hung == 1
        gate.set()
        (late,) = _collect(kit, 1)
        assert (late.move, late.ok, late.slots_busy) == (50, False, False)
        assert kit.store.stats().hung == 0
        assert not kit.store.wait_layer(50, 0)
        assert kit.get(1, 64, (5,)).ok
        assert kit.store.stats().errors == {"timeout": 1}


def test_a_write_that_hangs_leaves_nothing(tmp_path, monkeypatch):
    gate = Gate()
    real = os.pwritev
    with Kit(tmp_path) as kit:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", lambda *args: (gate.wait(20), real(*args))[1])
            kit.moves = 60
            kit.store.start([_store(1, 61)])
            _give_up(kit, gate)
            (first,) = _collect(kit, 1)
            assert (first.ok, first.slots_busy) == (False, True)
            gate.set()
            (second,) = _collect(kit, 1)
            assert (second.ok, second.slots_busy) == (False, False)
        assert list(kit.path.glob("extents/*/*")) == []
        assert kit.store.stats().disk_bytes == 0
        assert kit.put(1, 64, (0,)).ok


@pytest.mark.parametrize("call", ["rename", "commit"])
def test_a_store_that_returns_late_harms_no_newer_one(tmp_path, monkeypatch, call):
    """The late store undoes itself: an extent stored under the same name meanwhile, or afterwards, stays."""
    gate = Gate()
    with Kit(tmp_path) as kit:
        with monkeypatch.context() as patch:
            if call == "rename":
                _hang_once(patch, os, "rename", gate)
            else:
                _hang_once(patch, catalog_rows, "insert", gate)
            kit.store.start([_store(1, 60)])
            _give_up(kit, gate)
            assert _collect(kit, 1)[0].slots_busy
            kit.store.start([_store(1, 61)])
            (meanwhile,) = _collect(kit, 1)
            gate.set()
            assert _collect(kit, 1)[0].move == 60
        _expect_stored(kit, meanwhile)


@pytest.mark.parametrize("call", ["unlink", "delete"])
def test_a_drop_that_returns_late_removes_nothing_newer(tmp_path, monkeypatch, call):
    gate = Gate()
    with Kit(tmp_path) as kit:
        kit.put(1, 64, (0,))
        with monkeypatch.context() as patch:
            _hang_once(patch, pathlib.Path if call == "unlink" else catalog_rows, call, gate)
            kit.store.start([Drop(60, extent_name(1))])
            _give_up(kit, gate)
            assert _collect(kit, 1)[0].slots_busy
            kit.store.start([Drop(61, extent_name(1)), _store(1, 62)])
            meanwhile = _collect(kit, 2)[-1]
            gate.set()
            assert _collect(kit, 1)[0].move == 60
        _expect_stored(kit, meanwhile)


def test_a_read_that_returns_late_with_an_error_removes_nothing_newer(tmp_path, monkeypatch):
    gate = Gate()
    with Kit(tmp_path) as kit:
        kit.put(1, 64, (0,))
        with monkeypatch.context() as patch:
            for module in (os, pieces):
                _hang_once(patch, module, "preadv", gate, then=_raise(errno.ENOENT))
            kit.store.start([Load(60, extent_name(1), 64, (5,))])
            _give_up(kit, gate)
            assert _collect(kit, 1)[0].slots_busy
            kit.store.start([Drop(61, extent_name(1)), _store(1, 62)])
            meanwhile = _collect(kit, 2)[-1]
            gate.set()
            assert _collect(kit, 1)[0].move == 60
        _expect_stored(kit, meanwhile)


def _hang_once(patch, module, name, gate, then=None):
    real, left = getattr(module, name), [1]

    def call(*args, **more):
        if left and left.pop():
            assert gate.wait(20)
            return (then or real)(*args, **more)
        return real(*args, **more)

    patch.setattr(module, name, call)


def _expect_stored(kit, done):
    """Expect that a store reported as done is there, and that a refused one can be repeated now."""
    assert kit.settle() == []
    if not done.ok:
        assert done.why == "refused"
        assert kit.put(1, 64, (0,)).ok
    assert kit.get(1, 64, (5,)).ok
    assert np.array_equal(contents(kit.store.arena, (5,), 64), contents(kit.store.arena, (0,), 64))
    kit.store.close()
    assert [found.id for found in admin.list_extents(kit.path)] == [extent_name(1)]
    assert [file.name for file in kit.path.glob("extents/*/*")] == [kit.file(1).name]


def _store(number, move):
    from afterglow.plan.step import Store
    from tests.store.store_kit import record

    return Store(move, record(number, 64), (0,))


def _collect(kit, count):
    found = []

    def enough():
        found.extend(kit.store.finished())
        return len(found) >= count

    wait_for(enough)
    assert len(found) == count
    return found


# -------------------------------------------------------------------------------------------- catalogs


def fill(folder, count=4):
    with Kit(folder) as kit:
        for n in range(count):
            kit.put(n, 64 + n, (2 * n, 2 * n + 1) if n else (0,), last_used=float(n + 1), parent="aa" * 32)
        return kit.path / "catalog.sqlite", [contents(kit.store.arena, (2 * n,), 64) for n in range(count)]


def check_all(kit, wanted):
    for n, rows in enumerate(wanted):
        slots = (50, 51) if n else (50,)
        assert kit.get(n, 64 + n, slots).ok
        assert np.array_equal(contents(kit.store.arena, (50,), 64), rows)


def harm_bytes(path):
    path.write_bytes(os.urandom(20_000))


def harm_middle(path):
    raw = bytearray(path.read_bytes())
    raw[1000:] = os.urandom(len(raw) - 1000)
    path.write_bytes(raw)


def harm_schema(path):
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 99")


def harm_table(path):
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("DROP TABLE extents")
        db.commit()


def harm_schema_text(path):
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA writable_schema = ON")
        db.execute("UPDATE sqlite_master SET sql = CAST(x'9020ff' AS TEXT) WHERE name = 'extents'")
        db.commit()


def harm_truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def harm_folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "harm", [harm_bytes, harm_middle, harm_schema, harm_table, harm_schema_text, harm_truncate, harm_folder]
)
def test_an_unreadable_catalog_is_rebuilt_from_the_extents(tmp_path, harm, caplog):
    path, wanted = fill(tmp_path)
    harm(path)
    with Kit(tmp_path) as kit:
        records = {record.id: record for record in kit.store.records()}
        assert sorted(records) == sorted(extent_name(n) for n in range(4))
        assert all(record.parent == "aa" * 32 for record in records.values())
        assert kit.store.stats().catalog_rebuilds == 1
        check_all(kit, wanted)
    assert "rebuilt" in caplog.text
    assert len(list(path.parent.glob("catalog.sqlite.damaged*"))) == 1
    with Kit(tmp_path) as kit:
        assert len(kit.store.records()) == 4
        assert kit.store.stats().catalog_rebuilds == 0


@pytest.mark.parametrize("how", ["missing", "emptied"])
def test_a_lost_catalog_is_rebuilt_too(tmp_path, how):
    path, wanted = fill(tmp_path)
    path.write_bytes(b"")
    if how == "missing":
        path.unlink()
    assert [problem.kind for problem in admin.check(path.parent, name_of=name_of).problems] == ["catalog"]
    with Kit(tmp_path) as kit:
        assert len(kit.store.records()) == 4
        assert kit.store.stats().catalog_rebuilds == 1
        check_all(kit, wanted)
    assert not list(path.parent.glob("*.damaged"))


def test_damage_upon_damage_keeps_one_relic(tmp_path):
    path, wanted = fill(tmp_path)
    for harm in (harm_folder, harm_bytes, harm_folder):
        harm(path)
        with Kit(tmp_path) as kit:
            check_all(kit, wanted)
    assert [p.name for p in path.parent.glob("*.damaged*")] == ["catalog.sqlite.damaged"]


@pytest.mark.parametrize(
    "change",
    ["tokens = zeroblob(256)", "parent = 'bb'", "salt = 'other'", "kind = 'odd'", "rows = 1", "bytes = 5"],
)
def test_a_damaged_row_is_read_from_its_extent(tmp_path, change):
    """SQLite would not notice; a wrong token would let a prompt match keys that are not its own."""
    path, wanted = fill(tmp_path)
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute(f"UPDATE extents SET {change} WHERE id = ?", [extent_name(0)])
        db.commit()
    with Kit(tmp_path) as kit:
        found = next(record for record in kit.store.records() if record.id == extent_name(0))
        assert (found.rows, found.parent, found.salt, found.kind) == (64, "aa" * 32, "s", "exact")
        check_all(kit, wanted)
    with Kit(tmp_path) as kit:
        assert len(kit.store.records()) == 4


@pytest.mark.parametrize(("old", "new"), MADE)
def test_an_extent_with_odd_metadata_does_not_stop_a_rebuild(tmp_path, old, new):
    """Its checksum is right: another program has made it."""
    path, _ = fill(tmp_path)
    with Kit(tmp_path) as kit:
        file = kit.file(0)
    raw = file.read_bytes()
    size = ALIGNED.head_bytes(peek_rows(raw))
    file.write_bytes(with_metadata(raw[:size], old, new) + raw[size:])
    path.write_bytes(b"")
    kinds = [problem.kind for problem in admin.check(path.parent, name_of=name_of).problems]
    assert sorted(kinds) == ["catalog", "damaged"]
    with Kit(tmp_path) as kit:
        assert sorted(record.id for record in kit.store.records()) == sorted(extent_name(n) for n in range(1, 4))


@pytest.mark.parametrize("place", range(3))
def test_a_row_whose_id_is_damaged_goes(tmp_path, place):
    path, _ = fill(tmp_path)
    flip_text(path, extent_name(0).encode(), place)
    for _ in range(2):
        with Kit(tmp_path):
            pass
        with contextlib.closing(sqlite3.connect(path)) as db:
            ids = [row[0] for row in db.execute("SELECT id FROM extents NOT INDEXED")]
    assert set(ids) <= {extent_name(n) for n in range(4)}
    assert len(ids) == len(set(ids))


def test_a_catalog_that_cannot_be_written_fails_the_store(tmp_path, monkeypatch):
    with Kit(tmp_path) as kit:
        kit.put(1, 64, (0,))
        with monkeypatch.context() as patch:
            patch.setattr(catalog_rows, "insert", _sqlite_full)
            done = kit.put(2, 64, (1,))
        assert not done.ok
        assert "full" in done.error
        assert not kit.file(2).exists()
        assert kit.store.stats().errors == {"no_space": 1}
        assert kit.put(2, 64, (1,)).ok


def test_a_catalog_without_room_counts_as_a_full_disk(tmp_path):
    """The words are SQLite's own: its file may not grow any more."""
    with Kit(tmp_path) as kit:
        db = doors.catalog_database(kit.store)
        pages = db.execute("PRAGMA page_count").fetchone()[0]
        db.execute(f"PRAGMA max_page_count = {pages}")
        done = [kit.put(n, 1000, range(16)) for n in range(20)]
        failed = [one for one in done if not one.ok]
        assert failed
        assert all("full" in one.error for one in failed)
        assert kit.store.stats().errors == {"no_space": len(failed)}


def _sqlite_full(*_):
    raise sqlite3.OperationalError("database or disk is full")


def test_rows_without_files_and_files_without_rows(tmp_path):
    fill(tmp_path)
    with Kit(tmp_path) as kit:
        kit.settle()
        one, other = kit.file(0), kit.file(1)
    one.unlink()
    orphan = other.with_name(other.name[:2] + "f" * 62 + ".safetensors")
    misplaced = other.with_name("f" * 64 + ".safetensors")
    shutil.copy(other, misplaced)
    shutil.copy(other, orphan)
    (other.parent / ".tmp-123-4").write_bytes(b"half")
    with Kit(tmp_path) as kit:
        ids = {record.id for record in kit.store.records()}
        assert ids == {extent_name(n) for n in (1, 2, 3)}
        kit.settle()
        assert not orphan.exists()
        assert not misplaced.exists()
        assert not (other.parent / ".tmp-123-4").exists()
        assert kit.store.stats().orphans_swept == 1
        assert kit.store.stats().disk_bytes == sum(p.stat().st_size for p in kit.path.glob("extents/*/*"))


def test_the_sweep_spares_what_is_stored_meanwhile(tmp_path):
    """The orphan's own id is stored again before its turn to be swept comes."""
    path, _ = fill(tmp_path)
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("DELETE FROM extents")
        db.commit()
    with Kit(tmp_path) as kit:
        assert kit.put(2, 66, (4, 5)).ok
        kit.settle()
        assert kit.get(2, 66, (8, 9)).ok
        assert [p.name for p in kit.path.glob("extents/*/*")] == [kit.file(2).name]
        assert 3 <= kit.store.stats().orphans_swept <= 4
