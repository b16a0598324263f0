"""Results of steps, taken in: new rows, tokens that were drawn, jobs that end or could not go on.

It knows jobs and their drafts; not the next step.

Some steps are carried out several times before they are committed. A simulator advances uneventful decode steps together; an
engine carries out each step once. Both take the same steps.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from struct import iter_unpack

from afterglow.plan.batching.batch import Batch
from afterglow.plan.batching.job import Job
from afterglow.plan.batching.queue import RequestQueue
from afterglow.plan.cache import Cache
from afterglow.plan.step import ExtentId, Run, SelectingPass, Step, StepResult
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
            self._decoded(step.runs, result, now)
            return
        self._measure(step, result, opened, now)
        hopeless = self._hopeless(step, result)
        for run in step.runs:
            if run.job in result.selecting and run.own > 1:  # decoded tokens may have a pass of their own too
                self._selected(run, result.selecting[run.job])
            if run.job in result.exhausted:
                self._exhausted(self._queue.jobs[run.job], run.job == hopeless, now)
            elif run.job in result.failed:
                self._failed(self._queue.jobs[run.job], result.failed[run.job], run.job in result.late, now)
            elif run.job in result.waiting:
                self._waiting(self._queue.jobs[run.job], run, now)
            else:
                self._committed(run, result.tokens, now, result.accepted.get(run.job, 0))

    def _selected(self, run: Run, told: SelectingPass) -> None:
        """Learn what selecting takes, which part of the bytes on disk it reads, and how long it waits for them."""
        job = self._queue.jobs[run.job]
        self._cache.cost.selected(run.own, run.start, told.seconds)
        if job.on_disk and job.spec.retention:
            self._cache.cost.read_selected(job.spec.retention, job.on_disk, told.bytes, told.waited)

    def _measure(self, step: Step, result: StepResult, opened: float, now: float) -> None:
        """Learn what computing takes from passes with a prefill in them that had nothing to wait for."""
        if all(run.own == 1 for run in step.runs):
            return
        self._cache.cost.worked(now - opened)
        waited = any(gather.move is not None for run in step.runs for gather in run.gathers)
        waited = waited or bool(result.waiting)
        waited = waited or any(run.own > 1 and self._queue.jobs[run.job].approximate for run in step.runs)
        if waited or result.failed or result.exhausted:
            return
        work = Work()
        for run in step.runs:
            work.add(len(run.tokens), run.start, sum(gather.stop - gather.start for gather in run.gathers))
        self._cache.cost.passed(work, now - opened)

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

    def _decoded(self, runs: Sequence[Run], result: StepResult, now: float) -> None:
        """Take in a step of decodes that was perhaps carried out several times: no job ended before the last time."""
        repeats, drawn = result.repeats, result.drawn
        for run in runs:
            job = self._queue.jobs[run.job]
            tokens = drawn.get(run.job, b"")
            if repeats == 1 and _changes_more(job, run):
                self._committed(run, {run.job: int.from_bytes(tokens, "little")}, now)
                continue
            job.rows = run.start + repeats
            if run.saves:
                self._drafts.advance(job, repeats, now)
            elif job.spec.write:
                self._cache.counters.rows_unsaved += repeats
            job.tokens += tokens
            job.generated += repeats
            if job.cancelled:
                self._queue.finish(job, None, "cancelled", now)
            elif len(job.tokens) >= 4 * job.end:
                self._queue.finish(job, int.from_bytes(tokens[-4:], "little"), "length", now)

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

    def _hopeless(self, step: Step, result: StepResult) -> int | None:
        """Find the job that the device will never have memory for. Runs are left out from the last on, so that the first one was tried alone,
        unless a job with a pass of its own has kept its memory meanwhile; and no other job holds memory."""
        tried = [run.job for run in step.runs]
        if any(job not in result.exhausted for job in tried) or any(
            job.spec.job not in tried for job in self._batch.running
        ):
            return None
        return next((job for job in tried if self._queue.jobs[job].approximate), tried[0] if tried else None)

    def _exhausted(self, job: Job, hopeless: bool, now: float) -> None:
        """Send back a job that the device had no memory for: it waits until another job has left. `hopeless`: it ends."""
        if job.cancelled or hopeless:
            self._queue.finish(job, None, "cancelled" if job.cancelled else "no_memory", now, retain=False)
            return
        self._cache.counters.preemptions += 1
        self._queue.send_back(job, now)
        self._queue.full = bool(self._batch.running)  # none: the others have left in this very step

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


@dataclass(slots=True)
class Outlook:
    """What may make the step after this one another step. Set while a step is composed."""

    restless: bool = False  # it may be another one although nothing arrives, ends or completes before
    closed: bool = False  # no job can join before a running one ends
    awaited: bool = False  # a waiting job could join when a move ends

    def reset(self) -> None:
        """Forget the outlook of the step before."""
        self.restless = self.closed = self.awaited = False


def most_repeats(running: Sequence[Job], limit: int) -> int:
    """Return how often a step of decodes may be carried out, at most `limit`: until a job ends, or needs something new."""
    for job in running:
        if job.state != "decoding" or job.spec.stop_tokens:
            return 1
        most = min(job.end - 1, job.segment.capacity) - job.rows
        if job.drafts:
            draft = job.drafts[-1]
            if draft.planned > draft.rows:
                most = min(most, draft.room - draft.planned + 1)
            elif not draft.sealed:  # this row is not saved: the draft has to be sealed
                return 1
        if most < limit:
            limit = most
    return max(limit, 1)


def _changes_more(job: Job, run: Run) -> bool:
    """May a row change more of a job than its rows and tokens? Not where a step may be repeated: see `most_repeats`."""
    return job.state != "decoding" or bool(job.spec.stop_tokens) or (bool(job.drafts) and not run.saves)


def expanded(step: Step, result: StepResult) -> Iterator[tuple[Step, dict[int, int]]]:
    """Yield the steps that a repeated step stands for, each with the tokens drawn in it."""
    drawn = {job: [token for (token,) in iter_unpack("<I", text)] for job, text in result.drawn.items()}
    for i in range(result.repeats):
        tokens = {job: text[i] for job, text in drawn.items()} if result.drawn else result.tokens
        runs = [
            run._replace(
                start=run.start + i,
                tokens=run.tokens if i == 0 else (drawn[run.job][i - 1],),
                saves=tuple(s._replace(draft_row=s.draft_row + i, job_row=s.job_row + i) for s in run.saves),
            )
            for run in step.runs
        ]
        yield replace(step, number=step.number + i, runs=tuple(runs), repeat=1), tokens
        step = replace(step, releases=(), frees=())
