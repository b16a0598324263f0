"""Memory is touched ahead of its use, as far as it goes, and nothing in it changes."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from afterglow.engine import touch
from afterglow.engine.setup import allocate
from afterglow.engine.touch import TouchAhead
from afterglow.kernels import memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="touching ahead is Linux's")

LAYERS, SLOTS = 3, 200
SLOT = (64, 2, 32)  # 16 KiB in float32
AHEAD = 64


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Tensor:
    size = LAYERS * 2 * SLOTS * 64 * 2 * 32 * 4
    monkeypatch.setattr(touch, "AHEAD_BYTES", size // SLOTS * AHEAD)
    return allocate(size, pin=False).view(torch.float32).view(LAYERS, 2, SLOTS, *SLOT)


def settled() -> None:
    for thread in threading.enumerate():
        if thread.name == "touch-ahead":
            thread.join()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_slots_ahead_are_touched_and_keep_what_they_hold(blocks: Tensor) -> None:
    ahead = TouchAhead(blocks)
    blocks[:, :, :5] = 7.0
    ahead.reach(5)
    settled()
    if not ahead._works:
        pytest.skip("this kernel cannot")
    assert ahead._reached == 5 + AHEAD
    assert (blocks[:, :, :5] == 7).all()
    assert not blocks[:, :, 5:].any()


def test_threads_only_where_there_is_something_to_do(blocks: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges: list[tuple[int, int]] = []
    monkeypatch.setattr(TouchAhead, "_touch", lambda self, start, stop: ranges.append((start, stop)))
    ahead = TouchAhead(blocks)
    for used in (0, 1, 31, 32, 33, 34, 60, 150, 199, 200, 200):
        ahead.reach(used)
        settled()
    assert ranges == [(0, 64), (64, 97), (97, 200)]


def test_an_older_kernel_is_asked_once(blocks: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "POPULATE_WRITE", 9999)
    ahead = TouchAhead(blocks)
    ahead.reach(1)
    settled()
    assert not ahead._works
    before = resident()
    ahead.reach(150)
    settled()
    assert resident() - before < 8 << 20


def test_slots_that_are_too_large_are_left_alone(blocks: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(touch, "AHEAD_BYTES", 1000)
    ahead = TouchAhead(blocks)
    ahead.reach(100)
    assert ahead._reached == 0


def test_a_step_goes_first(blocks: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PATIENCE", 60.0)
    ahead = TouchAhead(blocks)
    with memory.computing():
        ahead.reach(5)
        before = resident()
        time.sleep(0.05)
        assert resident() - before < 1 << 20
        assert any(thread.name == "touch-ahead" for thread in threading.enumerate())
    settled()
    assert not ahead._works or resident() - before >= 64 * 6 * 16384
