"""Changes of a directory, made by one thread in the order in which they were asked for; those that a rest of the directory holds up wait for its end."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from afterglow.store.shared.directory_names import DirectoryNames

MAX_CHANGES: Final = 4096  # that wait
TRY_S: Final = 0.05  # at least, before what failed is tried again,
MOST_S: Final = 60.0  # and at most


class Change(NamedTuple):
    """A change of what the directory has of a model."""

    model: str
    make: Callable[[DirectoryNames], object]


class DirectoryChanges:
    """The thread, and what waits for it."""

    def __init__(
        self, make: Callable[[Change], bool], missed: Callable[[Change], None], rests: Callable[[], float]
    ) -> None:
        """`make`: makes a change; False: it has to be tried again. `missed` is told of one that is never made. `rests`: for how many
        seconds the directory is left alone.
        """
        self._make, self._missed, self._rests = make, missed, rests
        self._changed = threading.Condition()
        self._waiting: deque[Change] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, change: Change, seconds: float) -> None:
        """Queue a change, and wait until it is made: for so many seconds, unless the directory rests."""
        with self._changed:
            full = len(self._waiting) >= MAX_CHANGES
            if not full and not self._closed:
                self._waiting.append(change)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="afterglow-directory-changes", daemon=True)
                    self._thread.start()
                self._changed.notify_all()
        if full:
            self._missed(change)
        elif seconds:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or all(each is not change for each in self._waiting) or self._rests(),
                    seconds,
                )

    def close(self) -> None:
        """Leave out what waits; the thread ends."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        wait = 0.0
        while True:
            with self._changed:
                if wait:
                    self._changed.wait_for(lambda: self._closed, wait)
                self._changed.wait_for(lambda: self._closed or self._waiting)
                if self._closed:
                    return
                change = self._waiting[0]
            made = self._make(change)
            wait = 0.0 if made else min(max(TRY_S, self._rests()), MOST_S)
            with self._changed:
                if made and self._waiting:
                    self._waiting.popleft()
                self._changed.notify_all()
