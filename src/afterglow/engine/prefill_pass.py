"""Run steps of few rows on CUDA as graphs of some layers each: next turns of conversations, replies beside them, and guesses (`static_pass`).

Between two graphs a step has the next layers' cached rows come, and the new rows of the last layers leave: both go on beside computing
(CachedAttention §3.2). Larger prefills keep the device busy for longer than their launches take, and are launched kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from afterglow.engine.cached_attention import RelayAttend, RelayGroup
from afterglow.engine.gather import BatchEntry
from afterglow.engine.kv_shape import KVShape
from afterglow.engine.static_pass import PassCache, Size, Static, StaticNumbers
from afterglow.kernels.paged_parts import WIDE_CHUNK, PartLists
from afterglow.kernels.sending import whole
from afterglow.kernels.stored_rows import stored_width
from afterglow.model.decoder import Hidden

ROWS = (16, 32, 64, 128, 192, 256, 384, 512)  # of a pass
MOST_RESULTS = 4096  # of attention in a layer: queries, times the parts that their rows are read in
LAYERS = 4  # of a graph
MOST_PASSES = 64  # sizes that are kept


class Between:
    """Hold what graphs hand on: a pass's rows between layers, and new rows of the last layers, which leave while the next ones are computed.
    The memory is the same for all passes, since one runs after another."""

    def __init__(self, shape: KVShape, hidden: int, kv_dtype: torch.dtype) -> None:
        self.layers = min(LAYERS, shape.layers)
        self.x, self.normed = torch.empty((2, ROWS[-1], hidden), dtype=shape.dtype, device=shape.device)
        width = stored_width(shape.head_dim, kv_dtype)
        size = (2, self.layers, 2, ROWS[-1], shape.kv_heads, width)
        self._new = torch.empty(size, dtype=kv_dtype, device=shape.device)
        self._sent: list[Any] = [None, None]  # events: the new rows of a half have left
        self._device, self._where = torch.get_device_module(shape.device), shape.device

    def new(self, graph: int) -> Tensor:
        """Return where new rows of a graph's layers go: [layers, 2, rows, kv_heads, stored width]."""
        return self._new[graph % 2]

    def wait(self, graph: int) -> None:
        """Have the computing queue come after the rows that leave from where a graph puts its own."""
        if (sent := self._sent[graph % 2]) is not None:
            self._device.current_stream(self._where).wait_event(sent)

    def sent(self, graph: int, event: Any) -> None:
        """Note that a graph's new rows have left after an event, None for none."""
        self._sent[graph % 2] = event


class PrefillPass:
    """The passes of one size, over numbers on the device that each step fills in anew."""

    def __init__(self, static: Static, size: Size, between: Between) -> None:
        self._static, self._between, self._size = static, between, size.rows
        self.numbers = StaticNumbers(static, size)
        layers = static.shape.layers
        self._layers = [(at, min(at + between.layers, layers)) for at in range(0, layers, between.layers)]
        self._graphs: list[torch.cuda.CUDAGraph | None] = [None] * len(self._layers)
        self._computed = 0  # graphs whose kernels have been built: nothing can be built while a graph is recorded

    def run(self, record: bool, entries: Sequence[BatchEntry]) -> Hidden:
        """Take the step's rows through all layers, or up to the layers that an entry's cached rows do not come to. `record`: graphs, if it is
        time.

        Raises: NotStatic; NotRecorded.
        """
        static, between = self._static, self._between
        done = 0
        for graph, (first, stop) in enumerate(self._layers):
            for layer in range(first, stop):
                static.gatherer.layer(layer)
            if any(entry.failed is not None for entry in entries):
                break
            between.wait(graph)
            self._launch(graph, record)
            between.sent(graph, static.tee.send_layers(first, stop, between.new(graph)))
            static.gatherer.computed(stop - 1)
            done = stop
        return Hidden(between.x[: self._size], between.normed[: self._size], done)

    def _launch(self, graph: int, record: bool) -> None:
        if self._graphs[graph] is None and record and graph < self._computed:
            self._graphs[graph], _ = self._static.recorder.record(lambda: self._compute(graph))
        recorded = self._graphs[graph]
        if recorded is not None:
            recorded.replay()
            return
        self._compute(graph)
        self._computed = max(self._computed, graph + 1)

    def _compute(self, graph: int) -> None:
        """Take rows through the layers of a graph, from and to the memory that graphs share."""
        static, between, rows, numbers = self._static, self._between, self._size, self.numbers
        first, stop = self._layers[graph]
        x, normed = between.x[:rows], between.normed[:rows]
        new: list[tuple[Tensor, Tensor]] = []
        attend = numbers.attend(lambda layer, keys, values: new.append((keys, values)))
        if first:
            hidden = Hidden(x, normed, first)
        else:
            hidden = static.decoder.begin(numbers.ids, numbers.positions)
        static.decoder.go_on(hidden, attend, stop=stop)
        static.tee.take_layers(first, new, numbers.index, between.new(graph)[: stop - first, :, :rows])
        x.copy_(hidden.x)
        normed.copy_(hidden.normed)


class PrefillPasses:
    """Passes of all sizes that steps have had of late. For the runner alone."""

    def __init__(self, static: Static, kv_dtype: torch.dtype) -> None:
        self._static = static
        between = Between(static.shape, static.decoder.spec.hidden, kv_dtype)
        self._cache = PassCache(lambda size: PrefillPass(static, size, between), MOST_PASSES)
        self.counts = self._cache.counts  # passes that were launched, and unfinished ones

    def hidden(self, ids: Sequence[int], entries: list[BatchEntry], groups: list[RelayGroup]) -> Hidden | None:
        """Take a step's rows, with tokens `ids`, through all layers, or through the first ones where the rest is to be computed in another
        way; None: through none. `groups`: of entries that read rows together."""
        static = self._static
        most = next((each for each in ROWS if len(ids) <= each), None)
        if self._cache.off or most is None or most > static.rows:
            return None
        if sum((entry.stop - entry.start) * (entry.stop // WIDE_CHUNK) for entry in entries) > MOST_RESULTS:
            return None
        tables = static.tables(RelayAttend(entries, None, static.gatherer, static.tee, groups), ROWS[-1])
        size = None if tables is None else size_of(most, tables)
        if tables is None or size is None:
            return None
        numbers = static.numbers(ids, entries, static.tee.places(len(ids)), tables, size)
        chosen = self._cache.of(size)
        static.inputs.send(whole(numbers), into=chosen.numbers.all)
        hidden = self._cache.launch(lambda record: chosen.run(record, entries))
        if hidden is None:
            return None
        self.counts["unfinished"] += hidden.layer < static.shape.layers
        if not hidden.layer:
            return None
        return Hidden(hidden.x[: len(ids)], hidden.normed[: len(ids)], hidden.layer)


def size_of(rows: int, tables: Sequence[PartLists]) -> Size | None:
    """Return the size of a pass that has room for tables; None for too large ones. All have as many results: no kernel touches those that
    are too many, and there are fewer sizes."""
    if max(each.sizes.results for each in tables) > MOST_RESULTS:
        return None
    sizes = (each.sizes.rounded(rows)._replace(order=MOST_RESULTS, results=MOST_RESULTS) for each in tables)
    return Size(rows, tuple(sizes))
