"""Marks: rows before a request's breakpoints, which are evicted after other rows while the marks live.

A mark is a preference and no pin. It lives for some seconds after its last use, and then its rows are ordinary ones. A use is a
request that names the breakpoint again, or one whose prompt goes through marked rows. Of a path the head is used
whenever the tail is, and never ends before it.

In each tier a tenant's marks count as far as they fit into its share, which is that of its pins (`--tenant-pins`): in the last
tier, beside what is pinned; the last used ones first. Marks beyond it count as none, so that no tenant can keep the rows of
others out. Rows of the operator's registered prompts are pinned anyway.

It knows extents and their tenants; not where they lie.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import accumulate
from math import inf

from afterglow.plan.options import Capacity
from afterglow.plan.prefix.extent import Extent, ExtentMark, View
from afterglow.plan.prefix.salts import tenant_of
from afterglow.plan.prefix.shared_prefixes import OPERATOR
from afterglow.plan.stats import Counters
from afterglow.plan.tiers.quota import Pins
from afterglow.request import Breakpoint

MARKS_PER_NOTE = 64


class Marks:
    """All marks that live. `ranked` is told of extents whose place in the order of eviction has changed."""

    def __init__(
        self,
        capacity: Capacity,
        pins: Pins,
        marked: dict[Extent, None],
        counters: Counters,
        ranked: Callable[[Extent], None],
        expire: Callable[[Extent, float], None],
    ) -> None:
        self._host = _Share(lambda extent: capacity.blocks(extent.rows), pins.room_in_host)
        self._disk = _Share(lambda extent: extent.file_bytes, pins.room)
        self._has_disk = capacity.disk_bytes > 0
        self._pins = pins
        self._counters = counters
        self._ranked = ranked
        self._expire = expire
        self._ends: list[tuple[float, int, Extent]] = []  # a heap of looks; one for each marked extent
        self._looks: dict[Extent, None] = {}  # the extents in it
        self._marked = marked
        self._pinned = 0  # the count of changes of pins when shares were last looked at
        self._notes = 0  # of before a restart
        self.rows = 0

    def __len__(self) -> int:
        return len(self._marked)

    # ------------------------------------------------------------------------------------------------ use

    def use(self, path: Sequence[View], breakpoints: Sequence[Breakpoint], now: float) -> None:
        """Take note that a prompt begins with the rows of a path, from its first token on: mark those before a breakpoint, and
        refresh the marks that there are."""
        if not (breakpoints or self._marked):
            return
        stops = list(accumulate(view.stop - view.start for view in path))
        named = [each.rows for each in breakpoints]
        for view, stop in zip(reversed(path), reversed(stops), strict=True):  # the head is the last used
            extent, start = view.extent, stop - (view.stop - view.start)
            old = extent.mark if extent.mark is not None and extent.mark.end > now else None
            ttl = max((each.ttl_s for each in breakpoints if each.rows > start), default=0.0)
            if not (ttl or old is not None):
                continue
            whole = view.stop == extent.rows
            moved = any(rows > stop for rows in named)  # a later breakpoint stands for the one that was here
            self._counters.rows_marked += extent.rows if old is None else 0
            border = whole and (stop in named or (old is not None and old.border and not moved))
            self._mark(extent, ExtentMark(now, max(ttl, old.ttl if old is not None else 0.0), border))

    def _mark(self, extent: Extent, mark: ExtentMark) -> None:
        if extent.dead or extent.salt == OPERATOR:
            return
        if extent.mark is None:
            self._marked[extent] = None
            self.rows += extent.rows
        extent.mark = mark
        self._expire(extent, mark.end)
        if extent not in self._looks:
            self._look_at(extent, mark.end)
        self._count(extent)

    def _count(self, extent: Extent) -> None:
        """Count a marked extent as its tenant's last used one."""
        mark = extent.mark
        assert mark is not None
        mark.in_host = True
        over = self._host.add(extent)
        for other in over:
            self._over(other).in_host = False
        if self._has_disk:
            mark.on_disk = True
            more = self._disk.add(extent)
            for other in more:
                self._over(other).on_disk = False
            over += more
        for other in dict.fromkeys((extent, *over)):
            self._ranked(other)

    def _over(self, extent: Extent) -> ExtentMark:
        self._counters.rows_over_share += extent.rows
        assert extent.mark is not None
        return extent.mark

    # ------------------------------------------------------------------------------------------------ ends

    @property
    def next(self) -> float:
        """Return when to sweep next; infinity: never."""
        return self._ends[0][0] if self._ends else inf

    def sweep(self, now: float) -> None:
        """Let marks end whose time has come, and marks that pins have left no room for count no more."""
        while self._ends and self._ends[0][0] <= now:
            _, _, extent = heappop(self._ends)
            del self._looks[extent]
            if extent.mark is not None and extent.mark.end > now:
                self._look_at(extent, extent.mark.end)
            elif extent.mark is not None:
                self.lost(extent)
                self._ranked(extent)
        if self._pinned != self._pins.changes:
            self._pinned = self._pins.changes
            for share, tier in ((self._host, "in_host"), (self._disk, "on_disk")):
                for other in share.shrink():
                    setattr(self._over(other), tier, False)
                    self._ranked(other)

    def _look_at(self, extent: Extent, when: float) -> None:
        self._looks[extent] = None
        heappush(self._ends, (when, extent.serial, extent))

    def lost(self, extent: Extent) -> None:
        """Take the mark from an extent that is forgotten, or whose mark has ended."""
        if extent.mark is not None:
            extent.mark = None
            del self._marked[extent]
            self.rows -= extent.rows
            self._host.remove(extent)
            self._disk.remove(extent)

    def replace(self, mark: ExtentMark | None, whole: Extent) -> None:
        """ExtentMark an extent that has come in the place of others, with the mark that these had."""
        if mark is not None:
            self._mark(whole, ExtentMark(mark.used, mark.ttl, mark.border))

    # --------------------------------------------------------------------------------------- over restarts

    def take_notes(self) -> list[tuple[str, str | None]]:
        """Return the marks, to be remembered over a restart; asked for when the plan ends. After a crash rows
        are unmarked until they are used again: a note for every use would cost more than that is worth."""
        found = [(extent, extent.mark) for extent in self._marked if extent.disk == "ready"]
        facts = [(e.id, mark.used, mark.ttl, mark.border) for e, mark in found if mark is not None]
        notes: list[tuple[str, str | None]] = []
        for at in range(0, max(len(facts), self._notes * MARKS_PER_NOTE), MARKS_PER_NOTE):
            some = facts[at : at + MARKS_PER_NOTE]
            notes.append((f"{at // MARKS_PER_NOTE:06d}", json.dumps(some) if some else None))
        return notes

    def recall(self, notes: Mapping[str, str], extents: Mapping[str, Extent], now: float) -> None:
        """Take over the notes of before a restart, when the extents are there again. What cannot be read is ignored."""
        self._notes = len(notes)
        found: list[tuple[float, int, int, Extent, float, bool]] = []
        for text in notes.values():
            try:
                for name, used, ttl, border in json.loads(text):
                    extent = extents.get(name)
                    if extent is not None and 0 < ttl < inf:
                        used = min(float(used), now)  # the clock may have been set back
                        found.append((used, -extent.first_row, extent.serial, extent, float(ttl), bool(border)))
            except (ValueError, TypeError):
                continue
        for used, _, _, extent, ttl, border in sorted(found, key=lambda item: item[:3]):
            if used + ttl > now:
                self._mark(extent, ExtentMark(used, ttl, border))

    def check(self) -> None:
        """Assert that marks, shares and looks fit each other."""
        assert self.rows == sum(extent.rows for extent in self._marked)
        for extent in self._marked:
            assert not extent.dead
            assert extent.mark is not None
            assert extent in self._looks
            assert extent.mark.in_host == self._host.counts(extent)
            assert extent.mark.on_disk == self._disk.counts(extent)
        self._host.check()
        self._disk.check()


