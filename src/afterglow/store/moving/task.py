"""A piece of work of the mover, as the mover, the work itself and the threads that wait for it see it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from afterglow.errors import StoreError
from afterglow.plan.step import DEMAND

Place = tuple[int, int, int, int]  # priority, turn, layers in place, number of the entry: the lower goes first


class Abandoned(StoreError):
    """Raised inside a task that was given up, so that it ends without an effect."""


def _over(_: Task) -> int:
    raise Abandoned("it has ended")


class Task:
    """Holds one piece of work of the mover. `work(task)` returns the bytes moved and calls `advance` as it goes.

    `move` is None for the store's own housekeeping, which is not reported. `gate`: how many layers may be in place
    before `Mover.release` (None: all). A work that is not done calls `pause` and returns, either at its `limit` or to let
    other tasks go first; it is called again when the gate is open and its turn has come. `label` is for the receiver
    of the report. `ahead`: it reads, and nothing waits for it before it is urged.
    """

    def __init__(
        self,
        key: str,
        priority: int,
        work: Callable[[Task], int],
        *,
        move: int | None,
        writes: bool,
        gate: int | None = None,
        label: str = "",
        ahead: bool = False,
    ) -> None:
        self.key = key
        self.priority = priority
        self.work = work
        self.move = move
        self.writes = writes
        self.gate = gate
        self.arrived: int | None = None  # layers whose bytes have come to the disk; None: all
        self.label = label
        self.ahead = ahead
        self.patient = False  # runs as one of those that leave a thread to others
        self.turn = 0  # tasks of one turn go on side by side, whichever has come the least far
        self.place: Place | None = None  # its entry in a queue; other entries of this task are void
        self.started = False  # runs, or has ended; not while it waits at its gate, or for others
        self.paused = False
        self.abandoned = False
        self.progress_at = 0.0  # monotonic seconds
        self.bytes = 0  # moved by the calls of `work` that have returned
        self.seconds = 0.0  # spent in them
        self.layers = 0  # in place
        self._ended: bool | None = None  # None: not yet; then whether it went well
        self._changed = threading.Condition()

    def limit(self, layers: int) -> int:
        """Return how many of `layers` layers may be in place while the gate is as it is, and no more bytes have come."""
        return min(each for each in (layers, self.gate, self.arrived) if each is not None)

    @property
    def waits(self) -> bool:
        """Tell whether the task has come to its gate, and the gate is closed, or to bytes that have not come yet."""
        return any(each is not None and self.layers >= each for each in (self.gate, self.arrived))

    @property
    def can_wait(self) -> bool:
        """Tell whether the task must leave a thread to others: it writes, or reads what nothing waits for."""
        return self.writes or (self.ahead and self.priority != DEMAND)

    def pause(self) -> None:
        """Note that there is more to do, behind the gate or after other tasks; the work calls this, then returns."""
        self.paused = True

    def advance(self, layers: int = 0) -> None:
        """Note progress: the first `layers` layers are in place.

        Raises:
            Abandoned: the task was given up after a time-out.
        """
        self.progress_at = time.monotonic()
        with self._changed:
            if self.abandoned:
                raise Abandoned("given up after a time-out")
            if layers > self.layers:
                self.layers = layers
                self._changed.notify_all()

    def abandon(self) -> None:
        """Give the task up: its next `advance` raises."""
        with self._changed:
            self.abandoned = True

    def end(self, ok: bool) -> None:
        """Wake all threads that wait for a layer; only the first call counts.

        The reference to the work is dropped. The work often refers to the waiting object, and that to the task: such a
        circle keeps its buffers until the next garbage collection.
        """
        with self._changed:
            if self._ended is None:
                self._ended = ok
                self.work = _over
                self._changed.notify_all()

    @property
    def over(self) -> bool:
        """Tell whether the task has ended, well or not."""
        return self._ended is not None

    def wait_layer(self, layer: int, timeout: float | None) -> bool:
        """Wait for `layer`, at most `timeout` seconds; tell whether it is in place."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended is not None or self.layers > layer, timeout)
            return self.layers > layer if self._ended is None else self._ended
