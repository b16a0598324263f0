"""Scatter reads and gather writes that bypass the page cache where the file system allows. Knows of extents their names and
sizes alone.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np

from afterglow.errors import DamageError, StoreError
from afterglow.memory.pages import allocate
from afterglow.store.extents.head import Bytes
from afterglow.store.extents.layout import ALIGNMENT, KVLayout, align_up
from afterglow.store.places import open_file

IOV_MAX: Final = min(1024, os.sysconf("SC_IOV_MAX") if hasattr(os, "sysconf") else 1024)
_O_DIRECT: Final = getattr(os, "O_DIRECT", 0)


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


def check_size(fd: int, layout: KVLayout, rows: int) -> None:
    """Check that a file is as long as that of an extent of `rows` rows. Raises DamageError where it is not."""
    size, wanted = os.fstat(fd).st_size, layout.file_bytes(rows)
    if size != wanted:
        raise DamageError(f"{size} bytes long instead of the {wanted} of {rows} rows")


@contextmanager
def naming(extent: str, doing: str) -> Iterator[None]:
    """Name the extent in errors, which are of the kinds that tiers raise: DamageError and StoreError."""
    try:
        yield
    except DamageError as error:
        raise DamageError(f"extent {extent[:16]}: {error}") from error
    except OSError as error:
        raise StoreError(f"{doing} extent {extent[:16]}: {error.strerror}") from error


def read_full(fd: int, buffers: Sequence[Bytes], offset: int) -> int:
    """Fill all buffers from `offset` on; returns the bytes. Raises DamageError where the file ends early."""
    return _transfer(fd, buffers, offset, os.preadv, "the file ends early")


def read_span(fd: int, start: int, num_bytes: int, scratch: Scratch) -> Bytes:
    """Read bytes from any offset of a file whose size is a multiple of 4096: uint8 [num_bytes], in `scratch`.

    Whole pages are read, as files need that are open for direct I/O. Raises DamageError where the file ends early.
    """
    begin = start // ALIGNMENT * ALIGNMENT
    pages = scratch.take(span_bytes(start, num_bytes))
    read_full(fd, [pages], begin)
    return pages[start - begin :][:num_bytes]


def span_bytes(start: int, num_bytes: int) -> int:
    """Compute how many bytes `read_span` reads."""
    return align_up(start + num_bytes) - start // ALIGNMENT * ALIGNMENT


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


class Scratch(threading.local):
    """A page-aligned buffer per thread, which grows to the largest size asked for."""

    def __init__(self) -> None:
        self._memory: Bytes = np.empty(0, np.uint8)

    def take(self, num_bytes: int) -> Bytes:
        """uint8 [num_bytes]; the contents are undefined, and gone with this thread's next call."""
        if self._memory.nbytes < num_bytes:
            self._memory = allocate(num_bytes)
        return self._memory[:num_bytes]
