"""Carries out a step's forward pass: batch tensors, device contexts, the decoder, sampling.

Knows nothing of queues, policies or tiers' budgets; all of that is decided in the step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from afterglow.config import RelayName
from afterglow.engine.attend import CachedAttend
from afterglow.engine.context import DeviceContext, KVShape
from afterglow.engine.gather import Gatherer, HostRows, Part
from afterglow.engine.important import Important, Passing, Patience, Selecting, Taking
from afterglow.engine.relay import Group, RelayAttend, RelayCosts, depth_of, groups_of
from afterglow.engine.requests import stop_tokens
from afterglow.engine.sampling import Sampler, logprobs_of, sample
from afterglow.engine.scores import Scores, ScoringAttend
from afterglow.engine.stats import RelayCounts
from afterglow.engine.tee import Tee
from afterglow.engine.touch import TouchAhead
from afterglow.importance.loader import LoaderStats
from afterglow.kernels.built import native
from afterglow.kernels.memory import computing
from afterglow.model.decoder import Decoder
from afterglow.plan.scheduler import IDLE_PREFILL
from afterglow.plan.step import Run, Save, Step, StepResult
from afterglow.request import Request, Selected, TokenLogprob
from afterglow.store.kvstore import KVStore

log = logging.getLogger("afterglow.engine")

# Seconds that a step waits for the disk for requests that select, where others compute in it, and where none do: then the engine
# has nothing to do but to look for new requests in between.
PATIENCE_BESIDE, PATIENCE_ALONE = 0.001, 0.01
LOGIT_ROWS = 256  # prompt log-probabilities: rows of logits at a time, so that a long prompt needs little memory


@dataclass(slots=True)
class RunOutput:
    """A step's result for the plan, and what only the callers need."""

    result: StepResult
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[int, list[TokenLogprob]]] = field(
        default_factory=dict
    )  # by job: from which row on
    selected: dict[int, Selected] = field(default_factory=dict)  # by job

    def add(self, other: RunOutput) -> None:
        """What came of other runs of the same step."""
        self.result.tokens.update(other.result.tokens)
        self.result.failed.update(other.result.failed)
        self.logprobs.update(other.logprobs)
        self.prompt_logprobs.update(other.prompt_logprobs)
        self.selected.update(other.selected)


class Runner(Protocol):
    """What carries out forward passes: the engine's seam to the hardware."""

    def register(self, job: int, request: Request) -> None:
        """A job's request, before its first run."""

    def shorten(self, job: int, prompt: bytes) -> None:
        """A registered job's prompt was cut; these tokens remain."""

    def forget(self, job: int) -> None:
        """The job has ended; what it has on the device stays until the plan releases it."""

    def release(self, step: Step) -> None:
        """Carry out the step's releases and frees."""

    def run(self, step: Step) -> RunOutput:
        """Carry out the step's runs."""


@dataclass(slots=True)
class _Job:
    request: Request
    sampler: Sampler
    context: DeviceContext | None = None
    taking: Taking | None = None  # what it takes of a prefix that does not come as a whole
    passing: Passing | None = None  # its pass through the decoder, where that is one of its own and goes on
    ended: bool = False


