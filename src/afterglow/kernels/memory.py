"""Large tensors in huge pages: the first touch of 4 KiB pages takes longer than the copy that causes it, and reading through
so many is slower (2,048 rows of `bench-100m` from host memory: 27 to 9 ms; its decoding: 15.9 to 14.8 ms a token)."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
LEAST = 2 * HUGE_PAGE  # below it, rounding up would waste too much


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """As `torch.empty`; on CPU, where it is large, in huge pages if the system has any. Its memory is given back with it."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if (device is not None and device.type != "cpu") or num_bytes < LEAST or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.ceil(num_bytes / HUGE_PAGE) * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(tuple(shape))
