"""Retention on a real engine: over restarts, and of requests for memory only."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from afterglow.request import Request, SamplingParams
from tests.engine.conftest import Handle

Start = Callable[..., Handle]
PROMPT = [3 + i * 7 % 11 for i in range(200)]


def ask(handle: Handle, **more: Any) -> int:
    """Rows that were cached."""
    request = Request(f"r{time.monotonic_ns()}", PROMPT, SamplingParams(max_tokens=2, temperature=0), **more)
    (done,) = handle.engine.generate([request])
    handle.engine.settle()
    return done.cached.total


def files(folder: Path) -> int:
    return len(list(folder.rglob("*.safetensors")))


@pytest.mark.parametrize("write_policy", ["write_back", "write_through"])
def test_rows_without_a_name_expire_after_a_restart(
    start: Start, model_of: Callable[[str], Path], tmp_path: Path, write_policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = start(model_of("llama"), tmp_path, write_policy=write_policy)
    ask(handle, ttl_s=3600.0)
    ask(handle, ttl_s=3600.0)
    handle.engine.close()
    assert files(tmp_path) > 0
    handle = start(model_of("llama"), tmp_path)
    assert ask(handle, ttl_s=3600.0) == 199
    handle.engine.close()
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3700)
    handle = start(model_of("llama"), tmp_path)
    handle.engine.settle()
    assert files(tmp_path) == 0
    assert ask(handle) == 0


@pytest.mark.parametrize("write_policy", ["write_back", "write_through", "write_through_selective"])
def test_what_is_in_memory_only_leaves_no_file(
    start: Start, model_of: Callable[[str], Path], tmp_path: Path, write_policy: str
) -> None:
    handle = start(model_of("llama"), tmp_path, write_policy=write_policy)
    ask(handle, volatile=True, ttl_s=3600.0)
    assert ask(handle, volatile=True, ttl_s=3600.0) == 199
    handle.engine.close()
    assert files(tmp_path) == 0
