"""The disk tier, able to read some of an extent's layers: for loads that stop at a read buffer and go on later."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from afterglow.errors import DamageError, StoreError
from afterglow.store import disk
from afterglow.store.extent import Head
from afterglow.store.files import forget_pages, open_direct, read_full
from afterglow.store.layout import align_up
from afterglow.store.tier import HostArena


class LayeredDisk(disk.DiskTier):
    """A DiskTier whose `read` knows `first` and `stop`. A part verifies the head anew, and its own chunks."""

    def read(
        self,
        extent: str,
        rows: int,
        arena: HostArena,
        slots: Sequence[int],
        layer_done: Callable[[int], None],
        first: int = 0,
        stop: int | None = None,
    ) -> int:
        """Fill `slots` with layers [first, stop) of the first `len(slots)` blocks, each verified. See `Tier.read`."""
        layers = range(self.layout.layers)[first:stop]
        if len(layers) == self.layout.layers:
            return super().read(extent, rows, arena, slots, layer_done)
        head = self.head(extent)
        if head.record.rows != rows:
            raise DamageError(f"extent {extent[:16]}: {head.record.rows} rows instead of {rows}")
        try:
            fd, direct = open_direct(str(self.path(extent)), os.O_RDONLY, direct=self.direct)
            try:
                total = self._read_layers(fd, head, arena, slots, layer_done, layers)
                if not direct:
                    forget_pages(fd)
            finally:
                os.close(fd)
        except DamageError as error:
            raise DamageError(f"extent {extent[:16]}: {error}") from error
        except OSError as error:
            raise StoreError(f"reading extent {extent[:16]}: {error.strerror}") from error
        return total + (self.layout.head_bytes(rows) if first == 0 else 0)

    def _read_layers(
        self,
        fd: int,
        head: Head,
        arena: HostArena,
        slots: Sequence[int],
        layer_done: Callable[[int], None],
        layers: range,
    ) -> int:
        layout, rows = self.layout, head.record.rows
        whole = len(slots) == layout.blocks(rows)
        span = layout.tensor_bytes(rows) if whole else align_up(len(slots) * layout.chunk_bytes)
        total = 0
        for joined in self._pieces(rows, span, slots, disk.READ_BYTES):
            piece = [tensor for tensor in joined if tensor[0] in layers]
            if not piece:
                continue
            bounce = None if arena.aligned else self._scratch.take(len(piece) * span)
            buffers = self._direct_buffers(piece, arena, slots) if bounce is None else [bounce]
            total += read_full(fd, buffers, layout.offset(rows, *piece[0]))
            for index, (layer, kv) in enumerate(piece):
                plane = arena.plane(layer, kv)
                if bounce is None:
                    chunks = [plane[slot] for slot in slots]
                else:
                    used = bounce[index * span :][: len(slots) * layout.chunk_bytes]
                    chunks = list(used.reshape(len(slots), -1))
                    plane[list(slots)] = used.reshape(len(slots), -1)
                self._compare(chunks, head, layer, kv)
            layer_done(piece[-1][0] + piece[-1][1])
        return total
