"""How much memory this process may still take."""

from __future__ import annotations

from pathlib import Path

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
