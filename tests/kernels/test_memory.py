"""Large tensors in huge pages are tensors like others, and their memory goes with them."""

from __future__ import annotations

import gc
import mmap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from afterglow.kernels import memory
from afterglow.kernels.memory import LEAST, empty


def mapped() -> int:
    """Bytes of address space that the process has."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shape", [(3, 5), (0, 7), (7, 1000, 1001), (LEAST + 1,)])
def test_like_any_other(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = empty(shape, dtype)
    assert (x.shape, x.dtype, x.is_contiguous()) == (shape, dtype, True)
    x.fill_(3)
    assert (x == 3).all()
    part = x[1:]
    del x
    gc.collect()
    assert (part == 3).all(), "a view holds on to its memory"


def rest() -> None:
    """Until nobody touches memory ahead any more: neither this test's pool nor that of an engine of an earlier one."""
    for thread in threading.enumerate():
        if thread.name == "touch-ahead":
            thread.join(30)
            assert not thread.is_alive()


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    rest()
    monkeypatch.setattr(memory, "_pool", memory._Pool())
    yield
    rest()  # as long as what a test has changed still holds


@pytest.mark.usefixtures("pool")
def test_memory_that_was_left_is_used_again() -> None:
    first = empty((LEAST,), torch.uint8)
    view, where = first[5:], first.data_ptr()
    del first
    other = empty((LEAST,), torch.uint8)
    assert other.data_ptr() != where, "a view still lives there"
    del view
    assert empty((3, LEAST // 4), torch.float32).data_ptr() != where, "too small"
    smaller = empty((LEAST // 4,), torch.float32)
    assert smaller.data_ptr() == where


@pytest.mark.usefixtures("pool")
def test_a_small_tensor_does_not_take_a_large_place() -> None:
    where = empty((8 * LEAST,), torch.uint8).data_ptr()
    assert empty((LEAST,), torch.uint8).data_ptr() != where
    assert empty((7 * LEAST,), torch.uint8).data_ptr() == where


@pytest.mark.usefixtures("pool")
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc on this system")
def test_no_more_is_kept_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "KEPT", 4 * LEAST)
    before = mapped()
    kept = [empty((LEAST,), torch.float32) for _ in range(20)]
    assert mapped() - before >= 20 * 4 * LEAST
    kept.clear()
    gc.collect()
    assert mapped() - before <= 6 * LEAST


def test_the_c_library_is_told_or_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    memory.keep_freed_memory()
    assert torch.zeros(1 << 20).sum() == 0
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _: object())
    memory.keep_freed_memory()


@pytest.mark.usefixtures("pool")
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only where pages can be asked for")
def test_memory_that_will_be_wanted_again_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "AHEAD", 3 * LEAST)
    asked: list[int] = []
    populated = memory.populated
    monkeypatch.setattr(memory, "populated", lambda at, size: asked.append(size) or populated(at, size))

    kept = [empty((LEAST,), torch.uint8)]
    assert not asked, "nobody said that there would be more"
    kept.append(empty((LEAST,), torch.uint8, again=True))
    rest()
    prepared = sum(map(len, memory._pool._free))
    assert LEAST <= prepared <= 4 * LEAST
    assert sum(asked) == prepared
    places = {m.__hash__() for m in memory._pool._free}
    kept.append(empty((LEAST,), torch.uint8, again=True))
    rest()
    assert len(places & {m.__hash__() for m in memory._pool._free}) == len(places) - 1, "one of them was taken"
    monkeypatch.setattr(memory, "populated", lambda at, size: False)
    memory._pool._free.clear()
    kept += [empty((LEAST,), torch.uint8, again=True) for _ in range(3)]
    assert len(kept) == 6, "without such a call memory comes all the same"


@pytest.mark.usefixtures("pool")
def test_where_there_is_no_memory_ahead_none_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped, refused = memory._mapped, []

    def scarce(num_bytes: int) -> mmap.mmap:
        if threading.current_thread().name == "touch-ahead":
            refused.append(num_bytes)
            raise OSError(12, "Cannot allocate memory")
        return mapped(num_bytes)

    monkeypatch.setattr(memory, "_mapped", scarce)
    for _ in range(3):
        assert empty((LEAST,), torch.uint8, again=True).shape == (LEAST,)
        rest()
    assert len(refused) == 1
