"""Notes: small texts that survive a restart, bounded, each row with a checksum."""

from __future__ import annotations

import contextlib
import math
import sqlite3
from collections import OrderedDict

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from afterglow.errors import StoreError
from afterglow.store import admin
from afterglow.store.database import catalog, notes
from afterglow.store.database.catalog import Catalog
from afterglow.store.database.connection import read_only
from tests import doors
from tests.store.store_kit import Kit, extent_name


def sql(path, statement, *values):
    with contextlib.closing(sqlite3.connect(path / "catalog.sqlite")) as db:
        found = db.execute(statement, values).fetchall()
        db.commit()
    return found


@pytest.fixture
def opened(tmp_path):
    """A function that opens a catalog of the test's folder anew; the last one is closed."""
    last = []

    def reopen():
        if last:
            last.pop().close()
        last.append(Catalog(tmp_path / "catalog.sqlite"))
        last[0].load()
        return last[0]

    yield reopen
    last[0].close()


def test_notes_survive_a_restart_by_kind_and_in_order(tmp_path):
    with Kit(tmp_path) as kit:
        assert kit.store.notes("reply") == {}
        kit.store.note("reply", [("a", "1"), ("b", "2"), ("c", "3")])
        kit.store.note("session", [("a", "other")])
        kit.store.note("reply", [("a", "4")])
    with Kit(tmp_path) as kit:
        assert list(kit.store.notes("reply").items()) == [("b", "2"), ("c", "3"), ("a", "4")]
        assert kit.store.notes("reply") == {}  # handed over
        assert kit.store.notes("session") == {"a": "other"}
        kit.store.note("reply", [("b", None), ("never there", None)])
        kit.store.note("session", [("b", "x"), ("b", None), ("c", None), ("c", "y")])
    with Kit(tmp_path) as kit:
        assert kit.store.notes("reply") == {"c": "3", "a": "4"}
        assert kit.store.notes("session") == {"a": "other", "c": "y"}
        assert kit.store.stats().notes_damaged == 0
        assert kit.store.stats().errors == {}


def test_any_text_can_be_noted(tmp_path):
    texts = ["", "\0", "naïve 中 🙂", "\ud83d", "a" * 10_000, "'; DROP TABLE extents; --"]
    with Kit(tmp_path) as kit:
        kit.store.note("any\udc00", [(text, text[::-1]) for text in texts])
    with Kit(tmp_path) as kit:
        assert kit.store.notes("any\udc00") == {text: text[::-1] for text in texts}
    assert admin.check(tmp_path / next(tmp_path.iterdir())).ok


def test_without_a_disk_nothing_is_noted():
    with Kit(None) as kit:
        kit.store.note("reply", [("a", "1")])
        assert kit.store.notes("reply") == {}


def test_notes_are_written_with_whatever_else_is(tmp_path):
    """No waiting for the end: the next transaction takes them along."""
    with Kit(tmp_path) as kit:
        kit.store.note("reply", [("a", "1")])
        assert kit.put(1, 64, (0,)).ok
        assert sql(kit.path, "SELECT count(*) FROM notes") == [(1,)]


@pytest.mark.parametrize(
    "harm",
    [
        "value = CAST('10' AS BLOB)",
        "value = x'ff'",
        "value = 7",
        "value = 'text'",
        "value = CAST(x'ff' AS TEXT)",
        "key = CAST('z' AS BLOB)",
        "key = x'c328'",
        "kind = CAST('session' AS BLOB)",
        "crc32c = crc32c + 1",
        "crc32c = 'none'",
    ],
)
def test_a_damaged_note_is_dropped_and_counted(tmp_path, harm):
    with Kit(tmp_path) as kit:
        kit.put(1, 64, (0,))
        kit.store.note("reply", [("a", "1"), ("b", "2")])
        path = kit.path
    sql(path, f"UPDATE notes SET {harm} WHERE key = CAST('a' AS BLOB)")
    with Kit(tmp_path) as kit:
        assert kit.store.stats().notes_damaged == 1
        assert kit.store.stats().catalog_rebuilds == 0
        assert kit.store.notes("reply") == {"b": "2"}
        assert kit.store.notes("session") == {}
        assert [record.id for record in kit.store.records()] == [extent_name(1)]
        kit.store.note("reply", [("a", "3")])
    with Kit(tmp_path) as kit:
        assert kit.store.stats().notes_damaged == 0
        assert kit.store.notes("reply") == {"b": "2", "a": "3"}