class TorchRunner:
    """The decoder on one device."""

    def __init__(
        self,
        decoder: Decoder,
        store: KVStore,
        arena: Tensor,
        *,
        kv_dtype: torch.dtype,
        max_batch: int,
        read_timeout: float,
        scores: Scores | None = None,
        relay: RelayName = "off",
        important: Important | None = None,
        prefill_chunk: int = 0,
        pressed: Callable[[], bool] = lambda: False,
    ) -> None:
        """`prefill_chunk`: rows that requests with passes of their own may compute in a step while others decode (0: any).
        `scores`: where to record what attention tokens get, if the policy asks for it. `relay`: read what the jobs of
        a step share together, always or where that is faster. `important`: for requests that take only a part of their
        prefix. `pressed`: does a caller wait for this thread?"""
        spec = decoder.spec
        self.decoder = decoder
        self.shape = KVShape(spec.layers, spec.kv_heads, spec.head_dim, decoder.dtype, decoder.device)
        self._gatherer = Gatherer(HostRows(arena, store, read_timeout, decoder.device, pressed), spec.layers)
        self._tee = Tee(store, self.shape, kv_dtype, max_batch)
        self._ahead = TouchAhead(arena) if decoder.device.type == "cpu" else None
        if self._ahead is not None:
            self._ahead.reach(0)
        self._scores = scores
        self._important = important
        self._chunk = prefill_chunk
        self._jobs: dict[int, _Job] = {}
        self._contexts: dict[int, DeviceContext] = {}  # retained, by the plan's number
        self._relay = relay
        self._costs = RelayCosts.measured(self.shape, spec.heads) if relay == "auto" else None
        self.relayed = RelayCounts()

    def register(self, job: int, request: Request) -> None:
        sampling = request.sampling
        ends = stop_tokens(sampling, frozenset(self.decoder.spec.eos_ids))
        self._jobs[job] = _Job(request, Sampler.of(sampling, self.decoder.device, request.prompt, ends))

    def shorten(self, job: int, prompt: bytes) -> None:
        shaping = self._jobs[job].sampler.shaping
        if shaping is not None:
            shaping.shorten(memoryview(prompt).cast("I"))

    def forget(self, job: int) -> None:
        found = self._jobs.get(job)
        if found is not None:
            found.ended = True
            if found.context is None:
                del self._jobs[job]

    def release(self, step: Step) -> None:
        for release in step.releases:
            self._tee.release(release.job)
            job = self._jobs[release.job]
            context, job.context, job.taking, job.passing = job.context, None, None, None
            if job.ended:
                del self._jobs[release.job]
            if release.context is not None:
                assert context is not None, f"job {release.job} has nothing on the device to retain"
                context.rows = release.rows
                self._contexts[release.context] = context
        for number in step.frees:
            self._contexts.pop(number, None)

    def run(self, step: Step) -> RunOutput:
        if not step.runs:
            return RunOutput(StepResult({}, {}))
        with computing(), torch.inference_mode():
            return self._run(step)

    def _run(self, step: Step) -> RunOutput:
        """The runs that share a pass, and beside it, as far as that keeps nobody waiting, those that have one of their own."""
        runs = [run for run in step.runs if not self._passes_apart(run)]
        self._tee.begin(*_saves(runs))
        apart = [run for run in step.runs if self._passes_apart(run)]
        out = RunOutput(StepResult({}, {}))
        for run in apart:
            self._begin_pass(run)
        work = self._chunk if runs and self._chunk else IDLE_PREFILL
        work *= self.decoder.spec.layers
        patience = self._patience(PATIENCE_BESIDE if runs else PATIENCE_ALONE)
        if runs:
            if apart:  # what they read comes while the others compute
                work = self._go_on(apart, work, self._patience(0.0))
            out = self._with_memory(step, runs, patience)
        if apart:
            self._go_on(apart, work, patience)
            self._end_passes(apart, out)
        return out

    def _patience(self, seconds: float) -> Patience:
        return Patience(seconds, self._important.loader.stats if self._important is not None else LoaderStats())

    def _passes_apart(self, run: Run) -> bool:
        return self._jobs[run.job].passing is not None or (run.admit is not None and bool(run.admit.selectable))

    def _begin_pass(self, run: Run) -> None:
        """Of a prompt that asks what is important of its prefix."""
        job = self._jobs[run.job]
        if job.passing is not None:
            return
        assert self._important is not None, "a job that selects, on an engine that does not"
        assert run.admit is not None
        part = self._part(run, slice(0, len(run.tokens)))
        job.taking = self._important.begin(run.admit.selectable, job.request.kv_retention, run.admit.exact)
        part.own_from = job.taking.rows
        device = self.decoder.device
        positions = torch.arange(part.start, part.stop, device=device)
        hidden = self.decoder.begin(torch.tensor(run.tokens, device=device), positions)
        job.passing = Passing(job.taking, part, hidden)

    def _go_on(self, runs: Sequence[Run], work: int, patience: Patience) -> int:
        """Take passes through their next layers, until they have computed `work` rows of layers, and at least a layer, or all have
        to wait. Returns what is left of it."""
        passes = [passing for run in runs if (passing := self._jobs[run.job].passing) is not None]
        while passes:
            for passing in passes:
                rows = len(passing.hidden.x)
                wanted = torch.tensor([rows - 1], device=self.decoder.device)
                while work > 0 and not passing.over and passing.waits_for is None:
                    work -= rows * max(1, passing.go_on(max(1, work // rows), wanted))
            passes = [passing for passing in passes if not passing.over]
            readings = [reading for passing in passes if (reading := passing.waits_for) is not None]
            if work <= 0 or (readings and not patience.wait(readings[0])):
                break
        return work

    def _end_passes(self, runs: Sequence[Run], out: RunOutput) -> None:
        """What has come of them, into the step's result."""
        waiting, exhausted = list(out.result.waiting), list(out.result.exhausted)
        for run in runs:
            job = self._jobs[run.job]
            assert job.passing is not None
            part, taking = job.passing.part, job.passing.taking
            if not job.passing.over:
                waiting.append(run.job)
                continue
            hidden, spent, job.passing = job.passing.hidden.normed, job.passing.exhausted, None
            if spent:
                exhausted.append(run.job)
                continue
            failed = {run.job: part.failed} if part.failed is not None else {}
            part.context.rows = part.start if failed else part.stop
            rows = [part.stop - part.start - 1]
            own = self._outputs([run], [replace(part, where=slice(0, rows[0] + 1))], hidden, failed, rows)
            if not failed:
                own.selected[run.job] = taking.summary()
            out.add(own)
        out.result = replace(out.result, waiting=waiting, exhausted=exhausted)

    def _with_memory(self, step: Step, runs: Sequence[Run], patience: Patience) -> RunOutput:
        """As many of the runs as the device has memory for: without the last one, the newest job's, if need be."""
        every = runs
        while runs:
            try:
                out = self._forward(step, runs, patience, len(runs) == len(every))
            except torch.OutOfMemoryError as error:
                log.warning("the device has no memory for %d rows of %d requests: %s", _rows(runs), len(runs), error)
            else:
                if left := [run.job for run in every[len(runs) :]]:
                    out.result = replace(out.result, exhausted=left)
                return out
            self._gatherer.end()
            runs = runs[:-1]
            self._tee.cut(_rows(runs))
            if self.decoder.device.type == "cuda":
                torch.cuda.empty_cache()
        return RunOutput(StepResult({}, {}, exhausted=[run.job for run in every]))

    def _forward(self, step: Step, runs: Sequence[Run], patience: Patience, whole: bool) -> RunOutput:
        """The first `runs` of those of the step that share a pass; not the `whole` of them where an attempt at more has
        failed."""
        device = self.decoder.device
        parts: list[Part] = []
        ids: list[int] = []
        positions: list[Tensor] = []
        at = 0
        for run in runs:
            n = len(run.tokens)
            parts.append(self._part(run, slice(at, at + n)))
            ids += run.tokens
            positions.append(torch.arange(run.start, run.start + n))
            at += n
        if self._ahead is not None:
            self._ahead.reach(
                max((save.slots[-1] + 1 for run in step.runs for save in run.saves if save.slots), default=0)
            )
        places = torch.cat(positions).to(device)
        takings = {part.job: taking for part in parts if (taking := self._jobs[part.job].taking) is not None}
        exact = [part for part in parts if part.job not in takings]
        selecting = Selecting(takings, [part for part in parts if part.job in takings], patience) if takings else None
        apart = self._relay == "off" or self._scores is not None or not whole
        groups = [] if apart else groups_of(step.shares, exact, self._costs)
        self._gatherer.begin(parts, self.decoder.rope)
        attend = self._attend(parts, places, groups, exact)
        attend.beside = selecting
        wanted = self._wanted(runs, parts, len(ids))
        index = None if wanted is None else torch.tensor(wanted, dtype=torch.int64, device=device)
        hidden = self.decoder.begin(torch.tensor(ids, device=device), places)
        if selecting is not None:
            selecting.hidden = hidden
        self.decoder.go_on(hidden, attend, index)
        if isinstance(attend, ScoringAttend):
            attend.finish(runs)
        for group in groups:
            self.relayed.group(group.stop - group.start, len(group.parts))
        self.relayed.levels = max(self.relayed.levels, depth_of(groups))
        self._gatherer.end()
        left = selecting.left if selecting is not None else {}
        for job, passing in left.items():
            self._jobs[job].passing = passing
        failed = {part.job: part.failed for part in parts if part.failed is not None}
        for part in parts:
            part.context.rows = part.start if part.job in failed or part.job in left else part.stop
        outputs = self._outputs(runs, parts, hidden.normed, failed, wanted, left)
        late = [part.job for part in parts if part.late]
        outputs.result = replace(outputs.result, waiting=list(left), late=late)
        for job, taking in takings.items():
            if job not in left:
                outputs.selected[job] = taking.summary()
        self._tee.end()
        return outputs

    def _attend(self, parts: list[Part], places: Tensor, groups: list[Group], whole: list[Part]) -> CachedAttend:
        """`whole`: the parts that attend to all of their context."""
        angles = self.decoder.rotation(places)
        if groups or (self._scores is None and self.decoder.device.type == "cpu" and native() is not None):
            return RelayAttend(parts, angles, self._gatherer, self._tee, groups, whole)
        if self._scores is None:
            return CachedAttend(parts, angles, self._gatherer, self._tee, whole)
        return ScoringAttend(parts, angles, self._gatherer, self._tee, self._scores, whole)

    def _part(self, run: Run, where: slice) -> Part:
        """The run's device segment, with what the plan wants in it before the forward."""
        job = self._jobs[run.job]
        admit = run.admit
        if admit is not None and job.context is None:  # else it has come with an earlier attempt at this step
            if admit.context is not None and admit.take:
                job.context = self._contexts.pop(admit.context)
                job.context.rows = admit.device_rows
                job.context.reserve(run.capacity)
            else:
                context = DeviceContext(self.shape, run.capacity)
                if admit.context is not None:
                    context.copy_rows(self._contexts[admit.context], admit.device_rows)
                job.context = context
        assert job.context is not None, f"job {run.job} runs without ever having been admitted"
        job.context.reserve(run.capacity)
        stop = run.start + len(run.tokens)
        gather_from = run.start - sum(gather.stop - gather.start for gather in run.gathers)
        return Part(run.job, where, run.start, stop, job.context, run.gathers, gather_from)

    def _wanted(self, runs: Sequence[Run], parts: Sequence[Part], rows: int) -> list[int] | None:
        """The rows of the batch that logits are computed from; None: all of them."""
        if any(self._jobs[run.job].request.sampling.prompt_logprobs is not None for run in runs):
            return None
        wanted = [part.where.stop - 1 for run, part in zip(runs, parts, strict=True) if run.sample]
        return None if len(wanted) == rows else wanted

    def _outputs(
        self,
        runs: Sequence[Run],
        parts: Sequence[Part],
        hidden: Tensor,
        failed: dict[int, str],
        wanted: list[int] | None,
        left: Container[int] = (),
    ) -> RunOutput:
        """`hidden`: of the rows `wanted`. `left`: jobs whose rows are void."""
        drawing = [i for i, run in enumerate(runs) if run.sample and run.job not in failed and run.job not in left]
        out = RunOutput(StepResult({}, failed))
        if drawing:
            last = [parts[i].where.stop - 1 for i in drawing]
            rows = torch.tensor(last if wanted is None else [wanted.index(row) for row in last], device=hidden.device)
            logits = self.decoder.logits(hidden if len(rows) == len(hidden) else hidden[rows])
            jobs = [self._jobs[runs[i].job] for i in drawing]
            tokens = sample(logits, [job.sampler for job in jobs])
            out.result.tokens.update({runs[i].job: t for i, t in zip(drawing, tokens, strict=True)})
            wanted = [n for n, job in enumerate(jobs) if job.request.sampling.logprobs is not None]
            if wanted:
                found = logprobs_of(
                    logits[wanted],
                    [tokens[n] for n in wanted],
                    [jobs[n].request.sampling.logprobs or 0 for n in wanted],
                )
                out.logprobs = {runs[drawing[n]].job: lp for n, lp in zip(wanted, found, strict=True)}
        for run, part in zip(runs, parts, strict=True):
            job = self._jobs[run.job]
            top = job.request.sampling.prompt_logprobs
            if top is not None and run.start < len(job.request.prompt) and run.job not in failed:
                out.prompt_logprobs[run.job] = (run.start, self._prompt_logprobs(job.request, part, hidden, top))
        return out

    def _prompt_logprobs(self, request: Request, part: Part, hidden: Tensor, top: int) -> list[TokenLogprob]:
        """Log-probabilities of prompt tokens [start + 1, stop + 1), as far as the prompt goes."""
        targets = list(request.prompt[part.start + 1 : part.stop + 1])
        rows = hidden[part.where]
        found: list[TokenLogprob] = []
        for i in range(0, len(targets), LOGIT_ROWS):
            piece = targets[i : i + LOGIT_ROWS]
            found += logprobs_of(self.decoder.logits(rows[i : i + len(piece)]), piece, [top] * len(piece))
        return found


def _rows(runs: Sequence[Run]) -> int:
    return sum(len(run.tokens) for run in runs)


def _saves(runs: Sequence[Run]) -> tuple[list[tuple[slice, Save]], list[tuple[int, int, Save]]]:
    """The step's saves as the tee wants them: single decoded rows apart from runs of prefilled rows."""
    prefills, decodes = [], []
    at = 0
    for run in runs:
        for save in run.saves:
            first = at + save.job_row - run.start
            if len(run.tokens) == 1 and run.admit is None and run.sample:
                decodes.append((run.job, first, save))
            else:
                prefills.append((slice(first, first + save.rows), save))
        at += len(run.tokens)
    return prefills, decodes
