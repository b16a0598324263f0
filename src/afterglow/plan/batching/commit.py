"""Results of steps, taken in: new rows, tokens that were drawn, jobs that end or could not go on.

It knows jobs and their drafts; not the next step.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from afterglow.plan.batching.batch import Batch
from afterglow.plan.batching.job import Job
from afterglow.plan.batching.queue import RequestQueue
from afterglow.plan.batching.repetition import advance, changes_nothing
from afterglow.plan.cache import Cache
from afterglow.plan.step import ExtentId, Run, Step, StepResult
from afterglow.plan.tiers.cost import Work


class Committer:
    """Takes in the results of steps."""

    def __init__(self, cache: Cache, queue: RequestQueue, batch: Batch) -> None:
        self._cache = cache
        self._queue = queue
        self._batch = batch
        self._drafts = batch.drafts

    def commit(self, step: Step, result: StepResult, opened: float, now: float) -> None:
        """Take in the result of a step that was handed out at `opened`."""
        if result.drawn:
            for run in step.runs:
                self._decoded(run, result, now)
            return
        self._measure(step, result, now - opened)
        for run in step.runs:
            if run.job in result.exhausted:
                self._exhausted(self._queue.jobs[run.job], now)
            elif run.job in result.failed:
                self._failed(self._queue.jobs[run.job], result.failed[run.job], run.job in result.late, now)
            elif run.job in result.waiting:
                self._waiting(self._queue.jobs[run.job], run, now)
            else:
                self._committed(run, result.tokens, now, result.accepted.get(run.job, 0))

    def _measure(self, step: Step, result: StepResult, seconds: float) -> None:
        """Learn what computing takes from passes with a prefill in them that had nothing to wait for."""
        waited = any(gather.move is not None for run in step.runs for gather in run.gathers)
        waited = waited or bool(result.waiting)
        waited = waited or any(run.own > 1 and self._queue.jobs[run.job].approximate for run in step.runs)
        if waited or result.failed or result.exhausted or all(run.own == 1 for run in step.runs):
            return
        work = Work()
        for run in step.runs:
            work.add(len(run.tokens), run.start, sum(gather.stop - gather.start for gather in run.gathers))
        self._cache.cost.passed(work, seconds)

    def _committed(self, run: Run, tokens: Mapping[int, int], now: float, accepted: int = 0) -> None:
        """Take in a run. `accepted`: how many of its guesses were right."""
        job = self._queue.jobs[run.job]
        if not job.stages:
            if job.pins and not (job.approximate and job.spec.renews):
                self._batch.unpin(job)
            if not job.admitted:
                self._queue.tell_admitted(job)
        right = run.tokens[run.own : run.own + accepted]
        void = run.guessed - accepted
        job.rows, job.lingering = run.start + run.own + accepted, False
        job.tokens += struct.pack(f"<{accepted}I", *right)
        job.generated += accepted
        if void and run.saves:
            self._drafts.take_back(job, void)
        if job.spec.write:
            new = job.rows - max(run.start, job.covered)
            if not job.approximate:
                saved = sum(save.rows for save in run.saves) - (void if run.saves else 0)
                self._cache.counters.rows_unsaved += max(0, new) - saved
            self._drafts.commit(job, now)
            self._batch.settle(job, now)
        if job.cancelled:
            self._queue.finish(job, None, "cancelled", now)
        elif run.sample:
            for token in right:
                self._queue.drew(job, token)
            self._sampled(job, tokens[run.job], now)
        elif job.rows == job.length:
            self._queue.finish(job, None, "length", now)

    def _decoded(self, run: Run, result: StepResult, now: float) -> None:
        """Take in a job's share of a step that was perhaps carried out several times: no job ended before the last time."""
        job = self._queue.jobs[run.job]
        drawn = result.drawn.get(run.job, b"")
        if not changes_nothing(job, run, result):
            self._committed(run, {run.job: int.from_bytes(drawn, "little")}, now)  # something changes with it
            return
        advance(job, run, result, self._drafts, self._cache.counters, now)
        if job.cancelled:
            self._queue.finish(job, None, "cancelled", now)
        elif len(job.tokens) >= 4 * job.end:
            self._queue.finish(job, int.from_bytes(drawn[-4:], "little"), "length", now)

    def _sampled(self, job: Job, token: int, now: float) -> None:
        job.tokens += token.to_bytes(4, "little")
        job.generated += 1
        if job.state == "prefilling":
            job.state = "decoding"
            self._queue.version += 1
        if token in job.spec.stop_tokens:
            self._queue.finish(job, token, "stop", now)
        elif job.length >= job.end:
            self._queue.finish(job, token, "length", now)
        else:
            self._queue.drew(job, token)

    def _exhausted(self, job: Job, now: float) -> None:
        """Send back a job that the device had no memory for: it waits until another job has left, or ends where there is none."""
        if job.cancelled or self._batch.running == [job]:
            self._queue.finish(job, None, "cancelled" if job.cancelled else "no_memory", now, retain=False)
            return
        self._cache.counters.preemptions += 1
        self._queue.send_back(job, now)
        self._queue.full = True

    def _waiting(self, job: Job, run: Run, now: float) -> None:
        """Take note that a job's run has not ended, and is to be handed out again."""
        job.rows, job.lingering = run.start, True
        if job.cancelled:
            self._queue.finish(job, None, "cancelled", now, retain=False)

    def _failed(self, job: Job, extent: ExtentId, late: bool, now: float) -> None:
        """Send back a job whose extent did not arrive: the next attempt does not wait for it again. But one that is `late` comes, and the job
        joins when it is there."""
        job.patient = late
        self._cache.counters.stalled += late
        self._cache.counters.failed_loads += not late
        missing = self._cache.index.extents.get(extent)
        if missing is not None and job.approximate:
            self._cache.placement.unread(missing, now)
        elif missing is not None and not late:
            self._cache.loading.avoid(missing, now)
        if job.cancelled:
            self._queue.finish(job, None, "cancelled", now, retain=False)
        else:
            self._queue.send_back(job, now)
