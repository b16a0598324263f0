"""Passes whose work on CUDA is the same whatever their rows are: recorded once for each size as CUDA graphs, and replayed.

Launching a layer's dozen kernels takes longer than a device computes few rows. All numbers of a pass lie in one vector on the device,
which a step fills in one copy. Batches are filled up to the next size with rows of no request, which read nothing, are written to a row
of their own, and are saved in a lane of their own.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from afterglow.engine.cached_attention import RelayAttend, Results
from afterglow.engine.gather import BatchEntry, Gatherer
from afterglow.engine.kv_shape import KVShape
from afterglow.engine.recorder import NotRecorded, Recorder
from afterglow.engine.tee import Tee
from afterglow.engine.transfers import StepInputs
from afterglow.kernels.device_reads import DeviceReads
from afterglow.kernels.device_rows import DeviceRows
from afterglow.kernels.paged_parts import PartLists, PartTables, RowPlaces, TableSizes, place_numbers
from afterglow.kernels.rope import LayerRotations
from afterglow.model.decoder import Attention, Decoder

log = logging.getLogger("afterglow.engine")

AGAIN = 1024  # passes, after which one is recorded again where there was no memory for it

Kind = tuple[bool, int]  # of layers that read the same rows: whether they hold the last ones alone, and their window
SaveLayer = Callable[[int, Tensor, Tensor], None]  # takes a layer, its new keys (un-rotated) and values
Pass = TypeVar("Pass")
Result = TypeVar("Result")


class Size(NamedTuple):
    """How large a pass is: rows of its batch, and the tables that each kind of layers reads."""

    rows: int
    tables: tuple[TableSizes, ...]


class NotStatic(Exception):
    """A kernel that a pass needs is not there, or was given up."""


class Static(NamedTuple):
    """What all passes of an engine share. `base`: a row on the device, which is no context's. `layer_of`: one layer of each kind. `rows`: a
    pass has at most."""

    decoder: Decoder
    shape: KVShape
    tee: Tee
    inputs: StepInputs
    gatherer: Gatherer
    recorder: Recorder
    base: Tensor
    layer_of: Mapping[Kind, int]
    rows: int

    @classmethod
    def of(cls, decoder: Decoder, shape: KVShape, tee: Tee, inputs: StepInputs, gatherer: Gatherer) -> Static:
        """Take a decoder on CUDA that has `static_rows`. `inputs`: what a step's numbers are sent by."""
        base = torch.zeros((shape.layers, 2, shape.kv_heads, 1, shape.head_dim), dtype=shape.dtype, device=shape.device)
        kinds = [(shape.place(at)[0], layer.attention.window) for at, layer in enumerate(decoder.layers)]
        layer_of = {kind: kinds.index(kind) for kind in sorted(set(kinds))}
        return cls(decoder, shape, tee, inputs, gatherer, Recorder(decoder.device), base, layer_of, decoder.static_rows)

    def groups(self) -> Iterator[int]:
        """Yield a layer that holds all rows, and one that holds the last rows alone, as far as there are such layers."""
        for recent in (False, True):
            yield from [layer for kind, layer in self.layer_of.items() if kind[0] is recent][:1]

    def tables(self, attend: RelayAttend, most: int | None = None) -> list[PartLists] | None:
        """List what each kind of layers reads. `most`: queries of a read; None: as many as decoding has. None: a read has more."""
        found: list[PartLists] = []
        for layer in self.layer_of.values():
            attention = self.decoder.layers[layer].attention
            parts = [read.part(most) for read in attend.wanted(layer, attention)]
            few = [part for part in parts if part is not None]
            if not few or len(few) < len(parts):
                return None
            found.append(PartLists(few, attention.heads // attention.kv_heads, self.base))
        return found

    def numbers(
        self,
        ids: Sequence[int],
        entries: Sequence[BatchEntry],
        saved: tuple[list[int], list[int]],
        tables: Sequence[PartLists],
        size: Size,
    ) -> list[int]:
        """List the numbers of a pass, as `StaticNumbers` has them. `saved`: lanes of the tee, and places there, of each row."""
        spare = [0] * (size.rows - len(ids))
        numbers = [*ids, *spare]
        for entry in entries:
            numbers += range(entry.start, entry.stop)
        numbers += spare
        for each, none in zip(saved, self.tee.nowhere, strict=True):
            numbers += each
            numbers += [none] * len(spare)
        for layer in self.groups():
            new = [(entry.context.pages(layer), entry.start, entry.stop) for entry in entries]
            numbers += place_numbers(new, self.base)
            numbers += (0, *self.base.stride()[:3]) * len(spare)
        for lists, sizes in zip(tables, size.tables, strict=True):
            numbers += lists.numbers(sizes)
        return numbers


class StaticNumbers:
    """The numbers of passes of one size, in one vector on the device. `index`: as `Tee.use` takes it."""

    def __init__(self, static: Static, size: Size) -> None:
        device = static.decoder.device
        groups = sorted({recent for recent, _ in static.layer_of})
        lengths = [*[size.rows] * 4, *[4 * size.rows] * len(groups), *(each.total for each in size.tables)]
        self.all = torch.zeros(sum(lengths), dtype=torch.int64, device=device)
        self.ids, self.positions, lanes, places, *rest = torch.split(self.all, lengths)
        self.index = torch.arange(size.rows, device=device), lanes, places
        self._static = static
        self._rows = {recent: RowPlaces(static.base, rest.pop(0).view(-1, 4)) for recent in groups}
        self._tables = {
            kind: PartTables(static.base, sizes, numbers)
            for kind, sizes, numbers in zip(static.layer_of, size.tables, rest, strict=True)
        }

    def attend(self, save: SaveLayer) -> StaticAttend:
        """Return attention by these numbers. `save` takes each layer's new rows."""
        angles = self._static.decoder.rotation(self.positions)
        return StaticAttend(self._static.shape, save, angles, self._rows, self._tables)


class StaticAttend:
    """Attend by tables that stay where they are. An `Attend` for all steps of one size."""

    def __init__(
        self,
        shape: KVShape,
        save: SaveLayer,
        angles: LayerRotations | None,
        rows: Mapping[bool, RowPlaces],
        tables: Mapping[Kind, PartTables],
    ) -> None:
        """`rows`: where new rows go, by whether layers hold the last rows alone. `tables`: what is read."""
        self._shape, self._save, self._angles, self._tables = shape, save, angles, tables
        self._rows = {recent: DeviceRows(places) for recent, places in rows.items()}
        self._results = Results()

    def __call__(self, layer: int, attention: Attention, x: Tensor) -> Tensor:
        """Attend in one layer. See `Attend`. Raises: NotStatic."""
        recent, number = self._shape.place(layer)
        q, k, v = attention.project(x)
        self._save(layer, k, v)
        placed = self._rows[recent].place(number, q, k, v, None if self._angles is None else self._angles.at(layer))
        if placed is None:
            raise NotStatic
        out, lse = self._results.cleared(attention, placed)
        if not DeviceReads(self._tables[recent, attention.window], attention.cap).attend(
            number, placed, attention.scale, out, lse
        ):
            raise NotStatic
        return out.to(placed.dtype).flatten(1)


class PassCache(Generic[Pass]):
    """Passes of the sizes that steps have had of late, and whether they are recorded. `counts`: passes that were launched."""

    def __init__(self, make: Callable[[Size], Pass], most: int) -> None:
        """`make` makes the pass of a size, `most` are kept, those used last."""
        self._most = most
        self.counts = Counter[str]()
        self.off = False  # a kernel is missing
        self._make = make
        self._passes: dict[Size, Pass] = {}
        self._record_from = 0.0  # launched passes before which none is recorded

    def of(self, size: Size) -> Pass:
        """Return the pass of a size."""
        chosen = self._passes.pop(size, None)
        if chosen is None:
            chosen = self._make(size)
        self._passes[size] = chosen
        if len(self._passes) > self._most:
            del self._passes[next(iter(self._passes))]
        return chosen

    def launch(self, run: Callable[[bool], Result]) -> Result | None:
        """Launch a pass: `run` is told whether it may be recorded. None: it could not be launched."""
        self.counts["launched"] += 1
        record = self.counts["launched"] >= self._record_from
        short = False
        try:
            return run(record)
        except NotStatic:
            self.off = True
        except NotRecorded as error:
            log.warning("steps are not recorded as CUDA graphs: %s", error)
            self._record_from = math.inf
            short = error.short
        if short:  # a pass as it is needs less, and there may be more later
            self._record_from = self.counts["launched"] + AGAIN
            torch.cuda.empty_cache()  # what the error held is free by now
        return None
