"""PyTorch's CUDA sanitizer, frames of Python, and what reads slots, whose members are private: what they are used for here."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.cuda._sanitizer import EventHandler

if TYPE_CHECKING:  # the device is there before the package is imported
    from afterglow.plan.step import Gather


class Sanitizer:
    """The logic of PyTorch's CUDA sanitizer. Memory is named by numbers, as are streams and events."""

    def __init__(self) -> None:
        self._handler = EventHandler()
        self._memory = self._handler.tensors_accessed

    def launch(self, stream: int, reads: set[int], writes: set[int], name: str) -> list[Any]:
        """Note a kernel. Returns what it races with."""
        names: dict[int, list[str]] = {each: [] for each in reads | writes}
        return self._handler._handle_kernel_launch(stream, reads, writes, set(), name, names)

    def record(self, event: int, stream: int) -> None:
        self._handler._handle_event_record(event, stream)

    def wait(self, stream: int, event: int) -> None:
        self._handler._handle_event_wait(event, stream)

    def wait_for_event(self, event: int) -> None:
        """Note that the host, and so all that is launched later, comes after an event."""
        self._handler._handle_event_synchronization(event)

    def wait_for_stream(self, stream: int) -> None:
        """Note that the host, and so all that is launched later, comes after what a stream was given."""
        self._handler._handle_stream_synchronization(stream)

    @property
    def known(self) -> dict[int, Any]:
        """Memory that was used, and by what."""
        return self._memory.accesses

    def forget(self, memory: int) -> None:
        self._memory.delete_tensor(memory)


def slots_read(gather: Any) -> list[tuple[int, int, int]]:
    """Return the slots that a `SlotGather` reads, each with its first row and the row after its last one."""
    return [(piece.slot, piece.first, piece.stop) for piece in gather._pieces]


def slots_of(runner: Any, gathers: Iterable[Gather]) -> list[torch.Tensor]:
    """Return the memory of the slots that gathers read, and that rows are leaving for."""
    arena = runner._gatherer._host.arena
    leaving = [each.there for each in runner._tee._exit.leaving] if runner._tee._exit is not None else []
    return [arena[:, :, slot] for gather in gathers for slot in gather.slots] + [
        each for all in leaving for each in all
    ]


def caller(depth: int) -> FrameType | None:
    """Return the frame so many calls up."""
    return sys._getframe(depth + 1)


def schema(operator: Any) -> Any:
    """Return what an operator takes and returns."""
    return operator._schema
