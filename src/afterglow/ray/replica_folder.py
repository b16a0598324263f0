"""A replica's folder for its disk tier: the first of its machine that no process holds. Needs no Ray."""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = "lock"


@contextmanager
def own_folder(parent: Path) -> Iterator[Path]:
    """Hold the folder `replica-N` below `parent` with the lowest number that is free.

    The lock ends with its process, even with a killed one. So a replica that is started again finds what it had.
    """
    for number in itertools.count(1):
        folder = parent / f"replica-{number}"
        folder.mkdir(0o700, parents=True, exist_ok=True)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        try:
            yield folder
        finally:
            os.close(lock)
        return
