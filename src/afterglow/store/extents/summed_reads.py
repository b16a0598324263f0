"""Reads into slots by one call of the compiled kernels (`kernels/native/read.c`), which computes checksums as pieces come.

Python's own reads cost a call for each piece, and the interpreter lock after each; these cost one.
"""

from __future__ import annotations

import functools
import os
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from afterglow.errors import DamageError
from afterglow.kernels.built import Native, native
from afterglow.store.extents.head import Bytes
from afterglow.store.extents.tier import HostArena

ENDS_EARLY = -1


@functools.cache
def kernels() -> Native | None:
    """Return the compiled kernels, or None if reads are left to Python."""
    return native()


class Stretch(NamedTuple):
    """What one call reads: an `afterglow_reading`, the bytes that it brings, and the kernels that know it."""

    library: Native
    reading: Any
    bytes: int


def preadv(fd: int, stretch: Stretch, offset: int) -> int:
    """Carry a read out without the interpreter lock, as `os.preadv` does, but to the end; return the bytes.

    Raises:
        DamageError: the file ends early.
        OSError: the system reports an error.
    """
    assert stretch.reading.offset == offset
    fault = stretch.library.lib.afterglow_read(fd, stretch.reading, 1)
    if fault == ENDS_EARLY:
        raise DamageError("the file ends early")
    if fault:
        raise OSError(fault, os.strerror(fault))
    return stretch.bytes


def read_summed(
    fd: int, library: Native, arena: HostArena, planes: range, slots: Sequence[int], head: Bytes | None, offset: int
) -> tuple[int, array[int]]:
    """Read a stretch of a file from `offset` on: the bytes of `head`, if any, then one chunk for each slot of each plane
    (2 * layer, or 2 * layer + 1 for values). Return the
    bytes, and the CRC32C of each chunk, plane by plane.

    Raises:
        DamageError, OSError: as `preadv`.
        IndexError: a plane or slot is none of the arena's.
    """
    places = array("q", slots)
    if not (min(places) >= 0 and max(places) < arena.slots and planes.start >= 0 and planes.stop <= arena.planes):
        raise IndexError(f"planes {planes} and slots {slots} are not among {arena.planes} and {arena.slots}")
    sums = array("I", bytes(4 * len(planes) * len(places)))
    chunk_bytes = arena.layout.chunk_bytes
    plane_bytes = arena.slots * chunk_bytes
    reading = (
        *(offset, 0 if head is None else head.ctypes.data, 0 if head is None else head.nbytes),
        *(arena.address + planes.start * plane_bytes, plane_bytes, len(planes)),
        *(places.buffer_info()[0], len(places), chunk_bytes, sums.buffer_info()[0]),
    )
    size = len(sums) * chunk_bytes + (0 if head is None else head.nbytes)
    return preadv(fd, Stretch(library, library.new("afterglow_reading *", reading), size), offset), sums
