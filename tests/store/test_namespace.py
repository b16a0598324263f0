"""Namespaces: one holder at a time, and clear words for everybody else."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap

import pytest
from store_kit import ALIGNED, DIGEST, ODD

from afterglow.errors import ConfigError, StoreError
from afterglow.store.namespace import Namespace, folder_of, holder, read_description


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
        from afterglow.store.layout import KVLayout
        from afterglow.store.namespace import Namespace
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
        (lambda d: {k: v for k, v in d.items() if k != "format"}, "format None"),
        (lambda d: d | {"layout": ODD.as_dict()}, "another KV layout"),
        (lambda d: d | {"layout": ALIGNED.as_dict() | {"block_rows": 16}}, "blocks of 16 rows"),
        (lambda d: d | {"digest": DIGEST[:-1] + "0"}, "another model digest"),
        (lambda d: {"format": 1}, "incomplete"),
        (lambda d: [], "format None"),
        (lambda d: None, "format None"),
    ],
)
def test_another_format_is_refused_in_one_line(tmp_path, change, says):
    with open_one(tmp_path) as one:
        file = one.path / "afterglow.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with pytest.raises(ConfigError, match=says) as caught:
        open_one(tmp_path)
    assert "--cache-dir" in str(caught.value)
    assert str(file.parent) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert holder(file.parent) is None  # the lock was given back


def test_garbage_is_refused_in_one_line(tmp_path):
    with open_one(tmp_path) as one:
        file = one.path / "afterglow.json"
    file.write_bytes(b"\xff\x00{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        open_one(tmp_path)


def test_a_folder_that_is_none(tmp_path):
    with pytest.raises(ConfigError, match="no cache namespace"):
        Namespace.open_existing(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot use"):
        open_one(tmp_path / "file")
