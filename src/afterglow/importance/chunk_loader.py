"""Share among all selecting requests of an engine (SPEC §IV): cached chunks, measured rates, which rows were important, and
where rows lie in files.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from afterglow.config import BLOCK_ROWS
from afterglow.importance.chunk_cache import ChunkCache
from afterglow.importance.importance_notes import AT_ONCE, ImportanceNotes, Note
from afterglow.importance.row_layout import ExtentView, RowImportance, RowLayout, RowOrder
from afterglow.importance.speculation import Prior, ReadBudget, SpeculationTally, Worth
from afterglow.memory.reused_buffers import Buffers
from afterglow.plan.step import Selectable
from afterglow.store.extents.chunks import ExtentChunks
from afterglow.store.extents.layout import KVLayout
from afterglow.store.moving.reading import ChunkIO, Reading, Rewrite

MAX_EXTENTS = 512  # whose rows' importance, and row orders, are remembered
MAX_LAYOUT_ROWS = 4 << 20  # of remembered layouts, summed over layers: 96 MiB
MEANS_BYTES = 64 << 20  # of means of extents in host


class RowsLost(Exception):
    """Rows of an extent cannot be read."""

    def __init__(self, extent: str, stale: bool = False) -> None:
        """`stale`: the extent's file was written anew since the request looked at it; its rows are there."""
        super().__init__(extent)
        self.extent, self.stale = extent, stale


@dataclass(slots=True)
class ImportanceStats:
    """Count since the start what selecting requests do."""

    requests: int = 0
    layers: int = 0  # that rows were selected in
    fallbacks: int = 0  # layers that needed all keys
    rows_of: int = 0  # of the prefixes in these layers
    rows_kept: int = 0  # that were selected
    renewals: int = 0  # layers that selected anew while decoding
    renewed_rows: int = 0  # whose keys or values were loaded for that, in whole chunks
    failed_renewals: int = 0  # layers that could not load rows, and kept their selection
    read_bytes: int = 0  # from disk: chunks, guessed ones too, in whole pages, and heads of files
    waited: float = 0.0  # seconds of the engine's thread for the disk
    mapping: float = 0.0  # seconds of mapping rows to chunks
    identifying: float = 0.0  # seconds of finding out which rows are important
    reordered: int = 0  # extents whose files were rewritten in another order
    tally: SpeculationTally = field(default_factory=SpeculationTally)


