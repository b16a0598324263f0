"""The jobs that have not ended: those that wait, and those on the device.

The queue knows how jobs line up, leave the device, are sent back and end, and what callers are told. The batch knows their room
on the device, and the contexts and drafts that remain when they leave. Neither knows what a step consists of.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from afterglow.plan.batching.drafts import Drafts
from afterglow.plan.batching.job import Job
from afterglow.plan.batching.lookahead import LookAhead
from afterglow.plan.batching.merging import Merging
from afterglow.plan.cache import Cache
from afterglow.plan.options import SchedulerOptions
from afterglow.plan.prefix.extent import Extent, View
from afterglow.plan.prefix.salts import client_salt, covers
from afterglow.plan.prefix.truncation import Cut, is_private
from afterglow.plan.step import Admitted, Emitted, Event, JobSpec, Release
from afterglow.plan.tiers.device import GROWTH_BLOCKS
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


class Batch:
    """Jobs that run, and jobs that have run and are still being saved."""

    def __init__(self, cache: Cache, drafts: Drafts, merging: Merging) -> None:
        self.running: list[Job] = []  # in order of admission
        self.releases: list[Release] = []
        self._tails: dict[int, Job] = {}  # off the device, perhaps finished, with drafts still being saved; by seq
        self._cache = cache
        self.drafts = drafts
        self.merging = merging

    def extend(self, job: Job) -> bool:
        """Give a decoding job more room, at the cost of retained contexts."""
        least = self._cache.capacity.round_up(job.rows + 1)
        most = self._cache.capacity.round_up(len(job.spec.prompt) // 4 + job.spec.max_tokens)
        for rows in (min(job.capacity + GROWTH_BLOCKS * self._cache.capacity.block_rows, most), least):
            if least <= rows <= self._cache.device.most and self._cache.device.reserve(rows, job.capacity):
                job.capacity = rows
                return True
        return False

    def extend_early(self, job: Job) -> None:
        """Give a decoding job more room before it needs it, if that costs nothing."""
        most = self._cache.capacity.round_up(len(job.spec.prompt) // 4 + job.spec.max_tokens)
        device = self._cache.device
        rows = min(job.capacity + GROWTH_BLOCKS * self._cache.capacity.block_rows, most, device.most)
        if rows > job.capacity and device.has_room(rows, job.capacity):
            device.reserve(rows, job.capacity)
            job.capacity = rows

    def pin(self, job: Job, views: Sequence[View]) -> None:
        """Pin the extents that the job is about to gather from; unpin those of before."""
        before, job.pins = job.pins, [view.extent for view in views]
        for extent in job.pins:
            self._cache.pin(extent)
        for extent in before:
            self._cache.unpin(extent)

    def unpin(self, job: Job) -> None:
        """Unpin the job's extents: it has gathered its rows, or never will."""
        self.pin(job, ())

    def depart(self, job: Job, now: float, retain: bool) -> None:
        """Take a job off the device. Its committed rows may stay as a context, as far as the index knows them or will."""
        self.running.remove(job)
        self.unpin(job)
        self.drafts.leave(job, now)
        if job.drafts:
            self._tails[job.seq] = job
        rows = min(job.rows, job.reach)
        job.context = None
        if retain and job.spec.write and rows and not job.approximate:
            tokens = bytes(job.tokens[: 4 * rows])
            lacks = self._cache.device.letting_go(job.lacks, job.rows)
            job.context = self._cache.retain(job.spec.salt, tokens, rows, job.capacity, lacks).id
        else:
            self._cache.device.release(job.capacity)
        self.releases.append(Release(job.spec.job, job.context, rows if job.context is not None else 0))
        job.rows = job.capacity = 0
        job.stages, job.stop = [], None

    def settle(self, job: Job, now: float) -> None:
        """Let go of a job's extents, if none of its rows is on the device or being saved any more."""
        if job.grown:
            self.merging.grown(job, now)
        if job.drafts:
            return
        self._tails.pop(job.seq, None)
        if job.running:
            return
        used = list(job.uses)
        if used and job.spec.session is not None and job.spec.write and not job.disowned:
            extents = [view.extent for view in self._cache.match(job.spec.salt, bytes(job.tokens)).views]
            self._cache.sessions.used(client_salt(job.spec.salt), job.spec.session, extents, now)
        self._let_go(job)
        if job.disowned:
            self.merging.cancel()
            self._cache.sessions.discard(used)
        if job.context is not None:
            self._cache.trim(job.context)
        job.context = None
        if used and job.state == "gone" and not job.disowned:
            self.merging.ended(job, now)

    def promising(self) -> Iterator[Job]:
        """Yield the jobs whose tokens are on their way into the index."""
        yield from self.running
        yield from self._tails.values()

    def forget_tails(self, whose: str | None) -> None:
        """Give up the drafts that departed jobs (see `covers`) still save: they become no extents, and keep none."""
        for job in self._tails.values():
            if not covers(whose, job.spec.salt):
                continue
            self.drafts.kill(job)
            if not job.running:
                self._let_go(job)

    def disown(self, tenant: str, name: str, jobs: Iterable[Job]) -> None:
        """Take note that a conversation was deleted: the rows of its turns (among `jobs`, or still being saved) go when they
        end."""
        for job in (*jobs, *self._tails.values()):
            if job.owner == (tenant, name):
                job.disowned = True

    def _let_go(self, job: Job) -> None:
        for extent in job.uses:
            extent.ref_count -= 1
        job.uses = {}

    def path_rows(self, job: Job) -> int:
        """Count the rows of all extents that a job goes through or leaves, in whole blocks."""
        rows = [*(extent.rows for extent in job.uses), *(draft.rows for draft in job.drafts)]
        return sum(self._cache.capacity.round_up(count) for count in rows)

    def expected_slots(self) -> int:
        """Host slots that running prefills are going to need."""
        return sum(
            self._cache.capacity.blocks(job.target - max(job.rows, job.covered))
            for job in self.running
            if job.state == "prefilling" and job.saving
        )

    def check(self, queued: list[Job], copied: list[Extent]) -> None:
        """Budgets and reference counts against the jobs (and copies, which read `copied`) that cause them."""
        self._cache.device.check([job.capacity for job in self.running])
        pins: dict[Extent, int] = {}
        users: dict[Extent, int] = {}
        for extent in copied:
            pins[extent] = pins.get(extent, 0) + 1
        for job in dict.fromkeys([*queued, *self.running, *self._tails.values()]):
            for extent in job.pins:
                pins[extent] = pins.get(extent, 0) + 1
            for extent in job.uses:
                users[extent] = users.get(extent, 0) + 1
            assert bool(job.drafts) or job.seq not in self._tails
            assert job.running or not (job.capacity or job.rows)
        for extent in self._cache.index.extents.values():
            assert extent.pins == pins.get(extent, 0)
            assert extent.ref_count == users.get(extent, 0)
