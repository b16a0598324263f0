"""Maintenance: a check names all faults and nothing else; a repair leaves a sound namespace."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
from functools import partial

import pytest

from afterglow.errors import ConfigError, DamageError, StoreError
from afterglow.plan.step import Use
from afterglow.store import admin
from tests.store.store_kit import ALIGNED, DIGEST, Kit, extent_name, name_of, record

check = partial(admin.check, name_of=name_of)


@pytest.fixture
def filled(tmp_path):
    """The folder of a namespace with extents 0..4 of 100 rows each."""
    with Kit(tmp_path) as kit:
        for n in range(5):
            kit.put(n, 100, (2 * n, 2 * n + 1), last_used=float(n))
        return kit.path


def file_of(path, number):
    name = extent_name(number)
    return path / "extents" / name[:2] / f"{name}.safetensors"


def flip(file, position):
    raw = bytearray(file.read_bytes())
    raw[position] ^= 4
    file.write_bytes(raw)


def sql(path, statement, *values):
    with contextlib.closing(sqlite3.connect(path / "catalog.sqlite")) as db:
        db.execute(statement, values)
        db.commit()


def test_a_sound_namespace(filled):
    seen = []
    report = check(filled, progress=lambda done, total: seen.append((done, total)))
    assert report.ok
    assert report.problems == []
    assert (report.extents, report.bytes) == (5, 5 * ALIGNED.file_bytes(100))
    assert seen[0] == (0, 5)
    assert seen[-1] == (5, 5)


def harm_keys(path):
    flip(file_of(path, 1), ALIGNED.offset(100, 1, 0) + 7)


def harm_header(path):
    flip(file_of(path, 1), 200)


def harm_padding(path):
    flip(file_of(path, 1), -1)


def harm_length(path):
    os.truncate(file_of(path, 1), 5000)


def harm_swap(path):
    shutil.copy(file_of(path, 2), file_of(path, 1))


def harm_gone(path):
    file_of(path, 1).unlink()


def harm_orphan(path):
    file = file_of(path, 1)
    shutil.copy(file, file.with_name(file.name[:2] + "e" * 62 + ".safetensors"))


def harm_row_missing(path):
    sql(path, "DELETE FROM extents WHERE id = ?", extent_name(1))


def harm_row(path):
    sql(path, "UPDATE extents SET tokens = zeroblob(400) WHERE id = ?", extent_name(1))


def harm_leftover(path):
    (file_of(path, 1).parent / ".tmp-1-1").write_bytes(b"x")


def harm_catalog(path):
    (path / "catalog.sqlite").write_bytes(b"not a database" * 1000)


def harm_catalog_and_extent(path):
    harm_catalog(path)
    harm_keys(path)


@pytest.mark.parametrize(
    ("harm", "kinds", "left"),
    [
        (harm_keys, ["damaged"], 4),
        (harm_header, ["damaged"], 4),
        (harm_padding, ["damaged"], 4),
        (harm_length, ["damaged"], 4),
        (harm_swap, ["damaged"], 4),
        (harm_gone, ["missing"], 4),
        (harm_orphan, ["orphan"], 5),
        (harm_row_missing, ["orphan"], 4),
        (harm_row, ["row"], 5),
        (harm_leftover, ["leftover"], 5),
        (harm_catalog, ["catalog"], 5),
        (harm_catalog_and_extent, ["catalog", "damaged"], 4),
    ],
)
def test_each_harm_is_named_and_mended(tmp_path, filled, harm, kinds, left):
    harm(filled)
    report = check(filled)
    assert [problem.kind for problem in report.problems] == kinds
    assert not report.ok
    assert [problem.kind for problem in check(filled).problems] == kinds  # looking changes nothing
    mended = check(filled, repair=True)
    assert mended.ok
    assert [problem.kind for problem in mended.problems] == kinds
    after = check(filled)
    assert after.problems == []
    assert after.extents == left
    with Kit(tmp_path) as kit:
        assert len(kit.store.records()) == left
        kit.settle()
        assert kit.store.stats().orphans_swept == 0
        assert kit.store.stats().catalog_rebuilds == 0


def test_a_name_that_is_not_the_hash_of_its_contents(filled):
    """Extent 3 is the only one whose name is right, and 6, which follows a missing extent, has no name to be compared with."""
    with Kit(filled.parent) as kit:
        kit.put(5, 100, (0, 1), parent=extent_name(3), parent_rows=64)
        kit.put(6, 100, (0, 1), parent=extent_name(99), parent_rows=64)
    seen = []

    def lie(digest, salt, prefix, own):
        seen.append((digest, salt, len(prefix), len(own)))
        right = own == record(3, 100).tokens
        return extent_name(3) if right else "f" * 64

    wrong = [problem.name for problem in admin.check(filled, name_of=lie).problems if problem.kind == "id"]
    assert sorted(wrong) == sorted(extent_name(n) for n in (0, 1, 2, 4, 5))
    assert sorted(seen) == [(DIGEST, "s", 0, 400)] * 5 + [(DIGEST, "s", 256, 400)]
    assert [problem.kind for problem in check(filled).problems] == []
    admin.check(filled, repair=True, name_of=lie)
    assert sorted(record.id for record in admin.list_extents(filled)) == sorted(extent_name(n) for n in (3, 6))


def test_a_row_that_is_not_what_the_file_says(tmp_path, filled):
    """A sound row of another extent of the same name: only a comparison can tell."""
    with Kit(tmp_path) as kit:
        source = kit.file(1)
        content = source.read_bytes()
        kit.put(1, 120, (0, 1), last_used=9.0)
        source.write_bytes(content)
    assert [problem.kind for problem in check(filled).problems] == ["differs"]
    assert check(filled, repair=True).ok
    assert check(filled).problems == []
    row = next(record for record in admin.list_extents(filled) if record.id == extent_name(1))
    assert (row.rows, row.last_used) == (100, 9.0)


def test_an_end_that_a_use_has_put_off_is_no_problem(tmp_path, filled):
    """The file has the end as of its writing, and a repair of the row does not take the later one back."""
    with Kit(tmp_path) as kit:
        kit.put(5, 64, (0,), expires=50.5)
        content = kit.file(5).read_bytes()
        kit.store.touch([Use(extent_name(5), 60.0, 2, 99.0)])
    assert check(filled).ok
    with Kit(tmp_path) as kit:
        kit.put(5, 128, (0, 1), last_used=60.0, expires=99.0)
        kit.file(5).write_bytes(content)
    assert [problem.kind for problem in check(filled).problems] == ["differs"]
    assert check(filled, repair=True).ok
    row = next(record for record in admin.list_extents(filled) if record.id == extent_name(5))
    assert (row.last_used, row.expires) == (60.0, 99.0)


def test_beside_a_running_process(tmp_path, filled):
    with Kit(tmp_path) as kit:
        kit.put(7, 64, (0,))
        assert check(filled).problems == []
        (info,) = admin.list_namespaces(tmp_path, pytest.fail)
        assert info.holder.pid == os.getpid()
        assert info.extents == 6
        for forbidden in (admin.clear, lambda path: check(path, repair=True)):
            with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
                forbidden(filled)
        flip(kit.file(7), -1)
        assert [problem.kind for problem in check(filled).problems] == ["damaged"]


def test_lists_and_figures(tmp_path, filled):
    assert admin.list_namespaces(tmp_path / "nowhere", pytest.fail) == []
    (tmp_path / "something else").mkdir()
    (info,) = admin.list_namespaces(tmp_path, pytest.fail)
    assert (info.path, info.extents, info.rows, info.last_used) == (filled, 5, 500, 4.0)
    assert info.bytes == sum(f.stat().st_size for f in filled.rglob("*") if f.is_file())
    assert info.description.layout == ALIGNED
    assert info.holder is None
    assert [record.id for record in admin.list_extents(filled)] == [extent_name(n) for n in range(5)]


def test_other_formats_are_listed_with_their_problem(tmp_path, filled):
    file = filled / "afterglow.json"
    described = json.loads(file.read_text()) | {"format": 9}
    del described["crc32c"]
    file.write_text(json.dumps(described))
    (info,) = admin.list_namespaces(tmp_path, pytest.fail)
    assert info.description is None
    assert "format 9" in info.problem
    with pytest.raises(ConfigError, match="format 9"):
        check(filled)
    with pytest.raises(ConfigError, match="format 9"):
        admin.clear(filled)


def test_clear_removes_everything_but_the_namespace(tmp_path, filled):
    freed = admin.clear(filled)
    assert freed >= 5 * ALIGNED.file_bytes(100)
    assert sorted(p.name for p in filled.rglob("*")) == ["afterglow.json", "extents", "lock"]
    assert check(filled).ok
    with Kit(tmp_path) as kit:
        assert kit.store.records() == []
        assert kit.put(1, 64, (0,)).ok


def test_an_unreadable_catalog_is_not_listed(filled):
    harm_catalog(filled)
    with pytest.raises(DamageError):
        admin.list_extents(filled)


@pytest.mark.parametrize("left", [".tmp-123-direct", "folder/inner/file", "ab/.tmp-1-1", "stray"])
def test_clear_removes_whatever_lies_among_the_extents(filled, left):
    file = filled / "extents" / left
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"x" * 4096)
    admin.clear(filled)
    assert sorted(p.name for p in filled.rglob("*")) == ["afterglow.json", "extents", "lock"]


def test_a_catalog_that_cannot_be_read_now_is_not_called_damaged(filled, monkeypatch):
    def locked(*_):
        raise sqlite3.OperationalError("database is locked")

    monkeypatch.setattr(admin, "read_rows", locked)
    with pytest.raises(StoreError, match="locked") as caught:
        check(filled, repair=True)
    assert not isinstance(caught.value, DamageError)
    assert list(filled.glob("*.damaged")) == []


def test_a_crowd_of_readers_disturbs_nobody(tmp_path, filled):
    with Kit(tmp_path) as kit:
        for n in range(10, 16):
            kit.put(n, 64, (0,))
            assert admin.stats(filled).extents == n - 4
            assert check(filled).problems == []


def test_damaged_notes_are_found_and_dropped(filled):
    with Kit(filled.parent) as kit:
        kit.store.note("reply", [("a", "one"), ("b", "two")])
    assert check(filled).problems == []
    sql(filled, "UPDATE notes SET value = 'other' WHERE key = CAST('a' AS BLOB)")
    report = check(filled)
    assert [(problem.kind, problem.name) for problem in report.problems] == [("note", "1")]
    assert not report.ok
    assert check(filled, repair=True).ok
    assert check(filled).problems == []
    with Kit(filled.parent) as kit:
        assert kit.store.notes("reply") == {"b": "two"}
        assert kit.store.stats().notes_damaged == 0


def test_a_catalog_of_before_there_were_notes_is_sound(filled):
    sql(filled, "DROP TABLE notes")
    assert check(filled).problems == []
    assert len(admin.list_extents(filled)) == 5


def test_clearing_forgets_notes_too(filled):
    with Kit(filled.parent) as kit:
        kit.store.note("reply", [("a", "one")])
    admin.clear(filled)
    with Kit(filled.parent) as kit:
        assert kit.store.notes("reply") == {}
