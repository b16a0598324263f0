"""Moves that are planned and under way, and whose they are; and which slots of the host arena are free.

Neither knows a tier, a budget, or what lies in the slots. Free slots are kept as sorted runs: an extent in one ascending run is
gathered with one copy per layer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple

from afterglow.plan.prefix.extent import Extent
from afterglow.plan.step import Drop, Move


class Flight(NamedTuple):
    """A move under way. A Load owns its slots: the extent may be given up meanwhile."""

    move: Move
    extent: Extent


class Moves:
    """Every move has a number of its own."""

    def __init__(self) -> None:
        self._planned: list[Move] = []  # not yet handed out
        self._flights: dict[int, Flight] = {}
        self._last = 0

    def __len__(self) -> int:
        """Count the moves under way."""
        return len(self._flights)

    @property
    def planned(self) -> bool:
        """Are there any to be handed out?"""
        return bool(self._planned)

    def number(self) -> int:
        """Return the number of the next move."""
        self._last += 1
        return self._last

    def start(self, move: Move, extent: Extent) -> None:
        """Start to move an extent, until `end`."""
        self._planned.append(move)
        self._flights[move.move] = Flight(move, extent)

    def plan(self, move: Move) -> None:
        """Hand out a move whose end the caller watches for itself."""
        self._planned.append(move)

    def take(self) -> list[Move]:
        """Return the moves planned since the last call, in order."""
        planned, self._planned = self._planned, []
        return planned

    def is_under_way(self, move: int) -> bool:
        """Has a move not ended yet?"""
        return move in self._flights

    def end(self, move: int) -> Flight | None:
        """Take note that a move has ended. None: the move is unknown."""
        return self._flights.pop(move, None)

    def dropping(self) -> list[Extent]:
        """Return the extents whose files are being removed. For checks."""
        return [flight.extent for flight in self._flights.values() if isinstance(flight.move, Drop)]


class SlotPool:
    """The free slots of `total`."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = total
        self._starts: list[int] = [0] if total else []
        self._stops: dict[int, int] = {0: total} if total else {}

    def take(self, count: int, after: int | None = None) -> tuple[int, ...] | None:
        """`count` slots, or None: right after slot `after` if possible, else the lowest run that is long enough,
        else the lowest slots there are."""
        if count > self.free:
            return None
        if count == 0:
            return ()
        if after is not None and self._stops.get(after + 1, 0) - after - 1 >= count:
            return self._cut(after + 1, count)
        for start in self._starts:
            if self._stops[start] - start >= count:
                return self._cut(start, count)
        found: tuple[int, ...] = ()
        while len(found) < count:
            start = self._starts[0]
            found += self._cut(start, min(count - len(found), self._stops[start] - start))
        return found

    def give(self, slots: tuple[int, ...]) -> None:
        """Take slots back."""
        ordered = sorted(slots)
        first = 0
        for i in range(1, len(ordered) + 1):
            if i == len(ordered) or ordered[i] != ordered[i - 1] + 1:
                self._add(ordered[first], ordered[i - 1] + 1)
                first = i
        self.free += len(slots)

    def listing(self) -> list[int]:
        """List all free slots, ascending."""
        return [slot for start in self._starts for slot in range(start, self._stops[start])]

    def check(self) -> None:
        """Runs are sorted, apart, and add up."""
        assert self._starts == sorted(self._stops)
        assert self.free == sum(self._stops[start] - start for start in self._starts)
        for left, right in zip(self._starts, self._starts[1:], strict=False):
            assert self._stops[left] < right, "two runs touch"

    def _cut(self, start: int, count: int) -> tuple[int, ...]:
        stop = self._stops.pop(start)
        where = bisect_left(self._starts, start)
        if start + count < stop:
            self._starts[where] = start + count
            self._stops[start + count] = stop
        else:
            del self._starts[where]
        self.free -= count
        return tuple(range(start, start + count))

    def _add(self, start: int, stop: int) -> None:
        where = bisect_right(self._starts, start)
        if where and self._stops[self._starts[where - 1]] >= start:
            left = self._starts[where - 1]
            assert self._stops[left] == start, "a slot was given back twice"
            start = left
            where -= 1
        else:
            self._starts.insert(where, start)
        if where + 1 < len(self._starts) and self._starts[where + 1] <= stop:
            right = self._starts[where + 1]
            assert right == stop, "a slot was given back twice"
            stop = self._stops.pop(right)
            del self._starts[where + 1]
        self._stops[start] = stop


def watermarks(slots: int, low: int = 4, high: int = 0) -> tuple[int, int]:
    """Free slots to keep: refill below the first up to the second (CachedAttention's host buffer): 5 % and 10 %
    of all, at least `low` and `high`, at most a quarter and a half."""
    low = min(max(-(-slots // 20), low), slots // 4)
    return low, min(max(2 * low, high), slots // 2)
