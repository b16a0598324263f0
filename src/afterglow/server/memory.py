"""Memory that large requests have used, back to the system."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


def trim() -> None:
    """Where glibc is: give back what is free. It keeps freed memory between what is in use for the next request, which
    may never be as large. Takes milliseconds, and lets other threads run."""
    if (work := _trim()) is not None:
        work(0)


@cache
def _trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
