"""Run steps that decode alone on CUDA as one graph each, and launch the next one before its tokens have come (`static_pass`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from afterglow.engine.cached_attention import RelayAttend, RelayGroup
from afterglow.engine.gather import BatchEntry
from afterglow.engine.static_pass import PassCache, Size, Static, StaticNumbers
from afterglow.kernels.no_memory import ran_out
from afterglow.kernels.sending import on_device, whole
from afterglow.plan.step import Run

MOST_PASSES = 32  # sizes that are kept
BATCHES = (1, 2, 4, 8, 16, 32, 64, 96, 128)  # rows of a pass; above, multiples of 64


class DecodePass:
    """The passes of one size, over numbers on the device that each step fills in anew."""

    def __init__(self, static: Static, size: Size) -> None:
        self._static = static
        self.numbers = StaticNumbers(static, size)
        # The first time builds the kernels that are needed: nothing can be built while a graph is recorded.
        self._computed_once = False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._hidden = torch.empty(0)

    def run(self, record: bool) -> Tensor:
        """Compute the final-normed hidden rows [rows, hidden]. `record`: the pass, if it is time.

        Raises: NotStatic; NotRecorded.
        """
        if self._graph is None and record and self._computed_once:
            self._graph, self._hidden = self._static.recorder.record(self._computed)
        if self._graph is None:
            hidden = self._computed()
            self._computed_once = True
            return hidden
        self._graph.replay()
        return self._hidden

    def _computed(self) -> Tensor:
        tee, numbers = self._static.tee, self.numbers
        tee.use(numbers.index, in_order=True)
        return self._static.decoder.forward(numbers.ids, numbers.positions, numbers.attend(tee.layer))


@dataclass(frozen=True, slots=True)
class Ahead:
    """A step that was launched before the plan has asked for it. `rows`: by job and its row, the row of the batch. A job's context is the
    same in the next step that decodes alone. It is not kept here: when a job ends, its pages are free at once."""

    rows: dict[tuple[int, int], int]
    saved: list[tuple[int, int]]  # of each row of the batch: lane and place
    hidden: Tensor


class DecodePasses:
    """Passes of all sizes that steps have had of late, and the one that is ahead. For the runner alone."""

    def __init__(self, static: Static) -> None:
        self._static = static
        self._cache = PassCache(lambda size: DecodePass(static, size), MOST_PASSES)
        # Passes that were launched; passes launched ahead that were taken, and that were dropped.
        self.counts = self._cache.counts
        self._ahead: Ahead | None = None

    def hidden(self, runs: Sequence[Run], entries: list[BatchEntry], groups: list[RelayGroup]) -> Tensor | None:
        """Return the final-normed hidden rows [requests, hidden] of a step whose runs decode alone; None where it is to be computed in
        another way. `groups`: of entries that read rows together."""
        ahead = self._taken(entries)
        if ahead is not None:
            return ahead
        tokens = torch.tensor([run.tokens[0] for run in runs])
        return self._run(tokens, entries, groups, self._static.tee.places(len(entries)))

    def go_ahead(self, entries: Sequence[BatchEntry], groups: Sequence[RelayGroup], tokens: Tensor) -> None:
        """Launch the step that the plan expects next (`Step.decodes_on`): with `tokens`, int64 [requests] on the device, which are not known
        yet. What is written is no row of a context before the plan has asked for that step; if it does not, it is computed anew."""
        # Layers with a window may have pages up to this row alone.
        if not all(entry.context.holds(entry.stop + 1) for entry in entries):
            return
        saved = self._static.tee.next_places(len(entries))
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
        saved = list(zip(*self._static.tee.places(len(entries)), strict=True))
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
        static, rows = self._static, len(entries)
        most = next((each for each in BATCHES if rows <= each), -(-rows // 64) * 64)
        if self._cache.off or most > static.rows:
            return None
        tables = static.tables(RelayAttend(entries, None, static.gatherer, static.tee, groups))
        if tables is None:
            return None
        size = Size(most, tuple(each.sizes.rounded(most) for each in tables))
        ids = tokens.tolist() if tokens.device.type == "cpu" else [0] * rows
        numbers = static.numbers(ids, entries, saved, tables, size)
        chosen = self._cache.of(size)
        static.inputs.send(whole(numbers), into=chosen.numbers.all)
        if tokens.device.type != "cpu":
            chosen.numbers.all[:rows].copy_(tokens)
        hidden = self._cache.launch(chosen.run)
        return None if hidden is None else hidden[:rows]


def decodes_alone(runs: Sequence[Run]) -> bool:
    """Tell whether each run computes one row and draws from it, with nothing to be brought in before."""
    return all(len(run.tokens) == 1 and run.sample and run.admit is None and not run.gathers for run in runs)
