"""Eviction policies: rows of a table, and the ranking that turns a row into victims without scanning.

A policy is a name and an `order`: a pure function from an extent to a tuple, the smallest is the next victim. It may
use anything the extent says of itself. When something changes that an order depends on, the code that changed it calls
`Ranking.update`; that is all there is to the seam.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import NamedTuple, TypeAlias

from afterglow.plan.prefix.extent import Extent, Key
from afterglow.plan.prefix.ghosts import Reason

Order: TypeAlias = tuple[float, ...]
Forget: TypeAlias = Callable[[Extent, Reason], None]  # how an extent leaves all tiers, and what hangs below it


class Policy(NamedTuple):
    """A row: who goes first. `order` of an extent, and whether a mark keeps it. `looks_ahead`: the waiting queue counts, for
    eviction and for prefetching."""

    name: str
    order: Callable[[Extent, bool], Order]
    looks_ahead: bool = False


def _lru(extent: Extent, kept: bool) -> Order:
    # A job touches its whole path at once: of equals, the tail of the conversation goes first.
    return (kept, extent.last_used, -extent.first_row, extent.serial)


def _fifo(extent: Extent, kept: bool) -> Order:
    return (kept, extent.created_at, -extent.first_row, extent.serial)


def _lfu(extent: Extent, kept: bool) -> Order:
    return (kept, extent.hits, extent.last_used, -extent.first_row, extent.serial)


def _lookahead(extent: Extent, kept: bool) -> Order:
    # CachedAttention §3.3.2: first what no job waits for, then what the last in the queue waits for; of a path the tail.
    # A mark says that a job may come; one that waits has come.
    if not extent.waiting:
        return (int(kept), extent.last_used, -extent.first_row, extent.serial)
    priority, turn, tie, number = extent.waiting[0]
    return (2, -priority, -turn, -tie, -number, -extent.first_row, extent.serial)


POLICIES: dict[str, Policy] = {
    row.name: row
    for row in (
        Policy("lookahead", _lookahead, looks_ahead=True),
        Policy("lru", _lru),
        Policy("fifo", _fifo),
        Policy("lfu", _lfu),
    )
}


class Ranking:
    """Extents in the order of a policy: a lazy heap, whose outdated entries are dropped when they come up.

    Those that come all at once (`fill`: a million after a restart) are sorted and wait in line without entries of their
    own. The first in line enters the heap when it would be the next victim, any other when its order changes.
    """

    def __init__(self, policy: Policy, kept: Callable[[Extent], bool]) -> None:
        """`kept`: does a mark keep an extent where it is ranked?"""
        self._rank, self._kept = policy.order, kept
        self._members: dict[Extent, Order | None] = {}  # None: it stands in line
        self._heap: list[tuple[Order, int, Extent]] = []
        self._line: list[Extent] = []  # the first victim last; members with an order have left it

    def _order(self, extent: Extent) -> Order:
        return self._rank(extent, extent.mark is not None and self._kept(extent))

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, extent: Extent) -> bool:
        return extent in self._members

    def fill(self, extents: Iterable[Extent]) -> None:
        """Make many extents members at once. None is one yet, and no job waits for any: their orders are alike.

        They are sorted by one part of the order after the other, the last one first: a million tuples at a time, if only
        as keys, would take more memory than all that stays, and some would not be given back.
        """
        self._tidy()
        come = list(extents)
        self._members.update(dict.fromkeys(come))
        self._line += come
        parts = len(self._order(come[0])) if come else 0
        for part in reversed(range(parts)):
            self._line.sort(key=lambda extent: self._order(extent)[part], reverse=True)

    def set(self, extent: Extent, member: bool) -> None:
        """Make an extent a member, or not."""
        if member:
            self.update(extent, add=True)
        else:
            self._members.pop(extent, None)

    def update(self, extent: Extent, add: bool = False) -> None:
        """Look again at a member's order (of no effect on others, unless `add`)."""
        if not (add or extent in self._members):
            return
        mark = extent.mark
        order = self._rank(
            extent, mark is not None and self._kept(extent)
        )  # `_order`, without a call: this is done often
        if order != self._members.get(extent):
            self._enter(extent, order)
            if len(self._heap) + len(self._line) > 64 + 2 * len(self._members):
                self._tidy()

    def _enter(self, extent: Extent, order: Order) -> None:
        self._members[extent] = order
        heapq.heappush(self._heap, (order, extent.serial, extent))

    def _tidy(self) -> None:
        """Drop outdated entries."""
        self._heap = [(rank, item.serial, item) for item, rank in self._members.items() if rank is not None]
        heapq.heapify(self._heap)
        self._line = [item for item in self._line if self._in_line(item)]

    def _in_line(self, extent: Extent) -> bool:
        return self._members.get(extent, ()) is None

    def _call_up(self) -> bool:
        """Let the first in line enter the heap, unless a member there goes before it. False: no member is left."""
        while self._line and not self._in_line(self._line[-1]):
            self._line.pop()
        if self._line:
            order = self._order(self._line[-1])
            if not self._heap or order < self._heap[0][0]:
                self._enter(self._line.pop(), order)
        return bool(self._heap)

    def visit(self, more: Callable[[Extent], bool]) -> None:
        """Show members, first victim first, until `more` says no. It may change the membership of what it is shown."""
        shown: list[tuple[Order, int, Extent]] = []
        going = True
        while going and self._call_up():
            entry = heapq.heappop(self._heap)
            if self._members.get(entry[2]) == entry[0] and not (shown and shown[-1] == entry):
                shown.append(entry)
                going = more(entry[2])
        for entry in shown:
            if self._members.get(entry[2]) == entry[0]:
                heapq.heappush(self._heap, entry)

    def members(self) -> list[Extent]:
        """List all members, first victim first. For tests and for rare, whole-cache work."""
        return sorted(self._members, key=self._order)


