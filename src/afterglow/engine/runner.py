"""Carry out a step's forward passes: batch tensors, device contexts, the decoder, sampling.

The runner knows no queues, policies or budgets of tiers; all of that is decided in the step.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from afterglow.config import EngineConfig
from afterglow.engine.cached_attention import CachedAttend, RelayAttend, RelayCosts, RelayGroup, depth_of, groups_of
from afterglow.engine.contexts import Contexts
from afterglow.engine.decode_pass import DecodePasses, decodes_alone
from afterglow.engine.gather import BatchEntry, Gatherer, HostRows
from afterglow.engine.grammars.masks import Constraint
from afterglow.engine.kv_shape import KVShape
from afterglow.engine.page_pool import PagePool
from afterglow.engine.prefill_pass import PrefillPasses
from afterglow.engine.read_buffer import DeviceReadBuffer
from afterglow.engine.sampling import Meanwhile
from afterglow.engine.scores import Scores, ScoringAttend
from afterglow.engine.selective import PrefixSelection, SelectiveAttention
from afterglow.engine.separate_pass import SelectiveDecoding, SeparatePass, WaitBudget, go_on
from afterglow.engine.sizes import Sizes, windowed_layers
from afterglow.engine.speculation.guesser import Guesser
from afterglow.engine.static_pass import Static
from afterglow.engine.stats import GatherCounters, RelayCounters
from afterglow.engine.tee import Tee, saves_of
from afterglow.engine.token_outputs import RunOutput, TokenOutputs
from afterglow.engine.transfers import StepInputs
from afterglow.importance.chunk_loader import ImportanceStats
from afterglow.kernels.built import native
from afterglow.kernels.device_reads import possible
from afterglow.kernels.no_memory import ran_out
from afterglow.kernels.sending import on_device
from afterglow.memory.prefault import Prefault, SlotPrefault
from afterglow.model.decoder import Decoder
from afterglow.plan.batching.compose import IDLE_PREFILL
from afterglow.plan.step import Run, SelectingPass, Step, StepResult
from afterglow.request import Request

log = logging.getLogger("afterglow.engine")

# Seconds that a step waits for the disk for requests that select rows: beside other requests, and alone, where the engine has
# nothing else to do but to look for new requests in between.
WAIT_BESIDE, WAIT_ALONE = 0.001, 0.01


class TorchRunner:
    """Run the decoder on one device: the engine's seam to the hardware."""

    def __init__(
        self,
        decoder: Decoder,
        host: HostRows,
        config: EngineConfig,
        size: Sizes,
        scores: Scores | None = None,
        selective: SelectiveAttention | None = None,
        guesser: Guesser | None = None,
    ) -> None:
        """`host`: the host arena. `scores`: records attention, for truncation by importance. `selective`: for requests that
        attend to a part of their prefix. `guesser`: guesses what replies go on with."""
        self.decoder, spec = decoder, decoder.spec
        windowed = windowed_layers(spec) if size.held.windowed else ()
        row = (spec.layers, spec.kv_heads, spec.head_dim, decoder.dtype, decoder.device)
        self.shape = KVShape(*row, windowed, size.held)
        self.gathered = GatherCounters()
        windows = [spec.window_of(layer) for layer in range(spec.layers)]
        ahead = size.read_buffer_bytes
        buffer = DeviceReadBuffer(host.arena, self.shape, ahead, self.gathered) if ahead else None
        self._gatherer = Gatherer(host, spec.layers, windows=windows, counters=self.gathered, buffer=buffer)
        self._pressed = host.pressed
        self._tee = Tee(host.store, self.shape, host.arena, size.max_batch)
        self._inputs = StepInputs(decoder.device)
        self.passes, self.prefills = None, None
        if decoder.device.type == "cuda" and decoder.static_rows and scores is None:
            static = Static.of(decoder, self.shape, self._tee, self._inputs, self._gatherer)
            self.passes, self.prefills = DecodePasses(static), PrefillPasses(static, host.arena.dtype)
        self._outputs = TokenOutputs(decoder, guesser)
        self._prefault = Prefault()
        self._pool = PagePool(self.shape, size.context_bytes, self._prefault)
        self._short = False  # the device had no memory in the last step
        self._pool.prepare(spec.layers - len(windowed) or len(windowed))
        on_cpu = decoder.device.type == "cpu"  # otherwise the arena is locked in memory, and so is there already
        self._slot_prefault = SlotPrefault(self._prefault, host.store.arena.view) if on_cpu else None
        if self._slot_prefault is not None:
            self._slot_prefault.reach(0)
        self._scores = scores
        self._selective = selective
        self._chunk = size.prefill_chunk  # rows that separate passes may compute in a step while others decode; 0: any
        self.contexts = Contexts(self.shape, self._pool)
        self._selections: dict[int, PrefixSelection] = {}  # of prefixes that are not attended to as a whole, by job
        self._separate: dict[int, SeparatePass] = {}  # passes of their own that go on, by job
        self._ended: set[int] = set()  # jobs that have ended, and whose device memory the plan has not released yet
        # Recording importance computes the attention weights of each request apart.
        self._relay = config.relay if scores is None else "off"
        self._costs = RelayCosts.measured(self.shape, spec.heads) if self._relay == "auto" else None
        self.relayed = RelayCounters()

    def register(self, job: int, request: Request, constraint: Constraint | None = None) -> None:
        """Take in a job's request, before its first run. `constraint`: of its reply, at the beginning of the grammar."""
        self._outputs.register(job, request, constraint)

    def shorten(self, job: int, prompt: bytes) -> None:
        """Note that a registered job's prompt was cut to these tokens."""
        self._outputs.shorten(job, prompt)

    def forget(self, job: int) -> None:
        """Note that the job has ended; its device memory stays until the plan releases it."""
        if job in self.contexts.running:
            self._ended.add(job)
        else:
            self._outputs.forget(job)

    def release(self, step: Step) -> None:
        """Carry out the step's releases and frees."""
        self._gatherer.keep(step)
        for release in step.releases:
            self._tee.release(release.job)
            for save in release.saves:
                self._tee.context(self.contexts.running[release.job], save, self.decoder.rotation)
            self.contexts.release(release)
            if (selection := self._selections.pop(release.job, None)) is not None:
                selection.prefix.close()
            self._separate.pop(release.job, None)
            if release.job in self._ended:
                self._ended.remove(release.job)
                self._outputs.forget(release.job)
        for number in step.frees:
            self.contexts.retained.pop(number, None)
        if self._short:
            self._short = False
            self._pool.shrink()

    def run(self, step: Step) -> RunOutput:
        """Carry out the step's runs."""
        if not step.runs:
            self._tee.hand_over()
            return RunOutput(StepResult({}, {}))
        with self._prefault.computing, torch.inference_mode():
            return self._run(step)

    def _run(self, step: Step) -> RunOutput:
        """Run the shared pass, and separate passes beside it as far as they delay no other request."""
        for run in step.runs:  # first of all
            self.contexts.shorten(run)
        runs = [run for run in step.runs if not self._is_separate(run)]
        separate = [run for run in step.runs if self._is_separate(run)]
        self._tee.begin(*saves_of(runs))
        out = RunOutput(StepResult({}, {}))
        passes = self._separate_passes(separate)
        work = self._chunk if runs and self._chunk else IDLE_PREFILL
        work *= self.decoder.spec.layers
        budget = self._wait_budget(WAIT_BESIDE if runs else WAIT_ALONE)
        if runs:
            if separate:  # their reads go on while the shared pass computes
                work = go_on(passes, work, self._wait_budget(0.0))
            out = self._with_memory(step, runs, budget)
        if separate:
            go_on(passes, work, budget)
            self._end_passes(separate, out)
        self._tee.end()
        return out

    # ---------------------------------------------------------------------------------------------- separate passes

    def _wait_budget(self, seconds: float) -> WaitBudget:
        return WaitBudget(seconds, self._selective.loader.stats if self._selective is not None else ImportanceStats())

    def _is_separate(self, run: Run) -> bool:
        return run.job in self._separate or (run.admit is not None and bool(run.admit.selectable))

    def _separate_passes(self, runs: Sequence[Run]) -> list[SeparatePass]:
        """Get the separate passes of the runs that the device has memory for."""
        found: list[SeparatePass] = []
        for run in runs:
            try:
                found.append(self._separate_pass(run))
            except RuntimeError as error:
                self._leave_out([run], error)
        return found

    def _separate_pass(self, run: Run) -> SeparatePass:
        """Get the separate pass of a run; begin it, with the selection from the prefix, at the job's first run."""
        if (separate := self._separate.get(run.job)) is not None:
            return separate
        assert self._selective is not None, "a job that selects, on an engine that does not"
        assert run.admit is not None
        self.contexts.admit(run)
        entry = self.contexts.entry(run, slice(0, len(run.tokens)))
        kept = self._outputs.request(run.job).kv_retention
        selection = self._selections[run.job] = self._selective.begin(run.admit.selectable, kept, run.admit.exact)
        entry.own_from = selection.rows
        positions = torch.arange(entry.start, entry.stop, device=self.decoder.device)
        hidden = self.decoder.begin(on_device(run.tokens, self.decoder.device), positions)
        separate = self._separate[run.job] = SeparatePass(selection, entry, hidden)
        return separate

    def _end_passes(self, runs: Sequence[Run], out: RunOutput) -> None:
        """Add the outputs of separate passes to the step's."""
        self._tee.join()
        waiting, exhausted = list(out.result.waiting), list(out.result.exhausted)
        for run in runs:
            separate = self._separate.get(run.job)
            if separate is not None and not separate.over:
                waiting.append(run.job)
                continue
            self._separate.pop(run.job, None)
            if separate is None or separate.exhausted:
                exhausted.append(run.job)
                continue
            entry = separate.entry
            failed = {run.job: entry.failed} if entry.failed is not None else {}
            entry.context.rows = entry.start if failed else entry.stop
            last = entry.stop - entry.start - 1
            moved = replace(entry, where=slice(0, last + 1))
            try:
                selected = None if failed else separate.selection.summary()
                own = self._outputs.draw([run], [moved], separate.hidden.normed, [last], failed=failed)
            except RuntimeError as error:
                self._leave_out([run], error)
                exhausted.append(run.job)
                continue
            if selected is not None:
                own.selected[run.job] = selected
                read = separate.selection.prefix.reads.bytes
                own.result.selecting[run.job] = SelectingPass(separate.seconds, read, separate.waited)
            out.add(own)
        out.result = replace(out.result, waiting=waiting, exhausted=exhausted)

    # -------------------------------------------------------------------------------------------------- shared pass

    def _with_memory(self, step: Step, runs: Sequence[Run], budget: WaitBudget) -> RunOutput:
        """Run as many runs as the device has memory for: where it runs out, without the last one, the newest job's."""
        every = runs
        while runs:
            try:
                out = self._forward(step, runs, budget, len(runs) == len(every))
            except RuntimeError as error:
                if ran_out(error):
                    self._gatherer.end()
                self._leave_out(runs, error)
            else:
                if left := [run.job for run in every[len(runs) :]]:
                    out.result = replace(out.result, exhausted=left)
                return out
            runs = runs[:-1]
            self._tee.cut(_rows(runs))
        return RunOutput(StepResult({}, {}, exhausted=[run.job for run in every]))

    def _leave_out(self, runs: Sequence[Run], error: RuntimeError) -> None:
        """Leave out the last of runs that the device has no memory for, and return what nothing uses. Raises: `error`, if it means
        another thing."""
        if not ran_out(error):
            raise error
        log.warning("the device has no memory for %d rows of %d requests: %s", _rows(runs), len(runs), error)
        self.contexts.leave_out(runs[-1])
        self._short = True
        self._pool.shrink()
        if self.decoder.device.type == "cuda":
            self._tee.hand_over()  # rows that leave hold memory
            torch.cuda.empty_cache()

    def _forward(self, step: Step, runs: Sequence[Run], budget: WaitBudget, whole: bool) -> RunOutput:
        """Run the decoder once for `runs`. `whole`: they are all runs of the step that share a pass."""
        entries: list[BatchEntry] = []
        ids: list[int] = []
        positions: list[Tensor] = []
        at = 0
        for run in runs:
            self.contexts.admit(run)
        for run in runs:
            n = len(run.tokens)
            entries.append(self.contexts.entry(run, slice(at, at + n)))
            ids += run.tokens
            positions.append(torch.arange(run.start, run.start + n))
            at += n
        if self._slot_prefault is not None:
            self._slot_prefault.reach(
                max((save.slots[-1] + 1 for run in step.runs for save in run.saves if save.slots), default=0)
            )
        rows = self._outputs.logit_rows(runs, entries, len(ids))
        selecting = self._selective_decoding(entries, budget)
        exact = entries if selecting is None else [e for e in entries if e.job not in self._selections]
        apart = self._relay == "off" or not whole
        groups = [] if apart else groups_of(step.shares, exact, self._costs)
        self._gatherer.begin(entries, self.decoder.rope)
        normed, meanwhile, passes = None, None, self.passes
        if passes is not None and selecting is None and rows is None and decodes_alone(runs):
            normed = passes.hidden(runs, entries, groups)
            if normed is not None and step.decodes_on and not self._pressed():
                meanwhile = partial(passes.go_ahead, entries, groups)
        elif passes is not None:
            passes.drop()
        if normed is None:
            normed = self._computed(runs, entries, (ids, positions, rows), groups, exact, selecting)
        for group in groups:
            self.relayed.group(group.stop - group.start, len(group.entries))
        self.relayed.levels = max(self.relayed.levels, depth_of(groups))
        self._gatherer.read_ahead(step.ahead, self.decoder.rope)
        return self._after(runs, entries, normed, rows, selecting, meanwhile)

    def _computed(
        self,
        runs: Sequence[Run],
        entries: list[BatchEntry],
        batch: tuple[list[int], list[Tensor], list[int] | None],
        groups: list[RelayGroup],
        exact: list[BatchEntry],
        selecting: SelectiveDecoding | None,
    ) -> Tensor:
        """Compute the final-normed hidden rows of the batch: token ids, positions, and the rows that are wanted, None for all.
        `exact`: entries that attend to all of their context."""
        ids, positions, rows = batch
        prefills = self.prefills if selecting is None else None
        begun = None if prefills is None else prefills.hidden(ids, entries, groups)
        if begun is not None and begun.layer == self.shape.layers:
            return begun.normed if rows is None else begun.normed[on_device(rows, self.decoder.device)]
        numbers = torch.tensor(ids), torch.cat(positions), torch.tensor(rows or [], dtype=torch.int64)
        there, places, wanted, *index = self._inputs.send(*numbers, *self._tee.index)
        self._tee.use(index, in_lanes=0 if begun is None else begun.layer)
        attend = self._attend(entries, places, groups, exact)
        attend.beside = selecting
        hidden = begun or self.decoder.begin(there, places)
        if selecting is not None:
            selecting.hidden = hidden
        if rows is not None:
            self.decoder.go_on(hidden, attend, wanted)
        elif not attend.go_through(self.decoder, hidden):
            self.decoder.go_on(hidden, attend)
        if isinstance(attend, ScoringAttend):
            attend.finish(runs)
        return hidden.normed

    def _after(
        self,
        runs: Sequence[Run],
        entries: Sequence[BatchEntry],
        hidden: Tensor,
        rows: list[int] | None,
        selecting: SelectiveDecoding | None,
        meanwhile: Meanwhile | None,
    ) -> RunOutput:
        """Count the new rows of the contexts, and draw tokens from the rows `rows` of the batch. `meanwhile`: goes on from these."""
        left = selecting.left if selecting is not None else {}
        failed = {entry.job: entry.failed for entry in entries if entry.failed is not None}
        selected = {
            entry.job: selection.summary()
            for entry in (entries if selecting is not None else ())
            if (selection := self._selections.get(entry.job)) is not None and entry.job not in left
        }
        self._tee.join()
        out = self._outputs.draw(runs, entries, hidden, rows, failed=failed, left=left, meanwhile=meanwhile)
        self._gatherer.end()
        # From here on nothing needs memory of the device: a step that has drawn is never attempted again.
        self._separate.update(left)
        for entry in entries:
            entry.context.rows = entry.start if entry.job in failed or entry.job in left else entry.stop
        for run, entry in zip(runs, entries, strict=True):
            if void := run.guessed - out.result.accepted.get(run.job, 0):
                entry.context.rows -= void
                if run.saves:
                    self._tee.take_back(run.job, void)
        out.result = replace(out.result, waiting=list(left), late=[entry.job for entry in entries if entry.late])
        out.selected.update(selected)
        return out

    def _selective_decoding(self, entries: Sequence[BatchEntry], budget: WaitBudget) -> SelectiveDecoding | None:
        """Prepare the attention of entries whose requests have selected rows of their prefix."""
        found = {e.job: selection for e in entries if (selection := self._selections.get(e.job)) is not None}
        return SelectiveDecoding(found, [e for e in entries if e.job in found], budget) if found else None

    def _attend(
        self, entries: list[BatchEntry], places: Tensor, groups: list[RelayGroup], whole: list[BatchEntry]
    ) -> CachedAttend:
        """Choose how to attend. `whole`: the entries that attend to all of their context."""
        angles = self.decoder.rotation(places)
        if groups or (self._scores is None and self._reads_in_one_call()):
            return RelayAttend(entries, angles, self._gatherer, self._tee, groups, whole)
        if self._scores is None:
            return CachedAttend(entries, angles, self._gatherer, self._tee, whole)
        return ScoringAttend(entries, angles, self._gatherer, self._tee, self._scores, whole)

    def _reads_in_one_call(self) -> bool:
        """Tell whether a kernel attends for all requests of a step at once."""
        shape, spec = self.shape, self.decoder.spec
        if shape.device.type == "cpu":
            return native() is not None
        return possible(shape.device, shape.dtype, shape.head_dim, spec.heads, shape.kv_heads, spec.score_cap or 0.0)


def _rows(runs: Sequence[Run]) -> int:
    return sum(len(run.tokens) for run in runs)
