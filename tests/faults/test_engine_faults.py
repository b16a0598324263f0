"""Real faults under the whole engine: afterwards the same tokens as without a cache, and `check` tells the truth."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from afterglow.errors import ConfigError, RequestError
from afterglow.store import admin
from tests.engine.conftest import VOCAB, Handle, model_of, start  # noqa: F401  (fixtures)
from tests.engine.test_exact_reuse import same
from tests.store.store_kit import patch_reads

Start = Callable[..., Handle]
Models = Callable[[str], Path]
PROMPT = [i * i % VOCAB for i in range(300)]


@pytest.fixture
def stored(start: Start, model_of: Models, tmp_path: Path) -> tuple[Path, Path]:
    """A closed engine whose cache directory holds PROMPT: (model, namespace directory)."""
    model = model_of("llama")
    handle = start(model, tmp_path / "cache")
    handle.ask(PROMPT, max_tokens=20)
    handle.engine.close()
    (namespace,) = [p for p in (tmp_path / "cache").iterdir() if p.is_dir()]
    return model, namespace


def extents(namespace: Path) -> list[Path]:
    return sorted(namespace.glob("extents/*/*.safetensors"))


def check(namespace: Path, repair: bool = False) -> admin.Report:
    return admin.check(namespace, repair=repair)


def answers_as_without_cache(handle: Handle) -> int:
    """Ask for the stored prompt twice; returns how many rows came from the disk the first time."""
    prompt = [*PROMPT, 1, 2, 3]
    first = handle.ask(prompt, max_tokens=8)
    same(first, handle.ask(prompt, reuse=False, max_tokens=8))
    second = handle.ask(prompt, max_tokens=8)
    same(second, first)
    assert second.cached.total == len(prompt) - 1  # the lost rows have been computed and kept again
    return first.cached.disk


def test_nothing_damaged(start: Start, stored: tuple[Path, Path]) -> None:
    model, namespace = stored
    assert check(namespace).ok
    assert answers_as_without_cache(start(model, namespace.parent)) >= len(PROMPT)


@pytest.mark.parametrize("where", [0.0, 0.1, 0.3, 0.5, 0.9])
def test_flipped_byte(start: Start, stored: tuple[Path, Path], where: float) -> None:
    model, namespace = stored
    victim = max(extents(namespace), key=lambda p: p.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[int(where * len(data)) + 16] ^= 0x10
    victim.write_bytes(data)
    assert not check(namespace).ok
    handle = start(model, namespace.parent)
    assert answers_as_without_cache(handle) < len(PROMPT)
    handle.engine.close()
    assert check(namespace).ok  # the damaged file went with the miss


@pytest.mark.parametrize("keep", [0, 7, 4096, 0.5, 0.99])
def test_truncated_extent(start: Start, stored: tuple[Path, Path], keep: float) -> None:
    model, namespace = stored
    victim = max(extents(namespace), key=lambda p: p.stat().st_size)
    size = victim.stat().st_size
    os.truncate(victim, int(keep * size) if isinstance(keep, float) else keep)
    assert not check(namespace).ok
    assert answers_as_without_cache(start(model, namespace.parent)) < len(PROMPT)


def test_deleted_file(start: Start, stored: tuple[Path, Path]) -> None:
    model, namespace = stored
    max(extents(namespace), key=lambda p: p.stat().st_size).unlink()
    assert not check(namespace).ok
    assert answers_as_without_cache(start(model, namespace.parent)) < len(PROMPT)


def test_check_repairs(start: Start, stored: tuple[Path, Path]) -> None:
    model, namespace = stored
    victim = extents(namespace)[0]
    victim.write_bytes(b"not an extent")
    assert not check(namespace).ok
    check(namespace, repair=True)
    assert check(namespace).ok
    answers_as_without_cache(start(model, namespace.parent))


@pytest.mark.parametrize("damage", ["garbage", "missing", "emptied"])
def test_catalog_lost(start: Start, stored: tuple[Path, Path], damage: str) -> None:
    """The catalog can be rebuilt from the extents; garbage in its place is not fatal."""
    model, namespace = stored
    catalog = namespace / "catalog.sqlite"
    for extra in namespace.glob("catalog.sqlite-*"):
        extra.unlink()
    if damage == "garbage":
        catalog.write_bytes(os.urandom(8192))
    elif damage == "missing":
        catalog.unlink()
    else:
        catalog.write_bytes(b"")
    answers_as_without_cache(start(model, namespace.parent))


def test_catalog_of_another_model(
    start: Start,
    stored: tuple[Path, Path],
    model_of: Models,
    tmp_path: Path,
) -> None:
    """Another model's catalog and extents in our namespace: none of its rows is ever served."""
    model, namespace = stored
    other = start(model_of("qwen2"), tmp_path / "other")
    other.ask(PROMPT, max_tokens=20)
    other.engine.close()
    (theirs,) = [p for p in (tmp_path / "other").iterdir() if p.is_dir()]
    for name in ("catalog.sqlite", "extents"):
        target = namespace / name
        shutil.rmtree(target) if target.is_dir() else target.unlink()
        source = theirs / name
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    for extra in namespace.glob("catalog.sqlite-*"):
        extra.unlink()
    assert answers_as_without_cache(start(model, namespace.parent)) == 0


