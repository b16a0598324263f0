"""Returns freed memory to the operating system: that of large requests, and of what loading a model has taken for a while."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

TRIM_AFTER = 64 << 20  # bytes of tensors read: how often loading returns what it has freed


def trim() -> None:
    """Return freed memory to the system, where the C library is glibc. Otherwise glibc keeps free memory between used
    blocks for a next use that may never be as large. Takes milliseconds, and lets other threads run."""
    if (work := _trim()) is not None:
        work(0)


@cache
def _trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
