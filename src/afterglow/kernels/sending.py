"""Send lists of numbers to the device, by copies that nothing waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def on_device(values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return numbers as a tensor on the device, without waiting for what it does."""
    return sent(torch.tensor(values, dtype=dtype), device)


def sent(numbers: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the CPU on the device, without waiting. It leaves from locked memory, which torch uses again once it has been
    read; a copy from other memory may wait for all work that was queued before."""
    if device.type == "cpu":
        return numbers
    locked = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    return locked.copy_(numbers).to(device, non_blocking=True)
