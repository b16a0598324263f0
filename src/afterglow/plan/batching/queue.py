"""The jobs that have not ended: how they line up, leave the device, are sent back and end, and what callers are told.

It knows the queue, the batch and the look-ahead; not what a step consists of.
"""

from __future__ import annotations

from bisect import insort
from typing import Literal

from afterglow.plan.batching.batch import Batch
from afterglow.plan.batching.job import Job
from afterglow.plan.batching.lookahead import LookAhead
from afterglow.plan.cache import Cache
from afterglow.plan.options import SchedulerOptions
from afterglow.plan.prefix.truncation import Cut, is_private
from afterglow.plan.step import Admitted, Emitted, Event, JobSpec
from afterglow.plan.tiers.policy import POLICIES

Finish = Literal["stop", "length", "cancelled", "no_memory"]


class RequestQueue:
    """All jobs that have not ended; those that wait, by priority and arrival."""

    def __init__(self, cache: Cache, batch: Batch, options: SchedulerOptions) -> None:
        self.jobs: dict[int, Job] = {}
        self.waiting: list[Job] = []
        self.ahead = LookAhead(cache, self.waiting, POLICIES[options.policy].looks_ahead)
        self.version = 0  # changes whenever an attempt to admit may end differently
        self.full = False  # has the device run out of memory, and has no job left it since?
        self._counters = cache.counters
        self._batch = batch
        self._max_model_len = options.max_model_len
        self._retain = options.retain
        self._turns: dict[tuple[str, str], list[int]] = {}  # of each conversation, in the order in which they came
        self._arrivals = 0
        self._events: list[Event] = []

    def arrive(self, spec: JobSpec, step: int, cut: Cut | None, unscored: bool) -> None:
        """Queue a job that comes after so many steps, perhaps with a prompt that was cut (`unscored`: for want of scores by another
        policy than the one that was asked for)."""
        if spec.job in self.jobs:
            raise ValueError(f"job {spec.job} exists")
        self._arrivals += 1
        self._counters.submitted += 1
        end = min(len(spec.prompt) // 4 + spec.max_tokens, self._max_model_len)
        job = self.jobs[spec.job] = Job(spec, self._arrivals, step, bytearray(spec.prompt), end=end)
        if cut is not None:
            job.dropped, job.origin = cut.dropped, cut.origin
            self._counters.truncations += 1
            self._counters.truncations_unscored += unscored
        self._line_up(job)
        self.version += 1

    def admit(self, job: Job) -> None:
        """Move a job from the queue to the device."""
        self._leave_queue(job)
        self._batch.running.append(job)

    def send_back(self, job: Job, now: float) -> None:
        """Move a job off the device into the queue; the tokens that it has generated become part of its prompt."""
        self._depart(job, now, retain=False)
        job.state, job.tried = "waiting", -1
        self._line_up(job)
        self._batch.settle(job, now)

    def finish(self, job: Job, token: int | None, why: Finish, now: float, retain: bool = True) -> None:
        """End a job, at whatever state it was in."""
        if job.running:
            self.ahead.finished(self._batch.path_rows(job))
            self._depart(job, now, retain and self._retain)
        else:
            self._leave_queue(job)
            self._batch.unpin(job)
        job.state = "gone"
        del self.jobs[job.spec.job]
        if why == "cancelled":
            self._counters.cancelled += 1
        else:
            self._counters.finished += 1
        self._events.append(Emitted(job.spec.job, token, why))
        self.version += 1
        self._batch.settle(job, now)

    def is_next_turn(self, job: Job) -> bool:
        """Does no earlier turn of its conversation wait, whatever their priorities?"""
        return job.conversation is None or self._turns[job.conversation][0] == job.seq

    def _line_up(self, job: Job) -> None:
        insort(self.waiting, job, key=lambda item: item.key)  # one that was sent back has kept its number: it is first
        if job.conversation is not None:
            insort(self._turns.setdefault(job.conversation, []), job.seq)
        self.ahead.joined(job)

    def _leave_queue(self, job: Job) -> None:
        self.waiting.remove(job)
        if job.conversation is not None:
            self._turns[job.conversation].remove(job.seq)
            if not self._turns[job.conversation]:
                del self._turns[job.conversation]
        self.ahead.left(job)

    def _depart(self, job: Job, now: float, retain: bool) -> None:
        self.version += 1
        self.full = False
        self._batch.depart(job, now, retain)

    # ------------------------------------------------------------------------------------- what callers are told

    def drew(self, job: Job, token: int) -> None:
        """Tell of a token that is not the last one."""
        self._events.append(Emitted(job.spec.job, token, None))

    def tell_admitted(self, job: Job) -> None:
        """Tell how much of a job's prompt was cached."""
        # Once, and not before its loads have come: one may fail.
        job.admitted = True
        embedded = is_private(job.spec.salt) and any(job.hits)
        device, host, disk, shared = job.hits
        why, missed = job.missed
        told = Admitted(job.spec.job, device, host, disk, job.dropped, embedded, why, missed, shared)
        self._events.append(told)
        self._counters.count_hits(job.target, *job.hits)
        self._counters.count_miss(*job.missed)

    def take_events(self) -> list[Event]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events
