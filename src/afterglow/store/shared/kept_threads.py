"""Threads that are kept for what comes next: to start one takes its time while others compute."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

KEPT: Final = 8  # idle threads


class KeptThreads:
    """As many threads as there are things to do at the same time. They are daemons: what hangs keeps no process alive."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[Callable[[], object] | None]] = []
        self._closed = False

    @property
    def idle(self) -> int:
        """Count the threads that wait for something to do."""
        with self._lock:
            return len(self._idle)

    def run(self, work: Callable[[], object]) -> None:
        """Have a thread do `work`, which raises nothing. Returns at once."""
        with self._lock:
            todo = self._idle.pop() if self._idle else None
        if todo is None:
            todo = SimpleQueue()
            threading.Thread(target=self._work, args=(todo,), name=self._name, daemon=True).start()
        todo.put(work)

    def close(self) -> None:
        """End the threads that are idle, and the others when they are."""
        with self._lock:
            self._closed = True
            for todo in self._idle:
                todo.put(None)
            self._idle.clear()

    def _work(self, todo: SimpleQueue[Callable[[], object] | None]) -> None:
        while (work := todo.get()) is not None:
            work()
            del work  # and what it holds
            with self._lock:
                if self._closed or len(self._idle) >= KEPT:
                    return
                self._idle.append(todo)