def test_a_catalog_of_before_there_were_notes_opens(tmp_path):
    with Kit(tmp_path) as kit:
        kit.put(1, 64, (0,))
        path = kit.path
    sql(path, "DROP TABLE notes")
    with Kit(tmp_path) as kit:
        assert kit.store.notes("reply") == {}
        assert len(kit.store.records()) == 1
        assert kit.store.stats().catalog_rebuilds == 0
        kit.store.note("reply", [("a", "1")])
    with Kit(tmp_path) as kit:
        assert kit.store.notes("reply") == {"a": "1"}


def test_a_rebuilt_catalog_has_no_notes(tmp_path):
    with Kit(tmp_path) as kit:
        kit.put(1, 64, (0,))
        kit.store.note("reply", [("a", "1")])
        path = kit.path
    sql(path, "PRAGMA user_version = 99")
    with Kit(tmp_path) as kit:
        assert kit.store.stats().catalog_rebuilds == 1
        assert kit.store.notes("reply") == {}
        assert len(kit.store.records()) == 1


def test_a_table_of_another_shape_is_a_damaged_catalog(tmp_path):
    with Kit(tmp_path) as kit:
        kit.put(1, 64, (0,))
        path = kit.path
    sql(path, "DROP TABLE notes")
    sql(path, "CREATE TABLE notes (something TEXT)")
    with Kit(tmp_path) as kit:
        assert kit.store.stats().catalog_rebuilds == 1
        kit.store.note("reply", [("a", "1")])
    with Kit(tmp_path) as kit:
        assert kit.store.notes("reply") == {"a": "1"}


def test_a_table_that_has_anothers_rows_is_a_damaged_catalog(tmp_path):
    """One byte of the schema: where the table of notes begins."""
    with Kit(tmp_path) as kit:
        kit.put(1, 64, (0,))
        path = kit.path
    root = "(SELECT rootpage FROM sqlite_master WHERE name = 'extents')"
    with contextlib.closing(sqlite3.connect(path / "catalog.sqlite")) as db:
        db.execute("PRAGMA writable_schema = ON")
        db.execute(f"UPDATE sqlite_master SET rootpage = {root} WHERE name = 'notes'")
        db.commit()
    with Kit(tmp_path) as kit:
        assert kit.store.stats().catalog_rebuilds == 1
        assert [record.id for record in kit.store.records()] == [extent_name(1)]


def test_the_oldest_of_a_kind_go_first(tmp_path):
    most = notes.NOTES_MOST
    assert most == 65_536
    with Kit(tmp_path) as kit:
        kit.store.note("other", [("a", "1")])
        kit.store.note("reply", [(f"{n}", "first") for n in range(most)])
        kit.put(1, 64, (0,))
        kit.store.note("reply", [("0", "again")])
        kit.store.note("reply", [(f"more {n}", "x") for n in range(10)])
        kit.store.close(timeout=120)  # a slow machine needs longer for 65,536 notes than a server waits
    with Kit(tmp_path) as kit:
        assert kit.store.notes("other") == {"a": "1"}
        found = kit.store.notes("reply")
        assert len(found) == most
        assert list(found)[:2] == ["11", "12"]
        assert list(found)[-11:] == ["0", *(f"more {n}" for n in range(10))]
        assert kit.store.stats().catalog_bytes > most * 8


def test_what_nobody_can_write_does_not_grow_for_ever(opened, monkeypatch):
    monkeypatch.setattr(catalog, "NOTES_MOST", 100)
    book = opened()
    monkeypatch.setattr(catalog, "TOUCH_SECONDS", math.inf)
    for n in range(1000):
        book.note("reply", [(str(n), "x")])
    book.note("other", [("a", "1")])
    assert len(doors.pending_notes(book)["reply"]) == 100
    assert next(iter(doors.pending_notes(book)["reply"])) == "900"
    assert len(doors.pending_notes(book)["other"]) == 1