def test_another_format_is_refused(start: Start, stored: tuple[Path, Path]) -> None:
    model, namespace = stored
    facts = namespace / "afterglow.json"
    described = json.loads(facts.read_text()) | {"format": 99}
    del described["crc32c"]
    facts.write_text(json.dumps(described))
    with pytest.raises(ConfigError, match="99"):
        start(model, namespace.parent)


def test_second_process_is_told_who_holds_the_cache(start: Start, stored: tuple[Path, Path]) -> None:
    model, namespace = stored
    start(model, namespace.parent)
    with pytest.raises(ConfigError, match=str(os.getpid())):
        start(model, namespace.parent)


def test_save_without_space(
    start: Start,
    model_of: Models,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ENOSPC at the system call: the request is answered, the failure counted, no half-written file stays."""

    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    handle = start(model_of("llama"), tmp_path, write_policy="write_through")
    monkeypatch.setattr(os, "pwritev", full)
    monkeypatch.setattr(os, "pwrite", full)
    monkeypatch.setattr(os, "write", full)
    handle.ask(PROMPT)
    handle.engine.settle()
    assert handle.engine.stats().plan.counters.store_failures > 0
    monkeypatch.undo()
    answers_as_without_cache(handle)
    handle.engine.close()
    (namespace,) = [p for p in tmp_path.iterdir() if p.is_dir()]
    assert check(namespace).ok


def test_a_registration_without_space_leaves_no_trace(
    start: Start, model_of: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused as soon as the disk says so; the prompt registered under its name stays; later it is possible."""

    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    engine = start(model_of("llama"), tmp_path).engine
    old = engine.register_prefix("mine", PROMPT[:150], about="old")
    assert old.disk == 150
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        for name in ("mine", "new"):
            with pytest.raises(RequestError, match="could not be written to disk") as refused:
                engine.register_prefix(name, [3, *PROMPT[:200]], about="new")
            assert refused.value.status == 507
        (left,) = engine.prefixes()
        assert (left.name, left.tokens, left.about) == ("mine", 150, "old")
    done = engine.register_prefix("new", [4, *PROMPT[:200]], about="new")
    assert (done.tokens, done.disk) == (201, 201)
    engine.close()
    again = start(model_of("llama"), tmp_path).engine
    assert [(each.name, each.about) for each in again.prefixes()] == [("mine", "old"), ("new", "new")]


def test_read_error(start: Start, stored: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model, namespace = stored
    handle = start(model, namespace.parent)

    def broken(*args: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    patch_reads(monkeypatch, lambda _: broken)
    first = handle.ask(PROMPT, max_tokens=8)
    monkeypatch.undo()
    same(first, handle.ask(PROMPT, reuse=False, max_tokens=8))


def test_read_only_directory(start: Start, model_of: Models, tmp_path: Path) -> None:
    """A cache directory that was asked for and cannot be written is refused in one line."""
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(ConfigError, match=r"--cache-dir .*file"):
        start(model_of("llama"), blocker / "cache")


KILLED = """
import sys, time
from pathlib import Path
from afterglow.config import CacheConfig, EngineConfig
from afterglow.engine.engine import Engine
from afterglow.request import Request, SamplingParams
model, folder, vocab = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
cache = CacheConfig(cache_dir=folder, write_policy="write_through", host_cache=1 << 18, device_cache=4 << 20)
engine = Engine.load(model, EngineConfig(cache=cache, threads=1))
engine.start()
print("up", flush=True)
n = 0
while True:
    n += 1
    prompt = [i * i % vocab for i in range(300)] if n % 2 else [(i * 7 + n) % vocab for i in range(400)]
    engine.generate([Request(str(n), prompt, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))])
    engine.demote("host")
"""


@pytest.mark.parametrize("after", [0.05, 0.3, 0.9])
def test_kill_9_while_saving_and_loading(
    start: Start,
    model_of: Models,
    tmp_path: Path,
    after: float,
) -> None:
    """A host tier of a few blocks makes the process save and load all the time; it is killed somewhere in it."""
    model = model_of("llama")
    command = [sys.executable, "-c", KILLED, str(model), str(tmp_path), str(VOCAB)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    time.sleep(after + random.random() * 0.2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    handle = start(model, tmp_path)
    answers_as_without_cache(handle)
    handle.engine.close()
    (namespace,) = [p for p in tmp_path.iterdir() if p.is_dir()]
    assert check(namespace).ok
    with sqlite3.connect(namespace / "catalog.sqlite") as catalog:
        assert catalog.execute("pragma integrity_check").fetchone() == ("ok",)
    assert not list(namespace.glob("extents/**/*.tmp*"))
