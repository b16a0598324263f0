"""Publishes extents in the background: the file of the disk tier as one object, then the object that lists it.

Nothing waits for it. What a client deletes goes before all else, also while a publication waits for room. All other things are done in the
order in which they were asked for. While the store does not answer the queue waits; what it has no room for is left out. What a merged
extent replaces stays until that is there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from afterglow.errors import RefusedError, StoreError
from afterglow.plan.prefix.block_keys import Lead
from afterglow.plan.prefix.published import Published
from afterglow.plan.retention.shared_room import LastUses, is_used_again
from afterglow.plan.step import ExtentId
from afterglow.store.shared.budget import Budget
from afterglow.store.shared.counters import SharedCounters
from afterglow.store.shared.paths import Paths
from afterglow.store.shared.remote import Remote

log = logging.getLogger("afterglow.store")

MAX_QUEUE: Final = 256  # extents that wait; they are on disk, so that only their names wait
MAX_REMOVALS: Final = 1 << 18
MAX_MERGED: Final = 4096  # merged extents that are not published yet
MAX_TRIES: Final = 3  # of one thing, before the next has its turn
RETRY_S: Final = 30.0  # after which removals that failed are tried again
PUT_S: Final = 10.0  # for an object, and
PUT_RATE: Final = 1 << 20  # bytes/s that a store has at least to take
MAX_LEAD: Final = 65536  # bytes of a lead


class Publication(NamedTuple):
    """An extent to be published. `key`: what it is listed under; `lead`: how a directory finds it."""

    published: Published
    key: str
    file: Path
    lead: Lead | None = None


class _Removal(NamedTuple):
    path: str
    again: bool  # later, if it fails
    first: bool = False  # a client waits for it


class _Use(NamedTuple):
    path: str


class ExtentPublisher:
    """One thread that writes, deletes and keeps the budget."""

    def __init__(self, remote: Remote, paths: Paths, budget: Budget, counters: SharedCounters) -> None:
        self._remote = remote
        self._paths = paths
        self._budget = budget
        self._counters = counters
        self._changed = threading.Condition()
        self._jobs: deque[Publication | _Removal | _Use] = deque()
        self._first: deque[_Removal] = deque()  # go before the jobs
        self._doing: Publication | _Removal | _Use | None = None
        budget.meanwhile = self._delete_first
        self._extents = 0  # of the jobs, those that publish
        self._parts: dict[ExtentId, tuple[ExtentId, ...]] = {}  # that go once this merged extent is published
        self._tries = 0  # of the first job
        self._removals: list[_Removal] = []  # that failed, to be tried again
        self._retry_at = 0.0
        self._uses = LastUses[str]()  # paths of what lists extents
        self._told_full = False  # was it logged that too many removals wait?
        self._busy = False
        self._closing = False  # nothing is tried again
        self._closed = False
        self._thread: threading.Thread | None = None

    # --------------------------------------------------------------------------------------------- what to do

    def publish(self, what: Publication, above: Sequence[ExtentId] = ()) -> None:
        """Queue an extent; one that finds the queue full is left out. `above`: the extents that lead to it, the nearest first. They are used
        as well: without them it is of no use, and an engine that has them does not ask for them here.
        """
        with self._changed:
            if self._closed or self._extents >= MAX_QUEUE:
                self._counters.count(unpublished=1)
                return
            now = time.time()
            self._extents += 1
            self._uses.note(what.published.id, self._paths.kid(what.key, what.published), now)
            self._add(what)
            if len(self._jobs) < MAX_QUEUE:
                for kid in self._uses.again(above, now):
                    self._add(_Use(kid))

    def delete(self, extent: ExtentId, first: bool = True) -> None:
        """Queue the removal of an extent: its object, with all text, and what lists it. Where that was published long ago, or by
        another engine, it is removed when it is found to lead nowhere. `first`: before all that waits.
        """
        with self._changed:
            if self._extents:  # many may be deleted at once
                kept = [job for job in self._jobs if not isinstance(job, Publication) or job.published.id != extent]
                self._extents -= len(self._jobs) - len(kept)
                self._jobs = deque(kept)
            kid = self._uses.forget(extent)
        if kid is not None:
            self._remove(_Removal(kid, again=True, first=first))
        self._counters.count(deleted=self._remove(_Removal(self._paths.extent(extent), again=True, first=first)))
        self._delete_parts(extent, first)

    def replaced(self, part: ExtentId, whole: ExtentId) -> None:
        """Have an extent removed that a merged one has replaced, once that is published, or deleted. Until then others find its rows by it."""
        with self._changed:
            self._parts[whole] = (*self._parts.pop(whole, ()), *self._parts.pop(part, ()), part)
            oldest = next(iter(self._parts)) if len(self._parts) > MAX_MERGED else None
        if oldest is not None:
            self._delete_parts(oldest)

    def _delete_parts(self, whole: ExtentId, first: bool = False) -> None:
        with self._changed:
            parts = self._parts.pop(whole, ())
        for part in parts:
            self.delete(part, first)

    def damaged(self, extent: ExtentId) -> None:
        """Queue the removal of a damaged object. One that cannot be removed now is found again, by the next that reads it; later there might be
        a good one.
        """
        self._remove(_Removal(self._paths.extent(extent), again=False))

    def missing(self, extent: ExtentId) -> None:
        """Queue the removal of what lists an extent that is not there."""
        with self._changed:
            kid = self._uses.forget(extent)
        if kid is not None:
            self._remove(_Removal(kid, again=False))

    def _remove(self, what: _Removal) -> bool:
        """Queue a removal. False: too much waits."""
        with self._changed:
            waiting = len(self._jobs) + len(self._first)
            full = waiting >= MAX_REMOVALS
            if full and not self._told_full:
                log.warning(
                    "%d removals wait for the shared store: further objects that were deleted stay in it", waiting
                )
            self._told_full = full or (self._told_full and waiting > MAX_REMOVALS // 2)
            if not full:
                self._add(what)
            return not full

    def used(self, extent: ExtentId, kid: str, modified: float) -> None:
        """Note that an extent was used. `kid`: the path of what lists it, last written at `modified`."""
        with self._changed:
            now = time.time()
            again = is_used_again(modified, now) and not self._closed and len(self._jobs) < MAX_QUEUE
            self._uses.note(extent, kid, now if again else modified)
            if again:
                self._add(_Use(kid))

    @property
    def pending(self) -> int:
        """Count what waits or runs."""
        with self._changed:
            return len(self._first) + len(self._jobs) + self._busy

    def rest(self, seconds: float) -> bool:
        """Wait until nothing is left to do; tell whether that was so within `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._waits or self._busy), seconds)

    def close(self, seconds: float) -> None:
        """Do what is left for at most so many seconds, then leave it out."""
        with self._changed:
            self._closing = True
            self._changed.wait_for(lambda: not (self._waits or self._busy) or self._remote.rests, seconds)
            self._closed = True
            self._counters.count(unpublished=self._extents)
            left = len(self._first) + len(self._removals) + sum(isinstance(job, _Removal) for job in self._jobs)
            if left:
                log.warning(
                    "%d objects that were deleted here may still be in the shared store: it does not answer", left
                )
            self._jobs.clear()
            self._first.clear()
            self._changed.notify_all()

    @property
    def _waits(self) -> bool:
        """Is there a job? The lock is held."""
        return bool(self._first or self._jobs)

    def _add(self, job: Publication | _Removal | _Use) -> None:
        """Queue a job. The lock is held."""
        if isinstance(job, _Removal) and job.first:
            self._first.append(job)
        else:
            self._jobs.append(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="afterglow-publisher", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    # --------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                if not self._wait():
                    return
                self._busy = True
                job = self._doing = self._first.popleft() if self._first else self._jobs.popleft()
                self._extents -= isinstance(job, Publication)
            try:
                self._do(job)
                self._tries = 0
            except StoreError as error:
                self._failed(job, error)
            except Exception:
                log.exception("publishing to the shared store failed in a way that was not foreseen")
                self._tries = 0
                self._counters.count(unpublished=isinstance(job, Publication))

    def _wait(self) -> bool:
        """Wait for a job, and while the store is left alone; tell whether there is one. The lock is held."""
        while not self._closed:
            if self._removals and time.monotonic() >= self._retry_at:
                self._first.extendleft(reversed(self._removals))  # before what waits to be published once more
                self._removals.clear()
                self._tries = 0
            if self._waits and not self._remote.rests:
                return True
            self._changed.wait(1.0 if self._waits or self._removals else None)
        return False

    def _do(self, job: Publication | _Removal | _Use) -> None:
        if isinstance(job, Publication):
            self._publish(job)
        elif isinstance(job, _Removal):
            self._delete(job)
        else:
            self._use(job.path)

    def _failed(self, job: Publication | _Removal | _Use, error: StoreError) -> None:
        """Count a failure, and put the job back, to be tried again."""
        self._counters.failed(error)
        if not isinstance(error, RefusedError):
            log.warning("the shared store: %s", error)
        with self._changed:
            self._tries += 1
            if self._tries < MAX_TRIES and not self._closing:
                (self._first if isinstance(job, _Removal) and job.first else self._jobs).appendleft(job)  # type: ignore[arg-type]
                self._extents += isinstance(job, Publication)
                return
            self._tries = 0
            if isinstance(job, _Removal) and job.again and len(self._removals) < MAX_REMOVALS:
                self._removals.append(job)
                self._retry_at = time.monotonic() + RETRY_S
        self._counters.count(unpublished=isinstance(job, Publication))

    def _publish(self, what: Publication) -> None:
        path, kid = self._paths.extent(what.published.id), self._paths.kid(what.key, what.published)
        for late in [each for each in self._removals if each.path in (path, kid)]:
            self._delete(late)  # not after it has been published again
            self._removals.remove(late)
        try:
            data = what.file.read_bytes()
        except OSError:  # it has left the disk again
            self._counters.count(unpublished=1)
            return
        if not self._budget.make_room(len(data)):
            self._counters.count(unpublished=1)
            return
        new = self._put(path, data)
        if new:
            self._budget.wrote(len(data))
            self._counters.count(published=1, published_bytes=len(data))
        else:
            self._counters.count(published_before=1)
        # one that was there has been used: an engine has written it to its disk
        self._put(kid, b"" if what.lead is None else str(what.lead).encode(), replace=not new)
        self._delete_parts(what.published.id)

    def _use(self, kid: str) -> None:
        """Write what lists an extent once more, so that it says when that was used; nothing, where it has gone meanwhile."""
        try:
            lead = self._remote.call("reading a lead", lambda objects: objects.get(kid, 0, MAX_LEAD), PUT_S)
        except StoreError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return
            raise
        self._put(kid, lead, replace=True)

    def _delete(self, what: _Removal) -> None:
        self._remote.call("deleting an extent", lambda objects: objects.delete(what.path), PUT_S)

    def _delete_first(self) -> None:
        """Delete what clients wait for, while a publication waits for room; not the very extent, which is there afterwards."""
        now = self._doing
        mine = (
            (self._paths.extent(now.published.id), self._paths.kid(now.key, now.published))
            if isinstance(now, Publication)
            else ()
        )
        while not self._remote.rests:
            with self._changed:
                job = next((each for each in self._first if each.path not in mine), None)
                if job is None:
                    return
                self._first.remove(job)
            try:
                self._delete(job)
            except StoreError as error:
                self._failed(job, error)
                return

    def _put(self, path: str, data: bytes, replace: bool = False) -> bool:
        seconds = PUT_S + len(data) / PUT_RATE
        return self._remote.call("publishing", lambda objects: objects.put(path, data, replace=replace), seconds)