class EvictionCandidates:
    """The extents that have a state in which they can be asked to go, in the order of one policy."""

    def __init__(self, policy: Policy) -> None:
        self.in_order = policy.looks_ahead  # what jobs wait for goes last, and what the first job waits for at the end
        in_host, on_disk = attrgetter("kept_in_host"), attrgetter("kept_on_disk")
        self.host = Ranking(policy, in_host)  # in host, and not being written
        self.clean = Ranking(policy, in_host)  # in both
        self.cold = Ranking(policy, on_disk)  # whole on disk only, and nothing hangs below
        self.marked: dict[Extent, None] = {}  # extents that have a mark
        self.horizon: Key | None = None  # what jobs up to this one wait for does not leave the last tier
        self.watch: Callable[[Extent], None] | None = None  # is told of each extent whose place may have changed

    def place(self, extent: Extent) -> None:
        """Look again at an extent whose state in a tier, or whose children, have changed."""
        live = not extent.dead
        host, disk = extent.in_host, extent.disk == "ready"
        self.host.set(extent, live and host and extent.store is None)
        self.clean.set(extent, live and host and disk)
        self.cold.set(extent, live and disk and extent.host in ("absent", "partial") and not extent.has_children)
        if self.watch is not None:
            self.watch(extent)

    def written(self, extent: Extent) -> None:
        """Take note that an extent is being written: it cannot go before that has ended, and then it is placed again."""
        self.host.set(extent, member=False)

    def update(self, extent: Extent) -> None:
        """Something has changed that the policy's order may depend on."""
        self.host.update(extent)
        self.clean.update(extent)
        self.cold.update(extent)

    def must_stay(self, extent: Extent) -> bool:
        """May it not leave the last tier? It is in use or to be kept, something is matched through it only, or a job
        within the eviction window waits for it."""
        if extent.ref_count or extent.pin_count or extent.has_children:
            return True
        return extent.rank is not None and self.horizon is not None and extent.rank <= self.horizon
