"""Carries out a step's forward pass: batch tensors, device contexts, the decoder, sampling.

Knows nothing of queues, policies or tiers' budgets; all of that is decided in the step.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from afterglow.config import RelayName
from afterglow.engine.attend import CachedAttend
from afterglow.engine.context import DeviceContext, KVShape
from afterglow.engine.gather import Gatherer, HostRows, Part
from afterglow.engine.important import Important, ImportantAttend, Taking
from afterglow.engine.relay import Group, RelayAttend, RelayCosts, depth_of, groups_of
from afterglow.engine.requests import stop_tokens
from afterglow.engine.sampling import Sampler, logprobs_of, sample
from afterglow.engine.scores import Scores, ScoringAttend
from afterglow.engine.stats import RelayCounts
from afterglow.engine.tee import Tee
from afterglow.engine.touch import TouchAhead
from afterglow.importance.loader import Lost
from afterglow.kernels.built import native
from afterglow.kernels.memory import computing
from afterglow.model.decoder import Decoder
from afterglow.plan.step import Admit, Run, Save, Step, StepResult
from afterglow.request import Request, Selected, TokenLogprob
from afterglow.store.kvstore import KVStore

log = logging.getLogger("afterglow.engine")

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
    ) -> None:
        """`scores`: where to record what attention tokens get, if somebody wants to know. `relay`: read what the jobs of
        a step share together, always or where that is faster. `important`: for requests that take only a part of their
        prefix."""
        spec = decoder.spec
        self.decoder = decoder
        self.shape = KVShape(spec.layers, spec.kv_heads, spec.head_dim, decoder.dtype, decoder.device)
        self._gatherer = Gatherer(HostRows(arena, store, read_timeout, decoder.device), spec.layers)
        self._tee = Tee(store, self.shape, kv_dtype, max_batch)
        self._ahead = TouchAhead(arena) if decoder.device.type == "cpu" else None
        if self._ahead is not None:
            self._ahead.reach(0)
        self._scores = scores
        self._important = important
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
            context, job.context, job.taking = job.context, None, None
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
        """As many of the step's runs as the device has memory for: without the last one, the newest job's, if need be."""
        runs = step.runs
        self._tee.begin(*_saves(runs))
        while runs:
            try:
                out = self._forward(step, runs)
            except torch.OutOfMemoryError as error:
                log.warning("the device has no memory for %d rows of %d requests: %s", _rows(runs), len(runs), error)
            else:
                if left := [run.job for run in step.runs[len(runs) :]]:
                    out.result = replace(out.result, exhausted=left)
                return out
            self._gatherer.end()
            runs = runs[:-1]
            self._tee.cut(_rows(runs))
            if self.decoder.device.type == "cuda":
                torch.cuda.empty_cache()
        return RunOutput(StepResult({}, {}, exhausted=[run.job for run in step.runs]))

    def _forward(self, step: Step, runs: Sequence[Run]) -> RunOutput:
        """The step's first `runs`; fewer than all where an attempt at more has failed."""
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
        apart = self._relay == "off" or self._scores is not None or bool(takings) or len(runs) < len(step.runs)
        groups = [] if apart else groups_of(step.shares, parts, self._costs)
        self._gatherer.begin(parts, self.decoder.rope)
        attend = self._attend(parts, places, groups, takings)
        wanted = self._wanted(runs, parts, len(ids))
        index = None if wanted is None else torch.tensor(wanted, dtype=torch.int64, device=device)
        hidden = self.decoder.forward(torch.tensor(ids, device=device), places, attend, index)
        if isinstance(attend, ScoringAttend):
            attend.finish(runs)
        for group in groups:
            self.relayed.group(group.stop - group.start, len(group.parts))
        self.relayed.levels = max(self.relayed.levels, depth_of(groups))
        self._gatherer.end()
        failed = {part.job: part.failed for part in parts if part.failed is not None}
        for part in parts:
            part.context.rows = part.start if part.job in failed else part.stop
        outputs = self._outputs(runs, parts, hidden, failed, wanted)
        for job, taking in takings.items():
            if job not in failed:
                outputs.selected[job] = taking.summary()
        self._tee.end()
        return outputs

    def _attend(
        self, parts: list[Part], places: Tensor, groups: list[Group], takings: dict[int, Taking]
    ) -> CachedAttend:
        angles = self.decoder.rotation(places)
        if takings:
            return ImportantAttend(parts, angles, self._gatherer, self._tee, takings)
        if groups or (self._scores is None and self.decoder.device.type == "cpu" and native() is not None):
            return RelayAttend(parts, angles, self._gatherer, self._tee, groups)
        if self._scores is None:
            return CachedAttend(parts, angles, self._gatherer, self._tee)
        return ScoringAttend(parts, angles, self._gatherer, self._tee, self._scores)

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
        part = Part(run.job, where, run.start, stop, job.context, run.gathers, gather_from)
        if admit is not None and admit.selectable:
            self._begin_taking(job, part, admit)
        return part

    def _begin_taking(self, job: _Job, part: Part, admit: Admit) -> None:
        assert self._important is not None, "a job that selects, on an engine that does not"
        try:
            job.taking = self._important.begin(admit.selectable, job.request.kv_retention, admit.exact)
        except Lost as lost:
            part.failed = lost.extent

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
    ) -> RunOutput:
        """`hidden`: of the rows `wanted`."""
        drawing = [i for i, run in enumerate(runs) if run.sample and run.job not in failed]
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
