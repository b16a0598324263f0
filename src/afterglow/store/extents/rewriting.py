"""A new version of an extent's file, with its rows in another order, made beside the old one (SPEC §IV-D).

Rows are carried over layer by layer, so that other work may go first in between and no more than a layer is in memory. The
old file stays open until the new one has taken its place or is given up: so no other file gets its inode meanwhile, and
the inode says whether the file is still the one that was read.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from afterglow.config import BLOCK_ROWS
from afterglow.errors import DamageError
from afterglow.store.extents.chunks import TENSORS, crcs_of, in_text_order
from afterglow.store.extents.extent_folder import ExtentFolder
from afterglow.store.extents.files import Scratch, check_size, forget_pages, naming, open_direct, read_span, write_full
from afterglow.store.extents.head import Bytes, Head, Sidecar, crc32c, decode_head, encode_head
from afterglow.store.extents.layout import KEYS, MEANS, PROBES, VALUES, KVLayout

Ranks = Callable[[], npt.NDArray[np.uint16]]


class Rewriting:
    """Rewrites one file, if that is `needed`: call `go_on` until it returns False, then `publish`. For one thread at a time."""

    def __init__(
        self,
        folder: ExtentFolder,
        layout: KVLayout,
        digest: str,
        extent: str,
        rows: int,
        ranks: Ranks,
        carried: Callable[[int], None] | None = None,
    ) -> None:
        """Open both files. `ranks` gives uint16 [layers, rows]: which row of the text goes to each place.

        `carried` is called with the bytes of each layer.

        Raises:
            DamageError: the old file has a wrong size or a damaged head.
            StoreError: a file cannot be opened or read.
        """
        self._layout, self._digest, self._rows, self._extent = layout, digest, rows, extent
        self._path, self._temporary = folder.file_name(extent), folder.temporary(extent)
        self._carried = carried
        self._scratch = Scratch()
        self._layer = 0
        self._crcs = np.zeros((layout.layers, VALUES + 1, layout.file_chunks(rows)), np.uint32)
        self._probe_crcs = np.zeros((layout.layers, layout.file_chunks(rows)), np.uint32)
        fine = layout.part_rows < BLOCK_ROWS
        self._part_crcs = np.zeros((layout.layers, 2, layout.file_parts(rows)), np.uint32) if fine else None
        self.written = 0
        self._old = self._new = -1
        with naming(self._extent, "rewriting"):
            self._old, _ = open_direct(self._path, os.O_RDONLY, direct=folder.direct)
            check_size(self._old, layout, rows)
            raw = read_span(self._old, 0, layout.head_bytes(rows), self._scratch)
            self._head: Head = decode_head(raw.tobytes(), layout, digest, extent=extent, rows=rows)
            assert self._head.sidecar is not None, "rewriting needs a layout with probe heads"
            self._before = self._head.sidecar.order
            self._order = np.tile(np.arange(layout.padded_rows(rows), dtype=np.uint16), (layout.layers, 1))
            self._order[:, :rows] = ranks()
            # Parts are read whole: where every row stays in its part nothing is gained.
            self.needed = any(
                not np.array_equal(_parts(new, rows, layout.part_rows), _parts(old, rows, layout.part_rows))
                for new, old in zip(self._order, self._before, strict=True)
            )
            if self.needed:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                self._new, _ = open_direct(self._temporary, flags, direct=folder.direct and layout.aligned)

    def go_on(self) -> bool:
        """Carry one layer over; return False when the whole file has been written.

        Raises:
            DamageError: a chunk of the old file is damaged.
            StoreError: a file cannot be read or written.
        """
        with naming(self._extent, "rewriting"):
            layout, rows, layer, before = self._layout, self._rows, self._layer, self.written
            for kv in (KEYS, VALUES):
                stored = self._read(layer, kv)
                text = in_text_order(stored.reshape(-1, layout.row_bytes), self._before[layer])
                made = text[self._order[layer]]
                self._crcs[layer, kv] = _crcs(made, layout.file_chunks(rows))
                if self._part_crcs is not None:
                    self._part_crcs[layer, kv] = _crcs(made, layout.file_parts(rows))
                self._write(made, layout.offset(rows, layer, kv))
                if kv == KEYS:
                    probes = np.ascontiguousarray(made[:, : layout.probe_row_bytes])
                    self._probe_crcs[layer] = _crcs(probes, layout.file_chunks(rows))
                    self._write(probes, layout.offset(rows, layer, PROBES))
            if layout.means:  # of the text's rows, so they stay as they are
                self._write(self._read(layer, MEANS), layout.offset(rows, layer, MEANS))
            self._layer += 1
            if self._carried is not None:
                self._carried(self.written - before)
            if self._layer < layout.layers:
                return True
            before_sidecar = self._head.sidecar
            assert before_sidecar is not None
            sidecar = Sidecar(
                *(self._probe_crcs, self._order, before_sidecar.version + 1, self._part_crcs), before_sidecar.means
            )
            head = encode_head(layout, self._digest, self._head.record, self._crcs, sidecar)
            self._write(np.frombuffer(head, np.uint8), 0)
            forget_pages(self._old)
            forget_pages(self._new)
            return False

    @property
    def current(self) -> bool:
        """Tell whether the file in place is still the one that is read.

        Raises:
            StoreError: the file cannot be looked at.
        """
        with naming(self._extent, "rewriting"):
            try:
                there = os.stat(self._path)
            except FileNotFoundError:
                return False
            mine = os.fstat(self._old)
            return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)

    def publish(self) -> bool:
        """Take the old file's place, if that file is still there; no other thread may write the extent meanwhile.

        Raises:
            StoreError: the file cannot be renamed.
        """
        try:
            if not self.current:
                return False
            with naming(self._extent, "rewriting"):
                os.rename(self._temporary, self._path)
            return True
        finally:
            self.close()

    def close(self) -> None:
        """Give up a version that has not been published."""
        for fd in (self._old, self._new):
            if fd >= 0:
                os.close(fd)
        if self._new >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)
        self._old = self._new = -1

    def __del__(self) -> None:
        self.close()

    def _read(self, layer: int, kv: int) -> Bytes:
        """Read and verify a tensor as it is stored; the next call overwrites it."""
        layout, rows = self._layout, self._rows
        size, chunks = layout.tensor_bytes(rows), layout.file_chunks(rows)
        if kv == MEANS:
            size, chunks = layout.mean_bytes(rows), 1
        stored = read_span(self._old, layout.offset(rows, layer, kv), size, self._scratch)
        if _crcs(stored, chunks) != crcs_of(self._head, layer, kv):
            raise DamageError(f"layer {layer}, {TENSORS[kv]}")
        return stored

    def _write(self, data: Bytes, offset: int) -> None:
        buffer = self._scratch.take(data.nbytes)
        buffer[:] = data.reshape(-1)
        self.written += write_full(self._new, [buffer], offset)


def _parts(order: npt.NDArray[np.uint16], rows: int, part_rows: int) -> npt.NDArray[np.int64]:
    """Return in which part each row of the text lies."""
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return place[:rows] // part_rows


def _crcs(tensor: Bytes, chunks: int) -> list[int]:
    return [crc32c(chunk) for chunk in tensor.reshape(chunks, -1)]
