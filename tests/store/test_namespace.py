"""Namespaces: one holder at a time, and clear words for all others."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import textwrap

import pytest

from afterglow.errors import ConfigError, DamageError, StoreError
from afterglow.store import admin
from afterglow.store.extents.head import crc32c
from afterglow.store.namespace.namespace import Namespace, folder_of, holder, read_description
from tests.store.store_kit import ALIGNED, DIGEST, ODD


def open_one(folder, **more):
    values = {"name": "org/my model", "digest": DIGEST, "layout": ALIGNED}
    return Namespace.open(folder, **{**values, **more})


def test_a_namespace_describes_itself(tmp_path):
    with open_one(tmp_path) as one:
        assert one.path == tmp_path / f"my-model-{DIGEST[:16]}"
        found = read_description(one.path)
        assert (found.name, found.digest, found.layout) == ("org/my model", DIGEST, ALIGNED)
        path = one.path
    assert holder(path) is None
    open_one(tmp_path).close()


@pytest.mark.parametrize("name", ["a", "../../etc", "", "/", "a b/c\x00d", "x" * 300, "."])
def test_names_cannot_leave_the_cache_directory(tmp_path, name):
    path = folder_of(tmp_path, name, DIGEST)
    assert path.parent == tmp_path
    open_one(tmp_path, name=name).close()


def test_a_second_holder_is_told_who_has_it(tmp_path):
    with open_one(tmp_path) as one:
        with pytest.raises(ConfigError) as caught:
            open_one(tmp_path)
        assert f"process {os.getpid()} on {socket.gethostname()}" in str(caught.value)
        assert str(one.path) in str(caught.value)
        assert "\n" not in str(caught.value)
        assert holder(one.path).pid == os.getpid()
        with open_one(tmp_path, digest="0" * 64):
            pass  # another model is another namespace
    open_one(tmp_path).close()


def test_a_second_process_is_refused_and_a_dead_one_holds_nothing(tmp_path):
    code = f"""
        import sys
        from pathlib import Path
        from afterglow.store.extents.layout import KVLayout
        from afterglow.store.namespace.namespace import Namespace
        Namespace.open(Path({str(tmp_path)!r}), "m", {DIGEST!r}, KVLayout(2, 2, 8, "F32"))
        print("held", flush=True)
        sys.stdin.read()
    """
    other = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=f"process {other.pid} on"):
            open_one(tmp_path, name="m")
    finally:
        other.kill()
        other.wait()
        other.stdin.close()
        other.stdout.close()
    open_one(tmp_path, name="m").close()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d | {"format": 2}, "format 2, this version reads 1"),
        (lambda d: d | {"layout": ODD.as_dict()}, "another KV layout"),
        (lambda d: d | {"layout": ALIGNED.as_dict() | {"block_rows": 16}}, "blocks of 16 rows"),
        (lambda d: d | {"digest": DIGEST[:-1] + "0"}, "another model digest"),
    ],
)
def test_another_format_is_refused_in_one_line(tmp_path, change, says):
    with open_one(tmp_path) as one:
        file = one.path / "afterglow.json"
    found = json.loads(file.read_text())
    del found["crc32c"]  # as earlier versions wrote it
    file.write_text(json.dumps(change(found)))
    with pytest.raises(ConfigError, match=says) as caught:
        open_one(tmp_path)
    assert "--cache-dir" in str(caught.value)
    assert str(file.parent) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert holder(file.parent) is None  # the lock was given back


@pytest.mark.parametrize(
    "text",
    [b"\xff\x00{", b"", b"{", b"[]", b"null", b'{"format": 1}', b'{"format": "1"}', b'{"format": null}', b"[" * 9999],
)
def test_garbage_is_written_anew_and_counted(tmp_path, text):
    with open_one(tmp_path) as one:
        file = one.path / "afterglow.json"
    file.write_bytes(text)
    with pytest.raises(DamageError, match=r"afterglow\.json"):
        read_description(file.parent)
    with open_one(tmp_path) as one:
        assert one.damaged == 1
    assert read_description(file.parent).digest == DIGEST
    with open_one(tmp_path) as one:
        assert one.damaged == 0


def test_any_flipped_bit_in_a_description_is_damage_or_of_no_effect(tmp_path):
    with open_one(tmp_path) as one:
        file = one.path / "afterglow.json"
    sound = file.read_bytes()
    written_anew = 0
    for at in range(len(sound)):
        bit = 1 << at % 8
        file.write_bytes(sound[:at] + bytes([sound[at] ^ bit]) + sound[at + 1 :])
        with open_one(tmp_path) as one:
            written_anew += one.damaged
            found = read_description(one.path)
            assert (found.digest, found.layout) == (DIGEST, ALIGNED)
    assert written_anew > len(sound) // 2


def test_a_description_of_an_earlier_version_gets_its_checksum(tmp_path):
    with open_one(tmp_path) as one:
        file = one.path / "afterglow.json"
    found = json.loads(file.read_text())
    checksum = found.pop("crc32c")
    file.write_text(json.dumps(found))
    open_one(tmp_path).close()
    assert json.loads(file.read_text()) == {**found, "crc32c": checksum}


def test_a_later_format_with_its_checksum_is_refused(tmp_path):
    with open_one(tmp_path) as one:
        file = one.path / "afterglow.json"
    later = json.loads(file.read_text()) | {"format": 7}
    del later["crc32c"]
    later["crc32c"] = crc32c(json.dumps(later, sort_keys=True).encode())
    file.write_text(json.dumps(later))
    with pytest.raises(ConfigError, match="format 7"):
        open_one(tmp_path)


@pytest.mark.parametrize("how", ["deleted", "made anew", "a folder", "a link"])
def test_without_its_lock_file_a_second_holder_is_still_refused(tmp_path, how):
    with open_one(tmp_path) as one:
        lock = one.path / "lock"
        lock.unlink()
        if how == "made anew":
            lock.write_text("")
        elif how == "a folder":
            lock.mkdir()
        elif how == "a link":
            lock.symlink_to(tmp_path / "nowhere")
        assert holder(one.path) is not None
        with pytest.raises(ConfigError, match="in use"):
            open_one(tmp_path)
    open_one(tmp_path).close()
    assert not (tmp_path / "nowhere").exists()


def test_nobody_else_may_read_it(tmp_path):
    with open_one(tmp_path / "cache") as one:
        assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700
        for file in (one.path, *one.path.iterdir()):
            assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0, file
        one.path.chmod(0o755)
        (one.path / "conversations.sqlite").touch(0o644)
    with open_one(tmp_path / "cache") as one:  # what an earlier version made is tightened
        for file in (one.path, *one.path.iterdir()):
            assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0, file


def test_a_folder_that_is_none(tmp_path):
    with pytest.raises(ConfigError, match="no cache namespace"):
        Namespace.open_existing(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot use"):
        open_one(tmp_path / "file")


@pytest.mark.parametrize("use", [read_description, Namespace.open_existing, admin.check, admin.clear])
def test_maintenance_of_no_namespace_names_the_folder_and_leaves_it(tmp_path, use):
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "cat.png").write_bytes(b"cat")
    for path, why in [
        (folder, "is no cache namespace"),
        (tmp_path / "absent", "is no cache namespace"),
        (tmp_path / ("x" * 300), "cannot be read"),  # longer than a file system takes
    ]:
        with pytest.raises(ConfigError, match=why) as caught:
            use(path)
        assert str(path) in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["photos"]
    assert [entry.name for entry in folder.iterdir()] == ["cat.png"]
