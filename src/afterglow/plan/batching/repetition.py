"""Steps that are carried out several times before they are committed: how often, and what they stand for.

A simulator advances uneventful decode steps together; an engine carries out each step once. Both take the same steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from struct import iter_unpack

from afterglow.plan.batching.drafts import Drafts
from afterglow.plan.batching.job import Job
from afterglow.plan.stats import Counters
from afterglow.plan.step import Run, Step, StepResult


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
        most = min(job.end - 1, job.capacity) - job.rows
        if job.drafts:
            draft = job.drafts[-1]
            if draft.planned > draft.rows:
                most = min(most, draft.room - draft.planned + 1)
            elif not draft.sealed:  # this row is not saved: the draft has to be sealed
                return 1
        if most < limit:
            limit = most
    return max(limit, 1)


def changes_nothing(job: Job, run: Run, result: StepResult) -> bool:
    """Does the job just go on decoding, so that `advance` is all that its results ask for?"""
    once = result.repeats == 1
    return not (once and (job.state != "decoding" or job.spec.stop_tokens or (job.drafts and not run.saves)))


def advance(job: Job, run: Run, result: StepResult, drafts: Drafts, counters: Counters, now: float) -> None:
    """Add all tokens that a decoding job has drawn in a repeated step, and their rows."""
    job.rows = run.start + result.repeats
    if run.saves:
        drafts.advance(job, result.repeats, now)
    elif job.spec.write:
        counters.rows_unsaved += result.repeats
    job.tokens += result.drawn.get(run.job, b"")
    job.generated += result.repeats


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
