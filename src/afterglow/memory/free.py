"""How much memory this process may still take, and giving back what large requests and loading a model have taken for a while."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

MEMINFO = Path("/proc/meminfo")
GROUP = Path("/sys/fs/cgroup")  # of this process, in a container


def free_bytes() -> int | None:
    """Return the bytes that can be had without swapping, cached files counted as free; None where the system does not tell."""
    known = [number for number in (_available(), _left_in_group()) if number is not None]
    return min(known, default=None)


def _available() -> int | None:
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None


def _left_in_group() -> int | None:
    """Return what the limit of a control group (version 2) leaves, cached files counted as free."""
    try:
        limit, used = ((GROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        lines = (GROUP / "memory.stat").read_text().splitlines()
        if limit == "max":
            return None
        counts = {name: int(number) for name, _, number in (line.partition(" ") for line in lines)}
        return int(limit) - int(used) + counts.get("inactive_file", 0) + counts.get("active_file", 0)
    except (OSError, ValueError):
        return None


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
