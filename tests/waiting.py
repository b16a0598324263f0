"""Wait in tests for a condition that threads and processes bring about."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

PATIENCE = 20.0  # seconds: two busy cores are slow


def wait_for(condition: Callable[[], object], seconds: float = PATIENCE, message: object = "timed out") -> None:
    """Return once `condition()` is true.

    Raises: AssertionError with `message` if it is still false after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(0.002)


def wait_for_threads(name: str) -> None:
    """Return once no thread of this name runs."""
    wait_for(lambda: all(each.name != name for each in threading.enumerate()), message=f"threads {name} go on")
