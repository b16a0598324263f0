"""Triton's kernels for CUDA, behind a gate: torch does the work of those that cannot be built, or that answer otherwise.

A kernel passes its gate once for each device and kind of tensors: it is built, launched, and compared with the torch function
that it replaces. From its first failure on, then or later, torch does its work for that kind. Each failure is a warning in the log
and counts in `refused`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TypeVar

import torch

from afterglow.kernels.no_memory import ran_out

log = logging.getLogger("afterglow.kernels")

Found = TypeVar("Found")

refused: Counter[str] = Counter()
"""How often each kernel was given up. Not counted: machines without Triton."""


class Gate:
    """The gate of one kernel, in module `afterglow.kernels.NAME`, whose `trial(*kind)` raises if the kernel's answers are not
    torch's."""

    def __init__(self, name: str) -> None:
        """`name`: of the kernel's module. It is imported when the kernel is first wanted."""
        self.name = name
        self._tried: set[tuple[object, ...]] = set()
        self._refused: set[tuple[object, ...]] = set()

    def passes(self, device: torch.device, *kind: object) -> bool:
        """Return whether the kernel may be used for a kind of tensors on a device, which is what its trial takes. The first call for a
        kind waits for the device."""
        return self.run(lambda kernels: True, device, *kind) is not None

    def run(self, call: Callable[[ModuleType], Found], device: torch.device, *of: object) -> Found | None:
        """Return what `call` makes of the kernel's module; None if torch must do its work. Nothing has been computed then.

        Raises: torch.OutOfMemoryError, which is no fault of the kernel.
        """
        kind = device, *of
        kernels = None if kind in self._refused else _module(self.name)
        if kernels is None:
            return None
        try:
            with launching_on(device):
                if kind not in self._tried:
                    kernels.trial(*kind)
                    self._tried.add(kind)
                return call(kernels)
        except (
            Exception
        ) as error:  # no C compiler, a driver that does not fit, too little shared memory: there are many ways
            if ran_out(error):
                raise torch.OutOfMemoryError(str(error)) from error
            self._refused.add(kind)
            _refuse(self.name, error, f" ({', '.join(map(str, kind))})")
            return None


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """Launch on a device: Triton launches on the one that is current in its thread, whatever device the tensors are on."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@functools.cache
def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(f"afterglow.kernels.{name}")
    except ImportError:  # no Triton
        return None
    except Exception as error:  # one that does not fit
        _refuse(name, error)
        return None


def _refuse(name: str, error: Exception, kind: str = "") -> None:
    refused[name] += 1
    log.warning("%s is not used, torch does its work: %s%s", name, str(error).strip() or type(error).__name__, kind)


def agree(name: str, found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Compare a kernel's answer with the reference's, in float32. `tolerance`: the largest difference, in units of the largest
    magnitude expected, or of 1 if that is less.

    Raises: ArithmeticError if they differ by more, or one is not finite where the other is.
    """
    found, expected = found.float(), expected.float()
    most = max(1.0, float(expected.nan_to_num(posinf=0.0, neginf=0.0).abs().max()))
    if not torch.allclose(found, expected, rtol=0.0, atol=tolerance * most):
        gap = float((found - expected).abs().nan_to_num(nan=torch.inf).max())
        raise ArithmeticError(f"{name} differs from torch by {gap:.1e}, allowed is {tolerance * most:.1e}")
