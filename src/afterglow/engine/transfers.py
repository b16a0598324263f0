"""Move small lists between the host and the device, and wait for the device, all in one place.

A copy of its own for each list costs a launch, and `torch.tensor(list, device=...)` waits for all work queued before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

LEAST = 4096  # bytes of locked memory for what leaves the device, so that all small lists use the same memory again


class _Buffer:
    """Locked host memory, and an event: what was copied from it has been read."""

    def __init__(self) -> None:
        self.numbers = torch.empty(0, dtype=torch.int64)
        self.sent: Any = None


class StepInputs:
    """Send a step's row numbers to the device. Owns the locked host memory that they leave from: two buffers, since a step may be launched
    while the one before has not been computed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = deque((_Buffer(), _Buffer()))

    def send(self, *numbers: Tensor, into: Tensor | None = None) -> Sequence[Tensor]:
        """Return vectors of int64 on the CPU as vectors on the device, all in one copy. `into`: a vector there that takes them."""
        if self._device.type == "cpu":
            return numbers
        total = sum(map(len, numbers))
        self._buffers.rotate()
        own = self._buffers[0]
        if own.sent is not None:
            wait(own.sent)
        if total > len(own.numbers):
            own.numbers = torch.empty(max(1024, 2 * total), dtype=torch.int64, pin_memory=True)
        buffer = own.numbers[:total]
        torch.cat(numbers, out=buffer)
        there = buffer.to(self._device, non_blocking=True) if into is None else into.copy_(buffer, non_blocking=True)
        own.sent = torch.get_device_module(self._device).Event()
        own.sent.record(torch.get_device_module(self._device).current_stream(self._device))
        return torch.split(there, [len(each) for each in numbers])


def wait(event: Any) -> None:
    """Wait until the device has passed an event: the one place where a step waits for it. Most have passed: tokens are waited for first."""
    if not event.query():
        event.synchronize()


def fetched(*tensors: Tensor, meanwhile: Callable[[], None] | None = None) -> list[Any]:
    """Wait for the device, and return tensors as nested lists. They leave it in one copy. `meanwhile`: launches work that is not waited
    for."""
    where = tensors[0].device
    if where.type == "cpu":
        return [each.tolist() for each in tensors]
    parts = [each.contiguous().view(torch.uint8).flatten() for each in tensors]
    together = parts[0] if len(parts) == 1 else torch.cat(parts)
    found = torch.empty(max(LEAST, len(together)), dtype=together.dtype, pin_memory=True)[: len(together)]
    found.copy_(together, non_blocking=True)
    device = torch.get_device_module(where)
    left = device.Event()
    left.record(device.current_stream(where))
    if meanwhile is not None:
        meanwhile()
    wait(left)
    return [
        part.clone().view(each.dtype).view(each.shape).tolist()
        for part, each in zip(torch.split(found, [len(part) for part in parts]), tensors, strict=True)
    ]  # cloned: aligned for its dtype
