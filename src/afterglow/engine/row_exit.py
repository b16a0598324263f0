"""Copy new rows off a device, in a queue of its own, so that computing does not wait for the copies."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from afterglow.engine.transfers import wait


@dataclass(slots=True)
class _Leaving:
    """Follow rows that leave the device. `began`, `event`: events before and after their copies. `then`: is called with the seconds that
    these took. `there`: the host's memory that they come to. `rows`: the device's memory that is copied, until the computing queue comes
    after the copies anyway."""

    began: Any
    event: Any
    then: Callable[[float], None]
    there: tuple[Tensor, ...]
    rows: tuple[Tensor, ...]
    size: int  # bytes of these


class RowExit:
    """Copy rows off the device, in a second queue, into host memory that the store may read after that.

    The device holds what has not left yet: that is the papers' write buffer (CachedAttention §3.2.2). Where it is full, the computing
    queue waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._where = device
        self._device = torch.get_device_module(device)
        self._stream = self._device.Stream()
        self.leaving: deque[_Leaving] = deque()
        self._held = 0  # of these, how many still hold memory of the device: the last ones
        self._bytes = 0  # of that memory

    def stage(self, then: Callable[[Tensor], None], rows: Tensor) -> None:
        """Copy `rows` to locked memory, and call `then` with that soon."""
        staged = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=self._where.type == "cuda")
        self.copy([(staged, rows)], lambda seconds: then(staged))

    def copy(
        self, pairs: Sequence[tuple[Tensor, Tensor]], then: Callable[[float], None], most: int | None = None
    ) -> Any:
        """Copy to the first tensor of each pair, which is contiguous and locked, from the second, and call `then` soon with the seconds that
        it took. `most`: bytes that may be leaving; None: any number. Returns an event: the copies are done."""
        began, event = (self._device.Event(enable_timing=True) for _ in range(2))
        self._stream.wait_stream(self._device.current_stream(self._where))
        with self._device.stream(self._stream):
            began.record(self._stream)
            for to, rows in pairs:
                to.copy_(rows, non_blocking=True)
            event.record(self._stream)
        there, here = zip(*pairs, strict=True)
        size = sum(rows.nbytes for rows in here)
        self.leaving.append(_Leaving(began, event, then, there, here, size))
        self._held, self._bytes = self._held + 1, self._bytes + size
        while most is not None and self._bytes > most and self._held > 1:
            self._come_after(self.leaving[-self._held])
        self.hand_over()
        return event

    @property
    def last(self) -> Any:
        """Return the event of the rows that leave last; None if none leave."""
        return self.leaving[-1].event if self.leaving else None

    def join(self) -> Any:
        """Have the computing queue come after all rows that leave. Returns the event of the last ones."""
        last = self.last
        if last is not None:
            self._device.current_stream(self._where).wait_event(last)
            for each in self.leaving:
                each.rows = ()
            self._held = self._bytes = 0
        return last

    def hand_over(self, wait_for: Any = None) -> None:
        """Hand over the rows that have left the device, in order. `wait_for`: an event of rows that are waited for."""
        if wait_for is not None:
            wait(wait_for)
        while self.leaving and self.leaving[0].event.query():
            if self._held == len(self.leaving):
                self._held, self._bytes = self._held - 1, self._bytes - self.leaving[0].size
            done = self.leaving.popleft()
            done.then(done.began.elapsed_time(done.event) / 1000)

    def _come_after(self, first: _Leaving) -> None:
        """Have the computing queue come after the first rows that hold memory, which it may then use again."""
        self._device.current_stream(self._where).wait_event(first.event)
        first.rows = ()
        self._held, self._bytes = self._held - 1, self._bytes - first.size
