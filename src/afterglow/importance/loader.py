"""Rows of a cached prefix, loaded in chunks as layers want them, and guessed one layer ahead (SPEC §IV-B, §IV-C).

A prefix is a list of views of extents. Those that are in host as a whole are read where they are; of the others, chunks come
from the shelf or from disk. What the next layer needs for certain, its probe keys, is asked for first; then what it is
likely to select, as much as can be read while this layer computes.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from afterglow.importance.identify import Selection
from afterglow.importance.order import Importance, Order, normalised
from afterglow.importance.places import Chunk, Places, View
from afterglow.importance.prior import Budget, Prior, Speculation, Tally, guess, within
from afterglow.importance.shelf import Name, Shelf
from afterglow.plan.step import DEMAND, PREFETCH, Selectable
from afterglow.store.chunks import ChunkRead
from afterglow.store.files import aligned_memory
from afterglow.store.layout import KEYS, PROBES, VALUES, KVLayout
from afterglow.store.reading import Reader, Reading

CHUNK = 64
KNOWN = 512  # extents whose rows' importance is remembered


class Lost(Exception):
    """Rows of an extent did not come: `extent`."""

    def __init__(self, extent: str, stale: bool = False) -> None:
        """`stale`: they are there, in a newer version of the file."""
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
    ) -> None:
        """`arena`: host slots, [layers, 2, slots, 64, kv_heads, head_dim]. `dtype`: that rows are computed in. `reader`:
        None without a disk tier. `timeout`: seconds after which rows count as lost."""
        self.arena, self.layout, self.reader, self.shelf = arena, layout, reader, shelf
        self.dtype, self.timeout, self.prior = dtype, timeout, prior
        self.stats = LoaderStats()
        self.budget = Budget()
        self.bandwidth = 0.0  # bytes/s of reads, a moving average
        self.importance: OrderedDict[str, Importance] = OrderedDict()
        self._orders: OrderedDict[tuple[str, int], list[Order]] = OrderedDict()  # by extent and version, of its layers
        self._changed: dict[str, None] = {}  # extents whose importance has changed since they were last looked at

    def open(self, views: Sequence[Selectable]) -> Prefix:
        """Begin with a request. Errors: `Lost`."""
        self.stats.requests += 1
        return Prefix(self, views)

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
            self.importance.popitem(last=False)
        known.add(layer, view.start, mean.cpu())
        self._changed[view.extent] = None

    def orders(self, extent: str, version: int, stored: np.ndarray) -> list[Order]:
        """How an extent's rows lie, by layer: `stored` uint16 [layers, rows], as its head has it."""
        found = self._orders.get((extent, version))
        if found is None:
            rows = torch.from_numpy(stored.astype(np.int64))
            found = [Order(order, order.argsort()) for order in rows]
            self._orders[extent, version] = found
            if len(self._orders) > KNOWN:
                self._orders.popitem(last=False)
        return found

    def reorder(self) -> int:
        """Have extents rewritten, in the background, whose important rows lie scattered (spec S12); returns how many. What
        is known of chunks' use ages by half."""
        begun = 0
        changed, self._changed = self._changed, {}
        for extent in changed:
            known = self.importance.get(extent)
            if known is None or self.reader is None or not self.reader.has(extent):
                continue
            orders = [Order.by(mean) for mean in known.mean]
            text = Order.of_text(known.mean.shape[1])
            if all(order.same_chunks(text, CHUNK) for order in orders):
                continue
            self.reader.rewrite(extent, np.stack([order.order.numpy().astype(np.uint16) for order in orders]))
            self.shelf.forget(extent)
            begun += 1
        self.shelf.cache.age()
        self.stats.reordered += begun
        return begun

    def forget(self, extent: str) -> None:
        """An extent is lost."""
        self.importance.pop(extent, None)
        self._changed.pop(extent, None)
        self.shelf.forget(extent)


@dataclass(frozen=True, slots=True)
class _Here:
    """The chunks of a layer that need not be read: in it, if neither their keys nor their values are missing."""

    prefix: Prefix
    places: Places
    layer: int

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and not self.prefix.missing(self.places, self.layer, number)


