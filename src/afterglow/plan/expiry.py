"""How long extents are needed: until they expire (a time to live, A15), or for as long as somebody keeps them.

It knows extents and when; not where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from heapq import heappop, heappush
from math import inf

from afterglow.plan.extent import Extent
from afterglow.plan.victims import Forget

EXPIRY_RETRY_S = 60.0  # when what has expired but is still needed is looked at again


class Expiry:
    """When to look at which extent. Who is looked at before its time is looked at again."""

    def __init__(self, forget: Forget) -> None:
        self._forget = forget
        self._times: list[tuple[float, int, Extent]] = []  # a heap; entries may be out of date

    def __len__(self) -> int:
        """How often somebody is going to be looked at."""
        return len(self._times)

    def expire(self, extent: Extent, when: float) -> None:
        """No job needs it after that, unless one has said, or says, a later time."""
        if when > extent.expires:
            extent.expires = when
            if when < inf and not extent.timed:
                self._look_at(extent, when)

    @property
    def next(self) -> float:
        """When to sweep next; infinity: never."""
        return self._times[0][0] if self._times else inf

    def sweep(self, now: float, awaited: Callable[[], Container[Extent]]) -> None:
        """Forget what has expired (A15), unless it is queued for (`awaited`), in use, or something hangs below it."""
        if now < self.next:
            return  # as nearly always
        queued: Container[Extent] | None = None

        def needed(extent: Extent) -> bool:
            nonlocal queued
            if extent.users or extent.pins or extent.rank is not None or extent.kept or extent.has_children:
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
        """Those that have expired, of those that are to be looked at; the others later."""
        due: list[Extent] = []
        while self._times and self._times[0][0] <= now:
            _, _, extent = heappop(self._times)
            extent.timed = False
            if extent.dead or extent.expires == inf:
                continue
            if extent.expires > now:
                self._look_at(extent, extent.expires)
            else:
                due.append(extent)
        return due

    def _look_at(self, extent: Extent, when: float) -> None:
        extent.timed = True
        heappush(self._times, (when, extent.serial, extent))
