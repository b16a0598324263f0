"""Links, FIFOs and folders in the places of a cache's files: counted, never followed, never waited for."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import stat
from functools import partial

import numpy as np
import pytest

from afterglow.store import admin
from afterglow.store.database.conversations import Conversations
from afterglow.store.namespace.namespace import holder
from tests import doors
from tests.store.store_kit import Kit, contents, extent_name, name_of

check = partial(admin.check, name_of=name_of)
pytestmark = pytest.mark.timeout(60)
NUMBERS = range(5)
KINDS = ("folder", "full folder", "link to a folder", "link to a file", "dangling link", "FIFO")
PLACES = (
    "afterglow.json",
    "lock",
    "catalog.sqlite",
    "catalog.sqlite-wal",
    "catalog.sqlite-shm",
    "conversations.sqlite",
    "extents",
    "extents/XX",
    "extents/XX/NAME",
    "extents/XX/stray",
    "extents/stray",
    "stray",
)


@pytest.fixture
def outside(tmp_path):
    """Make a folder outside the cache, with copies of everything that a cache would like to delete."""
    folder = tmp_path / "outside"
    (folder / extent_name(1)[:2]).mkdir(parents=True)
    for name in ("file", ".tmp-1-1", f"{extent_name(1)}.safetensors", f"{extent_name(1)[:2]}/.tmp-1-1"):
        (folder / name).write_bytes(b"mine" * 1000)
    return folder


@pytest.fixture
def filled(tmp_path):
    with Kit(tmp_path / "cache") as kit:
        for n in NUMBERS:
            kit.put(n, 100, (2 * n, 2 * n + 1), last_used=float(n))
        with contextlib.closing(Conversations(kit.path)) as kept:
            kept.add("r1", "t", None, "m", {}, [])
        return kit.path


def listing(folder):
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def put(kind, path, outside):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if kind in ("folder", "full folder"):
        path.mkdir()
        if kind == "full folder":
            (path / "mine").write_text("a user's")
    elif kind == "FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to(outside if "folder" in kind else outside / ("file" if kind == "link to a file" else "nowhere"))


def place(path, name):
    extent = extent_name(1)
    return path / name.replace("XX", extent[:2]).replace("NAME", f"{extent}.safetensors")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", PLACES)
def test_a_start_and_a_check_live_with_it(tmp_path, filled, outside, where, kind):
    before = listing(outside)
    with Kit(tmp_path / "cache") as kit:  # what the extents hold
        kit.get(0, 100, (30, 31))
        wanted = contents(kit.store.arena, (30, 31), 100)
    put(kind, place(filled, where), outside)
    with contextlib.suppress(admin.ConfigError, admin.StoreError):
        check(filled)  # and ends
        admin.stats(filled)
        holder(filled)
    with Kit(tmp_path / "cache") as kit:
        known = {record.id for record in kit.store.records()}
        harmed = set(map(extent_name, NUMBERS)) if where == "extents" else {extent_name(1)}
        assert known >= set(map(extent_name, NUMBERS)) - harmed
        if extent_name(0) in known:
            assert kit.get(0, 100, (40, 41)).ok
            assert np.array_equal(contents(kit.store.arena, (40, 41), 100), wanted)
        assert kit.put(1, 100, (2, 3)).ok  # the lost extent can be stored again
        assert kit.get(1, 100, (50, 51)).ok
        assert kit.put(9, 100, (4, 5)).ok
        stats = kit.store.stats()
        if where.startswith("extents") and not (where == "extents" and kind == "folder"):
            assert stats.errors.get("damage", 0) + stats.errors.get("missing", 0) > 0, stats.errors
        with contextlib.closing(Conversations(kit.path)) as kept:
            kept.add("r2", "t", None, "m", {}, [])
            assert kept.get("r2", "t") is not None
            assert kept.damaged == (where == "conversations.sqlite")
    with Kit(tmp_path / "cache") as kit:
        assert {extent_name(1), extent_name(9)} <= {record.id for record in kit.store.records()}
    assert listing(outside) == before
    report = check(filled, repair=True)
    assert report.ok
    assert check(filled).ok
    admin.clear(filled)
    assert listing(outside) == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["extents", "extents/XX", "extents/XX/NAME"])
def test_it_may_come_while_a_process_runs(tmp_path, filled, outside, where, kind):
    before = listing(outside)
    with Kit(tmp_path / "cache") as kit:
        put(kind, place(filled, where), outside)
        assert not kit.get(1, 100, (30, 31)).ok
        errors = kit.store.stats().errors
        assert errors.get("damage", 0) + errors.get("missing", 0) == 1, errors
        doors.remove_extent(kit.store, extent_name(1))  # as the plan has it done
        assert kit.put(1, 100, (2, 3)).ok
        assert kit.get(1, 100, (30, 31)).ok
        assert np.array_equal(contents(kit.store.arena, (30, 31), 100), contents(kit.store.arena, (2, 3), 100))
    assert listing(outside) == before


@pytest.mark.parametrize("what", ["extents", "namespace", "cache directory", "moved away"])
def test_what_is_removed_under_a_running_process_is_made_again(tmp_path, filled, what):
    cache = tmp_path / "cache"
    with Kit(cache) as kit:
        if what == "extents":
            shutil.rmtree(filled / "extents")
        elif what == "moved away":
            cache.rename(tmp_path / "elsewhere")
        else:
            shutil.rmtree(filled if what == "namespace" else cache)
        assert not kit.get(1, 100, (30, 31)).ok
        assert kit.put(1, 100, (2, 3)).ok
        assert kit.get(1, 100, (30, 31)).ok
        assert kit.put(2, 100, (4, 5)).ok
        assert holder(filled) is not None
        with pytest.raises(admin.ConfigError, match="in use"):
            Kit(cache)
    with Kit(cache) as kit:
        assert {extent_name(1), extent_name(2)} <= {record.id for record in kit.store.records()}
        assert kit.get(1, 100, (30, 31)).ok
    assert check(filled, repair=True).ok


def test_a_folder_that_is_not_ours_is_left_alone(tmp_path, filled):
    """As some network storage makes them."""
    theirs = [filled / "extents" / "@eaDir", filled / "extents" / extent_name(1)[:2] / "@eaDir"]
    for folder in theirs:
        folder.mkdir()
        (folder / "thumb").write_text("x")
    with Kit(tmp_path / "cache") as kit:
        assert len(kit.store.records()) == len(NUMBERS)
        assert kit.store.stats().errors == {"damage": 2}
    assert all((folder / "thumb").exists() for folder in theirs)


def test_nobody_else_may_read_what_is_written(tmp_path, filled):
    old = os.umask(0)
    try:
        with Kit(tmp_path / "cache") as kit:
            kit.put(7, 100, (2, 3))
            made = kit.file(7)
            with contextlib.closing(Conversations(kit.path)) as kept:
                kept.add("r2", "t", None, "m", {}, [])
                loose = [path for path in filled.rglob("*") if stat.S_IMODE(path.stat().st_mode) & 0o077]
    finally:
        os.umask(old)
    assert loose == []
    assert made.exists()


def test_damage_of_stored_responses_is_counted(filled):
    file = filled / "conversations.sqlite"
    with contextlib.closing(Conversations(filled)) as kept:
        kept.replies.keep("aa", "s", None, {"text": "a reply that is damaged"})
        kept.add("r2", "t", None, "m", {"said": "a response that is damaged"}, [])
        with contextlib.closing(sqlite3.connect(file)) as other:
            other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        assert kept.damaged == 0
    raw = file.read_bytes()
    file.write_bytes(raw.replace(b"is damaged", b"is dbmaged"))
    with contextlib.closing(Conversations(filled)) as kept:
        assert kept.get("r2", "t") is None
        assert kept.replies.all() == []
        assert kept.damaged == 2
        assert kept.get("r1", "t") is not None
    file.write_bytes(b"x" * len(raw))
    with contextlib.closing(Conversations(filled)) as kept:
        assert kept.damaged == 1
