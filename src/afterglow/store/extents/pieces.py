"""Which tensors of an extent's file move in one call, and the memory of the arena that they move from or to.

Where there are compiled kernels, one call of theirs (`kernels/native/read.c`) brings chunks to slots, or parts of many extents to any memory,
and sums them up as they come. Python's own reads cost a call for each piece, and the interpreter lock after each; these cost one.
"""

from __future__ import annotations

import functools
import os
from array import array
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple

from afterglow.errors import DamageError
from afterglow.kernels.built import Native, native
from afterglow.store.extents.chunks import States
from afterglow.store.extents.extent_folder import ExtentFolder
from afterglow.store.extents.files import IOV_MAX, check_size, open_direct
from afterglow.store.extents.head import Bytes
from afterglow.store.extents.layout import KVLayout
from afterglow.store.extents.tier import ExtentRead, HostArena, runs

READ_BYTES: Final = 4 << 20  # small layers are read together up to this; more gains nothing and delays layer 0
SUMMED_READ_BYTES: Final = 8 << 20  # where the compiled kernels read: they cut it up by themselves
WRITE_BYTES: Final = 4 << 20
ENDS_EARLY = -1

Tensors = list[tuple[int, int]]  # (layer, kv) of tensors that lie side by side in the file and move in one call


def pieces(layout: KVLayout, rows: int, span: int, segments: int, limit: int) -> Iterator[Tensors]:
    """Yield all tensors in file order, joined where neighbours fit one call of about `limit` bytes. `span`: bytes of a tensor
    that move, from or to so many `segments` of the arena.

    A layer's keys and values always go together: one is of no use without the other, and every call costs
    this thread the interpreter lock, which a busy thread gives back only after milliseconds.
    """
    most = 1
    if span == layout.tensor_bytes(rows):  # neighbours, without a gap between them
        most = max(1, min(limit // span, IOV_MAX // segments) // 2) * 2
    tensors = [(layer, kv) for layer in range(layout.layers) for kv in (0, 1)]
    for start in range(0, len(tensors), most):
        yield tensors[start : start + most]


def cut(parts: Sequence[Tensors], read: ExtentRead) -> list[Tensors]:
    """Cut pieces so that tensors whose first blocks are left out move alone, and those of which nothing is left do not."""
    found: list[Tensors] = []
    for part in parts:
        for whole, tensors in groupby(part, lambda tensor: not read.skipped(tensor[0])):
            if whole:
                found.append(list(tensors))
            elif read.skip < len(read.slots):
                found += [[tensor] for tensor in tensors]
    return found


def arena_buffers(tensors: Tensors, arena: HostArena, slots: Sequence[int]) -> list[Bytes]:
    """Views of the arena in the order of the file; a run of consecutive slots is one buffer."""
    stretches = list(runs(slots))
    planes = [arena.plane(layer, kv) for layer, kv in tensors]
    return [plane[a:b] for plane in planes for a, b in stretches]


@functools.cache
def kernels() -> Native | None:
    """Return the compiled kernels, or None if reads are left to Python."""
    return native()


def open_as_expected(path: str, num_bytes: int, direct: bool) -> int:
    """Open an extent's file for reading, past the page cache if `direct`: in one call, without the interpreter lock. Return its
    descriptor, or -1 where there are no compiled kernels, or the file, its size or its folders are not as they should be.
    """
    library = kernels()
    return -1 if library is None else int(library.lib.afterglow_open(os.fsencode(path), num_bytes, direct))


def open_extent(folder: ExtentFolder, layout: KVLayout, extent: str, rows: int) -> tuple[int, bool]:
    """Open the file of an extent of `rows` rows; return its descriptor, and whether it bypasses the page cache.

    Raises:
        DamageError: the file, its size or its folders are not as they should be.
        OSError: it cannot be opened.
    """
    fd = open_as_expected(folder.file_name(extent), layout.file_bytes(rows), folder.direct)
    if fd >= 0:
        return fd, folder.direct
    folder.check(extent)
    return open_sized(folder.file_name(extent), layout, rows, folder.direct)


def open_sized(path: str, layout: KVLayout, rows: int, direct: bool) -> tuple[int, bool]:
    """Open a file that is as long as that of an extent of `rows` rows; return as `open_extent`. Raises: as that."""
    fd, direct = open_direct(path, os.O_RDONLY, direct=direct)
    try:
        check_size(fd, layout, rows)
    except BaseException:
        os.close(fd)
        raise
    return fd, direct


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
    assert (stretch.reading.fd, stretch.reading.offset) == (fd, offset)
    _carry_out(stretch.library, stretch.reading, 1, 0)
    return stretch.bytes


def preadv_parts(library: Native, readings: array[int], states: States) -> None:
    """Carry out many reads in one call. `readings`: the fields of an `afterglow_reading` for each; `states` of each, which the call keeps.

    Raises:
        DamageError, OSError: as `preadv`, for one of them; the memory of all may have changed.
    """
    kept = library.over("uint8_t[]", states)
    _carry_out(library, library.over("afterglow_reading[]", readings), len(states), library.address(kept))


def _carry_out(library: Native, readings: Any, count: int, states: int) -> None:
    fault = library.lib.afterglow_read(readings, count, states, 1)
    if fault == ENDS_EARLY:
        raise DamageError("the file ends early")
    if fault:
        raise OSError(fault, os.strerror(fault))


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
    places = _places(arena, planes, slots)
    stretch, sums = _stretch(library, arena, planes, places, fd, head, offset)
    return preadv(fd, stretch, offset), sums


def sums_of(library: Native, arena: HostArena, planes: range, slots: Sequence[int]) -> array[int]:
    """Compute the CRC32C of one chunk for each slot of each plane, plane by plane, in one call without the interpreter lock.

    Raises:
        IndexError: a plane or slot is none of the arena's.
    """
    places = _places(arena, planes, slots)
    stretch, sums = _stretch(library, arena, planes, places, -1, None, 0)
    library.lib.afterglow_sum(stretch.reading)
    return sums


def _places(arena: HostArena, planes: range, slots: Sequence[int]) -> array[int]:
    """Compute how far from a plane's beginning its slots lie, in bytes."""
    if not (min(slots) >= 0 and max(slots) < arena.slots and planes.start >= 0 and planes.stop <= arena.planes):
        raise IndexError(f"planes {planes} and slots {list(slots)} are not among {arena.planes} and {arena.slots}")
    size = arena.chunk_bytes
    return array("q", [slot * size for slot in slots])


def _stretch(
    library: Native, arena: HostArena, planes: range, places: array[int], fd: int, head: Bytes | None, offset: int
) -> tuple[Stretch, array[int]]:
    """Describe chunks of an arena, and their checksums to come. `places` have to outlive the stretch."""
    sums = array("I", bytes(4 * len(planes) * len(places)))
    chunk_bytes = arena.chunk_bytes
    plane_bytes = arena.slots * chunk_bytes
    reading = (
        # `head.ctypes` would take as long as all the rest
        *((fd, offset, 0, 0) if head is None else (fd, offset, head.__array_interface__["data"][0], head.nbytes)),
        *(arena.address + planes.start * plane_bytes, plane_bytes, len(planes)),
        *(places.buffer_info()[0], len(places), chunk_bytes, sums.buffer_info()[0]),
    )
    size = len(sums) * chunk_bytes + (0 if head is None else head.nbytes)
    return Stretch(library, library.new("afterglow_reading *", reading), size), sums
