"""The contexts on the device: those of running jobs, and those of finished ones that the plan retains."""

from __future__ import annotations

from afterglow.engine.context import DeviceContext
from afterglow.engine.gather import BatchEntry
from afterglow.engine.kv_shape import KVShape
from afterglow.engine.page_pool import PagePool
from afterglow.engine.stats import PoolLevels
from afterglow.plan.step import Release, Run


class Contexts:
    """Make, lend and free contexts as steps say. For the runner alone, but for `levels`."""

    def __init__(self, shape: KVShape, pool: PagePool) -> None:
        self._shape, self._pool = shape, pool
        self.running: dict[int, DeviceContext] = {}  # by job
        self.retained: dict[int, DeviceContext] = {}  # by the plan's number

    def levels(self) -> PoolLevels:
        """Count the pages that all contexts hold; see `PagePool.levels`."""
        return self._pool.levels()

    def shorten(self, run: Run) -> None:
        """Leave out of what a job takes over the rows that it does not go on from: others may get their pages in the same step."""
        admit = run.admit
        if admit is not None and admit.take and admit.context in self.retained:
            self.retained[admit.context].shorten(admit.device_rows)

    def admit(self, run: Run) -> None:
        """Make the context of a job's first run, with the rows that the plan wants in it before the forward pass.

        Raises: `torch.OutOfMemoryError`. The same step may then be attempted again.
        """
        job, admit = run.job, run.admit
        if admit is None:
            return
        if admit.context is not None and admit.take:
            if job not in self.running:
                self.running[job] = self.retained.pop(admit.context)
            self.running[job].cut(admit.device_rows)  # also if an attempt at this step has failed before
            return
        if job in self.running:
            return
        context = DeviceContext(self._shape, self._pool, run.start if admit.selectable else 0)
        source = self.retained[admit.context] if admit.context is not None else None
        if admit.fellow is not None:
            source = self.running[admit.fellow]
        if source is not None:
            context.share(source, admit.device_rows)
        self.running[job] = context

    def entry(self, run: Run, where: slice) -> BatchEntry:
        """Give a run's context pages for its new rows.

        Raises: `torch.OutOfMemoryError`.
        """
        assert run.job in self.running, f"job {run.job} runs without ever having been admitted"
        context, stop = self.running[run.job], run.start + len(run.tokens)
        context.make_room(stop, run.capacity)
        gather_from = run.start - sum(gather.stop - gather.start for gather in run.gathers)
        return BatchEntry(run.job, where, run.start, stop, context, run.gathers, gather_from)

    def leave_out(self, run: Run) -> None:
        """Free what a run has that is not carried out, for those that are tried again: the plan sends its job back, or ends it, and does not
        count what it was to take over any more."""
        self.running.pop(run.job, None)
        admit = run.admit
        if admit is not None and admit.context is not None and admit.take:
            self.retained.pop(admit.context, None)

    def release(self, release: Release) -> None:
        """Retain a job's context, or free it."""
        context = self.running.pop(release.job, None)
        if release.context is not None:
            assert context is not None, f"job {release.job} has nothing on the device to retain"
            context.shorten(release.rows)
            self.retained[release.context] = context
