"""Steps after which the next one may be launched before their tokens are known.

Where all that a step draws from is known to come one row further, an engine need not wait for the tokens: it computes the next rows from
them where they are drawn (on a device). What it has launched is of no use if another job joins, or tokens are guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from afterglow.plan.batching.job import Job
from afterglow.plan.step import Run


class StepAhead:
    """Tells it of each step. After a step that was not as foreseen, one is left out: where guesses come and go, so do launches in vain."""

    def __init__(self, enabled: bool, jobs: Mapping[int, Job]) -> None:
        self._enabled = enabled
        self._jobs = jobs
        self._foreseen = False  # the last step was to be followed by one that decodes on
        self._left_out = False  # the next one that could be followed so is not

    def choose(self, runs: Sequence[Run], repeats: int) -> tuple[bool, int]:
        """Return whether the step after these runs is foreseen, and how often of `repeats` times the runs may be carried out until that
        changes."""
        if not self._enabled or not runs:
            return False, repeats
        self._left_out |= self._foreseen and not all(map(_decodes, runs))
        self._foreseen = self._goes_on(runs)
        if not self._foreseen:
            return False, repeats
        if self._left_out:
            self._left_out = self._foreseen = False
            return False, 1
        return True, max(1, repeats - 1)  # jobs end with the last one, or have no room for a next row

    def _goes_on(self, runs: Sequence[Run]) -> bool:
        jobs = [self._jobs[run.job] for run in runs]
        able = all(
            _decodes(run) and job.spec.plain and run.start + 2 <= run.capacity
            for run, job in zip(runs, jobs, strict=True)
        )
        return able and any(job.length + 1 < job.end for job in jobs)


def _decodes(run: Run) -> bool:
    return len(run.tokens) == 1 and run.sample and run.admit is None and not run.gathers
