"""Rows of a cached prefix, loaded in chunks as layers want them, and guessed one layer ahead (SPEC §IV-B, §IV-C).

A prefix is a list of views of extents. Those that are in host as a whole are read where they are; of the others, chunks come
from the shelf or from disk. What the next layer needs for certain, its probe keys, is asked for first; then what it is
likely to select, as much as can be read while this layer computes.

Nothing here waits: what has to is a generator that yields the reading it waits for, and goes on when that has ended, or is
given up (`waited` is one that waits by itself). So a step of others goes on meanwhile (`engine.important`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from afterglow.importance.identify import Selection
from afterglow.importance.loader import CHUNK, Loader, Lost
from afterglow.importance.order import Order, normalised
from afterglow.importance.places import Chunk, Places
from afterglow.importance.prior import Speculation, guess, within
from afterglow.importance.shelf import Name
from afterglow.kernels.pick import picked
from afterglow.plan.step import DEMAND, PREFETCH, Selectable
from afterglow.store.chunks import ChunkRead
from afterglow.store.files import aligned_memory
from afterglow.store.layout import KEYS, PROBES, VALUES
from afterglow.store.reading import Reading

T = TypeVar("T")
Waits = Generator[Reading, None, T]

AGAIN = 4  # times that a file may turn out to be another one while a layer reads it
LIKELY = 2  # guessed rows of a chunk that is read early: with one it is not likelier than others


@dataclass(slots=True)
class _Coming:
    """A chunk on its way: `rows`, of a buffer of its own that `reading` fills."""

    reading: Reading
    rows: Tensor
    counted: list[bool]  # one for all chunks of a reading: has it been added to the sums?


class _Lying(NamedTuple):
    """Where rows lie: `chunks` in order, and how many rows of each are wanted. `which` int64 [rows]: in which of the chunks a row
    is; `place` int64 [rows]: where in it."""

    chunks: list[Chunk]
    hits: list[int]
    which: Tensor
    place: Tensor


def waited(work: Waits[T], timeout: float) -> T:
    """What it comes to, waiting for whatever it waits for."""
    try:
        while True:
            next(work).wait(timeout)
    except StopIteration as ended:
        found: T = ended.value
        return found


class Prefix:
    """One request's prefix while its prompt is computed. First `open`, then layers in order: `probe_keys`, perhaps
    `all_keys`, `take`, `ahead`. `away`: seconds that it has waited.

    All tensors are rows of the prefix in the order of the text, un-rotated, on the CPU or wherever the shelf has them.
    """

    def __init__(self, loader: Loader, views: Sequence[Selectable]) -> None:
        loader.stats.requests += 1
        self._loader = loader
        self._layout = loader.layout
        self.views = tuple(views)
        self.rows = sum(view.stop - view.start for view in views)
        starts = torch.tensor([view.stop - view.start for view in views]).cumsum(0).tolist()
        self._starts = [0, *starts]
        self._view_of = torch.arange(len(views)).repeat_interleave(torch.tensor([v.stop - v.start for v in views]))
        self._editions: list[str] = [""] * len(views)
        self._orders: list[list[Order] | None] = [None] * len(views)
        self._coming: dict[Name, _Coming] = {}
        self._places: dict[int, Places] = {}
        self._guessed: dict[int, Speculation[Name]] = {}
        self.away = 0.0
        self._began, self._away = time.perf_counter(), 0.0

    def open(self) -> Waits[None]:
        """Look at the files. Errors: `Lost`."""
        yield from self._look_up()
        self._began, self._away = time.perf_counter(), self.away
        self.certain(0)
        self._speculate(0, None)

    # ----------------------------------------------------------------------------------------------- for layers

    def certain(self, layer: int) -> None:
        """Ask for a layer's probe keys."""
        if layer < self._layout.layers:
            self._ask([name for at in self._on_disk() if (name := self._sidecar(at, layer))], PREFETCH)

    def probe_keys(self, layer: int) -> Waits[Tensor]:
        """[rows, probe_heads, head_dim]. Errors: `Lost`."""
        return self._fresh(lambda: self._probe_keys(layer))

    def _probe_keys(self, layer: int) -> Waits[Tensor]:
        sidecars = [self._sidecar(at, layer) for at in range(len(self.views))]
        here = yield from self._fetch([name for name in sidecars if name is not None])
        parts, used = [], []
        for view, name in zip(self.views, sidecars, strict=True):
            if name is None:
                parts.append(self._probe_keys_in_host(view, layer))
            else:
                parts.append(here[name])
                used.append((name, parts[-1], view.rows))
        found = self._joined(parts, self._view_of, self._places_of(layer).stored)
        for name, rows, count in used:  # now, as it may cost others their places on the shelf
            self._loader.shelf.used(name, rows, count, count)
        return found

    def all_keys(self, layer: int) -> Waits[Tensor]:
        """[rows, kv_heads, head_dim], for a layer that falls back. Errors: `Lost`."""
        every = torch.arange(self.rows)
        return self._fresh(lambda: self._tensor(layer, KEYS, self._lying(layer, every, every)))

    def take(self, layer: int, selection: Selection, keys: Tensor | None) -> Waits[tuple[Tensor, Tensor]]:
        """Keys and values of what a layer has selected, [kept, kv_heads, head_dim]; each KV head's may be other rows (spec
        X16). `keys`: what `all_keys` returned, if it was asked. Errors: `Lost`."""
        stats = self._loader.stats
        stats.layers += 1
        stats.fallbacks += selection.kind == "per_head"
        stats.rows_of += self.rows
        stats.rows_kept += selection.kept
        wanted = selection.wanted().cpu()
        if keys is not None:
            keys = _by_head(keys, selection.rows.T) if selection.kind == "per_head" else keys[wanted.to(keys.device)]
        taken, values = yield from self._fresh(lambda: self._taken(layer, wanted, keys))
        if selection.mean is not None:
            mean = normalised(selection.mean)
            for at, view in enumerate(self.views):
                self._loader.learn(view, layer, mean[self._starts[at] : self._starts[at + 1]])
        if selection.kind != "per_head":
            return taken, values
        return taken, _by_head(values, torch.searchsorted(wanted, selection.rows.cpu()).T)

    def _taken(self, layer: int, wanted: Tensor, keys: Tensor | None) -> Waits[tuple[Tensor, Tensor]]:
        lying = self._lying(layer, wanted, wanted)
        self._settle(layer, lying, keys is None)
        if keys is None:
            keys = yield from self._tensor(layer, KEYS, lying)
        return keys, (yield from self._tensor(layer, VALUES, lying))

    def ahead(self, layer: int, selection: Selection) -> None:
        """A layer knows what it wants, and is about to compute: ask for what the next one needs (SPEC §IV-C)."""
        now = time.perf_counter()
        self._loader.budget.measured(now - self._began - (self.away - self._away))
        self._began, self._away = now, self.away
        if layer + 1 < self._layout.layers:
            self.certain(layer + 1)
            self._speculate(layer + 1, selection)

    def more(self, layer: int, tensor: int, wanted: Tensor) -> Waits[tuple[Tensor, Tensor]]:
        """Rows (int64, ascending) that have not been loaded yet and are wanted while decoding, with those that come in the same
        chunks: which, and their keys or values [rows, kv_heads, head_dim]. Errors: `Lost`."""
        return self._fresh(lambda: self._more(layer, tensor, wanted.cpu()))

    def _fresh(self, work: Callable[[], Waits[T]]) -> Waits[T]:
        """What it comes to, begun again where a file turns out to be another one. Errors: `Lost`."""
        for _ in range(AGAIN):
            try:
                return (yield from work())
            except Lost as lost:
                if not lost.stale:
                    raise
            self._places.clear()
            self._coming.clear()
            self.close()
            yield from self._look_up()
        return (yield from work())

    def close(self) -> None:
        """The last layer has what it wants. Waits for nothing; buffers that are still being filled live on by themselves."""
        for guessed in self._guessed.values():
            guessed.settle([])
        self._guessed.clear()
        self._coming.clear()

    def _more(self, layer: int, tensor: int, wanted: Tensor) -> Waits[tuple[Tensor, Tensor]]:
        places = self._places_of(layer)
        chunks = torch.zeros(len(places), dtype=torch.bool)
        chunks[places.number[wanted]] = True
        rows = chunks[places.number].nonzero().squeeze(1)
        found = yield from self._tensor(layer, tensor, self._lying(layer, rows, wanted))
        self._coming.clear()  # nobody asks for these chunks again
        self._loader.stats.renewed_rows += len(rows)
        return rows, found

    # --------------------------------------------------------------------------------------------- what to read

    def _on_disk(self) -> Iterator[int]:
        return (at for at, view in enumerate(self.views) if not view.slots)

    def _look_up(self) -> Waits[None]:
        """Which edition of each file there is, and how its rows lie. Errors: `Lost`."""
        reader = self._loader.reader
        readings = {}
        for at in self._on_disk():
            if reader is None:
                raise Lost(self.views[at].extent)
            readings[at] = reader.read(self.views[at].extent, [], "", DEMAND)
        for at, reading in readings.items():
            view = self.views[at]
            yield from self._come(reading, view.extent)
            head = reading.head
            assert head is not None
            self._editions[at], self._orders[at] = head.edition, None
            self._loader.shelf.now(view.extent, head.edition)
            if head.sidecar is not None and head.sidecar.reordered:
                stored = head.sidecar.order[:, : view.rows]
                self._orders[at] = self._loader.orders(view.extent, head.edition, stored)

    def _sidecar(self, at: int, layer: int) -> Name | None:
        """A view's probe keys in a layer; None where they are in host."""
        view = self.views[at]
        return None if view.slots else Name(view.extent, self._editions[at], layer, PROBES, 0)

    def _places_of(self, layer: int) -> Places:
        if all(order is None for order in self._orders):
            layer = 0  # all layers lie alike
        found = self._places.get(layer)
        if found is None:
            began = time.perf_counter()
            orders = [None if order is None else order[layer] for order in self._orders]
            found = self._places[layer] = self._loader.places(self.views, self._editions, layer, orders)
            self._loader.stats.mapping += time.perf_counter() - began
        return found

    def _name(self, places: Places, layer: int, tensor: int, number: int) -> Name | None:
        """A chunk by its number; None where its extent is in host."""
        at, chunk = places[number]
        view = self.views[at]
        return None if view.slots else Name(view.extent, self._editions[at], layer, tensor, chunk)

    def _speculate(self, layer: int, before: Selection | None) -> None:
        loader = self._loader
        most = loader.budget.bytes(loader.bandwidth) // self._layout.chunk_bytes
        if most < 2 or loader.prior == "none" or not any(True for _ in self._on_disk()):
            return
        k = before.kept if before is not None else self.rows
        rows = guess(loader.prior, before, self._known(layer) if before is None else None, self.rows, k)
        places = self._places_of(layer)
        guessed = self._guessed[layer] = Speculation(loader.stats.tally)
        names = within(places.by_hits(rows, LIKELY), lambda number: self._missing(places, layer, number), most)
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

    def _missing(self, places: Places, layer: int, number: int) -> list[Name]:
        """Keys and values of a chunk that are neither here nor on their way."""
        names = (self._name(places, layer, tensor, number) for tensor in (KEYS, VALUES))
        look = self._loader.shelf.look
        return [name for name in names if name is not None and name not in self._coming and look(name) is None]

    def _settle(self, layer: int, lying: _Lying, keys: bool) -> None:
        """The layer knows what it wants: count what was guessed, and ask for the rest."""
        tensors = (KEYS, VALUES) if keys else (VALUES,)
        names = [
            Name(self.views[at].extent, self._editions[at], layer, tensor, chunk)
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
            reads: list[ChunkRead] = []
            pieces: list[tuple[Name, np.ndarray]] = []
            for run in _runs(sorted(wanted)):
                first, stop = run[0], run[0].chunk + len(run)
                if first.tensor == PROBES:
                    stop = layout.blocks(rows)
                    into = [aligned_memory(stop * layout.probe_chunk_bytes)]
                else:
                    into = [loader.buffers.take() for _ in run]
                reads.append(ChunkRead(first.layer, first.tensor, first.chunk, stop, into))
                pieces += zip(run, into, strict=True)
            reading = loader.reader.read(extent, reads, wanted[0].edition, priority)
            counted = [False]
            for name, memory in pieces:
                self._coming[name] = _Coming(reading, self._as_rows(memory, name.tensor), counted)

    def _as_rows(self, memory: np.ndarray, tensor: int) -> Tensor:
        heads = self._layout.probe_heads if tensor == PROBES else self._layout.kv_heads
        return torch.from_numpy(memory).view(self._loader.arena.dtype).view(-1, heads, self._layout.head_dim)

    # ------------------------------------------------------------------------------------------------ what is here

    def _lying(self, layer: int, rows: Tensor, wanted: Tensor) -> _Lying:
        """Where rows (int64, ascending) of a layer are to be found, of which some count as wanted."""
        places = self._places_of(layer)
        began = time.perf_counter()
        number = places.number[rows]
        rows_in = torch.bincount(number, minlength=len(places))
        numbers = rows_in.nonzero().squeeze(1)
        hits = rows_in if wanted is rows else places.hits(wanted)
        which = (rows_in.clamp(max=1).cumsum(0) - 1)[number]
        chunks = [places[number] for number in numbers.tolist()]
        found = _Lying(chunks, hits[numbers].tolist(), which, places.within[rows])
        self._loader.stats.mapping += time.perf_counter() - began
        return found

    def _tensor(self, layer: int, tensor: int, lying: _Lying) -> Waits[Tensor]:
        """A layer's keys or values of rows, [rows, kv_heads, head_dim]. Errors: `Lost`."""
        views, editions = self.views, self._editions
        names = [
            None if views[at].slots else Name(views[at].extent, editions[at], layer, tensor, chunk)
            for at, chunk in lying.chunks
        ]
        here = yield from self._fetch([name for name in names if name is not None])
        parts, used = [], []
        for (at, chunk), name, hit in zip(lying.chunks, names, lying.hits, strict=True):
            if name is None:
                part = self._block(views[at], layer, tensor, chunk)
            else:
                part = here[name]
                tokens = min(CHUNK, views[at].rows - CHUNK * chunk)
                used.append((name, part, tokens, min(hit, tokens)))
            parts.append(part)
        joined = self._joined(parts, lying.which, lying.place)
        for name, part, tokens, wanted in used:  # now, as it may cost others their places on the shelf
            self._loader.shelf.used(name, part, tokens, wanted)
        return joined

    def _joined(self, parts: Sequence[Tensor], which: Tensor, place: Tensor) -> Tensor:
        """Rows out of tensors, those that are on the device and those that are not: on the device if one of them is."""
        dtype = self._loader.dtype
        devices = {part.device for part in parts}
        if len(devices) == 1:
            return picked(parts, which, place).to(dtype)
        here = self._loader.shelf.device
        out = torch.empty((len(which), *parts[0].shape[1:]), dtype=dtype, device=here)
        for device in devices:
            mine = torch.tensor([part.device == device for part in parts])
            at = mine[which].nonzero().squeeze(1)
            some = [part for part in parts if part.device == device]
            out[at.to(here)] = picked(some, (mine.cumsum(0) - 1)[which[at]], place[at]).to(here, dtype)
        return out

    def _fetch(self, names: Sequence[Name]) -> Waits[dict[Name, Tensor]]:
        """Chunks from the shelf, and from the disk. Errors: `Lost`."""
        shelf, found = self._loader.shelf, {}
        for name in names:  # now: while others come, these may lose their places on the shelf
            if (rows := shelf.look(name)) is not None:
                found[name] = rows
        self._ask([name for name in names if name not in found], DEMAND)
        for name in names:
            if name in found:
                continue
            coming = self._coming[name]
            yield from self._come(coming.reading, name.extent)
            if not coming.counted[0]:
                coming.counted[0] = True
                self._loader.took(coming.reading)
            found[name] = coming.rows
        return found

    def _come(self, reading: Reading, extent: str) -> Waits[None]:
        """Wait for a reading. Errors: `Lost`."""
        if not reading.ended:
            began = time.perf_counter()
            yield reading
            self.away += time.perf_counter() - began
        if not reading.wait(0):
            if not reading.stale:
                self._loader.forget(extent)
            raise Lost(extent, reading.stale)

    def _block(self, view: Selectable, layer: int, tensor: int, chunk: int) -> Tensor:
        return self._loader.arena[layer, tensor, view.slots[chunk]]

    def _probe_keys_in_host(self, view: Selectable, layer: int) -> Tensor:
        """Of all rows that a view's extent has up to the view's end."""
        keys = self._loader.arena[layer, KEYS, :, :, : self._layout.probe_heads]
        return keys.index_select(0, torch.tensor(view.slots[: -(-view.stop // CHUNK)])).flatten(0, 1)


def _by_head(rows: Tensor, places: Tensor) -> Tensor:
    """`out[i, head] = rows[places[i, head], head]`: `rows` [rows, heads, head_dim], `places` int64 [k, heads]."""
    heads = rows.shape[1]
    flat = heads * places + torch.arange(heads, device=places.device)
    return rows.flatten(0, 1).index_select(0, flat.flatten().to(rows.device)).view(-1, heads, rows.shape[2])


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
