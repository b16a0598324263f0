"""The face of the shared tier: look up, fetch, publish, delete. All calls return at once; ends are told from its threads."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from afterglow.errors import DamageError, SlowError, StoreError
from afterglow.plan.prefix.block_keys import Lead
from afterglow.plan.prefix.published import Published
from afterglow.plan.step import ExtentId
from afterglow.store.extents.disk_tier import DiskTier
from afterglow.store.shared.budget import Budget
from afterglow.store.shared.counters import SharedCounters, SharedStats
from afterglow.store.shared.extent_publisher import ExtentPublisher, Publication
from afterglow.store.shared.fetcher import Fetch, FetchEnd, Fetcher
from afterglow.store.shared.finder import Finder, Prompt, SharedExtent
from afterglow.store.shared.objects import Objects
from afterglow.store.shared.paths import Paths
from afterglow.store.shared.records import Records
from afterglow.store.shared.remote import KeptThreads, Remote

log = logging.getLogger("afterglow.store")

LOOKUP_S: Final = 0.5  # that a request waits for at most
MAX_LOOKUPS: Final = 16  # at a time
CLOSE_S: Final = 5.0  # that the end of the process waits for what is still to be published

Found = Callable[[Sequence[SharedExtent]], object]


class SharedStore:
    """One model's extents in a store that engines share; `size`: the bytes that they may take there, all together.

    The disk tier's files are what is published and fetched.
    """

    def __init__(
        self, open_objects: Callable[[], Objects], disk: DiskTier, size: int, counters: SharedCounters | None = None
    ) -> None:
        self.paths = Paths(disk.digest)
        self._remote = Remote(open_objects)
        self._counters = counters or SharedCounters()
        self._budget = Budget(self._remote, self.paths, size, self._counters)
        self._finder = Finder(self._remote, self.paths, disk.layout, disk.digest)
        self._publisher = ExtentPublisher(self._remote, self.paths, self._budget, self._counters)
        self._fetcher = Fetcher(self._remote, self.paths, disk)
        self.records = Records(self._remote, disk.digest, self._counters)
        self._disk = disk
        self._lock = threading.Lock()
        self._lookups = 0
        self._threads = KeptThreads("afterglow-lookup")
        self._remote.warm(self._finder.find_nothing)

    def look_up(self, prompt: Prompt, found: Found) -> None:
        """Look for the extents of a prompt. `found` is called once, in any case, at most a little later than `LOOKUP_S` from now:
        with none where the store fails.
        """
        with self._lock:
            skips = self._lookups >= MAX_LOOKUPS or self._remote.rests
            self._lookups += not skips
        if skips:
            self._counters.count(lookups_skipped=1)
            found(())
            return
        self._threads.run(partial(self._look_up, prompt, found))

    def _look_up(self, prompt: Prompt, found: Found) -> None:
        path: list[SharedExtent] = []
        began = time.perf_counter()
        try:
            self._finder.find(prompt, LOOKUP_S, path.append)
        except StoreError as error:
            log.warning("looking up a prompt in the shared store: %s", error)
            self._counters.failed(error)
        except Exception:
            log.exception("looking up a prompt in the shared store failed in a way that was not foreseen")
            path.clear()
        finally:
            self._counters.count(lookups=1, lookup_seconds=time.perf_counter() - began, found_extents=len(path))
            with self._lock:
                self._lookups -= 1
            found(path)

    def expect(self, taken: Sequence[SharedExtent]) -> None:
        """Note that these extents, in the order of their rows, were taken over: they count as used, the first one last. Of a path the end
        goes first when there is no room: without its beginning nothing leads to it.
        """
        for each in reversed(taken):
            self._publisher.used(each.published.id, each.listed.path, each.listed.modified)

    def fetch(self, what: Fetch) -> None:
        """Fetch an extent to a file of the disk tier's folder. `ended` is called once, in any case."""
        self._fetcher.fetch(what._replace(ended=partial(self._fetched, what)))

    def _fetched(self, what: Fetch, end: FetchEnd) -> None:
        extent, error = what.extent, end.error
        if error is None:
            self._counters.count(fetches=1, fetch_bytes=end.size, fetch_seconds=end.seconds)
        elif isinstance(error, DamageError):
            log.warning("removed from the shared store: %s", error)
            self._counters.failed(error)
            self._publisher.damaged(extent)
        elif not isinstance(error, SlowError):
            log.warning("fetching from the shared store: %s", error)
            if self._counters.failed(error) == "missing":
                self._publisher.missing(extent)
        what.ended(end)

    def failed(self, error: StoreError) -> None:
        """Count a failure of one that uses what was found here."""
        self._counters.failed(error)

    def publish(self, published: Published, key: str, lead: Lead | None = None, above: Sequence[ExtentId] = ()) -> None:
        """Publish an extent whose file is on disk, when there is time; listings find it under `key`, a directory by its lead. `above`: the
        extents that lead to it, the nearest first, which count as used.
        """
        self._publisher.publish(Publication(published, key, self._disk.path(published.id), lead), above)

    def delete(self, extent: ExtentId) -> None:
        """Remove an extent that a client has deleted, before all that is to be published."""
        self._publisher.delete(extent)

    def replaced(self, part: ExtentId, whole: ExtentId) -> None:
        """Remove an extent that a merged one has replaced, once that is published, or deleted."""
        self._publisher.replaced(part, whole)

    def rest(self, seconds: float) -> bool:
        """Wait until nothing is to be published, deleted or fetched; tell whether that was so within `seconds`. For tests."""
        end = time.monotonic() + seconds
        while self._fetcher.pending and time.monotonic() < end:
            time.sleep(0.005)
        return self._publisher.rest(max(0.0, end - time.monotonic())) and not self._fetcher.pending

    def close(self) -> None:
        """End the threads; waits a little for what is still to be published."""
        self._publisher.close(CLOSE_S)
        self._fetcher.close()
        self._threads.close()
        self._remote.close()

    def stats(self) -> SharedStats:
        """Copy the counters, and the levels as they are now."""
        stats = self._counters.snapshot()
        stats.queue = self._publisher.pending + self._fetcher.pending
        stats.hung, stats.rests, stats.used_bytes = self._remote.hung, self._remote.rests, self._budget.used
        return stats
