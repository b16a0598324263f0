"""What the pretend device was asked to do: counts with the lines that caused them, and races between its streams.

Values are computed at once and in order, so a missing wait changes none. Races are found from the order alone, by the logic
of PyTorch's CUDA sanitizer (`torch.cuda._sanitizer.EventHandler`), which is told of launches, events and waits. It knows
memory by pointers; here each pointer stands for PIECE bytes, so that rows of one allocation are told apart.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.device.doors import Sanitizer, caller

PIECE = 16  # bytes: the smallest row of a head in tests' models is twice that
HOST = -1  # the host, as a stream that every launch comes after
SRC = str(Path(__file__).parents[2] / "src" / "afterglow")
NO_MEMORY = 2  # cudaErrorMemoryAllocation


class Race(RuntimeError):
    """Two streams use the same memory, one of them writes, and neither waits for the other."""


class Runtime:
    """CUDA's own locking of host memory."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.limit = 1 << 62
        self.free = 1 << 33  # bytes of the device
        self.last_error = 0  # which the next launch raises

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if size > self.limit:
            self.last_error = NO_MEMORY
            return NO_MEMORY
        self.locked[address] = size
        return 0

    def cudaMemGetInfo(self, device: int) -> tuple[int, int]:
        return self.free, 1 << 33

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


class StepCounts(NamedTuple):
    """Hold what one step asked of the device. `rows`: of its batch; `lines`: (what, file:function of the package)."""

    runs: int
    rows: int
    counts: Counter[str]
    lines: Counter[tuple[str, str]]


