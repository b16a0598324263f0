"""A thread with a queue, for work that must not wait for the disk or for the caller."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Generic, TypeVar

T = TypeVar("T")


class Worker(Generic[T]):
    """One thread that carries out items in batches, in the order in which they came."""

    def __init__(self, name: str, carry_out: Callable[[deque[T]], None], end: Callable[[], None] | None = None) -> None:
        """`carry_out` gets all items that have come since its last call, and takes each out when it is done with it. `end` is
        called when all is done. Both are called from the thread; neither may raise.
        """
        self._carry_out = carry_out
        self._end = end
        self._items: deque[T] = deque()
        self._due = inf  # when `carry_out` is called even without items
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, item: T) -> bool:
        """Queue an item; False when the worker is closed."""
        with self._changed:
            if not self._closed:
                self._items.append(item)
                self._changed.notify()
            return not self._closed

    def wake(self, within: float) -> None:
        """Call `carry_out` within so many seconds, with or without items."""
        with self._changed:
            self._due = min(self._due, time.monotonic() + within)
            self._changed.notify()

    def close(self, timeout: float | None = None) -> None:
        """Carry out queued items, call `carry_out` a last time, and end the thread: wait for that at most `timeout` seconds."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout)

    def _work(self) -> None:
        ended = False
        while not ended:
            with self._changed:
                while not (self._items or self._closed) and (left := self._due - time.monotonic()) > 0:
                    self._changed.wait(left if left < inf else None)
                items, self._items = self._items, deque()
                self._due, ended = inf, self._closed
            self._carry_out(items)
        if self._end is not None:
            self._end()
