"""Fetches extents of the shared tier to files in the disk tier's folder, range by range, in threads of its own.

All extents that a request waits for come side by side: the next range is one of the extent of which the least was asked for, so that
their first layers are there before the last layers of any. An extent that comes alone has all threads. Each range is verified as it comes, the head
with the first one; so what is damaged later is the fault of this machine's disk, and the object stays.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from operator import methodcaller
from typing import Final, NamedTuple

import numpy as np

from afterglow.errors import DamageError, SlowError, StoreError
from afterglow.plan.step import ExtentId
from afterglow.store.extents.disk_tier import DiskTier
from afterglow.store.extents.head import Head, crc32c, decode_head
from afterglow.store.extents.layout import KEYS, KVLayout
from afterglow.store.shared.paths import Paths
from afterglow.store.shared.remote import Remote

log = logging.getLogger("afterglow.store")

FETCHERS: Final = 4  # reads at a time
RANGE_BYTES: Final = 2 << 20  # of one read: whole layers, at least so much, but
MAX_RANGE_BYTES: Final = 8 << 20  # no more than that
READ_S: Final = 5.0  # for one read


class FetchEnd(NamedTuple):
    """How a fetch ended: after `size` bytes and `seconds` (its part of the time in which fetches were under way), with an error or
    none.
    """

    error: StoreError | None
    size: int
    seconds: float


class Fetch(NamedTuple):
    """An extent to be fetched. `file`: where to. `urgency`: the lower goes first. `goes_on(bytes, seconds)` is asked between reads: False
    gives the fetch up, as slow; `arrived` is told how many layers are there, `ended` of the end, after which the file, whole or not, is the
    caller's. All are called from other threads.
    """

    extent: ExtentId
    rows: int
    file: str
    urgency: Callable[[], tuple[int, int]]
    goes_on: Callable[[int, float], bool]
    arrived: Callable[[int], object]
    ended: Callable[[FetchEnd], object]


class _FetchProgress:
    """A fetch, and how far it has come. `asked`, `at`: bytes that were asked for, and those that are there without a gap."""

    def __init__(self, what: Fetch) -> None:
        self.what = what
        self.asked = 0
        self.at = 0
        self.seconds = 0.0
        self.flying = 0  # ranges
        self.error: StoreError | None = None
        self.head: Head | None = None  # with the first range
        self._beyond: dict[int, int] = {}  # stretches that came before what lies before them: ends by starts

    def came(self, start: int, length: int) -> bool:
        """Note that a range is in the file; tell whether more bytes are there without a gap."""
        self._beyond[start] = start + length
        before = self.at
        while (end := self._beyond.pop(self.at, None)) is not None:
            self.at = end
        return self.at > before


class Fetcher:
    """Threads that fetch extents."""

    def __init__(self, remote: Remote, paths: Paths, disk: DiskTier) -> None:
        self._remote = remote
        self._paths = paths
        self._disk = disk
        self._layout = disk.layout
        self._changed = threading.Condition()
        self._fetches: list[_FetchProgress] = []
        self._measured_at = 0.0
        self._started = False
        self._closed = False

    @property
    def pending(self) -> int:
        """Count the fetches that have not ended."""
        with self._changed:
            return len(self._fetches)

    def fetch(self, what: Fetch) -> None:
        """Queue a fetch; it ends in any case."""
        with self._changed:
            if not self._started:
                self._started = True
                for _ in range(FETCHERS):
                    threading.Thread(target=self._run, name="afterglow-fetcher", daemon=True).start()
            self._fetches.append(_FetchProgress(what))
            self._changed.notify()

    def close(self) -> None:
        """Give up what is queued, and what runs at its next read."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while (coming := self._next()) is None:
                    if self._closed and not self._fetches:
                        return
                    self._changed.wait()
                self._measure()
                start, length = coming.asked, _length(self._layout, coming.what.rows, coming.asked)
                coming.asked += length
                coming.flying += 1
            error = self._bring(coming, start, length)
            with self._changed:
                self._measure()
                coming.flying -= 1
                coming.error = coming.error or error
                if error is None and coming.came(start, length) and not self._whole(coming):
                    coming.what.arrived(_layers(self._layout, coming.what.rows, coming.at))
                ended = not coming.flying and (coming.error is not None or self._whole(coming))
                if ended:
                    self._fetches.remove(coming)
                self._changed.notify_all()
            if ended:
                self._end(coming)

    def _next(self) -> _FetchProgress | None:
        """Find the fetch whose next range is to be read: none before its first one has come, whose head is verified."""
        open_ones = [
            each for each in self._fetches
            if each.error is None and (each.at > 0 or not each.asked) and each.asked < self._layout.file_bytes(each.what.rows)
        ]  # fmt: skip
        return min(open_ones, key=self._place, default=None)

    def _place(self, coming: _FetchProgress) -> tuple[int, int, int]:
        return (*coming.what.urgency(), _layers(self._layout, coming.what.rows, coming.asked))

    def _whole(self, coming: _FetchProgress) -> bool:
        return coming.at == self._layout.file_bytes(coming.what.rows)

    def _measure(self) -> None:
        """Give the time since the last change to the fetches that were under way, each its part: they share a line."""
        now = time.perf_counter()
        flying = sum(each.flying for each in self._fetches)
        for each in self._fetches:
            each.seconds += (now - self._measured_at) * each.flying / flying if each.flying else 0.0
        self._measured_at = now

    def _bring(self, coming: _FetchProgress, start: int, length: int) -> StoreError | None:
        """Read a range and write it to the file; returns what went wrong."""
        what = coming.what
        try:
            if not what.goes_on(coming.at, coming.seconds):
                raise SlowError(f"given up after {coming.at} bytes in {coming.seconds:.3f} s")
            if self._closed:
                raise StoreError("the store is closed")
            try:
                data = self._read(coming, start, length)
            except DamageError:  # by the object, or on the way
                data = self._read(coming, start, length)
            self._write(what, data, start)
        except StoreError as error:
            return error
        except Exception as error:
            if not isinstance(error, OSError):
                log.exception("a fetch failed in a way that was not foreseen")
            failed = StoreError(f"a file for extent {what.extent[:16]}: {error}")
            failed.__cause__ = error
            return failed
        return None

    def _read(self, coming: _FetchProgress, start: int, length: int) -> bytes:
        """Read a range, and verify it.

        Raises:
            DamageError: it is not what was published.
            StoreError: the store fails.
        """
        layout, what = self._layout, coming.what
        read = methodcaller("get", self._paths.extent(what.extent), start, length)
        data: bytes = self._remote.call("fetching", read, READ_S)
        if len(data) != length:
            raise DamageError(f"extent {what.extent[:16]}: its object ends early")
        skipped = 0
        if start == 0:
            skipped = layout.head_bytes(what.rows)
            coming.head = decode_head(data[:skipped], layout, self._disk.digest, extent=what.extent, rows=what.rows)
        assert coming.head is not None, "the first range comes before all others"
        first = (start + skipped - layout.head_bytes(what.rows)) // layout.chunk_bytes
        chunks = np.frombuffer(data, np.uint8, offset=skipped).reshape(-1, layout.chunk_bytes)
        wanted = coming.head.crcs.ravel()[first : first + len(chunks)]
        for number, (chunk, crc) in enumerate(zip(chunks, wanted, strict=True), first):
            if crc32c(chunk) != crc:
                raise DamageError(f"extent {what.extent[:16]}: chunk {number}")
        return data

    def _write(self, what: Fetch, data: bytes, start: int) -> None:
        """Write a range to the file, which the first range makes."""
        layout, rows = self._layout, what.rows
        if start == 0:
            fd, _ = self._disk.folder.create(what.extent, what.file, direct=False)
        else:
            fd = os.open(what.file, os.O_WRONLY)
        try:
            if start == 0:
                os.ftruncate(fd, layout.file_bytes(rows))
            if os.pwrite(fd, data, start) != len(data):
                raise StoreError(f"extent {what.extent[:16]}: the disk takes no more bytes")
        finally:
            os.close(fd)

    def _end(self, coming: _FetchProgress) -> None:
        error = coming.error
        if error is not None and not coming.what.goes_on(coming.at, coming.seconds):  # nothing waits for it any more
            error = SlowError(str(error))
        coming.what.ended(FetchEnd(error, coming.at, coming.seconds))


def _length(layout: KVLayout, rows: int, at: int) -> int:
    """Choose the bytes of the next read: up to the end of a layer, or, if that is very large, of a chunk. The first one has the head too."""
    for layer in range(1, layout.layers):
        end = layout.offset(rows, layer, KEYS)
        if end >= at + RANGE_BYTES:
            break
    else:
        end = layout.file_bytes(rows)
    chunks = max(1, MAX_RANGE_BYTES // layout.chunk_bytes)
    return min(end, max(at, layout.head_bytes(rows)) + chunks * layout.chunk_bytes) - at


def _layers(layout: KVLayout, rows: int, at: int) -> int:
    """Count the layers whose bytes are among the first `at`."""
    return sum(layout.offset(rows, layer + 1, KEYS) <= at for layer in range(layout.layers))