class Watch:
    """Count what is asked of the device, and look for races where `look_for_races` was called."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.lines: Counter[tuple[str, str]] = Counter()  # (what, file:function of the package)
        self.steps: list[StepCounts] = []
        self.runtime = Runtime()
        self.pinned: dict[int, int] = {}  # by torch: addresses and sizes
        # Of pinned memory, by address, and of that which torch keeps, by size: when each stream copied it last.
        self._copied: dict[int, dict[int, int]] = defaultdict(dict)
        self._spare: dict[int, list[dict[int, int]]] = defaultdict(list)
        self.racing = False  # set before a model is loaded, to look for races later
        self.races: list[str] = []
        self.recorded: Any = None  # the graph that launches go to
        self._handler: Sanitizer | None = None
        self._of_thread = threading.local()
        self._owners: Counter[int] = Counter()  # by address of a storage: how many tensors hold it
        self._made_by: dict[int, tuple[int, int]] = {}  # by address: stream, bytes
        self._constants: set[int] = set()  # storages that nothing has written to since the model was loaded
        self._numbers, self._clock = count(1), count(1)
        self._after: dict[int, dict[int, int]] = defaultdict(dict)  # by stream: until when it comes after each stream
        self._marks: dict[int, tuple[int, dict[int, int]]] = {}  # by event: stream, and what it comes after
        self._known: dict[int, int] = {}  # by stream: until when the host knows it to be done

    # ---- counts

    def note(self, what: str) -> None:
        """Count an event under the line of the package that caused it."""
        self.counts[what] += 1
        if what != "launches":
            self.lines[what, _function()] += 1

    def in_step(self, runs: int, rows: int, call: Callable[[], Any]) -> Any:
        """Carry out a step, and count what it asked for."""
        counts, lines = self.counts.copy(), self.lines.copy()
        out = call()
        self.steps.append(StepCounts(runs, rows, self.counts - counts, self.lines - lines))
        return out

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor of the CPU lies in memory that is locked for copies."""
        at = tensor.data_ptr()
        return any(
            first <= at < first + size
            for ranges in (self.pinned, self.runtime.locked)
            for first, size in ranges.items()
        )

    # ---- streams

    @property
    def stream(self) -> int:
        """The stream that this thread launches on."""
        return getattr(self._of_thread, "stream", 0)

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        before, self._of_thread.stream = self.stream, stream
        try:
            yield
        finally:
            self._of_thread.stream = before

    @property
    def is_current(self) -> bool:
        """Whether this thread has chosen the device: what launches on the current one comes to another device otherwise."""
        return getattr(self._of_thread, "chosen", False)

    def choose(self, chosen: bool = True) -> None:
        """Have this thread launch on the device."""
        self._of_thread.chosen = chosen

    def new_number(self) -> int:
        """Number a stream or an event."""
        return next(self._numbers)

    def record(self, event: int, stream: int) -> None:
        self._after[stream][stream] = next(self._clock)
        self._marks[event] = stream, dict(self._after[stream])
        if self._handler is not None:
            self._handler.record(event, stream)

    def wait(self, stream: int, event: int) -> None:
        _later(self._after[stream], self._marks.get(event, (0, {}))[1])
        if self._handler is not None:
            self._handler.wait(stream, event)

    def wait_for_event(self, event: int) -> None:
        """The host waits for an event."""
        self.note("synchronisations")
        self._refuse_while_recording()
        _later(self._known, self._marks.get(event, (0, {}))[1])
        if self._handler is not None:
            self._handler.wait_for_event(event)

    def wait_for_stream(self, stream: int) -> None:
        """The host waits for all that a stream was given."""
        self.note("synchronisations")
        self._refuse_while_recording()
        self._after[stream][stream] = next(self._clock)
        _later(self._known, dict(self._after[stream]))
        if self._handler is not None:
            self._handler.wait_for_stream(stream)

    def _refuse_while_recording(self) -> None:
        if self.recorded is not None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def has_passed(self, event: int) -> bool:
        """Tell whether the host knows already that an event has passed. The device is as slow as it may be."""
        stream, marks = self._marks.get(event, (0, {}))
        return self._known.get(stream, 0) >= marks.get(stream, 0)

    # ---- memory

    def look_for_races(self) -> None:
        """Begin to look. What is held now, and is not written to later, is taken as one piece for each storage."""
        self._handler = Sanitizer()
        self._constants = set(self._owners)

    def launch(self, name: str, reads: Collection[torch.Tensor], writes: Collection[torch.Tensor]) -> None:
        """Note a kernel or a copy on this thread's stream. Tensors: the CPU's that stand for the device's, and pinned ones."""
        if self.runtime.last_error:
            self.runtime.last_error = 0
            raise RuntimeError("CUDA error: out of memory")
        if self.recorded is not None:
            self.recorded.reads += reads
            self.recorded.writes += writes
            return
        self.note("launches")
        self._access(name, self.stream, reads, writes)

    def on_host(self, name: str, reads: Collection[torch.Tensor], writes: Collection[torch.Tensor]) -> None:
        """Note that the host uses pinned memory. Every later launch comes after it."""
        handler = self._handler
        if handler is not None:
            self._access(name, HOST, reads, writes)
            event = self.new_number()
            handler.record(event, HOST)
            handler.wait_for_event(event)

    def reuse_locked(self, kept: Collection[torch.Tensor] = ()) -> None:
        """Note that the host may write to all memory that was locked as it is but for some: the store reads into slots that no step
        uses."""
        handler = self._handler
        if handler is None:
            return
        spared = set().union(*map(self._pieces, kept))
        for first, size in list(self.runtime.locked.items()):
            known = {at for at in handler.known if first // PIECE <= at < (first + size) // PIECE}
            self._check("the store fills slots", HOST, set(), known - spared)
        event = self.new_number()
        handler.record(event, HOST)
        handler.wait_for_event(event)

    def _access(
        self, name: str, stream: int, reads: Collection[torch.Tensor], writes: Collection[torch.Tensor]
    ) -> None:
        if self._handler is None:
            return
        for tensor in writes:
            self._constants.discard(tensor.untyped_storage().data_ptr())
        written = set().union(*map(self._pieces, writes))
        self._check(name, stream, set().union(*map(self._pieces, reads)) - written, written)

    def _check(self, name: str, stream: int, reads: set[int], writes: set[int]) -> None:
        assert self._handler is not None
        found = self._handler.launch(stream, reads, writes, name)
        if found:
            error: Any = found[0]
            before = error.previous_access
            self.races.append(
                f"{name} on stream {stream} ({_function()}) does not wait for {before.operator} on stream {before.stream}"
            )

    def _pieces(self, tensor: torch.Tensor) -> set[int]:
        storage = tensor.untyped_storage().data_ptr()
        if storage in self._constants:
            return {-storage}
        if not tensor.numel():
            return set()
        size, run = tensor.element_size(), tensor.element_size()
        dims = [(n, s * size) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1 and s]
        while dims and dims[-1][1] == run:
            run *= dims.pop()[0]
        starts = np.array([tensor.data_ptr()])
        for number, stride in dims:
            starts = (starts[:, None] + np.arange(number) * stride).ravel()
        first, last = starts // PIECE, (starts + run - 1) // PIECE
        pieces = first[:, None] + np.arange(int((last - first).max()) + 1)
        return set(pieces[pieces <= last[:, None]].tolist())

    def held(self, holder: object, tensor: torch.Tensor) -> None:
        """Note that `holder`, a tensor of the device, holds memory."""
        if not self.racing:
            return
        storage = tensor.untyped_storage()
        at = storage.data_ptr()
        if not at:
            return
        if not self._owners[at]:
            # A graph's memory is used again by graphs alone, which are replayed one after another.
            self._made_by[at] = 0 if self.recorded is not None else self.stream, storage.nbytes()
        self._owners[at] += 1
        weakref.finalize(holder, self._let_go, at).atexit = False

    def locked(self, tensor: torch.Tensor) -> None:
        """Note that torch has allocated pinned memory. It keeps what was freed, by powers of two, and uses it again once the host knows
        that its copies are done."""
        at, size = tensor.data_ptr(), tensor.untyped_storage().nbytes()
        rounded = 1 << (size - 1).bit_length() if size else 0
        spare = self._spare[rounded]
        done = (each for each in spare if all(self._known.get(stream, 0) >= end for stream, end in each.items()))
        found = next(done, None)
        if found is None:
            self.note("pinned allocations")
        else:
            spare.remove(found)
        self.pinned[at] = size
        self._forget(at, size)
        weakref.finalize(tensor, self._unpinned, at, rounded).atexit = False

    def copies_pinned(self, tensor: torch.Tensor) -> None:
        """Note that this thread's stream copies pinned memory, and the host goes on."""
        self._after[self.stream][self.stream] = next(self._clock)
        self._copied[tensor.untyped_storage().data_ptr()][self.stream] = self._after[self.stream][self.stream]

    def forget_spare(self) -> None:
        """Give back the pinned memory that torch keeps."""
        self._spare.clear()

    def _unpinned(self, at: int, rounded: int) -> None:
        self._forget(at, self.pinned.pop(at, 0))  # what comes to lie there is other memory: torch keeps this
        self._spare[rounded].append(self._copied.pop(at, {}))

    def _let_go(self, at: int) -> None:
        """The memory's stream may use it again at once: as if it wrote to it now."""
        self._owners[at] -= 1
        if self._owners[at]:
            return
        del self._owners[at]
        stream, size = self._made_by.pop(at)
        if self._handler is None or at in self._constants:
            return
        known = self._pieces_known(at, size)
        self._check("memory is used again", stream, set(), known)
        self._forget(at, size)

    def _pieces_known(self, at: int, size: int) -> set[int]:
        assert self._handler is not None
        return self._handler.known.keys() & set(range(at // PIECE, (at + size - 1) // PIECE + 1))

    def _forget(self, at: int, size: int) -> None:
        if self._handler is not None and size:
            for piece in self._pieces_known(at, size):
                self._handler.forget(piece)


def _later(known: dict[int, int], other: dict[int, int]) -> None:
    """Add times, by stream, to those that are known."""
    for stream, at in other.items():
        known[stream] = max(known.get(stream, 0), at)


def _function() -> str:
    """Find the innermost function of the package."""
    frame = caller(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith(SRC) and frame.f_code.co_name != "<listcomp>":
            return f"{frame.f_code.co_filename[len(SRC) + 1 :]}:{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


watch = Watch()


class Current:
    """`torch.cuda.device`: launch on the device, for a while."""

    def __init__(self, device: object) -> None:
        self._before = watch.is_current

    def __enter__(self) -> None:
        watch.choose()

    def __exit__(self, *exception: object) -> None:
        watch.choose(self._before)


class Stream:
    """A queue of the device."""

    def __init__(self, device: object = None, number: int | None = None) -> None:
        self.number = watch.new_number() if number is None else number

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)

    def wait_event(self, event: Event) -> None:
        watch.wait(self.number, event.number)

    def synchronize(self) -> None:
        watch.wait_for_stream(self.number)


class Event:
    """A mark in a queue."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.number = watch.new_number()
        self.timing = enable_timing

    def elapsed_time(self, other: Event) -> float:
        """Return 0 milliseconds: values are computed at once. Raises: ValueError, as torch does, for events that keep no time."""
        if not (self.timing and other.timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        return 0.0

    def record(self, stream: Stream | None = None) -> None:
        watch.record(self.number, watch.stream if stream is None else stream.number)

    def query(self) -> bool:
        return watch.has_passed(self.number)

    def synchronize(self) -> None:
        watch.wait_for_event(self.number)
