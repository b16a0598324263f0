"""A tier made slow on purpose, for benchmarks and tests: no real disk is like this.

The bytes are real and pass through the real tier; only their arrival is held back, as if over a line of a given speed.
A tier that is slower than that by itself is not held back any further.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from afterglow.errors import ConfigError, StoreError
from afterglow.plan.step import ExtentRecord
from afterglow.store.extents.chunks import ExtentChunks, Stale, States
from afterglow.store.extents.head import Head
from afterglow.store.extents.layout import align_up
from afterglow.store.extents.rewriting import Ranks, Rewriting
from afterglow.store.extents.tier import ExtentRead, HostArena, Tier

UNDER_WAY: Final = 16  # reads of chunks that a device has at a time: what is taken back of the others does not travel


@dataclass(frozen=True, slots=True)
class Throttle:
    """Sets the speed to pretend: bytes per second of all reads together and of all writes (infinity: no limit), and seconds
    that every call takes before its first byte.
    """

    read_bytes_per_s: float = math.inf
    write_bytes_per_s: float = math.inf
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.read_bytes_per_s > 0 and self.write_bytes_per_s > 0):
            raise ConfigError(f"a throttled tier needs speeds above 0 bytes per second, got {self}")
        if not 0 <= self.latency_s < math.inf:
            raise ConfigError(f"the latency of a throttled tier must be finite and not negative, got {self.latency_s}")


class Line:
    """Carries the bytes of all senders one after another: a token bucket that saves nothing up."""

    def __init__(self, bytes_per_s: float) -> None:
        self._seconds_per_byte = 1.0 / bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    def send(self, num_bytes: int, earliest: float) -> float:
        """Wait until bytes that could leave at `earliest` (perf_counter) have arrived; return that moment.

        Bytes of other senders that could leave before `earliest` do.
        """
        _sleep_until(earliest)
        with self._lock:
            self._free_at = arrival = max(self._free_at, earliest) + num_bytes * self._seconds_per_byte
        _sleep_until(arrival)
        return arrival


def _sleep_until(moment: float) -> None:
    while (left := moment - time.perf_counter()) > 0:
        time.sleep(left)


class ArtificiallySlowTier:
    """Wraps a Tier so that its layers arrive no sooner than `throttle` allows; all else is left to the tier inside."""

    def __init__(self, real: Tier, throttle: Throttle) -> None:
        self.real = real
        self.throttle = throttle
        self._reads = Line(throttle.read_bytes_per_s)
        self._writes = Line(throttle.write_bytes_per_s)

    def change(self, throttle: Throttle) -> None:
        """Pretend another speed from now on: what is under way goes on over the new lines with its next layer."""
        self.throttle = throttle
        self._reads, self._writes = Line(throttle.read_bytes_per_s), Line(throttle.write_bytes_per_s)

    def write(self, record: ExtentRecord, arena: HostArena, slots: Sequence[int], progress: Callable[[], None]) -> int:
        """Store an extent and then wait for the rest of the time that a slow device takes.

        The file has its name before that wait ends, unseen by callers: an extent exists when this returns.
        """
        at = time.perf_counter() + self.throttle.latency_s
        written = self.real.write(record, arena, slots, progress)
        layers = arena.layout.layers
        try:
            for layer in range(layers):
                at = self._writes.send(written * (layer + 1) // layers - written * layer // layers, at)
                progress()
        except BaseException:
            with contextlib.suppress(StoreError):
                self.real.delete(record.id)
            raise
        return written

    def read(self, read: ExtentRead, layer_done: Callable[[int], None], first: int = 0, stop: int | None = None) -> int:
        """Fill slots; a layer counts as arrived when the line has carried its bytes (and the head's, with layer 0). Bytes that
        have just come from elsewhere are not the disk's: no line carries them.
        """
        if read.file is not None:
            return self.real.read(read, layer_done, first, stop)
        layout, rows = read.arena.layout, read.rows
        whole = len(read.slots) == layout.blocks(rows)
        span = layout.tensor_bytes(rows) if whole else align_up(len(read.slots) * layout.chunk_bytes)
        at = time.perf_counter() + self.throttle.latency_s
        arrived = first

        def hold_back(layers: int) -> None:
            nonlocal at, arrived
            for layer in range(arrived, layers):
                size = 2 * max(0, span - read.skipped(layer) * layout.chunk_bytes)
                at = self._reads.send(size + (layout.head_bytes(rows) if layer == 0 else 0), at)
                layer_done(layer + 1)
            arrived = max(arrived, layers)

        return self.real.read(read, hold_back, first, stop)

    def read_chunks(self, asked: Sequence[ExtentChunks], states: States | None = None) -> tuple[int, list[Head]]:
        """Read a few chunks at a time, and wait until the line has carried them. All are asked for at once: one call's latency."""
        at = time.perf_counter() + self.throttle.latency_s
        total, first, heads = 0, 0, []
        for each in asked:
            for start in range(0, max(1, len(each.reads)), UNDER_WAY):
                some = each.reads[start : start + UNDER_WAY]
                stop = first + len(some)
                seen = None if states is None else memoryview(states)[first:stop]
                try:
                    moved, found = self.real.read_chunks([each._replace(reads=some)], seen)
                except Stale as stale:
                    stale.bytes += total
                    raise
                if moved:
                    self._reads.send(moved, at)
                total, first = total + moved, stop
            heads += found
        return total, heads

    def rewriting(
        self, extent: str, rows: int, ranks: Ranks, carried: Callable[[int], None] | None = None
    ) -> Rewriting:
        """Begin to rewrite an extent as the real tier does, but read and write over the slow lines."""
        return self.real.rewriting(extent, rows, ranks, self._carried if carried is None else carried)

    def _carried(self, moved: int) -> None:
        began = time.perf_counter() + self.throttle.latency_s
        self._writes.send(moved, self._reads.send(moved, began))

    def rewritten(self, extent: str) -> None:
        """Tell the real tier that a new version has been published."""
        self.real.rewritten(extent)

    def head(self, extent: str) -> Head:
        """Return the verified head of an extent, at the real tier's speed."""
        return self.real.head(extent)

    def delete(self, extent: str) -> None:
        """Remove an extent, after the latency of a call."""
        time.sleep(self.throttle.latency_s)
        self.real.delete(extent)

    def extents(self) -> Iterator[str]:
        """Yield the ids of all extents, at the real tier's speed."""
        return self.real.extents()
