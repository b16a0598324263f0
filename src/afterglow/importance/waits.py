"""Wait for the disk without blocking the engine's thread.

Work that may have to wait is a generator: it yields the reading that it waits for, and is resumed when that reading has ended
or is given up. A step of other requests goes on meanwhile (`engine.separate_pass`).
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

from afterglow.store.moving.reading import Reading

T = TypeVar("T")
Waits = Generator[Reading, None, T]


def waited(work: Waits[T], timeout: float) -> T:
    """Run work to its end, and wait up to `timeout` seconds for each reading. Returns its result."""
    try:
        while True:
            next(work).wait(timeout)
    except StopIteration as ended:
        found: T = ended.value
        return found


def at_hand(value: T) -> Waits[T]:
    """Make work that waits for nothing and returns `value`."""
    return value
    yield
