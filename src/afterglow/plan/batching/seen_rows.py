"""What the queries of a prefill see of cached rows in layers with a sliding window: the rest of an extent need not be loaded.

    window 3, queries from row 8 on       rows 0 1 2 3 4 5 . . | 8   seen: from row 6 on
                                          extents [0-3] [4-7]        of the first none, of the second its rows 2 and 3

A copy in host that lacks rows may be used by prefills that do not see them, and by nothing else (`Extent.in_host`).
It knows views and windows; not how extents come to host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from afterglow.plan.cache import Cache
from afterglow.plan.prefix.extent import Extent, View


class SeenRows:
    """One model's windows. Where loads bring all rows, all is seen."""

    def __init__(self, cache: Cache) -> None:
        self._capacity = cache.capacity
        self._registered = cache.registered
        self._window = cache.device.window if cache.capacity.window_block_bytes else 0

    def firsts(self, views: Sequence[View], kept: Sequence[View], row: int, *, forks: bool = False) -> list[int]:
        """Return of each kept view the first row of its extent that windows show, if the other views are recomputed.

        The views begin at `row` of a job. Kept ones one after another are gathered for queries from their common end on. `forks`:
        what windows show other prompts counts as well, those that leave this one's path where it is known to fork.
        """
        if not self._window:
            return [0] * len(kept)
        found: list[int] = []
        at = query = row + sum(view.stop - view.start for view in views)
        for view in reversed(views):
            if forks and view.forks():
                query = at
            at -= view.stop - view.start
            if len(found) < len(kept) and view is kept[-1 - len(found)]:
                found.append(max(0, query + 1 - self._window - at + view.start))
            else:
                query = at
        return found[::-1]

    def obtainable(self, view: View, first: int, mine: Sequence[Extent]) -> bool:
        """Are the rows that a view shows from `first` on in host, do they come there, or can they be loaded? An extent that others
        (`mine`: the pins of the job itself) gather from, or wait for, cannot be loaded again now. A registered prefix pins them
        too, but reads none."""
        extent = view.extent
        if extent.host == "absent" or view.shows(first):
            return True
        return extent.host == "partial" and extent.pins == mine.count(extent) + self._registered.holds(extent)

    def choose(
        self, views: Sequence[View], kept: list[View], row: int, shows: Callable[[View, int], bool]
    ) -> list[View]:
        """Choose the kept views that show what is seen of them: without one of them, earlier queries see the others."""
        while self._window:
            left = [view for view, first in zip(kept, self.firsts(views, kept, row), strict=True) if shows(view, first)]
            if len(left) == len(kept):
                break
            kept = left
        return kept

    def skip(self, extent: Extent, first: int) -> int:
        """Count the blocks at the beginning of an extent that windows do not show, if they show its rows from `first` on. Registered
        rows stay in host for later prompts: their loads bring all."""
        if not first or self._registered.holds(extent):
            return 0
        return self._capacity.blocks(extent.rows) if first >= extent.rows else first // self._capacity.block_rows

    def load_bytes(self, extent: Extent, first: int) -> int:
        """Compute the bytes of a load that brings what windows show."""
        return extent.file_bytes - self.skip(extent, first) * self._capacity.window_block_bytes