class ChunkLoader:
    """Hold the chunk cache, the reader, measured rates, and the importance of rows."""

    def __init__(
        self,
        arena: Tensor,
        layout: KVLayout,
        reader: ChunkIO | None,
        cache: ChunkCache,
        *,
        dtype: torch.dtype,
        timeout: float,
        prior: Prior = "cut",
        room: int | None = None,
        chunk_rows: int = BLOCK_ROWS,
    ) -> None:
        """`arena`: host slots, [layers, 2, slots, 64, kv_heads, stored width]. `reader`: None without a disk tier. `dtype`: of the
        rows that are returned. `timeout`: seconds after which a read counts as lost. `room`: bytes on disk that the new
        version of a file may take beside the old one; None: any. `chunk_rows`: what is read and cached at a time, one or more of the
        layout's parts."""
        self.arena, self.layout, self.reader, self.cache = arena, layout, reader, cache
        self.dtype, self.timeout, self.prior, self.room = dtype, timeout, prior, room
        self.chunk_rows, self.chunk_bytes = chunk_rows, chunk_rows * layout.row_bytes
        self.buffers = Buffers(self.chunk_bytes)
        self.stats = ImportanceStats()
        self.budget = ReadBudget()
        self.worth = Worth()
        self.bandwidth = 0.0  # bytes/s of reads, a moving average
        self.importance: OrderedDict[str, RowImportance] = OrderedDict()
        self._orders: OrderedDict[tuple[str, str], list[RowOrder]] = OrderedDict()  # by extent and edition
        self._layouts: OrderedDict[tuple[object, ...], RowLayout] = OrderedDict()  # by views, editions and layer
        self._layout_rows = 0
        self._means: OrderedDict[tuple[str, int], Tensor] = OrderedDict()  # of extents in host, by layer
        self._means_bytes = 0
        self._notes = ImportanceNotes(layout.layers)
        self._changed: dict[str, None] = {}  # extents whose importance has changed since the last `look`
        self._due: deque[str] = deque()  # extents that may have to be rewritten
        self._rewrite: tuple[str, Rewrite] | None = None  # under way
        self._readings: deque[tuple[Reading, bool]] = deque()  # that are not counted; do they bring chunks?

    def read(self, asked: Sequence[ExtentChunks], priority: int) -> Reading:
        """Begin to read chunks; of extents without reads, to look up their heads. The bytes count whether they are waited for or not."""
        assert self.reader is not None
        reading = self.reader.read(asked, priority)
        self._readings.append((reading, any(each.reads for each in asked)))
        return reading

    def count_reads(self) -> None:
        """Count the reads that have ended."""
        under_way: deque[tuple[Reading, bool]] = deque()
        for reading, of_chunks in self._readings:
            if not reading.ended:
                under_way.append((reading, of_chunks))
                continue
            self.stats.read_bytes += reading.bytes
            if of_chunks:
                self.took(reading)
        self._readings = under_way

    def took(self, reading: Reading) -> None:
        """Learn the rate of a read of chunks."""
        if reading.seconds > 0:
            rate = reading.bytes / reading.seconds
            self.bandwidth = rate if not self.bandwidth else self.bandwidth + 0.2 * (rate - self.bandwidth)

    def learn(self, view: Selectable, layer: int, mean: Tensor) -> None:
        """Remember how important a view's rows were to a request in one layer: float32 [rows of the view], as multiples of
        the mean."""
        known = self.importance.get(view.extent)
        if known is None or known.mean.shape[1] != view.rows:
            known = self.importance[view.extent] = RowImportance(self.layout.layers, view.rows)
        self.importance.move_to_end(view.extent)
        if len(self.importance) > MAX_EXTENTS:
            oldest, gone = self.importance.popitem(last=False)
            self._changed.pop(oldest, None)
            self._notes.forget(oldest, gone.mean.shape[1])
        known.add(layer, view.start, mean.cpu())
        self._changed[view.extent] = None
        self._notes.changed(view.extent)

    def take_notes(self, last: bool = False) -> list[Note]:
        """Return what has to be written down for the next start; of a few extents at a time, unless it is the `last` time."""
        return self._notes.take(self.importance, None if last else AT_ONCE)

    def recall(self, notes: Mapping[str, str], rows_of: Callable[[str], int | None]) -> None:
        """Take over what was written down before a restart. `rows_of`: the rows of an extent, None where it is gone."""
        recalled = self._notes.recall(notes, rows_of)
        for extent in list(recalled)[-MAX_EXTENTS:]:
            self.importance[extent] = recalled.pop(extent)
        for extent, known in recalled.items():
            self._notes.forget(extent, known.mean.shape[1])

    def orders(self, extent: str, edition: str, stored: np.ndarray) -> list[RowOrder]:
        """Get the row orders of an extent's layers. `stored` uint16 [layers, rows]: the orders as the file's head has them."""
        known = self._orders.get((extent, edition))
        if known is None:
            rows = torch.from_numpy(stored.astype(np.int64))
            known = self._orders[extent, edition] = [RowOrder(order, order.argsort()) for order in rows]
            if len(self._orders) > MAX_EXTENTS:
                self._orders.popitem(last=False)
        self._orders.move_to_end((extent, edition))
        return known

    def layout_of(
        self, views: Sequence[Selectable], editions: Sequence[str], layer: int, orders: Sequence[RowOrder | None]
    ) -> RowLayout:
        """Get the layout of a prefix's rows in a layer. `editions` and `orders`: of each view's file."""
        key = (*((view.extent, view.rows, view.start, view.stop) for view in views), *editions, layer)
        found = self._layouts.get(key)
        if found is None:
            shown = [ExtentView(view.rows, view.start, view.stop) for view in views]
            found = self._layouts[key] = RowLayout(shown, orders, self.chunk_rows)
            self._layout_rows += len(found.number)
            while self._layout_rows > MAX_LAYOUT_ROWS and len(self._layouts) > 1:
                self._layout_rows -= len(self._layouts.popitem(last=False)[1].number)
        self._layouts.move_to_end(key)
        return found

    def means_of(self, extent: str, layer: int, make: Callable[[], Tensor]) -> Tensor:
        """Get the means of an extent that is in host; `make` makes them."""
        found = self._means.pop((extent, layer), None)
        if found is None:
            found = make()
            self._means_bytes += found.nbytes
        self._means[extent, layer] = found
        while self._means_bytes > MEANS_BYTES and len(self._means) > 1:
            self._means_bytes -= self._means.popitem(last=False)[1].nbytes
        return found

    def look(self) -> None:
        """Consider for rewriting the extents whose rows' importance has changed. Counts of chunks' uses are
        halved."""
        changed, self._changed = self._changed, {}
        self._due = deque(dict.fromkeys([*self._due, *changed]))
        self.cache.placement.age()

    def rewrite(self, begin: bool = True) -> float | None:
        """Rewrite an extent whose important rows lie scattered, beside all other work: one at a time, and no new one unless
        `begin`.

        Returns the seconds of work of a rewrite that has ended since the last call, if one has.
        """
        seconds = None
        if self._rewrite is not None:
            extent, rewrite = self._rewrite
            if not rewrite.ended:
                return None
            self._rewrite, seconds = None, rewrite.seconds
            if rewrite.written:
                self.stats.reordered += 1
                self.cache.forget(extent)
        while begin and self._due and self._rewrite is None:
            extent = self._due.popleft()
            known = self.importance.get(extent)
            if known is None or self.reader is None or not self.reader.has(extent):
                continue
            if self.room is None or self.layout.file_bytes(known.mean.shape[1]) <= self.room:
                self._rewrite = extent, self.reader.rewrite(extent, partial(_ranks, known))
        return seconds

    @property
    def changed(self) -> bool:
        """Tell whether importance has changed since the last `look`."""
        return bool(self._changed)

    @property
    def rewriting(self) -> bool:
        """Tell whether an extent is being rewritten, or waits for that."""
        return self._rewrite is not None or bool(self._due)

    def forget(self, extent: str) -> None:
        """Forget an extent that is gone."""
        known = self.importance.pop(extent, None)
        if known is not None:
            self._notes.forget(extent, known.mean.shape[1])
        self._changed.pop(extent, None)
        self.cache.forget(extent)
        for key in [key for key in self._orders if key[0] == extent]:
            del self._orders[key]
        for layer in [name[1] for name in self._means if name[0] == extent]:
            self._means_bytes -= self._means.pop((extent, layer)).nbytes


def _ranks(known: RowImportance) -> np.ndarray:
    """Rank the rows of each layer, the most important first: uint16 [layers, rows]."""
    return np.stack([RowOrder.by(mean).order.numpy().astype(np.uint16) for mean in known.mean.clone()])
