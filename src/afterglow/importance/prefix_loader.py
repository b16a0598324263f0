"""Load rows of a cached prefix in chunks, as layers want them, and guess one layer ahead (SPEC §IV-B, §IV-C).

A prefix is a list of views of extents. Extents that are in host as a whole are read there; of the others, chunks come from the
chunk cache or from disk. While a layer computes, chunks that the next layer is likely to select are asked for, as many as can be read
in that time; then the probe keys of the layer after it, which are needed for certain.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from afterglow.importance import in_host
from afterglow.importance.chunk_cache import ChunkKey
from afterglow.importance.chunk_loader import ChunkLoader, RowsLost
from afterglow.importance.chunk_reads import ChunkReads
from afterglow.importance.left_out import whole_chunks
from afterglow.importance.row_layout import ChunkPlace, RowLayout, RowOrder, normalised
from afterglow.importance.select import Selection
from afterglow.importance.speculation import Speculation, guess, within
from afterglow.importance.waits import Waits
from afterglow.kernels.pick import picked
from afterglow.kernels.stored_rows import widened
from afterglow.plan.step import DEMAND, PREFETCH, Selectable
from afterglow.store.extents.chunks import ExtentChunks
from afterglow.store.extents.layout import KEYS, MEANS, PROBES, VALUES

T = TypeVar("T")

MAX_RETRIES = 4  # times that a file may turn out to be another one while a layer reads it
MIN_GUESSED_ROWS = 2  # of a chunk that is read early: a chunk with one guessed row is not likelier than others


class _Located(NamedTuple):
    """Tell where rows lie. `chunks` in order, and how many rows of each are wanted (`hits`). `which` int64 [rows]: in which of
    the chunks a row is; `place` int64 [rows]: where in that chunk."""

    chunks: list[ChunkPlace]
    hits: list[int]
    which: Tensor
    place: Tensor


class PrefixLoader:
    """Load rows of one request's prefix while its prompt is computed, and while it decodes.

    First `open`, then layers in order: `probe_keys`, perhaps `all_keys`, `take`, `means`, `ahead`; later `more`. All rows are in the
    order of the text, un-rotated, on the CPU or on the cache's device.
    """

    def __init__(self, loader: ChunkLoader, views: Sequence[Selectable], asks: bool = True) -> None:
        """`asks`: layers are going to ask for `probe_keys`."""
        loader.stats.requests += 1
        self._asks = asks
        self._loader = loader
        self._layout = loader.layout
        self.probes_all = asks and loader.layout.probe_heads == loader.layout.kv_heads  # the probe keys are all keys
        self.views = tuple(views)
        lengths = [view.stop - view.start for view in views]
        self.rows = sum(lengths)
        self._starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        self._view_of = torch.arange(len(views)).repeat_interleave(torch.tensor(lengths))
        self._editions: list[str] = [""] * len(views)
        self._orders: list[list[RowOrder] | None] = [None] * len(views)
        self.reads = ChunkReads(loader, self.views)
        self._layouts: dict[int, RowLayout] = {}
        self._guessed: dict[int, Speculation[ChunkKey]] = {}
        self._guesses: bool | None = None  # were chunks guessed for the layer that comes; None: there was no choice
        self._began, self._away = time.perf_counter(), 0.0

    def open(self) -> Waits[None]:
        """Look at the files, and ask for the first layer's chunks.

        Raises: `RowsLost`.
        """
        yield from self._look_up()
        self._began, self._away = time.perf_counter(), self.reads.away
        self._ask_probe_keys(0)
        self._speculate(0, None)
        self._ask_probe_keys(1)

    # ----------------------------------------------------------------------------------------------- for layers

    def probe_keys(self, layer: int) -> Waits[Tensor]:
        """Load the probe heads' keys of all rows: [rows, probe_heads, head_dim].

        Raises: `RowsLost`.
        """
        return self._retried(lambda: self._probe_keys(layer))

    def _probe_keys(self, layer: int) -> Waits[Tensor]:
        sidecars = [self._sidecar(at, layer) for at in range(len(self.views))]
        here = yield from self.reads.fetch([key for key in sidecars if key is not None])
        chunks, used = [], []
        for view, key in zip(self.views, sidecars, strict=True):
            if key is None:
                chunks.append(in_host.probe_keys(self._loader, view, layer))
            else:
                chunks.append(here[key])
                used.append((key, chunks[-1], view.rows))
        found = self._joined(chunks, self._view_of, self._layout_of(layer).stored)
        for key, rows, count in used:  # only now: it may push other chunks of this layer out of the cache
            self._loader.cache.used(key, rows, count, count)
        return found

    def all_keys(self, layer: int) -> Waits[Tensor]:
        """Load all keys of all rows, [rows, kv_heads, head_dim], for a layer that falls back.

        Raises: `RowsLost`.
        """
        every = torch.arange(self.rows)
        return self._retried(lambda: self._tensor(layer, KEYS, self._locate(layer, every, every)))

    def take(self, layer: int, selection: Selection, keys: Tensor | None) -> Waits[tuple[Tensor, Tensor]]:
        """Load keys and values that a layer has selected, [kept, kv_heads, head_dim] each. The rows of each KV head may be
        other ones. `keys`: the result of `all_keys`, if the layer has loaded all keys.

        Raises: `RowsLost`.
        """
        stats = self._loader.stats
        stats.layers += 1
        stats.fallbacks += selection.kind == "per_head"
        stats.rows_of += self.rows
        stats.rows_kept += selection.kept
        wanted = selection.wanted().cpu()
        if keys is not None:
            by_head = selection.kind == "per_head"
            keys = _rows_of_heads(keys, selection.rows.T) if by_head else keys[wanted.to(keys.device)]
        taken, values = yield from self._retried(lambda: self._taken(layer, wanted, keys))
        if selection.mean is not None:
            mean = normalised(selection.mean)
            for at, view in enumerate(self.views):
                self._loader.learn(view, layer, mean[self._starts[at] : self._starts[at + 1]])
        if selection.kind != "per_head":
            return taken, values
        return taken, _rows_of_heads(values, torch.searchsorted(wanted, selection.rows.cpu()).T)

    def means(self, layer: int) -> Waits[tuple[Tensor, Tensor]]:
        """Load the mean keys and values of the prefix's `whole_chunks`, float32 [chunks, kv_heads, head_dim], on the cache's device.

        Raises: `RowsLost`.
        """
        return self._retried(lambda: self._means(layer))

    def _means(self, layer: int) -> Waits[tuple[Tensor, Tensor]]:
        names = [self._key(at, layer, MEANS, 0) for at in range(len(self.views))]
        here = yield from self.reads.fetch([key for key in names if key is not None])
        keys, values, cache = [], [], self._loader.cache
        for view, key in zip(self.views, names, strict=True):
            found = here[key] if key is not None else in_host.means(self._loader, view, layer)
            some = slice(*whole_chunks(view))
            there = found.to(cache.device)
            keys.append(there[some])
            values.append(there[self._layout.file_chunks(view.rows) :][some])
            if key is not None:
                cache.used(key, found, view.rows, view.rows)
        return torch.cat(keys), torch.cat(values)

    def _taken(self, layer: int, wanted: Tensor, keys: Tensor | None) -> Waits[tuple[Tensor, Tensor]]:
        located = self._locate(layer, wanted, wanted)
        self._settle(layer, located, keys is None)
        if keys is None:
            keys = yield from self._tensor(layer, KEYS, located)
        return keys, (yield from self._tensor(layer, VALUES, located))

    def ahead(self, layer: int, selection: Selection) -> None:
        """Ask for chunks of the next layer, while this one, which has selected, computes (SPEC §IV-C)."""
        self.reads.leave(layer)  # otherwise they would stay in memory until the last layer, in no cache's budget
        now = time.perf_counter()
        self._loader.budget.measured(now - self._began - (self.reads.away - self._away))
        if self._guesses is not None:
            self._loader.worth.took(self._guesses, (now - self._began) / self.rows)
        self._began, self._away = now, self.reads.away
        if layer + 1 < self._layout.layers:
            self._speculate(layer + 1, selection)
            self._ask_probe_keys(layer + 2)

    def more(self, layer: int, tensor: int, wanted: Tensor) -> Waits[tuple[Tensor, Tensor]]:
        """Load rows (int64, ascending) that are wanted while decoding, and the rows in the same chunks.

        Returns all rows that were loaded, and their keys or values, [rows, kv_heads, head_dim].
        Raises: `RowsLost`.
        """
        return self._retried(lambda: self._more(layer, tensor, wanted.cpu()))

    def _more(self, layer: int, tensor: int, wanted: Tensor) -> Waits[tuple[Tensor, Tensor]]:
        places = self._layout_of(layer)
        chunks = torch.zeros(len(places), dtype=torch.bool)
        chunks[places.number[wanted]] = True
        rows = chunks[places.number].nonzero().squeeze(1)
        found = yield from self._tensor(layer, tensor, self._locate(layer, rows, wanted))
        self.reads.clear()  # these chunks are not asked for again
        self._loader.stats.renewed_rows += len(rows)
        return rows, found

    def close(self) -> None:
        """End after the last layer. Waits for nothing."""
        for guessed in self._guessed.values():
            guessed.settle([], self.reads.take_back(guessed.pending()))
        self._guessed.clear()
        self.reads.clear()

    def _retried(self, work: Callable[[], Waits[T]]) -> Waits[T]:
        """Run work, and begin it again where a file turns out to be another one.

        Raises: `RowsLost`.
        """
        for _ in range(MAX_RETRIES):
            try:
                return (yield from work())
            except RowsLost as lost:
                if not lost.stale:
                    raise
            self._layouts.clear()
            self.close()
            yield from self._look_up()
        return (yield from work())

    # --------------------------------------------------------------------------------------------- what to read

    def _on_disk(self) -> Iterator[int]:
        return (at for at, view in enumerate(self.views) if not view.slots)

    def _look_up(self) -> Waits[None]:
        """Read the edition of each file, and how its rows are ordered.

        Raises: `RowsLost`.
        """
        on_disk = {at: self.views[at] for at in self._on_disk()}
        if not on_disk:
            return
        extents = {view.extent: view.rows for view in on_disk.values()}
        if self._loader.reader is None:
            raise RowsLost(next(iter(extents)))
        reading = self._loader.read([ExtentChunks(extent, rows, "", ()) for extent, rows in extents.items()], DEMAND)
        yield from self.reads.wait_for(reading, next(iter(extents)))
        for at, view in on_disk.items():
            head = reading.heads[view.extent]
            self._editions[at], self._orders[at] = head.edition, None
            self._loader.cache.now(view.extent, head.edition)
            if head.sidecar is not None and head.sidecar.reordered:
                stored = head.sidecar.order[:, : view.rows]
                self._orders[at] = self._loader.orders(view.extent, head.edition, stored)

    def _key(self, at: int, layer: int, tensor: int, chunk: int) -> ChunkKey | None:
        """Name a chunk of a view's extent; None where the extent is in host."""
        view = self.views[at]
        return None if view.slots else ChunkKey(view.extent, self._editions[at], layer, tensor, chunk)

    def _sidecar(self, at: int, layer: int) -> ChunkKey | None:
        """Name the probe keys of a view's extent in a layer; None where the extent is in host."""
        return self._key(at, layer, PROBES, 0)

    def _layout_of(self, layer: int) -> RowLayout:
        if all(order is None for order in self._orders):
            layer = 0  # all layers have the same layout
        found = self._layouts.get(layer)
        if found is None:
            began = time.perf_counter()
            orders = [None if order is None else order[layer] for order in self._orders]
            found = self._layouts[layer] = self._loader.layout_of(self.views, self._editions, layer, orders)
            self._loader.stats.mapping += time.perf_counter() - began
        return found

    def _ask_probe_keys(self, layer: int) -> None:
        if self._asks and layer < self._layout.layers:
            self.reads.ask([key for at in self._on_disk() if (key := self._sidecar(at, layer))], PREFETCH)
            if self._layout.means:
                self.reads.ask([key for at in self._on_disk() if (key := self._key(at, layer, MEANS, 0))], PREFETCH)

    def _speculate(self, layer: int, before: Selection | None) -> None:
        """Ask for chunks that a layer is likely to select. `before`: the selection of the layer before."""
        loader = self._loader
        most = loader.budget.bytes(loader.bandwidth) // loader.chunk_bytes
        self._guesses = None
        if most < 2 or loader.prior == "none" or not any(True for _ in self._on_disk()):
            return
        self._guesses = loader.worth.next()
        if not self._guesses:
            return
        k = before.kept if before is not None else self.rows
        rows = guess(loader.prior, before, self._known(layer) if before is None else None, self.rows, k)
        places = self._layout_of(layer)
        guessed = self._guessed[layer] = Speculation(loader.stats.tally)
        numbers = places.by_hits(rows, MIN_GUESSED_ROWS)
        keys = within(numbers, lambda number: self._missing(places, layer, number), most)
        for key in keys:
            guessed.submit(key, loader.chunk_bytes)
        self.reads.ask(keys, PREFETCH)
        if not keys:
            self._guesses = None

    def _known(self, layer: int) -> Tensor | None:
        """Look up the rows' average importance in a layer, 0 for unknown rows; None if no row's is known."""
        known_rows = []
        for view in self.views:
            known = self._loader.importance.get(view.extent)
            if known is None or known.mean.shape[1] != view.rows:
                known_rows.append(torch.zeros(view.stop - view.start))
            else:
                known_rows.append(known.mean[layer, view.start : view.stop])
        mean = torch.cat(known_rows)
        return mean if bool(mean.any()) else None

    def _missing(self, places: RowLayout, layer: int, number: int) -> list[ChunkKey]:
        """List keys and values of a chunk that are neither cached nor on their way."""
        at, chunk = places[number]
        tensors = (VALUES,) if self.probes_all else (KEYS, VALUES)
        keys = (self._key(at, layer, tensor, chunk) for tensor in tensors)
        look = self._loader.cache.look
        return [key for key in keys if key is not None and key not in self.reads and look(key) is None]

    def _settle(self, layer: int, located: _Located, with_keys: bool) -> None:
        """Count which guesses for a layer were right, now that it has selected, and ask for the rest."""
        tensors = (KEYS, VALUES) if with_keys else (VALUES,)
        keys = [
            key
            for at, chunk in located.chunks
            for tensor in tensors
            if (key := self._key(at, layer, tensor, chunk)) is not None
        ]
        not_cached = [key for key in keys if self._loader.cache.look(key) is None]
        if not with_keys:  # all keys have been asked for
            not_cached += self.reads.asked(layer, KEYS)
        guessed = self._guessed.pop(layer, None)
        if guessed is not None:
            for key in guessed.pending():
                if self.reads.has_come(key):
                    guessed.landed(key)
            unwanted = set(guessed.pending()).difference(not_cached)
            gone = self.reads.take_back(list(unwanted))  # they would keep the disk from what is wanted next
            guessed.settle([(key, self._loader.chunk_bytes) for key in not_cached], gone)
        self.reads.ask(not_cached, DEMAND)

    # ------------------------------------------------------------------------------------------- cached rows

    def _locate(self, layer: int, rows: Tensor, wanted: Tensor) -> _Located:
        """Find the chunks of rows (int64, ascending) in a layer. Only the rows that are `wanted` count as hits."""
        places = self._layout_of(layer)
        began = time.perf_counter()
        number = places.number[rows]
        rows_in = torch.bincount(number, minlength=len(places))
        numbers = rows_in.nonzero().squeeze(1)
        hits = rows_in if wanted is rows else places.hits(wanted)
        which = (rows_in.clamp(max=1).cumsum(0) - 1)[number]
        chunks = [places[number] for number in numbers.tolist()]
        found = _Located(chunks, hits[numbers].tolist(), which, places.within[rows])
        self._loader.stats.mapping += time.perf_counter() - began
        return found

    def _tensor(self, layer: int, tensor: int, located: _Located) -> Waits[Tensor]:
        """Load a layer's keys or values of rows, [rows, kv_heads, head_dim].

        Raises: `RowsLost`.
        """
        keys = [self._key(at, layer, tensor, chunk) for at, chunk in located.chunks]
        here = yield from self.reads.fetch([key for key in keys if key is not None])
        chunks, used, size = [], [], self._loader.chunk_rows
        for (at, chunk), key, hit in zip(located.chunks, keys, located.hits, strict=True):
            view = self.views[at]
            if key is None:
                chunks.append(in_host.chunk(self._loader, view, layer, tensor, chunk))
            else:
                chunks.append(here[key])
                tokens = min(size, view.rows - size * chunk)
                used.append((key, chunks[-1], tokens, min(hit, tokens)))
        joined = self._joined(chunks, located.which, located.place)
        for key, rows, tokens, wanted in used:  # only now: it may push other chunks of this layer out of the cache
            self._loader.cache.used(key, rows, tokens, wanted)
        return joined

    def _joined(self, chunks: Sequence[Tensor], which: Tensor, place: Tensor) -> Tensor:
        """Pick rows out of chunks, and widen them. Where one chunk is on the device the result is there too."""
        dtype = self._loader.dtype
        devices = {chunk.device for chunk in chunks}
        if len(devices) == 1:
            return widened(picked(chunks, which, place), dtype)
        here = self._loader.cache.device
        out = torch.empty((len(which), *chunks[0].shape[1:]), dtype=chunks[0].dtype, device=here)
        for device in devices:
            mine = torch.tensor([chunk.device == device for chunk in chunks])
            at = mine[which].nonzero().squeeze(1)
            some = [chunk for chunk in chunks if chunk.device == device]
            out[at.to(here)] = picked(some, (mine.cumsum(0) - 1)[which[at]], place[at]).to(here)
        return widened(out, dtype)


def _rows_of_heads(rows: Tensor, places: Tensor) -> Tensor:
    """Pick other rows for each head: `out[i, head] = rows[places[i, head], head]`.

    `rows` [rows, heads, head_dim], `places` int64 [k, heads].
    """
    heads = rows.shape[1]
    flat = heads * places + torch.arange(heads, device=places.device)
    return rows.flatten(0, 1).index_select(0, flat.flatten().to(rows.device)).view(-1, heads, rows.shape[2])