class _Share:
    """Of one tier: the extents whose marks count, by tenant, the least recently used first. `room`: what a tenant may have
    under a salt, in the units of `size`."""

    def __init__(self, size: Callable[[Extent], int], room: Callable[[str], int]) -> None:
        self._size = size
        self._room = room
        self._own: dict[str, dict[Extent, None]] = {}
        self._used: dict[str, int] = {}

    def add(self, extent: Extent) -> list[Extent]:
        """Count an extent as the last used one; returns those that count no more."""
        self.remove(extent)
        tenant = tenant_of(extent.salt)
        self._own.setdefault(tenant, {})[extent] = None
        self._used[tenant] = self._used.get(tenant, 0) + self._size(extent)
        return self._fit(tenant)

    def remove(self, extent: Extent) -> None:
        """Count an extent no more, if it did."""
        tenant = tenant_of(extent.salt)
        own = self._own.get(tenant)
        if own is None or extent not in own:
            return
        del own[extent]
        self._used[tenant] -= self._size(extent)
        if not own:
            del self._own[tenant], self._used[tenant]

    def counts(self, extent: Extent) -> bool:
        """Does an extent's mark count?"""
        return extent in self._own.get(tenant_of(extent.salt), ())

    def shrink(self) -> list[Extent]:
        """Look again at the room; returns those that count no more."""
        return [extent for tenant in list(self._own) for extent in self._fit(tenant)]

    def _fit(self, tenant: str) -> list[Extent]:
        over: list[Extent] = []
        room = self._room(tenant)
        while self._used.get(tenant, 0) > max(0, room):
            over.append(next(iter(self._own[tenant])))
            self.remove(over[-1])
        return over

    def check(self) -> None:
        """Assert that sizes add up, within the room."""
        for tenant, own in self._own.items():
            assert self._used[tenant] == sum(self._size(extent) for extent in own)
