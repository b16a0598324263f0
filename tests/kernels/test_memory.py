"""Large tensors in huge pages are tensors like others, and their memory goes with them."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

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


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc on this system")
def test_its_memory_goes_with_it() -> None:
    before = mapped()
    kept = [empty((LEAST,), torch.float32) for _ in range(20)]
    assert mapped() - before >= 20 * 4 * LEAST
    kept.clear()
    gc.collect()
    assert mapped() - before < 4 * LEAST
