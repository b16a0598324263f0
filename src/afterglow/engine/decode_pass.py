"""Run steps that decode alone on CUDA: recorded once for each size of batch and tables as a CUDA graph, and replayed.

Launching a layer's dozen kernels takes longer than a device computes few rows. A pass of one size launches the same work whatever the
rows are: all its numbers lie in one vector on the device, which a step fills in one copy. Batches are filled up to the next size with
rows of no request, which read nothing, are written to a row of their own, and are saved in a lane of their own.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from afterglow.engine.cached_attention import RelayAttend, RelayGroup, Results
from afterglow.engine.gather import BatchEntry, Gatherer
from afterglow.engine.kv_shape import KVShape
from afterglow.engine.recorder import NotRecorded, Recorder
from afterglow.engine.tee import Tee
from afterglow.engine.transfers import StepInputs
from afterglow.kernels.device_reads import DeviceReads
from afterglow.kernels.device_rows import DeviceRows
from afterglow.kernels.no_memory import ran_out
from afterglow.kernels.paged_parts import PartLists, PartTables, RowPlaces, TableSizes, place_numbers
from afterglow.kernels.rope import LayerRotations
from afterglow.kernels.sending import on_device
from afterglow.model.decoder import Attention, Decoder
from afterglow.plan.step import Run

log = logging.getLogger("afterglow.engine")

BATCHES = (1, 2, 4, 8, 16, 32, 64, 96, 128)  # rows of a pass; above, multiples of 64
MOST_PASSES = 32  # sizes that are kept, those used last
AGAIN = 1024  # passes, after which one is recorded again where there was no memory for it

Kind = tuple[bool, int]  # of layers that read the same rows: whether they hold the last ones alone, and their window


class Size(NamedTuple):
    """How large a pass is: rows of its batch, and the tables that each kind of layers reads."""

    rows: int
    tables: tuple[TableSizes, ...]


class NotStatic(Exception):
    """A kernel that a pass needs is not there, or was given up."""


class StaticAttend:
    """Attend by tables that stay where they are. An `Attend` for all steps of one size."""

    def __init__(
        self,
        shape: KVShape,
        tee: Tee,
        angles: LayerRotations | None,
        rows: Mapping[bool, RowPlaces],
        tables: Mapping[Kind, PartTables],
    ) -> None:
        """`rows`: where new rows go, by whether layers hold the last rows alone. `tables`: what is read."""
        self._shape, self._tee, self._angles, self._tables = shape, tee, angles, tables
        self._rows = {recent: DeviceRows(places) for recent, places in rows.items()}
        self._results = Results()

    def __call__(self, layer: int, attention: Attention, x: Tensor) -> Tensor:
        """Attend in one layer. See `Attend`. Raises: NotStatic."""
        recent, number = self._shape.place(layer)
        q, k, v = attention.project(x)
        self._tee.layer(layer, k, v)
        placed = self._rows[recent].place(number, q, k, v, None if self._angles is None else self._angles.at(layer))
        if placed is None:
            raise NotStatic
        out, lse = self._results.cleared(attention, placed)
        if not DeviceReads(self._tables[recent, attention.window], attention.cap).attend(
            number, placed, attention.scale, out, lse
        ):
            raise NotStatic
        return out.to(placed.dtype).flatten(1)


class DecodePass:
    """The passes of one size, over numbers on the device that each step fills in anew."""

    def __init__(
        self,
        decoder: Decoder,
        shape: KVShape,
        tee: Tee,
        base: Tensor,
        size: Size,
        kinds: Sequence[Kind],
        recorder: Recorder,
    ) -> None:
        """`base`: a row on the device, which is no context's. `kinds`: of layers."""
        self._decoder, self._shape, self._tee, self._recorder = decoder, shape, tee, recorder
        groups = sorted({recent for recent, _ in kinds})
        lengths = [*[size.rows] * 4, *[4 * size.rows] * len(groups), *(each.total for each in size.tables)]
        self.numbers = torch.zeros(sum(lengths), dtype=torch.int64, device=decoder.device)
        self._ids, self._positions, lanes, places, *rest = torch.split(self.numbers, lengths)
        self._index = torch.arange(size.rows, device=decoder.device), lanes, places
        self._rows = {recent: RowPlaces(base, rest.pop(0).view(-1, 4)) for recent in groups}
        self._tables = {
            kind: PartTables(base, sizes, numbers)
            for kind, sizes, numbers in zip(kinds, size.tables, rest, strict=True)
        }
        # The first time builds the kernels that are needed: nothing can be built while a graph is recorded.
        self._computed_once = False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._hidden = torch.empty(0)

    def run(self, record: bool) -> Tensor:
        """Compute the final-normed hidden rows [rows, hidden]. `record`: the pass, if it is time.

        Raises: NotStatic; NotRecorded.
        """
        if self._graph is None and record and self._computed_once:
            self._graph, self._hidden = self._recorder.record(self._computed)
        if self._graph is None:
            hidden = self._computed()
            self._computed_once = True
            return hidden
        self._graph.replay()
        return self._hidden

    def _computed(self) -> Tensor:
        self._tee.use(self._index, in_order=True)
        attend = StaticAttend(self._shape, self._tee, self._decoder.rotation(self._positions), self._rows, self._tables)
        return self._decoder.forward(self._ids, self._positions, attend)


