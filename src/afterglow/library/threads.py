"""Thread settings that torch and tokenizers read once, when they are imported."""

from __future__ import annotations

import os
from pathlib import Path


def set_up_threads(threads: int | None) -> None:
    """Set how many compute threads there are, and that idle ones sleep. Has its full effect before torch is imported.

    Idle OpenMP threads spin by default: with anything else running on the machine (our own I/O threads, for
    one) that makes a two-thread torch many times slower.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("OMP_NUM_THREADS", str(threads or physical_cores()))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def physical_cores() -> int:
    """Count the cores that this process may use, hyper-threads once."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = set()
    for cpu in allowed:
        try:
            siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
        except OSError:
            siblings = str(cpu)
        cores.add(siblings.strip())
    return len(cores) or 1
