"""Returns the memory of large requests to the operating system."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


def trim() -> None:
    """Return freed memory to the system, where the C library is glibc. Otherwise glibc keeps free memory between used
    blocks for a next request that may never be as large. Takes milliseconds, and lets other threads run."""
    if (work := _trim()) is not None:
        work(0)


@cache
def _trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
