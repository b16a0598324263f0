"""How long extents are needed: until they expire (a time to live), or for as long as they are pinned.

It knows extents and when; not where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from heapq import heappop, heappush
from math import inf

from afterglow.plan.prefix.extent import Extent
from afterglow.plan.tiers.policy import Forget

EXPIRY_RETRY_S = 60.0  # when an expired extent that is still needed is looked at again


class Expiry:
    """A heap of the times at which extents may expire. An extent that is looked at too early is looked at again."""

    def __init__(self, forget: Forget) -> None:
        self._forget = forget
        self._times: list[tuple[float, int, Extent]] = []  # a heap; entries may be out of date

    def __len__(self) -> int:
        """Return how many looks are planned."""
        return len(self._times)

    def expire(self, extent: Extent, when: float) -> None:
        """Let an extent expire at `when`, unless a job has named, or names, a later time."""
        if when > extent.expires:
            extent.expires = when
            if when < inf and not extent.in_expiry_heap:
                self._look_at(extent, when)

    @property
    def next(self) -> float:
        """Return when to sweep next; infinity: never."""
        return self._times[0][0] if self._times else inf

    def sweep(self, now: float, awaited: Callable[[], Container[Extent]]) -> None:
        """Forget expired extents, except those that queued jobs wait for (`awaited`), that are in use, or that have
        children."""
        if now < self.next:
            return  # as nearly always
        queued: Container[Extent] | None = None

        def needed(extent: Extent) -> bool:
            nonlocal queued
            if extent.ref_count or extent.pins or extent.rank is not None or extent.pin_count or extent.has_children:
                return True
            queued = queued if queued is not None else awaited()
            return extent in queued

        for extent in sorted(self._due(now), key=lambda e: -e.first_row):  # children go before their parents
            if extent.dead:
                continue
            if needed(extent):
                self._look_at(extent, now + EXPIRY_RETRY_S)
                continue
            above: Extent | None = extent
            while above is not None and -inf < above.expires <= now and not needed(above):
                last, above = above, above.above  # which may have waited for its last child only
                self._forget(last, "expired")

    def _due(self, now: float) -> list[Extent]:
        """Return the extents that have expired by now. Others whose look was due are looked at later."""
        due: list[Extent] = []
        while self._times and self._times[0][0] <= now:
            _, _, extent = heappop(self._times)
            extent.in_expiry_heap = False
            if extent.dead or extent.expires == inf:
                continue
            if extent.expires > now:
                self._look_at(extent, extent.expires)
            else:
                due.append(extent)
        return due

    def _look_at(self, extent: Extent, when: float) -> None:
        extent.in_expiry_heap = True
        heappush(self._times, (when, extent.serial, extent))