def test_a_failed_transaction_loses_its_notes_and_says_so(opened, monkeypatch, caplog):
    book = opened()
    book.note("reply", [("a", "1")])
    book.remove([])  # returns when the transaction is committed
    with monkeypatch.context() as patch:
        patch.setattr(notes, "_crc", _full)
        book.note("reply", [("b", "2")])
        with pytest.raises(StoreError, match="full"):
            book.remove([])
    assert book.failures == 1
    assert "1 notes are lost" in caplog.text
    book.note("reply", [("c", "3")])
    assert opened().notes("reply") == {"a": "1", "c": "3"}


def _full(*_):
    raise sqlite3.OperationalError("database or disk is full")


KEYS = st.sampled_from("abcdefgh")
CALLS = st.lists(
    st.tuples(
        st.sampled_from(["reply", "session"]),
        st.lists(st.tuples(KEYS, st.one_of(st.none(), st.text(max_size=3), st.text(max_size=3))), max_size=5),
        st.booleans(),
    ),
    max_size=25,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=CALLS)
@example(calls=[("reply", [(key, "x") for key in keys], False) for keys in ("abcd", "efgh", "a", "b")])
def test_any_history_is_that_of_a_bounded_dictionary(calls, tmp_path_factory, monkeypatch):
    monkeypatch.setattr(notes, "NOTES_MOST", 5)
    monkeypatch.setattr(catalog, "NOTES_MOST", 5)
    path = tmp_path_factory.mktemp("notes") / "catalog.sqlite"
    model = {"reply": OrderedDict(), "session": OrderedDict()}
    book = Catalog(path)
    book.load()
    for kind, items, again in calls:
        book.note(kind, items)
        book.remove([])
        last: dict[str, str | None] = {}
        for key, value in items:  # of one key only the last value is written
            last.pop(key, None)
            last[key] = value
        while len(last) > 5:
            last.pop(next(iter(last)))
        for key, value in last.items():
            model[kind].pop(key, None)
            if value is not None:
                model[kind][key] = value
            while len(model[kind]) > 5:
                model[kind].popitem(last=False)
        with contextlib.closing(read_only(path)) as db:
            found = [(note, value) for _, note, value in notes.read(db) if note[0] == kind]
            assert found == [((kind, key), value) for key, value in model[kind].items()]
        if again:
            book.close()
            book = Catalog(path)
            book.load()
            assert book.notes_damaged == 0
            for name, wanted in model.items():
                assert list(book.notes(name).items()) == list(wanted.items())
    book.close()


def test_notes_about_importance_go_before_all_others(tmp_path):
    """A cache works nearly as well without them; they may be many."""
    shares = catalog.CatalogShares(note_bytes=1 << 20)
    book = Catalog(tmp_path / "catalog.sqlite", shares)
    book.load()
    book.note("session", [(f"s{n}", "x" * 100) for n in range(100)])
    book.remove([])
    for first in range(0, 100, 10):  # about 4 MB
        book.note(notes.IMPORTANCE, [(f"{n}", "y" * 32_768) for n in range(first, first + 10)])
        book.remove([])
    book.close()
    book = Catalog(tmp_path / "catalog.sqlite", shares)
    book.load()
    assert len(book.notes("session")) == 100
    kept = list(book.notes(notes.IMPORTANCE))
    assert 10 < len(kept) < 40
    assert kept == [f"{n}" for n in range(100 - len(kept), 100)]  # those that were written last
    book.note("session", [(f"more{n}", "z" * 32_768) for n in range(40)])  # which alone are too many
    book.close()
    book = Catalog(tmp_path / "catalog.sqlite", shares)
    book.load()
    assert book.notes(notes.IMPORTANCE) == {}
    assert 10 < len(book.notes("session")) < 40
    book.close()
