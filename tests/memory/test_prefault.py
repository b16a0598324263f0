"""Memory is touched ahead of its use, as far as it goes, and nothing in it changes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from afterglow.memory import prefault
from afterglow.memory.pages import HUGE_PAGE, Bytes, allocate
from afterglow.memory.prefault import Prefault, SlotPrefault

from .memory_kit import can_populate, resident, settle

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages are touched ahead on Linux alone")
populates = pytest.mark.skipif(sys.platform != "linux" or not can_populate(), reason="this kernel cannot")

LAYERS, SLOTS, CHUNK = 3, 200, 16384
SLOT = LAYERS * 2 * CHUNK
AHEAD = 64


@pytest.fixture
def arena() -> npt.NDArray[np.uint8]:
    return allocate(SLOT * SLOTS).reshape(LAYERS, 2, SLOTS, CHUNK)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record the pieces that are asked for, (address, bytes) each; no piece is touched."""
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(prefault, "populate", lambda at, size: calls.append((at, size)) is None)
    return calls


def slots_of(arena: Bytes, asked: list[tuple[int, int]]) -> set[int]:
    """The slots whose first byte lies in some piece, in every plane."""
    starts = arena.ctypes.data + np.arange(arena.size // CHUNK) * CHUNK
    covered = np.any([(at <= starts) & (starts < at + size) for at, size in asked] or [starts < 0], axis=0)
    return set(np.flatnonzero(covered.reshape(LAYERS * 2, SLOTS).all(0)).tolist())


@populates
def test_slots_ahead_are_touched_and_keep_what_they_hold(arena: Bytes) -> None:
    arena[:, :, :5] = 7
    SlotPrefault(Prefault(), arena, SLOT * 20).reach(5)
    settle()
    assert all(resident(plane[:25]) == 25 * CHUNK for layer in arena for plane in layer)
    assert (arena[:, :, :5] == 7).all()
    assert not arena[:, :, 5:].any()


def test_pages_are_asked_for_where_there_is_something_to_do(arena: Bytes, asked: list[tuple[int, int]]) -> None:
    ahead = SlotPrefault(Prefault(), arena, SLOT * AHEAD)
    reached = []
    for used in (0, 1, 31, 32, 33, 34, 60, 150, 199, 200, 200):
        asked.clear()
        ahead.reach(used)
        settle()
        if slots := slots_of(arena, asked):
            reached.append((min(slots), max(slots) + 1, len(slots)))
    assert reached == [(0, 64, 64), (64, 97, 33), (97, 200, 103)]


def test_pieces_end_at_huge_pages(asked: list[tuple[int, int]]) -> None:
    memory = allocate(3 * HUGE_PAGE)[5000 : 3 * HUGE_PAGE - 5000]
    said: list[bool] = []
    Prefault().start([memory], said.append)
    settle()
    assert said == [True]
    assert [size for _, size in asked] == [HUGE_PAGE - 4096, HUGE_PAGE, HUGE_PAGE - 5000]
    assert all(at % 4096 == 0 for at, _ in asked)


def test_no_work_waits_until_another_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (allocate(4 * HUGE_PAGE) for _ in range(2))
    begun, order = threading.Event(), []

    def populate(at: int, size: int) -> bool:
        begun.wait(10)
        order.append("first" if 0 <= at - first.ctypes.data < first.nbytes else "second")
        return True

    monkeypatch.setattr(prefault, "populate", populate)
    thread = Prefault()
    thread.start([first], lambda ok: order.append("first ends"))
    thread.start([second], lambda ok: order.append("second ends"))
    begun.set()
    settle()
    assert len(order) == 10
    assert order.index("second") < order.index("first ends")


def test_an_older_kernel_is_asked_once(arena: Bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefault, "_POPULATE_WRITE", 9999)
    calls: list[bool] = []
    real: Callable[[int, int], bool] = prefault.populate

    def populate(at: int, size: int) -> bool:
        calls.append(real(at, size))
        return calls[-1]

    monkeypatch.setattr(prefault, "populate", populate)
    ahead = SlotPrefault(Prefault(), arena, SLOT * AHEAD)
    for slots in (1, 150):
        ahead.reach(slots)
        settle()
    assert calls == [False]


def test_slots_that_are_too_large_are_left_alone(arena: Bytes, asked: list[tuple[int, int]]) -> None:
    SlotPrefault(Prefault(), arena, 1000).reach(100)
    settle()
    assert not asked


def test_an_arena_without_slots_is_left_alone(asked: list[tuple[int, int]]) -> None:
    SlotPrefault(Prefault(), np.empty((LAYERS, 2, 0, CHUNK), np.uint8)).reach(0)
    settle()
    assert not asked


def test_a_step_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a step computes nothing is touched before the patience ends."""
    computing, touched = [False], []
    monkeypatch.setattr(prefault, "populate", lambda at, size: touched.append(computing[0]) is None)
    thread, ended = Prefault(patience=60.0), threading.Event()
    computing[0] = True
    with thread.computing:
        thread.start([allocate(4 * HUGE_PAGE)], lambda ok: ended.set())
        assert not ended.wait(0.1)
        assert not touched
        computing[0] = False
    assert ended.wait(30)
    assert touched == [False] * 4


def test_an_engine_that_never_rests_does_not_stop_it(asked: list[tuple[int, int]]) -> None:
    thread, ended = Prefault(patience=0.0), threading.Event()
    with thread.computing:
        thread.start([allocate(4 * HUGE_PAGE)], lambda ok: ended.set())
        assert ended.wait(30)
    assert len(asked) == 4
