"""Run requests that select rows of their prefix, so that no other request waits for their reads.

A prompt that selects takes a separate pass through the decoder (`SeparatePass`), a few layers in each step while others decode.
Where the pass would have to wait for the disk it is left, and goes on in a later step. Decoded tokens go with those of other
requests (`SelectiveDecoding`); a request that would have to wait leaves that pass, and goes on in a separate one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from afterglow.engine.gather import BatchEntry
from afterglow.engine.selective import PrefixSelection
from afterglow.importance.chunk_loader import ImportanceStats, RowsLost
from afterglow.importance.waits import Waits
from afterglow.kernels.attention import attend, merge
from afterglow.kernels.no_memory import ran_out
from afterglow.kernels.sending import on_device
from afterglow.model.decoder import Attention, Hidden
from afterglow.store.moving.reading import Reading

log = logging.getLogger("afterglow.engine")


class WaitBudget:
    """Limit how long one step waits for the disk: `left` seconds, for all reads together."""

    def __init__(self, seconds: float, stats: ImportanceStats) -> None:
        self.left = seconds
        self._stats = stats

    def wait(self, reading: Reading) -> bool:
        """Wait for a reading within the budget. Returns whether it has ended."""
        if not reading.ended and self.left > 0:
            began = time.perf_counter()
            reading.wait(self.left)
            took = time.perf_counter() - began
            self.left -= took
            self._stats.waited += took
        return reading.ended


class SeparatePass:
    """Take one request's rows through the decoder, apart from others. An `Attend`."""

    def __init__(
        self,
        selection: PrefixSelection,
        entry: BatchEntry,
        hidden: Hidden,
        work: Waits[Tensor] | None = None,
        waits_for: Reading | None = None,
    ) -> None:
        """`work`: attention of the present layer, if it has begun, which waits for `waits_for`."""
        self.selection, self.entry, self.hidden = selection, entry, hidden
        self._work, self._waits_for, self._since = work, waits_for, time.monotonic()
        self.exhausted = False  # the device has no memory for it
        self.seconds = 0.0  # that it has computed and selected, without what it waited for
        self.waited = 0.0  # seconds, until it was its turn again
        decoder = selection.shared.decoder
        self._angles = decoder.rotation(torch.arange(entry.start, entry.stop, device=decoder.device))
        self._last = on_device([len(hidden.x) - 1], decoder.device)

    @property
    def over(self) -> bool:
        """Tell whether all layers are computed, or never will be."""
        through = self.hidden.layer == self.selection.shared.decoder.spec.layers
        return through or self.exhausted or self.entry.failed is not None

    @property
    def waits_for(self) -> Reading | None:
        """Get the reading that the pass cannot go on without; None if it has ended, or is too late."""
        reading = self._waits_for
        late = time.monotonic() - self._since >= self.selection.shared.loader.timeout
        return None if reading is None or reading.ended or late else reading

    def go_on(self, layers: int) -> int:
        """Compute up to `layers` more layers without waiting. Returns how many were computed.

        Where rows are lost, the entry's `failed` names the extent. The last layer computes the last row alone.
        """
        decoder, first, began = self.selection.shared.decoder, self.hidden.layer, time.perf_counter()
        if self._waits_for is not None:
            self.waited += time.monotonic() - self._since
        try:
            decoder.go_on(self.hidden, self, self._last, min(first + layers, decoder.spec.layers))
        except _MustWait:
            pass
        except RowsLost as lost:
            self.entry.failed = lost.extent
        except RuntimeError as error:
            if not ran_out(error):
                raise
            log.warning("the device has no memory for %d rows that select: %s", len(self.hidden.x), error)
            self.exhausted = True
        self.seconds += time.perf_counter() - began
        return self.hidden.layer - first

    def __call__(self, layer: int, attention: Attention, x: Tensor) -> Tensor:
        """Attend in one layer. See `Attend`."""
        entry = self.entry
        if self._work is None:
            q, k, v = attention.project(x)
            q, k = attention.rotate_both(q, k, self._angles)
            entry.context.write(layer, entry.start, k, v)
            self._work = attended(self.selection, entry, layer, q, attention.scale)
        try:
            while True:
                self._waits_for, self._since = next(self._work), time.monotonic()
                if self.waits_for is not None:
                    raise _MustWait
        except StopIteration as ended:
            self._work = self._waits_for = None
            out: Tensor = ended.value
            return out.flatten(1)


class _MustWait(Exception):
    """A pass cannot go on now."""


def go_on(passes: Sequence[SeparatePass], work: int, budget: WaitBudget) -> int:
    """Take passes through their next layers, at least one layer each, until they have computed `work` rows of layers, or all
    have to wait for longer than the budget. Returns the rest of `work`."""
    while passes:
        for each in passes:
            rows = len(each.hidden.x)
            while work > 0 and not each.over and each.waits_for is None:
                work -= rows * max(1, each.go_on(max(1, work // rows)))
        passes = [each for each in passes if not each.over]
        readings = [reading for each in passes if (reading := each.waits_for) is not None]
        if work <= 0 or (readings and not budget.wait(readings[0])):
            break
    return work


def attended(selection: PrefixSelection, entry: BatchEntry, layer: int, q: Tensor, scale: float) -> Waits[Tensor]:
    """Attend to the selected rows of the prefix, to the means of its other rows, and to the request's own rows, in one layer:
    [rows, heads, head_dim].

    The own rows are in the entry's context. Raises: `RowsLost`, while the prompt is computed.
    """
    own = entry.context.read(layer, entry.own_from, entry.stop)
    kept = yield from selection.layer(layer, q, own[0], scale)
    parts = [attend(q, *kept, scale=scale, causal=False), attend(q, *own, scale=scale, causal=True)]
    if (left_out := selection.left_out[layer]) is not None:
        parts.append(left_out.attend(q, scale))
    return merge(parts)[0]


class SelectiveDecoding:
    """Attend for the entries of a shared pass whose requests have selected rows.

    A request that would have to wait for longer than the budget leaves the pass: its rows there are void, and its separate pass
    is in `left`, by job.
    """

    def __init__(self, selections: dict[int, PrefixSelection], entries: list[BatchEntry], budget: WaitBudget) -> None:
        """`selections`: by job."""
        self._selections = [(entry, selections[entry.job]) for entry in entries]
        self._budget = budget
        self.hidden: Hidden | None = None  # of the shared pass
        self.left: dict[int, SeparatePass] = {}
        for entry, selection in self._selections:
            entry.own_from = selection.rows

    def attend(self, layer: int, scale: float, q: Tensor, out: Tensor) -> None:
        """Fill in the entries' rows of `out`. See `Beside`."""
        assert self.hidden is not None
        for entry, selection in self._selections:
            out[entry.where] = 0
            if entry.job in self.left:
                continue
            work = attended(selection, entry, layer, q[entry.where], scale)
            try:
                while self._budget.wait(reading := next(work)):
                    pass
                self.left[entry.job] = SeparatePass(selection, entry, self.hidden.part(entry.where), work, reading)
            except StopIteration as ended:
                out[entry.where] = ended.value
