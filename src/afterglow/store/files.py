"""Scatter reads and gather writes that bypass the page cache where the file system allows. Knows no
extents.
"""

from __future__ import annotations

import errno
import mmap
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from afterglow.errors import DamageError, SlowError, StoreError
from afterglow.store.extent import Bytes
from afterglow.store.layout import ALIGNMENT, align_up
from afterglow.store.places import open_file

IOV_MAX: Final = min(1024, os.sysconf("SC_IOV_MAX") if hasattr(os, "sysconf") else 1024)
_O_DIRECT: Final = getattr(os, "O_DIRECT", 0)
HUGE_PAGE: Final = 2 << 20
HELPER_SECONDS: Final = 1.0  # how long its thread waits for more
T = TypeVar("T")


def supports_direct(folder: Path) -> bool:
    """Whether files in this folder can be written and read with O_DIRECT. Raises OSError if not at all."""
    path = folder / f".tmp-{os.getpid()}-direct"
    page = mmap.mmap(-1, ALIGNMENT)
    try:
        for flag in (_O_DIRECT, 0):
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | flag, 0o600)
            except OSError as error:
                if flag and error.errno == errno.EINVAL:
                    continue
                raise
            try:
                os.pwritev(fd, [page], 0)
                os.preadv(fd, [page], 0)
                return flag != 0
            except OSError as error:
                if not flag or error.errno != errno.EINVAL:
                    raise
            finally:
                os.close(fd)
        return False
    finally:
        page.close()
        path.unlink(missing_ok=True)


def open_direct(path: str, flags: int, *, direct: bool) -> tuple[int, bool]:
    """A regular file's descriptor, and whether it bypasses the page cache (EINVAL: this file cannot). Raises DamageError
    for anything else, and OSError."""
    if direct:
        try:
            return open_file(path, flags | _O_DIRECT), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return open_file(path, flags), False


def read_full(fd: int, buffers: Sequence[Bytes], offset: int) -> int:
    """Fill all buffers from `offset` on; returns the bytes. Raises DamageError where the file ends early."""
    return _transfer(fd, buffers, offset, os.preadv, "the file ends early")


def write_full(fd: int, buffers: Sequence[Bytes], offset: int) -> int:
    """Write all buffers from `offset` on; returns the bytes."""
    return _transfer(fd, buffers, offset, os.pwritev, "the device takes no more bytes")


def _transfer(fd: int, buffers: Sequence[Bytes], offset: int, call: Callable[..., int], stuck: str) -> int:
    left = list(buffers)
    total = 0
    while left:
        moved = call(fd, left[:IOV_MAX], offset + total)
        if moved <= 0:
            raise DamageError(stuck)
        total += moved
        while left and moved >= left[0].nbytes:
            moved -= left.pop(0).nbytes
        if moved:  # a short transfer, which is rare: go on in the middle of a buffer
            left[0] = left[0].reshape(-1)[moved:]
    return total


def forget_pages(fd: int) -> None:
    """Ask the page cache to drop a file that could not be opened for direct I/O."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def aligned_memory(num_bytes: int) -> Bytes:
    """uint8 [num_bytes], page-aligned; from half a megabyte on, on huge pages where there are any.

    With them a transfer past the page cache is a few addresses for the device instead of one per 4 KiB.
    """
    huge = num_bytes >= HUGE_PAGE // 4 and hasattr(mmap, "MADV_HUGEPAGE")
    size = (-(-num_bytes // HUGE_PAGE) + 1) * HUGE_PAGE if huge else align_up(num_bytes)
    # Private, not shared as is mmap's default: only such memory can have huge pages.
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge:
        memory.madvise(mmap.MADV_HUGEPAGE)
    flat = np.frombuffer(memory, np.uint8)
    start = -flat.ctypes.data % (HUGE_PAGE if huge else ALIGNMENT)
    return flat[start : start + num_bytes]


class Scratch(threading.local):
    """A page-aligned buffer per thread, which grows to the largest size asked for."""

    def __init__(self) -> None:
        self._memory: Bytes = np.empty(0, np.uint8)

    def take(self, num_bytes: int) -> Bytes:
        """uint8 [num_bytes]; the contents are undefined, and gone with this thread's next call."""
        if self._memory.nbytes < num_bytes:
            self._memory = aligned_memory(num_bytes)
        return self._memory[:num_bytes]


class Helper:
    """A thread that computes while others sit in system calls. It ends when nothing has come for a second, and
    starts anew with the next work.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._alive = False

    def start(self, work: Callable[[], T]) -> Callable[[], T]:
        """Begin; the function that is returned waits for the result, or raises what `work` raised."""
        done: Future[T] = Future()
        with self._lock:
            self._queue.put((work, done))
            if not self._alive:
                threading.Thread(target=self._run, name="afterglow-checksums", daemon=True).start()
                self._alive = True
        return done.result

    def _run(self) -> None:
        while True:
            try:
                work, done = self._queue.get(timeout=HELPER_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._queue.empty():
                        self._alive = False
                        return
                continue
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)
            del work, done  # nothing of the caller's lives on while the queue is empty


def kind_of(error: BaseException) -> str:
    """A word for counters, and for `MoveDone.why`: damage, slow, missing, no_space, timeout or io."""
    if isinstance(error, DamageError):
        return "damage"
    if isinstance(error, SlowError):
        return "slow"
    cause = error.__cause__ if isinstance(error, StoreError) else error
    if isinstance(cause, sqlite3.OperationalError) and _says_full(cause):
        return "no_space"
    if isinstance(cause, OSError):
        if cause.errno == errno.ENOENT:
            return "missing"
        if cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return "no_space"
    return "timeout" if isinstance(cause, TimeoutError) else "io"


def _says_full(error: sqlite3.OperationalError) -> bool:
    code = getattr(error, "sqlite_errorcode", None)  # only SQLite itself sets it
    return "is full" in str(error) if code is None else code & 0xFF == sqlite3.SQLITE_FULL
