"""Record work of a CUDA device as a graph, which is launched as a whole."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

import torch

from afterglow.engine.undisturbed import undisturbed
from afterglow.kernels.no_memory import ran_out

Result = TypeVar("Result")


class NotRecorded(Exception):
    """A pass could not be recorded. `short`: there was no memory for it."""

    def __init__(self, error: RuntimeError) -> None:
        super().__init__(str(error))
        self.short = ran_out(error)


class Recorder:
    """Record passes as CUDA graphs, in a stream and memory of their own: graphs run one after another.

    `torch.cuda.graph` would do so in a stream of whichever device it was first used on, wait for all devices' work, and give back all
    memory that torch keeps, locked memory too, which the next steps would have to ask for again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = torch.get_device_module(device)
        self._index = device.index or 0
        self._stream = self._device.Stream(device)
        self._memory = torch.cuda.graph_pool_handle()
        # Torch records to no memory whose graphs are all gone: the first one stays.
        self._first: torch.cuda.CUDAGraph | None = None

    def record(self, compute: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        """Record what `compute` launches, without running it. Returns the graph, and the result, where each replay puts it.

        Raises: NotRecorded.
        """
        graph = torch.cuda.CUDAGraph()
        try:
            # No garbage is collected meanwhile: memory that it unlocks would spoil the graph.
            with undisturbed(), self._device.stream(self._stream):
                graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
                try:
                    found = compute()
                except BaseException:
                    with contextlib.suppress(RuntimeError):  # what has gone wrong says more
                        graph.capture_end()
                    raise
                graph.capture_end()
        except BaseException as error:
            self._leave_memory()
            if isinstance(error, RuntimeError):
                raise NotRecorded(error) from error
            raise
        self._first = self._first or graph
        return graph, found

    def _leave_memory(self) -> None:
        """Leave the memory of a graph that was not recorded. torch would take it as being recorded to for ever, and keep all that is
        freed, if the end of the recording failed; and it records to no memory whose only graph has failed."""
        with contextlib.suppress(RuntimeError, AttributeError):  # the recording has been ended; a torch without it
            torch._C._cuda_endAllocateToPool(self._index, self._memory)
        self._memory, self._first = torch.cuda.graph_pool_handle(), None
