"""Choose the device, time it, count cores, and allocate the host memory that KV is copied to and from."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from afterglow.config import format_size
from afterglow.errors import ConfigError
from afterglow.memory import pages

log = logging.getLogger("afterglow.engine")

COPIES, COPIED_BYTES = 4, 16 << 20  # they measure the rate of a bus, in 20 ms at 3 GB/s


def choose_device(name: str) -> torch.device:
    """Find the device of `--device`; `auto` is the first CUDA device, where there is one. CUDA devices have a number.

    Raises: ConfigError, for a name that is none, and for a device that is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    if name != "cpu" and (kind != "cuda" or (number and not number.isdecimal()) or name.endswith(":")):
        raise ConfigError(f"--device must be cpu, cuda, cuda:N or auto, got {name!r}")
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"--device {name} was asked for, but this PyTorch sees no CUDA device; use --device cpu")
    if int(number or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {name} was asked for, but there are {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", int(number or 0))


def use_device(device: torch.device) -> None:
    """Make this thread launch on `device`. The current CUDA device is a setting of each thread."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def free_on(device: torch.device) -> int:
    """Return the bytes that are free on a CUDA device. What torch keeps of freed tensors is given back, and counts as free."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def now_on(device: torch.device) -> float:
    """Read the clock, when the device has done all that it was given. On CPU it is that of the process, for each thread: what other
    processes take does not count, and costs are compared with each other only."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time() / torch.get_num_threads()


def copy_rate(host: Tensor, device: torch.device) -> float:
    """Measure how many bytes/s come from locked host memory to the device: the fastest of a few copies. `host`: uint8 [bytes]; 0 where
    there are none."""
    part = host[:COPIED_BYTES]
    if not len(part):
        return 0.0
    there = torch.empty_like(part, device=device)
    best = float("inf")
    for _ in range(COPIES):
        began = now_on(device)
        there.copy_(part, non_blocking=True)
        best = min(best, now_on(device) - began)
    rate = len(part) / max(best, 1e-9)
    log.info("%s gets %s from host memory in a second", device, format_size(int(rate)))
    return rate


def use_threads(threads: int | None) -> None:
    """Compute with `threads` threads; None: as many as torch takes."""
    if threads is not None:
        if threads > cores():
            log.warning("--threads %d is more than the %d cores here: they will wait for each other", threads, cores())
        torch.set_num_threads(threads)


def cores() -> int:
    """Count the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def allocate(num_bytes: int, pin: bool) -> Tensor:
    """Allocate page-aligned host memory, uint8 [num_bytes], that costs nothing until it is touched.

    `pin`: lock the memory at once, for copies to and from CUDA devices.
    Raises: ConfigError, where the system cannot give or lock so much.
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    try:
        array = pages.allocate(num_bytes, reserve=False)
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(f"--host-cache {format_size(num_bytes)} cannot be had on this machine: {error}") from None
    if pin:
        _pin(array)
    return torch.from_numpy(array)


def _pin(array: npt.NDArray[np.uint8]) -> None:
    """Lock exactly the array's bytes. Torch's own pinned memory would be rounded up to a power of two."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = array.ctypes.data
    error = int(runtime.cudaHostRegister(address, array.nbytes, 0))
    if error:
        with contextlib.suppress(RuntimeError):  # the next launch raises CUDA's last error: this one takes it away
            torch.ones(1, device="cuda")
        raise ConfigError(
            f"--host-cache {format_size(array.nbytes)} cannot be locked in memory for copies to the device (CUDA error "
            f"{error}); give it less, or raise the limit of locked memory (ulimit -l)"
        )
    weakref.finalize(array, runtime.cudaHostUnregister, address)
