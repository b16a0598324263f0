"""CUDA graphs of the pretend device: what is launched while one is recorded is launched again by its replay, in the same memory.

Nothing that is recorded has been computed: afterwards the results hold no numbers, and what torch's operators have written to holds what it
held before. Copies from pageable memory, and all that waits, are refused meanwhile, as CUDA does.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch

from tests.device.watching import Stream, watch


class Launch:
    """A launch that can be made again. `made`: tensors that it made, whose memory stays theirs."""

    def __init__(self, again: Callable[[], Any], made: list[torch.Tensor]) -> None:
        self.again, self.made = again, made

    def forget(self) -> None:
        for each in self.made:
            each.fill_(torch.nan if each.is_floating_point() else 85)

    def replay(self) -> None:
        out = self.again()
        found = [out] if isinstance(out, torch.Tensor) else [*out] if isinstance(out, list | tuple) else []
        for to, new in zip(
            self.made, [each for each in found if isinstance(each, torch.Tensor)], strict=bool(self.made)
        ):
            if to is not new:
                to.copy_(new)


class CUDAGraph:
    """A recorded graph."""

    streams: ClassVar[dict[Any, int]] = {}  # that graphs with the same memory were recorded in, by the memory
    users: ClassVar[Counter[Any]] = Counter()  # graphs of each memory; that of none is not recorded to any more

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.before: list[
            tuple[torch.Tensor, torch.Tensor]
        ] = []  # what is written to while recording, and what it held
        self.reads: list[torch.Tensor] = []
        self.writes: list[torch.Tensor] = []

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        if not watch.stream:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        if pool in self.streams and pool is not None and not self.users[pool]:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        assert self.streams.setdefault(pool, watch.stream) == watch.stream, "memory of graphs of another stream"
        self.users[pool] += 1
        weakref.finalize(self, self.users.subtract, [pool]).atexit = False
        watch.recorded = self
        watch.note("recordings")

    def capture_end(self) -> None:
        watch.recorded = None
        for written, held in reversed(self.before):
            written.copy_(held)
        self.before.clear()
        for each in self.launches:
            each.forget()

    def replay(self) -> None:
        assert self.launches, "a graph is recorded before it is replayed"
        watch.note("graphs")
        watch.launch("a graph", self.reads, self.writes)
        for each in self.launches:
            each.replay()


class Recording:
    """`torch.cuda.graph`: record what is launched, in one stream of the process, after all work of the device; torch gives back all memory
    that it keeps."""

    stream = Stream()

    def __init__(self, graph: CUDAGraph, pool: Any = None, **options: Any) -> None:
        self.graph, self.pool, self.on = graph, pool, watch.on(self.stream.number)

    def __enter__(self) -> None:
        watch.wait_for_stream(watch.stream)
        watch.forget_spare()
        self.on.__enter__()
        self.graph.capture_begin(self.pool)

    def __exit__(self, *exception: object) -> None:
        self.graph.capture_end()
        self.on.__exit__(None, None, None)


def recorded(again: Callable[[], Any], made: list[torch.Tensor]) -> None:
    """Note what a launch does, if a graph is recorded."""
    if watch.recorded is not None:
        watch.recorded.launches.append(Launch(again, made))


def writing(tensors: Iterable[torch.Tensor]) -> None:
    """Note what tensors hold that are about to be written to, if a graph is recorded."""
    if watch.recorded is not None:
        watch.recorded.before += [(each, each.clone()) for each in tensors]