@dataclass(frozen=True, slots=True)
class Ahead:
    """A step that was launched before the plan has asked for it. `rows`: by job and its row, the row of the batch. A job's context is the
    same in the next step that decodes alone. It is not kept here: when a job ends, its pages are free at once."""

    rows: dict[tuple[int, int], int]
    saved: list[tuple[int, int]]  # of each row of the batch: lane and place
    hidden: Tensor


class DecodePasses:
    """Passes of all sizes that steps have had of late, and the one that is ahead. For the runner alone."""

    def __init__(self, decoder: Decoder, shape: KVShape, tee: Tee, inputs: StepInputs, gatherer: Gatherer) -> None:
        """Take a decoder on CUDA that has `static_rows`. `inputs`: what a step's numbers are sent by."""
        self._decoder, self._shape, self._tee, self._inputs, self._gatherer = decoder, shape, tee, inputs, gatherer
        # Passes that were launched; passes launched ahead that were taken, and that were dropped.
        self.counts = Counter[str]()
        self._passes: dict[Size, DecodePass] = {}
        self._recorder = Recorder(decoder.device)
        self._most_rows = decoder.static_rows
        self._record_from = 0.0  # launched passes before which none is recorded
        self._off = False
        self._ahead: Ahead | None = None
        sizes = (shape.layers, 2, shape.kv_heads, 1, shape.head_dim)
        self._base = torch.zeros(sizes, dtype=shape.dtype, device=shape.device)
        kinds = [(shape.place(at)[0], layer.attention.window) for at, layer in enumerate(decoder.layers)]
        self._layer_of = {kind: kinds.index(kind) for kind in sorted(set(kinds))}  # one of each kind

    def hidden(self, runs: Sequence[Run], entries: list[BatchEntry], groups: list[RelayGroup]) -> Tensor | None:
        """Return the final-normed hidden rows [requests, hidden] of a step whose runs decode alone; None where it is to be computed in
        another way. `groups`: of entries that read rows together."""
        ahead = self._taken(entries)
        if ahead is not None:
            return ahead
        tokens = torch.tensor([run.tokens[0] for run in runs])
        return self._run(tokens, entries, groups, self._tee.places(len(entries)))

    def go_ahead(self, entries: Sequence[BatchEntry], groups: Sequence[RelayGroup], tokens: Tensor) -> None:
        """Launch the step that the plan expects next (`Step.decodes_on`): with `tokens`, int64 [requests] on the device, which are not known
        yet. What is written is no row of a context before the plan has asked for that step; if it does not, it is computed anew."""
        # Layers with a window may have pages up to this row alone.
        if not all(entry.context.holds(entry.stop + 1) for entry in entries):
            return
        saved = self._tee.next_places(len(entries))
        entry_of = {
            entry.job: BatchEntry(
                entry.job, entry.where, entry.stop, entry.stop + 1, entry.context, own_from=entry.own_from
            )
            for entry in entries
        }
        following = list(entry_of.values())
        shared = [
            RelayGroup([entry_of[each.job] for each in group.entries], group.start, group.stop, group.queries)
            for group in groups
        ]
        try:
            hidden = self._run(tokens, following, shared, saved)
        except RuntimeError as error:
            if not ran_out(error):
                raise
            hidden = None  # the step that is under way goes on without
        if hidden is not None:
            rows = {(entry.job, entry.start): row for row, entry in enumerate(following)}
            self._ahead = Ahead(rows, list(zip(*saved, strict=True)), hidden)

    def drop(self) -> None:
        """Forget the pass that is ahead."""
        self.counts["dropped"] += self._ahead is not None
        self._ahead = None

    def _taken(self, entries: Sequence[BatchEntry]) -> Tensor | None:
        """Return the hidden rows of a step that was launched ahead, if its requests are among those, and their rows are saved where
        they were put."""
        ahead = self._ahead
        if ahead is None:
            return None
        rows = [ahead.rows.get((entry.job, entry.start), -1) for entry in entries]
        saved = list(zip(*self._tee.places(len(entries)), strict=True))
        if any(row < 0 or ahead.saved[row] != place for row, place in zip(rows, saved, strict=True)):
            self.drop()
            return None
        self._ahead = None
        self.counts["taken"] += 1
        whole = rows == list(range(len(ahead.hidden)))
        return ahead.hidden if whole else ahead.hidden[on_device(rows, ahead.hidden.device)]

    def _run(
        self,
        tokens: Tensor,
        entries: list[BatchEntry],
        groups: list[RelayGroup],
        saved: tuple[list[int], list[int]],
    ) -> Tensor | None:
        """Run a pass. `tokens` int64 [requests], on the host or the device. `saved`: lanes of the tee, and places there."""
        attend = RelayAttend(entries, None, self._gatherer, self._tee, groups)
        found = None if self._off else self._numbers(tokens, entries, attend, saved)
        if found is None:
            return None
        size, numbers = found
        chosen = self._passes.pop(size, None)
        if chosen is None:
            parts = self._decoder, self._shape, self._tee, self._base
            chosen = DecodePass(*parts, size, tuple(self._layer_of), self._recorder)
        self._passes[size] = chosen
        if len(self._passes) > MOST_PASSES:
            del self._passes[next(iter(self._passes))]
        self._inputs.send(torch.tensor(numbers), into=chosen.numbers)
        if tokens.device.type != "cpu":
            chosen.numbers[: len(tokens)].copy_(tokens)
        self.counts["launched"] += 1
        record = self.counts["launched"] >= self._record_from
        short = False
        try:
            return chosen.run(record)[: len(entries)]
        except NotStatic:
            self._off = True
        except NotRecorded as error:
            log.warning("steps that decode are not recorded as CUDA graphs: %s", error)
            self._record_from = math.inf
            short = error.short
        if short:  # a pass as it is needs less, and there may be more later
            self._record_from = self.counts["launched"] + AGAIN
            torch.cuda.empty_cache()  # what the error held is free by now
        return None

    def _numbers(
        self, tokens: Tensor, entries: Sequence[BatchEntry], attend: RelayAttend, saved: tuple[list[int], list[int]]
    ) -> tuple[Size, list[int]] | None:
        """Make the numbers of a pass, as `DecodePass` has them. None: no pass of this size can be launched."""
        rows = len(entries)
        most = next((each for each in BATCHES if rows <= each), -(-rows // 64) * 64)
        if most > self._most_rows:
            return None
        tables: list[PartLists] = []
        for layer in self._layer_of.values():
            attention = self._decoder.layers[layer].attention
            parts = [read.part() for read in attend.wanted(layer, attention)]
            few = [part for part in parts if part is not None]
            if len(few) < len(parts):
                return None
            tables.append(PartLists(few, attention.heads // attention.kv_heads, self._base))
        spare = [0] * (most - rows)
        ids = tokens.tolist() if tokens.device.type == "cpu" else [0] * rows
        numbers = [*ids, *spare, *(entry.start for entry in entries), *spare]
        for each, none in zip(saved, self._tee.nowhere, strict=True):
            numbers += each
            numbers += [none] * len(spare)
        for layer in self._groups():
            new = [(entry.context.pages(layer), entry.start, entry.stop) for entry in entries]
            numbers += place_numbers(new, self._base)
            numbers += (0, *self._base.stride()[:3]) * len(spare)
        size = Size(most, tuple(each.sizes.rounded(most) for each in tables))
        for lists, sizes in zip(tables, size.tables, strict=True):
            numbers += lists.numbers(sizes)
        return size, numbers

    def _groups(self) -> Iterator[int]:
        """Yield a layer that holds all rows, and one that holds the last rows alone, as far as there are such layers."""
        for recent in (False, True):
            yield from [layer for kind, layer in self._layer_of.items() if kind[0] is recent][:1]


def decodes_alone(runs: Sequence[Run]) -> bool:
    """Tell whether each run computes one row and draws from it, with nothing to be brought in before."""
    return all(len(run.tokens) == 1 and run.sample and run.admit is None and not run.gathers for run in runs)
