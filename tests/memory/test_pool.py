"""Large memory of a pool is lent again, and never while an array looks at it."""

from __future__ import annotations

import gc

import pytest
import torch

from afterglow.engine.context import DeviceContext, KVShape
from afterglow.memory import pool as pools
from afterglow.memory import prefault
from afterglow.memory.pages import LARGE, Bytes, allocate
from afterglow.memory.pool import Pool
from afterglow.memory.prefault import Prefault
from tests import doors

from .memory_kit import STATM, can_populate, mapped, resident, settle

linux = pytest.mark.skipif(not STATM.exists(), reason="no /proc on this system")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 5, 40_000])
def test_a_context_on_pooled_memory_is_like_any_other(rows: int, dtype: torch.dtype) -> None:
    shape = KVShape(layers=2, kv_heads=1, head_dim=33, dtype=dtype, device=torch.device("cpu"))
    data = DeviceContext(shape, rows, Pool()).data
    assert (data.shape, data.dtype, data.is_contiguous()) == ((2, 2, 1, rows, 33), dtype, True)
    data.fill_(3)
    part = data[1:]
    del data
    gc.collect()
    assert (part == 3).all(), "a view holds on to its memory"


def test_memory_that_came_back_is_lent_again() -> None:
    pool = Pool()
    first = torch.from_numpy(pool.take(LARGE))
    view, where = first[5:], first.data_ptr()
    del first
    other = pool.take(LARGE)
    assert other.ctypes.data != where, "a view still lives there"
    del view
    assert pool.take(3 * LARGE).ctypes.data != where, "too small"
    smaller = pool.take(LARGE - 1)
    assert smaller.ctypes.data == where
    assert smaller.nbytes == LARGE - 1


def test_a_small_tensor_does_not_take_a_large_place() -> None:
    pool = Pool()
    where = pool.take(8 * LARGE).ctypes.data
    assert pool.take(LARGE).ctypes.data != where
    assert pool.take(7 * LARGE).ctypes.data == where


def test_memory_comes_back_with_the_last_view_of_it() -> None:
    """Also where that is a part of an array, and the array itself is gone."""
    pool = Pool()
    lent = pool.take(4 * LARGE)
    part = lent[LARGE:].reshape(3, LARGE)[1:]
    del lent
    gc.collect()
    assert pool.free_bytes() == 0
    del part
    gc.collect()
    assert pool.free_bytes() == 4 * LARGE


@linux
def test_no_more_is_kept_than_allowed() -> None:
    pool = Pool(max_free=16 * LARGE)
    before = mapped()
    lent = [pool.take(4 * LARGE) for _ in range(20)]
    assert mapped() - before >= 80 * LARGE
    lent.clear()
    gc.collect()
    assert pool.free_bytes() == 16 * LARGE
    assert mapped() - before <= 24 * LARGE


def test_what_comes_back_while_the_pool_is_busy_is_not_lost() -> None:
    """As the garbage collector may do it, within `take`."""
    pool = Pool()
    lent = pool.take(LARGE)
    with doors.lock_of(pool):
        del lent
    assert pool.free_bytes() == LARGE


@linux
def test_memory_that_will_be_needed_again_is_prepared() -> None:
    if not can_populate():
        pytest.skip("this kernel cannot")
    pool = Pool(Prefault(), ahead=3 * LARGE)
    kept = [pool.take(LARGE)]
    settle()
    assert pool.free_bytes() == 0, "no caller said that more would be needed"
    kept.append(pool.take(LARGE, again=True))
    settle()
    prepared = pool.free_bytes()
    assert LARGE <= prepared <= 4 * LARGE
    kept.append(pool.take(LARGE, again=True))
    assert [resident(memory) for memory in kept] == [0, 0, LARGE]
    settle()
    assert pool.free_bytes() == prepared, "one was taken, and one was made in its place"


def counted(monkeypatch: pytest.MonkeyPatch, works: bool) -> list[int]:
    """The calls of `populate` from now on, which do nothing but say `works`."""
    calls: list[int] = []
    monkeypatch.setattr(prefault, "populate", lambda at, size: calls.append(size) or works)
    return calls


@linux
def test_each_prepared_page_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = counted(monkeypatch, works=True)
    pool = Pool(Prefault(), ahead=3 * LARGE)
    lent = [pool.take(LARGE, again=True)]
    settle()
    first = pool.free_bytes()
    assert sum(asked) == first > 0
    lent.append(pool.take(LARGE, again=True))
    settle()
    assert pool.free_bytes() == first
    assert first < sum(asked) < 2 * first, "one more, in place of the one that was taken"


@linux
def test_where_pages_cannot_be_had_ahead_they_are_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = counted(monkeypatch, works=False)
    pool = Pool(Prefault())
    lent = []
    for _ in range(3):
        lent.append(pool.take(LARGE, again=True))
        settle()
    assert len(asked) == 1
    assert len({memory.ctypes.data for memory in lent}) == 3, "memory comes all the same"


def test_where_there_is_no_memory_ahead_none_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def scarce(num_bytes: int) -> Bytes:
        if num_bytes > LARGE:  # with the margin
            asked.append(num_bytes)
            raise OSError(12, "Cannot allocate memory")
        return allocate(num_bytes)

    monkeypatch.setattr(pools, "allocate", scarce)
    pool = Pool(Prefault())
    lent = []
    for _ in range(3):
        lent.append(pool.take(LARGE, again=True))
        settle()
    assert len(asked) == 1
    assert len({memory.ctypes.data for memory in lent}) == 3, "memory comes all the same"


def test_a_system_that_cannot_touch_ahead_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefault.sys, "platform", "darwin")
    asked = counted(monkeypatch, works=True)
    pool = Pool(Prefault())
    lent = pool.take(LARGE, again=True)
    settle()
    assert lent.nbytes == LARGE
    assert not asked
