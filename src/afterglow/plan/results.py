"""What a step has computed, taken in: rows that are there now, tokens that were drawn, jobs that end or could not go on.

It knows jobs and their drafts; not what is computed next.
"""

from __future__ import annotations

from collections.abc import Mapping

from afterglow.plan.admission import Admission
from afterglow.plan.batch import Batch
from afterglow.plan.cost import Cost, Work
from afterglow.plan.drafts import Drafts
from afterglow.plan.index import Index
from afterglow.plan.jobs import Job
from afterglow.plan.placement import Placement
from afterglow.plan.roster import Roster
from afterglow.plan.stats import Counters
from afterglow.plan.step import ExtentId, Run, Step, StepResult


class Results:
    """Results of steps."""

    def __init__(
        self,
        roster: Roster,
        batch: Batch,
        drafts: Drafts,
        admission: Admission,
        index: Index,
        placement: Placement,
        counters: Counters,
        cost: Cost,
    ) -> None:
        self._roster = roster
        self._batch = batch
        self._drafts = drafts
        self._admission = admission
        self._index = index
        self._placement = placement
        self._counters = counters
        self._cost = cost

    def take_in(self, step: Step, result: StepResult, opened: float, now: float) -> None:
        """A step that was handed out at `opened` has been carried out."""
        if result.drawn:
            for run in step.runs:
                self._decoded(run, result, now)
            return
        self._measure(step, result, now - opened)
        for run in step.runs:
            if run.job in result.exhausted:
                self._exhausted(self._roster.jobs[run.job], now)
            elif run.job in result.failed:
                self._failed(self._roster.jobs[run.job], result.failed[run.job], run.job in result.late, now)
            elif run.job in result.waiting:
                self._waiting(self._roster.jobs[run.job], run, now)
            else:
                self._committed(run, result.tokens, now)

    def _measure(self, step: Step, result: StepResult, seconds: float) -> None:
        """Learn what computing takes from passes with a prefill in them that had nothing to wait for."""
        waited = any(gather.move is not None for run in step.runs for gather in run.gathers)
        waited = waited or bool(result.waiting)
        waited = waited or any(len(run.tokens) > 1 and self._roster.jobs[run.job].approximate for run in step.runs)
        if waited or result.failed or result.exhausted or all(len(run.tokens) == 1 for run in step.runs):
            return
        work = Work()
        for run in step.runs:
            work.add(len(run.tokens), run.start, sum(gather.stop - gather.start for gather in run.gathers))
        self._cost.passed(work, seconds)

    def _committed(self, run: Run, tokens: Mapping[int, int], now: float) -> None:
        job = self._roster.jobs[run.job]
        if not job.stages:
            if job.pins and not (job.approximate and job.spec.renews):
                self._admission.unpin(job)
            if not job.admitted:
                self._roster.tell_admitted(job)
        job.rows, job.lingering = run.start + len(run.tokens), False
        if job.spec.write:
            new = job.rows - max(run.start, job.covered)
            if not job.approximate:
                self._counters.rows_unsaved += max(0, new) - sum(save.rows for save in run.saves)
            self._drafts.commit(job, now)
            if not job.drafts:
                self._batch.settle(job, now)
        if job.cancelled:
            self._roster.finish(job, None, "cancelled", now)
        elif run.sample:
            self._sampled(job, tokens[run.job], now)
        elif job.rows == job.length:
            self._roster.finish(job, None, "length", now)

    def _decoded(self, run: Run, result: StepResult, now: float) -> None:
        """A decoding job's share of a step that was perhaps carried out several times: nothing ended before the last."""
        job = self._roster.jobs[run.job]
        times, drawn = result.repeats, result.drawn.get(run.job, b"")
        if times == 1 and (job.state != "decoding" or job.spec.stop_tokens or (job.drafts and not run.saves)):
            self._committed(run, {run.job: int.from_bytes(drawn, "little")}, now)  # something changes with it
            return
        job.rows = run.start + times
        if run.saves:
            self._drafts.repeated(job, times, now)
        elif job.spec.write:
            self._counters.rows_unsaved += times
        job.tokens += drawn
        job.generated += times
        if job.cancelled:
            self._roster.finish(job, None, "cancelled", now)
        elif len(job.tokens) >= 4 * job.end:
            self._roster.finish(job, int.from_bytes(drawn[-4:], "little"), "length", now)

    def _sampled(self, job: Job, token: int, now: float) -> None:
        job.tokens += token.to_bytes(4, "little")
        job.generated += 1
        if job.state == "prefilling":
            job.state = "decoding"
            self._roster.version += 1
        if token in job.spec.stop_tokens:
            self._roster.finish(job, token, "stop", now)
        elif job.length >= job.end:
            self._roster.finish(job, token, "length", now)
        else:
            self._roster.drew(job, token)

    def _exhausted(self, job: Job, now: float) -> None:
        """The device had no memory for it: it waits until another job has left, or ends where there is none."""
        if job.cancelled or self._batch.running == [job]:
            self._roster.finish(job, None, "cancelled" if job.cancelled else "no_memory", now, retain=False)
            return
        self._counters.preemptions += 1
        self._roster.send_back(job, now)
        self._roster.full = True

    def _waiting(self, job: Job, run: Run, now: float) -> None:
        """Its run has not ended, and is to be handed out again."""
        job.rows, job.lingering = run.start, True
        if job.cancelled:
            self._roster.finish(job, None, "cancelled", now, retain=False)

    def _failed(self, job: Job, extent: ExtentId, late: bool, now: float) -> None:
        """An extent did not arrive: the next attempt does not wait for it again. But one that is `late` comes, and the job
        joins when it is there."""
        job.patient = late
        self._counters.stalled += late
        self._counters.failed_loads += not late
        missing = self._index.extents.get(extent)
        if missing is not None and job.approximate:
            self._placement.unread(missing, now)
        elif missing is not None and not late:
            self._placement.avoid(missing, now)
        if job.cancelled:
            self._roster.finish(job, None, "cancelled", now, retain=False)
        else:
            self._roster.send_back(job, now)
