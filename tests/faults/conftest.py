"""A scene for each test, and `docs/faults.md`: written, if that was asked for, when its lines have been played."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from afterglow.store.moving import mover, task
from tests.faults import report
from tests.faults.harness import small_pieces
from tests.faults.scenes import Scene, prepare
from tests.faults.syscalls import CLOCK, Syscalls


@pytest.fixture(scope="session", autouse=True)
def table() -> Iterator[None]:
    yield
    if report.WRITE:
        from tests.faults import test_kill, test_matrix, test_server_faults  # noqa: F401  (their lines)

        report.write()


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    prepare(folder)
    return folder


@pytest.fixture
def scene(tmp_path: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    for module in (mover, task):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=CLOCK.monotonic, perf_counter=time.perf_counter))
    with Syscalls(tmp_path) as calls, small_pieces():
        playing = Scene(tmp_path / "cache", prepared, calls)
        yield playing
        calls.clear()
        playing.gate.set()
        for world in playing.worlds:
            world.abandon()
