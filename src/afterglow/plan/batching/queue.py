"""The jobs that wait: how they line up, leave the device, are sent back and end, what callers are told, and what the queue's first jobs need.

Looking ahead in the queue is CachedAttention §3.3: which extents are waited for, how far to look, what to fetch before its
turn comes. `LookAhead` knows the queue, the index and the placement; not the device, not the batch. A job's item is all extents on its
path; an extent that many jobs wait for has the rank of the first one. `RequestQueue` knows not what a step consists of.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import Literal

from afterglow.plan.batching.batch import Batch
from afterglow.plan.batching.job import Job
from afterglow.plan.cache import Cache
from afterglow.plan.options import SchedulerOptions
from afterglow.plan.prefix.extent import Extent, Key
from afterglow.plan.prefix.salts import is_private
from afterglow.plan.prefix.truncation import Cut, Origin
from afterglow.plan.step import Admitted, Emitted, Event, JobSpec
from afterglow.plan.tiers.policy import POLICIES

MAX_REMATCHED = 16  # jobs at the head whose paths are looked up anew in a step, if the index has grown


class LookAhead:
    """The windows of one queue. Without a policy that looks ahead it does nothing; except that a read buffer (a
    baseline) is filled for the next job."""

    def __init__(self, cache: Cache, waiting: Sequence[Job], windows: bool) -> None:
        self._cache = cache
        self._waiting = waiting
        self._windows = windows
        self._items = 0  # finished jobs, and the rows of their paths in whole blocks
        self._item_rows = 0
        self._queued = 0  # the same of the jobs in the queue that wait for anything
        self._queued_rows = 0
        self._longest = cache.device.longest
        self._window = 1  # the prefetch window of this step
        self._changes = 0  # how often the queue, or a known path of its jobs, has changed
        self._fetched = (-1, -1, -1)  # changes, absences and window when all paths in the window were found in host
        self._seen = -1  # the index's version when the head of the queue was last matched

    @property
    def enabled(self) -> bool:
        """Is anything fetched before its turn?"""
        return self._windows or bool(self._cache.loading.read_buffer)

    # ---------------------------------------------------------------------------------------- the queue changes

    def joined(self, job: Job) -> None:
        """Take note that a job waits."""
        self._changes += 1
        if self.enabled and job.spec.read and not job.spec.selects:  # which does not load its path
            self._follow(job)

    def left(self, job: Job) -> None:
        """Take note that a job waits no more."""
        self._changes += 1
        for extent in job.path:
            place = bisect_left(extent.waiting, job.key)
            extent.waiting = (*extent.waiting[:place], *extent.waiting[place + 1 :])
            if place == 0:
                self._cache.placement.ranked(extent)
        self._count(job, -1)
        job.path, job.whole = (), -1

    def _follow(self, job: Job) -> None:
        """Find out what a job waits for, as far as it is known now."""
        job.match = self._cache.match(job.spec.salt, bytes(job.tokens[:-4]))
        found = dict.fromkeys(view.extent for view in job.match.views)
        if job.origin is not None:
            found.update(dict.fromkeys(self._surviving(job.origin)))
        path = tuple(found)
        if path == job.path:
            return
        self.left(job)
        job.path = path
        self._changes += 1
        self._count(job, 1)
        for extent in path:
            place = bisect_left(extent.waiting, job.key)
            extent.waiting = (*extent.waiting[:place], job.key, *extent.waiting[place:])
            if extent.waiting[0] == job.key:
                self._cache.placement.ranked(extent)

    def _surviving(self, origin: Origin) -> Iterator[Extent]:
        """Yield the extents whose rows a truncated job is going to keep."""
        row = 0
        for view in self._cache.match(origin.salt, origin.tokens).views:
            stop = row + view.stop - view.start
            if any(a < stop and row < b for a, b in origin.kept):
                yield view.extent
            row = stop

    def _count(self, job: Job, sign: int) -> None:
        if job.path:
            self._queued += sign
            self._queued_rows += sign * sum(self._cache.capacity.round_up(extent.rows) for extent in job.path)

    def _path(self, salt: str, tokens: bytes) -> tuple[Extent, ...]:
        return tuple(dict.fromkeys(view.extent for view in self._cache.match(salt, tokens).views))

    def awaited(self) -> dict[Extent, None]:
        """Find all extents that queued jobs wait for, looked up anew: the windows follow no more than they need."""
        found: dict[Extent, None] = {}
        for job in self._waiting:
            if job.spec.read and not job.spec.selects:
                found.update(dict.fromkeys(self._path(job.spec.salt, bytes(job.tokens[:-4]))))
                if job.origin is not None:
                    found.update(dict.fromkeys(self._path(job.origin.salt, job.origin.tokens)))
        return found

    # ---------------------------------------------------------------------------------------------- windows

    def finished(self, rows: int) -> None:
        """Count the path of a finished job: `rows` rows, in whole blocks."""
        if not rows:
            return  # it never ran
        self._items += 1
        self._item_rows += rows

    @property
    def item_rows(self) -> float:
        """S_kv, in rows: the mean of all finished jobs' paths; before the first one has finished, the longest."""
        return self._item_rows / self._items if self._items else float(self._longest)

    @property
    def _windowed_rows(self) -> float:
        """Return the larger of the mean finished and the mean queued path: a window fits its tiers where conversations grow."""
        queued = self._queued_rows / self._queued if self._queued else 0.0
        return max(self.item_rows, queued)

    @property
    def prefetch_window(self) -> int:
        """Waiting jobs whose items are brought to host: host room that is not pinned nor kept free, over S_kv."""
        return int(self._host_rows() / self._windowed_rows) if self._windows else 1

    @property
    def eviction_window(self) -> int:
        """Waiting jobs whose items are not let go of: room in host and on disk, over S_kv."""
        return int((self._host_rows() + self._disk_rows()) / self._windowed_rows)

    def _host_rows(self) -> int:
        free = self._cache.host.pool.total - self._cache.host.low
        pinned = {extent: None for job in self._waiting[:MAX_REMATCHED] for extent in job.pins}
        return max(0, free - sum(len(extent.slots) for extent in pinned)) * self._cache.capacity.block_rows

    def _disk_rows(self) -> float:
        if not self._cache.capacity.disk_bytes:
            return 0
        return (
            self._cache.capacity.disk_bytes / self._cache.capacity.file_bytes[-1] * self._cache.capacity.max_extent_rows
        )

    # --------------------------------------------------------------------------------------------- each step

    def watch(self) -> None:
        """Before a step is planned: who is at the head, and up to where may nothing be evicted?"""
        if self._items:
            blocks = self._cache.capacity.blocks(int(self.item_rows))
            self._cache.host.keep_free(2 * blocks, 4 * blocks)
        if not self.enabled:
            return
        if self._cache.index.version != self._seen:
            self._seen = self._cache.index.version
            for job in self._waiting[: min(self._window, MAX_REMATCHED)]:
                following = bytes(job.tokens[4 * job.match.rows : min(4 * job.match.rows + 4, len(job.tokens) - 4)])
                if job.spec.read and self._cache.index.outdated(job.spec.salt, job.match, following):
                    self._follow(job)
        if self._windows:  # once a step: it asks for everything that is pinned
            host, item = self._host_rows(), self._windowed_rows
            self._window = int(host / item)
            self._cache.placement.candidates.horizon = self._key_at(int((host + self._disk_rows()) / item))

    def coming(self, jobs: int) -> int:
        """Host slots that the rows of the next jobs are going to need, at most a quarter of all."""
        need = 0
        for job in self._waiting[:jobs]:
            known = sum(extent.rows for extent in job.path) if job.origin is None else 0  # they are copied
            need += self._cache.capacity.blocks(max(0, job.length - known)) + 1
        return min(need, self._cache.host.pool.total // 4)

    def prefetch(self, now: float, reserve: int) -> None:
        """Start to bring to host what the jobs in the window wait for, in the order of the queue; `reserve` slots are left
        for rows that are about to be computed."""
        state = (self._changes, self._cache.host.absences, self._window)
        if not self.enabled or state == self._fetched:
            return  # nothing has left host since all in the window was there, or on its way
        complete, absences = True, self._cache.host.absences
        for job in self._waiting[: self._window]:
            if job.whole == absences:
                continue
            whole = True
            ahead = self._buffered(job)
            for extent in job.path:
                if extent.dead:
                    whole = False
                    break
                if extent.host == "absent":
                    if not self._cache.loading.prefetch(extent, now, job.key, reserve, ahead):
                        return
                    complete = whole = complete and extent.host != "absent"
            if whole:
                job.whole = absences
        if complete:
            self._fetched = state

    def _buffered(self, job: Job) -> int | None:
        """Compute how many layers come before the job's turn; None: all. Rows that survive a truncation are copied as a whole."""
        if job.origin is not None:
            return None
        return self._cache.loading.buffered(job.path, job.length - job.match.rows, job.match.rows)

    @property
    def fetched(self) -> Key | None:
        """The last job in the prefetch window: what it and those before it wait for stays in host."""
        return self._key_at(self._window) if self._windows else None

    def _key_at(self, length: int) -> Key | None:
        length = min(length, len(self._waiting))
        return self._waiting[length - 1].key if length > 0 else None

    def check(self) -> None:
        """Every waiting list is made of exactly the queued jobs whose paths go through it."""
        waiting: dict[Extent, list[Key]] = {}
        for job in self._waiting:
            for extent in job.path:
                insort(waiting.setdefault(extent, []), job.key)
        for extent in self._cache.index.extents.values():
            assert list(extent.waiting) == waiting.get(extent, [])


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
            job.head = cut.head if is_private(spec.salt) else job.head
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
