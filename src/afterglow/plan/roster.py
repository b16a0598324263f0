"""The jobs that have not ended: how they line up, leave the device, are sent back and end, and what callers are told.

It knows the queue, the batch and the look-ahead; not what a step consists of.
"""

from __future__ import annotations

from typing import Literal

from afterglow.plan.admission import Admission
from afterglow.plan.batch import Batch
from afterglow.plan.jobs import Job, JobQueue
from afterglow.plan.lookahead import LookAhead
from afterglow.plan.stats import Counters
from afterglow.plan.step import Admitted, Emitted, Event, JobSpec
from afterglow.plan.truncation import Cut, is_private

Finish = Literal["stop", "length", "cancelled", "no_memory"]


class Roster:
    """All jobs that wait or run. `longest`: tokens of the longest context; `retain`: do contexts of jobs that have ended
    stay on the device while there is room?"""

    def __init__(
        self,
        queue: JobQueue,
        batch: Batch,
        ahead: LookAhead,
        admission: Admission,
        counters: Counters,
        longest: int,
        retain: bool,
    ) -> None:
        self.jobs: dict[int, Job] = {}
        self.version = 0  # changes whenever an attempt to admit may end differently
        self.full = False  # has the device run out of memory, and has no job left it since?
        self._queue = queue
        self._batch = batch
        self._ahead = ahead
        self._admission = admission
        self._counters = counters
        self._longest = longest
        self._retain = retain
        self._arrivals = 0
        self._events: list[Event] = []

    def arrive(self, spec: JobSpec, step: int, cut: Cut | None, unscored: bool) -> None:
        """A job comes after so many steps, perhaps with a prompt that was cut (`unscored`: for want of scores by another
        policy than the one that was asked for)."""
        if spec.job in self.jobs:
            raise ValueError(f"job {spec.job} exists")
        self._arrivals += 1
        self._counters.submitted += 1
        end = min(len(spec.prompt) // 4 + spec.max_tokens, self._longest)
        job = self.jobs[spec.job] = Job(spec, self._arrivals, step, bytearray(spec.prompt), end=end)
        if cut is not None:
            job.dropped, job.origin = cut.dropped, cut.origin
            self._counters.truncations += 1
            self._counters.truncations_unscored += unscored
        self._line_up(job)
        self.version += 1

    def board(self, job: Job) -> None:
        """It comes from the queue to the device."""
        self._leave_queue(job)
        self._batch.running.append(job)

    def send_back(self, job: Job, now: float) -> None:
        """Off the device and into the queue, with what has been generated as part of the prompt."""
        self._depart(job, now, retain=False)
        job.state, job.tried = "waiting", -1
        self._line_up(job)
        self._batch.settle(job, now)

    def finish(self, job: Job, token: int | None, why: Finish, now: float, retain: bool = True) -> None:
        """It has ended, at whatever state it was in."""
        if job.running:
            self._ahead.finished(self._batch.path_rows(job))
            self._depart(job, now, retain and self._retain)
        else:
            self._leave_queue(job)
            self._admission.unpin(job)
        job.state = "gone"
        del self.jobs[job.spec.job]
        if why == "cancelled":
            self._counters.cancelled += 1
        else:
            self._counters.finished += 1
        self._events.append(Emitted(job.spec.job, token, why))
        self.version += 1
        self._batch.settle(job, now)

    def _line_up(self, job: Job) -> None:
        self._queue.add(job)
        self._ahead.joined(job)

    def _leave_queue(self, job: Job) -> None:
        self._queue.remove(job)
        self._ahead.left(job)

    def _depart(self, job: Job, now: float, retain: bool) -> None:
        self.version += 1
        self.full = False
        self._batch.depart(job, self._admission, now, retain)

    # ------------------------------------------------------------------------------------- what callers are told

    def drew(self, job: Job, token: int) -> None:
        """A token, not the last one."""
        self._events.append(Emitted(job.spec.job, token, None))

    def tell_admitted(self, job: Job) -> None:
        """What of its prompt was cached."""
        # Not before its loads have come, because one that fails would make a liar of whoever tells earlier; and once.
        job.admitted = True
        embedded = is_private(job.spec.salt) and any(job.hits)
        self._events.append(Admitted(job.spec.job, *job.hits, job.dropped, embedded, *job.missed))
        self._counters.count_hits(job.target, *job.hits)
        self._counters.count_miss(*job.missed)

    def take_events(self) -> list[Event]:
        """Since the last call."""
        events, self._events = self._events, []
        return events