@dataclass(slots=True)
class _Coming:
    """Chunks on their way: `rows` of the buffer that `reading` fills."""

    reading: Reading
    rows: Tensor
    counted: list[bool]  # one for all chunks of a reading: has it been added to the sums?


class _Lying(NamedTuple):
    """Where rows lie: `chunks` in order, of each the rows to `picks` (int64, as they are stored), and how many of them are
    wanted. `order`: of all these, one after the other, their places among the rows that were asked for; None: the same."""

    chunks: list[Chunk]
    picks: tuple[Tensor, ...]
    hits: list[int]
    order: Tensor | None


class Prefix:
    """One request's prefix while its prompt is computed. Layers in order: `probe_keys`, perhaps `all_keys`, `take`, `ahead`.

    All tensors are rows of the prefix in the order of the text, un-rotated, on the CPU or wherever the shelf has them.
    """

    def __init__(self, loader: Loader, views: Sequence[Selectable]) -> None:
        self._loader = loader
        self._layout = loader.layout
        self.views = tuple(views)
        self.rows = sum(view.stop - view.start for view in views)
        starts = torch.tensor([view.stop - view.start for view in views]).cumsum(0).tolist()
        self._starts = [0, *starts]
        self._versions: list[int] = [0] * len(views)
        self._orders: list[list[Order] | None] = [None] * len(views)
        self._coming: dict[Name, _Coming] = {}
        self._places: dict[int, Places] = {}
        self._guessed: dict[int, Speculation[Name]] = {}
        self._look_up()
        self._began, self._waited = time.perf_counter(), loader.stats.waited
        self.certain(0)
        self._speculate(0, None)

    # ----------------------------------------------------------------------------------------------- for layers

    def certain(self, layer: int) -> None:
        """Ask for a layer's probe keys."""
        if layer < self._layout.layers:
            self._ask([name for at in self._on_disk() if (name := self._sidecar(at, layer))], PREFETCH)

    def probe_keys(self, layer: int) -> Tensor:
        """[rows, probe_heads, head_dim]. Errors: `Lost`."""
        heads, parts = self._layout.probe_heads, []
        sidecars = [self._sidecar(at, layer) for at in range(len(self.views))]
        self._ask([name for name in sidecars if name is not None], DEMAND)
        used = []
        for at, (view, name) in enumerate(zip(self.views, sidecars, strict=True)):
            if name is None:
                parts.append(self._in_host(view, layer, KEYS)[:, :heads])
            else:
                rows = self._rows(name)
                parts.append(self._in_text_order(rows, at, layer))
                used.append((name, rows, view.rows))
        for name, rows, count in used:  # now, as it may cost others their places on the shelf
            self._loader.shelf.used(name, rows, count, count)
        return torch.cat(parts).to(self._loader.dtype)

    def all_keys(self, layer: int) -> Tensor:
        """[rows, kv_heads, head_dim], for a layer that falls back. Errors: `Lost`."""
        return self._tensor(layer, KEYS, self._lying(layer, torch.arange(self.rows), None))

    def take(self, layer: int, selection: Selection, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keys and values of what a layer has selected, [kept, kv_heads, head_dim]; each KV head's may be other rows (spec
        X16). `keys`: what `all_keys` returned, if it was asked. Errors: `Lost`."""
        stats = self._loader.stats
        stats.layers += 1
        stats.fallbacks += selection.kind == "per_head"
        stats.rows_of += self.rows
        stats.rows_kept += selection.kept
        wanted = selection.wanted().cpu()
        lying = self._lying(layer, wanted, wanted)
        self._settle(layer, lying, keys is None)
        keys = self._tensor(layer, KEYS, lying) if keys is None else keys[wanted.to(keys.device)]
        values = self._tensor(layer, VALUES, lying)
        if selection.mean is not None:
            mean = normalised(selection.mean)
            for at, view in enumerate(self.views):
                self._loader.learn(view, layer, mean[self._starts[at] : self._starts[at + 1]])
        if selection.kind != "per_head":
            return keys, values
        heads = torch.arange(keys.shape[1])
        places = torch.searchsorted(wanted, selection.rows.cpu()).T
        return keys[places.to(keys.device), heads.to(keys.device)], values[places, heads]

    def ahead(self, layer: int, selection: Selection) -> None:
        """A layer knows what it wants, and is about to compute: ask for what the next one needs (SPEC §IV-C)."""
        now, waited = time.perf_counter(), self._loader.stats.waited
        self._loader.budget.measured(now - self._began - (waited - self._waited))
        self._began, self._waited = now, waited
        if layer + 1 < self._layout.layers:
            self.certain(layer + 1)
            self._speculate(layer + 1, selection)

    def more(self, layer: int, tensor: int, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Rows (int64, ascending) that have not been loaded yet and are wanted while decoding, with those that come in the same
        chunks: which, and their keys or values [rows, kv_heads, head_dim]. Errors: `Lost`."""
        try:
            return self._more(layer, tensor, wanted.cpu())
        except Lost as lost:
            if not lost.stale:
                raise
        self._places.clear()  # the file has been rewritten since
        self._coming.clear()
        self._look_up()
        return self._more(layer, tensor, wanted.cpu())

    def close(self) -> None:
        """The last layer has what it wants. Waits for nothing; buffers that are still being filled live on by themselves."""
        for guessed in self._guessed.values():
            guessed.settle([])
        self._guessed.clear()
        self._coming.clear()

    def _more(self, layer: int, tensor: int, wanted: Tensor) -> tuple[Tensor, Tensor]:
        places = self._places_of(layer)
        chunks = torch.zeros(len(places), dtype=torch.bool)
        chunks[places.number[wanted]] = True
        rows = chunks[places.number].nonzero().squeeze(1)
        found = self._tensor(layer, tensor, self._lying(layer, rows, wanted))
        self._coming.clear()  # nobody asks for these chunks again
        self._loader.stats.renewed_rows += len(rows)
        return rows, found

    # --------------------------------------------------------------------------------------------- what to read

    def _on_disk(self) -> Iterator[int]:
        return (at for at, view in enumerate(self.views) if not view.slots)

    def _look_up(self) -> None:
        """Which version of each file there is, and how its rows lie."""
        reader = self._loader.reader
        readings = {}
        for at in self._on_disk():
            if reader is None:
                raise Lost(self.views[at].extent)
            readings[at] = reader.read(self.views[at].extent, [], 0, DEMAND)
        for at, reading in readings.items():
            self._wait(reading, self.views[at].extent)
            assert reading.head is not None
            sidecar = reading.head.sidecar
            if sidecar is not None and sidecar.reordered:
                stored = sidecar.order[:, : self.views[at].rows]
                self._versions[at] = sidecar.version
                self._orders[at] = self._loader.orders(self.views[at].extent, sidecar.version, stored)

    def _sidecar(self, at: int, layer: int) -> Name | None:
        """A view's probe keys in a layer; None where they are in host."""
        view = self.views[at]
        return None if view.slots else Name(view.extent, self._versions[at], layer, PROBES, 0)

    def _in_text_order(self, stored: Tensor, at: int, layer: int) -> Tensor:
        """A view's rows out of all those of its extent, as they are stored."""
        view = self.views[at]
        if self._orders[at] is None:
            return stored[view.start : view.stop]
        return stored[self._places_of(layer).stored[self._starts[at] : self._starts[at + 1]]]

    def _places_of(self, layer: int) -> Places:
        if all(order is None for order in self._orders):
            layer = 0  # all layers lie alike
        found = self._places.get(layer)
        if found is None:
            began = time.perf_counter()
            orders = [None if order is None else order[layer] for order in self._orders]
            found = Places([View(v.rows, v.start, v.stop) for v in self.views], orders, CHUNK)
            self._places[layer] = found  # a thousandth of the rows' bytes
            self._loader.stats.mapping += time.perf_counter() - began
        return found

    def _name(self, places: Places, layer: int, tensor: int, number: int) -> Name | None:
        """A chunk by its number; None where its extent is in host."""
        at, chunk = places[number]
        view = self.views[at]
        return None if view.slots else Name(view.extent, self._versions[at], layer, tensor, chunk)

    def _speculate(self, layer: int, before: Selection | None) -> None:
        loader = self._loader
        size = 2 * self._layout.chunk_bytes
        budget = loader.budget.bytes(loader.bandwidth)
        if budget < size or loader.prior == "none" or not any(True for _ in self._on_disk()):
            return
        k = before.kept if before is not None else self.rows
        rows = guess(loader.prior, before, self._known(layer) if before is None else None, self.rows, k)
        places = self._places_of(layer)
        guessed = self._guessed[layer] = Speculation(loader.stats.tally)
        names = []
        for number in within(rows, places, budget, lambda _: size, _Here(self, places, layer)):
            names += self.missing(places, layer, number)
        for name in names:
            guessed.submit(name, self._layout.chunk_bytes)
        self._ask(names, PREFETCH)

    def _known(self, layer: int) -> Tensor | None:
        """The rows' average importance in a layer, if there is any; 0 for rows that nobody has looked at."""
        parts = []
        for view in self.views:
            known = self._loader.importance.get(view.extent)
            if known is None or known.mean.shape[1] != view.rows:
                parts.append(torch.zeros(view.stop - view.start))
            else:
                parts.append(known.mean[layer, view.start : view.stop])
        mean = torch.cat(parts)
        return mean if bool(mean.any()) else None

    def missing(self, places: Places, layer: int, number: int) -> list[Name]:
        """Keys and values of a chunk that are neither here nor on their way."""
        names = (self._name(places, layer, tensor, number) for tensor in (KEYS, VALUES))
        look = self._loader.shelf.look
        return [name for name in names if name is not None and name not in self._coming and look(name) is None]

    def _settle(self, layer: int, lying: _Lying, keys: bool) -> None:
        """The layer knows what it wants: count what was guessed, and ask for the rest."""
        tensors = (KEYS, VALUES) if keys else (VALUES,)
        names = [
            Name(self.views[at].extent, self._versions[at], layer, tensor, chunk)
            for at, chunk in lying.chunks
            if not self.views[at].slots
            for tensor in tensors
        ]
        off_shelf = [name for name in names if self._loader.shelf.look(name) is None]
        if not keys:  # all of them have been asked for
            off_shelf += [name for name in self._coming if name.layer == layer and name.tensor == KEYS]
        guessed = self._guessed.pop(layer, None)
        if guessed is not None:
            for name in guessed.pending():
                if self._coming[name].reading.ended:
                    guessed.landed(name)
            guessed.settle([(name, self._layout.chunk_bytes) for name in off_shelf])
        self._ask(off_shelf, DEMAND)

    def _ask(self, names: Sequence[Name], priority: int) -> None:
        """Read chunks that are neither on the shelf nor on their way; urge those that are, on demand."""
        loader, layout = self._loader, self._layout
        assert loader.reader is not None or not names
        urgent: list[Reading] = []
        by_extent: dict[str, list[Name]] = {}
        for name in dict.fromkeys(names):
            coming = self._coming.get(name)
            if coming is not None:
                if priority == DEMAND and not coming.reading.ended:
                    urgent.append(coming.reading)
            elif loader.shelf.look(name) is None:
                by_extent.setdefault(name.extent, []).append(name)
        if loader.reader is None:
            return
        if urgent:
            loader.reader.urge(urgent)
        for extent, wanted in by_extent.items():
            rows = next(view.rows for view in self.views if view.extent == extent)
            reads, pieces = [], []
            for run in _runs(sorted(wanted)):
                first = run[0]
                if first.tensor == PROBES:
                    stop, size = layout.blocks(rows), layout.probe_chunk_bytes
                else:
                    stop, size = first.chunk + len(run), layout.chunk_bytes
                into = aligned_memory((stop - first.chunk) * size).reshape(stop - first.chunk, size)
                reads.append(ChunkRead(first.layer, first.tensor, first.chunk, stop, into))
                pieces.append((run, into))
            reading = loader.reader.read(extent, reads, wanted[0].version, priority)
            counted = [False]
            for run, into in pieces:
                rows_of = self._as_rows(into, run[0].tensor)
                for at, name in enumerate(run):
                    part = rows_of if name.tensor == PROBES else rows_of[at * CHUNK : (at + 1) * CHUNK]
                    self._coming[name] = _Coming(reading, part, counted)

    def _as_rows(self, into: np.ndarray, tensor: int) -> Tensor:
        heads = self._layout.probe_heads if tensor == PROBES else self._layout.kv_heads
        return torch.from_numpy(into.reshape(-1)).view(self._loader.arena.dtype).view(-1, heads, self._layout.head_dim)

    # ------------------------------------------------------------------------------------------------ what is here

    def _lying(self, layer: int, rows: Tensor, selected: Tensor | None) -> _Lying:
        """Where rows (int64, ascending) of a layer are to be found. `selected`: those that count as wanted; None: not known
        yet."""
        places = self._places_of(layer)
        began = time.perf_counter()
        lies = CHUNK * places.number[rows] + places.stored[rows] % CHUNK
        order = None if bool((lies[1:] > lies[:-1]).all()) else lies.argsort()  # as the chunks lie
        if order is not None:
            lies = lies[order]
        numbers = lies // CHUNK
        cuts = ((numbers[1:] != numbers[:-1]).nonzero().squeeze(1) + 1).tolist()
        picks = torch.tensor_split(lies % CHUNK, cuts)
        numbers = numbers[[0, *cuts]]
        hits = [0] * len(picks) if selected is None else places.hits(selected)[numbers].tolist()
        found = _Lying([places[number] for number in numbers.tolist()], picks, hits, order)
        self._loader.stats.mapping += time.perf_counter() - began
        return found

    def _tensor(self, layer: int, tensor: int, lying: _Lying) -> Tensor:
        """A layer's keys or values of rows, [rows, kv_heads, head_dim]. Errors: `Lost`."""
        views, versions = self.views, self._versions
        names = [
            None if views[at].slots else Name(views[at].extent, versions[at], layer, tensor, chunk)
            for at, chunk in lying.chunks
        ]
        self._ask([name for name in names if name is not None], DEMAND)
        parts, used = [], []
        for (at, chunk), name, pick, hit in zip(lying.chunks, names, lying.picks, lying.hits, strict=True):
            if name is None:
                part = self._block(views[at], layer, tensor, chunk)
            else:
                part = self._rows(name)
                tokens = min(CHUNK, views[at].rows - CHUNK * chunk)
                used.append((name, part, tokens, min(hit, tokens)))
            parts.append((part if len(pick) == len(part) else part[pick.to(part.device)]).to("cpu"))
        joined = torch.cat(parts).to(self._loader.dtype)
        for name, part, tokens, wanted in used:  # now, as it may cost others their places on the shelf
            self._loader.shelf.used(name, part, tokens, wanted)
        if lying.order is None:
            return joined
        return torch.empty_like(joined).index_copy_(0, lying.order, joined)

    def _rows(self, name: Name) -> Tensor:
        """A chunk that was asked for, waiting for it."""
        found = self._loader.shelf.look(name)
        if found is not None:
            return found
        coming = self._coming[name]
        self._wait(coming.reading, name.extent)
        if not coming.counted[0]:
            coming.counted[0] = True
            self._loader.took(coming.reading)
        return coming.rows

    def _wait(self, reading: Reading, extent: str) -> None:
        began = time.perf_counter()
        if not reading.wait(self._loader.timeout):
            if not reading.stale:
                self._loader.forget(extent)
            raise Lost(extent, reading.stale)
        self._loader.stats.waited += time.perf_counter() - began

    def _block(self, view: Selectable, layer: int, tensor: int, chunk: int) -> Tensor:
        return self._loader.arena[layer, tensor, view.slots[chunk]]

    def _in_host(self, view: Selectable, layer: int, tensor: int) -> Tensor:
        """A view's rows out of its slots."""
        first, last = view.start // CHUNK, -(-view.stop // CHUNK)
        blocks = self._loader.arena[layer, tensor].index_select(0, torch.tensor(view.slots[first:last]))
        return blocks.flatten(0, 1)[view.start - first * CHUNK : view.stop - first * CHUNK]


def _runs(names: Sequence[Name]) -> Iterator[list[Name]]:
    """Chunks that lie side by side in the file."""
    run: list[Name] = []
    for name in names:
        if run and (name[:4] != run[-1][:4] or name.chunk != run[-1].chunk + 1):
            yield run
            run = []
        run.append(name)
    if run:
        yield run
