"""Tell errors that mean that a device has no memory left."""

from __future__ import annotations

import torch

# Memory that is locked for copies, Triton's programs, CUDA's libraries and torch on a CPU say it in a RuntimeError of their own.
SIGNS = (
    "CUDA error: out of memory",
    "[CUDA]: out of memory",
    "STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
)


def ran_out(error: BaseException) -> bool:
    """Return whether an error means that the device, or memory that is locked for it, has run out."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)
