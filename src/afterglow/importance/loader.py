"""What all requests share that take only what is important of their prefix (SPEC §IV): cached chunks, measured rates, which rows
have been important, and how they lie.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from afterglow.importance.buffers import Buffers
from afterglow.importance.order import Importance, Order
from afterglow.importance.places import Places, View
from afterglow.importance.prior import Budget, Prior, Tally
from afterglow.importance.shelf import Shelf
from afterglow.plan.step import Selectable
from afterglow.store.layout import KVLayout
from afterglow.store.reading import Reader, Reading, Rewrite

CHUNK = 64
KNOWN = 512  # extents whose rows' importance is remembered
PLACED = 4 << 20  # rows of layers whose places are: 96 MiB


class Lost(Exception):
    """Rows of an extent did not come: `extent`."""

    def __init__(self, extent: str, stale: bool = False) -> None:
        """`stale`: they are there, in a file that is another one now."""
        super().__init__(extent)
        self.extent, self.stale = extent, stale


@dataclass(slots=True)
class LoaderStats:
    """Sums since start. Bytes `read` off the disk: all of them, guessed ones included. `layers` that were selected from, of
    which `fallbacks` needed all keys; of `rows_of` rows in them `rows_kept` were kept. `renewals`: layers that selected anew
    while decoding, for which `renewed_rows` rows were loaded (keys or values), in whole chunks; `failed_renewals` had to go on
    with what they had. Seconds of the engine's thread: `waited` for the disk, `mapping` rows to chunks, `identifying` what is
    important."""

    requests: int = 0
    layers: int = 0
    fallbacks: int = 0
    rows_of: int = 0
    rows_kept: int = 0
    renewals: int = 0
    renewed_rows: int = 0
    failed_renewals: int = 0
    read_bytes: int = 0
    waited: float = 0.0
    mapping: float = 0.0
    identifying: float = 0.0
    reordered: int = 0
    tally: Tally = field(default_factory=Tally)


class Loader:
    """What all requests of an engine share: the shelf, measured rates, what is known of rows' importance."""

    def __init__(
        self,
        arena: Tensor,
        layout: KVLayout,
        reader: Reader | None,
        shelf: Shelf,
        *,
        dtype: torch.dtype,
        timeout: float,
        prior: Prior = "cut",
        room: int | None = None,
    ) -> None:
        """`arena`: host slots, [layers, 2, slots, 64, kv_heads, head_dim]. `dtype`: that rows are computed in. `reader`:
        None without a disk tier. `timeout`: seconds after which rows count as lost. `room`: bytes on disk that a file may
        take beside its old version (None: any)."""
        self.arena, self.layout, self.reader, self.shelf = arena, layout, reader, shelf
        self.dtype, self.timeout, self.prior, self.room = dtype, timeout, prior, room
        self.buffers = Buffers(layout.chunk_bytes)
        self.stats = LoaderStats()
        self.budget = Budget()
        self.bandwidth = 0.0  # bytes/s of reads, a moving average
        self.importance: OrderedDict[str, Importance] = OrderedDict()
        self._orders: OrderedDict[tuple[str, str], list[Order]] = OrderedDict()  # by extent and edition
        self._places: OrderedDict[tuple[object, ...], Places] = OrderedDict()  # of the last layers of prefixes
        self._placed = 0  # their rows
        self._changed: dict[str, None] = {}  # extents whose importance has changed since they were last looked at
        self._due: deque[str] = deque()  # those of them that may have to be rewritten
        self._rewrite: tuple[str, Rewrite] | None = None  # the one that is at it

    def took(self, reading: Reading) -> None:
        """A read has come."""
        self.stats.read_bytes += reading.bytes
        if reading.seconds > 0:
            rate = reading.bytes / reading.seconds
            self.bandwidth = rate if not self.bandwidth else self.bandwidth + 0.2 * (rate - self.bandwidth)

    def learn(self, view: Selectable, layer: int, mean: Tensor) -> None:
        """How important a view's rows were to a request in one layer: float32 [rows of the view], as multiples of the mean."""
        known = self.importance.get(view.extent)
        if known is None or known.mean.shape[1] != view.rows:
            known = self.importance[view.extent] = Importance(self.layout.layers, view.rows)
        self.importance.move_to_end(view.extent)
        if len(self.importance) > KNOWN:
            oldest, _ = self.importance.popitem(last=False)
            self._changed.pop(oldest, None)
        known.add(layer, view.start, mean.cpu())
        self._changed[view.extent] = None

    def orders(self, extent: str, edition: str, stored: np.ndarray) -> list[Order]:
        """How an extent's rows lie, by layer: `stored` uint16 [layers, rows], as its head has it."""
        known = self._orders.get((extent, edition))
        if known is None:
            rows = torch.from_numpy(stored.astype(np.int64))
            known = self._orders[extent, edition] = [Order(order, order.argsort()) for order in rows]
            if len(self._orders) > KNOWN:
                self._orders.popitem(last=False)
        self._orders.move_to_end((extent, edition))
        return known

    def places(
        self, views: Sequence[Selectable], editions: Sequence[str], layer: int, orders: Sequence[Order | None]
    ) -> Places:
        """Where the rows of a layer of a prefix lie, by its views, their files' editions, and the layer's orders in those."""
        key = (*((view.extent, view.rows, view.start, view.stop) for view in views), *editions, layer)
        found = self._places.get(key)
        if found is None:
            found = self._places[key] = Places([View(v.rows, v.start, v.stop) for v in views], orders, CHUNK)
            self._placed += len(found.number)
            while self._placed > PLACED and len(self._places) > 1:
                self._placed -= len(self._places.popitem(last=False)[1].number)
        self._places.move_to_end(key)
        return found

    def look(self) -> None:
        """Extents whose rows' importance has changed may have to be rewritten (spec S12). What is known of chunks' use ages by
        half."""
        changed, self._changed = self._changed, {}
        self._due = deque(dict.fromkeys([*self._due, *changed]))
        self.shelf.cache.age()

    def rewrite(self, begin: bool = True) -> float | None:
        """Have one of those extents rewritten whose important rows lie scattered, beside whatever else is done: one at a
        time, and none anew unless `begin`. Returns the seconds of work of one that has ended since the last call, if any has.
        """
        seconds = None
        if self._rewrite is not None:
            extent, rewrite = self._rewrite
            if not rewrite.ended:
                return None
            self._rewrite, seconds = None, rewrite.seconds
            if rewrite.written:
                self.stats.reordered += 1
                self.shelf.forget(extent)
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
        """Has importance changed since it was last looked at?"""
        return bool(self._changed)

    @property
    def rewriting(self) -> bool:
        """Is one being rewritten, or waiting for that?"""
        return self._rewrite is not None or bool(self._due)

    def forget(self, extent: str) -> None:
        """An extent is no more."""
        self.importance.pop(extent, None)
        self._changed.pop(extent, None)
        self.shelf.forget(extent)
        for key in [key for key in self._orders if key[0] == extent]:
            del self._orders[key]


def _ranks(known: Importance) -> np.ndarray:
    """The most important row of each layer first: uint16 [layers, rows]."""
    return np.stack([Order.by(mean).order.numpy().astype(np.uint16) for mean in known.mean.clone()])
