"""Write down how important rows were, as durable notes beside the extents, so that a restart forgets no averages.

An extent has one note or several, each of some layers, because a note has a largest size. Numbers are rounded: means to
half precision, and counts end at 255, so that later requests always move a mean a little. An extent of which a note is
missing, or has another size, is as one that no request has looked at.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from afterglow.importance.row_layout import RowImportance

Note = tuple[str, str | None]  # key and value; None: the note is to be erased

NOTE_BYTES = 24 * 1024  # of numbers in a note; as text a third more
AT_ONCE = 32  # extents: writing down 1,024 rows of 30 layers takes the engine's thread a quarter of a millisecond
CELL_BYTES = 3  # of a row in a layer: its mean in half precision, and its count
MOST_COUNT = 255
MOST_MEAN = float(torch.finfo(torch.float16).max)


class ImportanceNotes:
    """Collect what is to be written down. For the engine's thread alone."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._changed: dict[str, None] = {}
        self._erased: dict[str, None] = {}  # keys

    def changed(self, extent: str) -> None:
        """Note that the importance of an extent's rows has changed."""
        self._changed[extent] = None

    def forget(self, extent: str, rows: int) -> None:
        """Erase what was written down about an extent of so many rows."""
        self._changed.pop(extent, None)
        for first in _firsts(self._layers, rows):
            self._erased[_key(extent, first)] = None

    def take(self, known: Mapping[str, RowImportance], most: int | None = AT_ONCE) -> list[Note]:
        """Return notes to write, of `most` changed extents (None: all), those first that changed first; and all that are to be
        erased."""
        found: list[Note] = [(key, None) for key in self._erased]
        self._erased.clear()
        for extent in list(self._changed)[:most]:
            del self._changed[extent]
            if extent in known:
                found += written(extent, known[extent])
        return found

    def recall(self, notes: Mapping[str, str], rows_of: Callable[[str], int | None]) -> dict[str, RowImportance]:
        """Read what was written down, extents that were written last at the end. `rows_of`: the rows of an extent that is still
        there. Notes that are of no use any more are going to be erased."""
        by_extent: dict[str, dict[int, str]] = {}
        for key, value in notes.items():
            extent, _, first = key.rpartition(":")
            by_extent.setdefault(extent, {})[int(first) if first.isdecimal() and len(first) < 9 else -1] = value
        found = {}
        for extent, parts in by_extent.items():
            rows = rows_of(extent)
            known = None if rows is None else _read(parts, self._layers, rows)
            if known is not None:
                found[extent] = known
        self._erased.update((key, None) for key in notes if key.rpartition(":")[0] not in found)
        return found


def written(extent: str, known: RowImportance) -> list[tuple[str, str]]:
    """Write down the importance of an extent's rows: keys and values of notes."""
    layers, rows = known.mean.shape
    firsts = _firsts(layers, rows)
    found = []
    for first, stop in zip(firsts, [*firsts[1:], layers], strict=True):
        mean = known.mean[first:stop].clamp(max=MOST_MEAN).half()
        count = known.count[first:stop].clamp(max=MOST_COUNT).to(torch.uint8)
        numbers = mean.numpy().astype("<f2").tobytes() + count.numpy().tobytes()
        found.append((_key(extent, first), base64.b64encode(numbers).decode()))
    return found


def _read(parts: Mapping[int, str], layers: int, rows: int) -> RowImportance | None:
    """Read the notes of one extent, by their first layers; None if one is missing or not what it has to be."""
    firsts = _firsts(layers, rows)
    if sorted(parts) != list(firsts):
        return None
    known = RowImportance(layers, rows)
    for first, stop in zip(firsts, [*firsts[1:], layers], strict=True):
        cells = (stop - first) * rows
        try:
            numbers = base64.b64decode(parts[first], validate=True)
        except (binascii.Error, ValueError):
            return None
        if len(numbers) != CELL_BYTES * cells:
            return None
        mean = np.frombuffer(numbers, "<f2", cells).astype(np.float32)
        count = np.frombuffer(numbers, np.uint8, cells, 2 * cells).astype(np.int32)
        if not np.isfinite(mean).all():
            return None
        known.mean[first:stop] = _shaped(mean, rows)
        known.count[first:stop] = _shaped(count, rows)
    return known


def _shaped(numbers: np.ndarray, rows: int) -> Tensor:
    return torch.from_numpy(numbers).view(-1, rows)


def _firsts(layers: int, rows: int) -> Sequence[int]:
    """List the first layer of each note of an extent."""
    return range(0, layers, max(1, NOTE_BYTES // (CELL_BYTES * max(1, rows))))


def _key(extent: str, first: int) -> str:
    return f"{extent}:{first}"
