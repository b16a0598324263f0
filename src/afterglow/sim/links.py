"""Links: what carries bytes between tiers, one transfer after another, the urgent first."""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf
from typing import NamedTuple


class Ended(NamedTuple):
    """A transfer that has ended: its key, bytes, when it ended, and how long it had the link for itself."""

    key: int
    size: int
    at: float
    seconds: float


class Link:
    """A link of `bandwidth` bytes/s and `latency` seconds per transfer. Transfers do not interrupt each other;
    the waiting transfer of the lowest priority goes first, among equals the one that was asked for first."""

    def __init__(self, bandwidth: float, latency: float = 0.0) -> None:
        self.bandwidth = bandwidth
        self.latency = latency
        self.bytes = 0
        self.busy = 0.0  # seconds
        self._waiting: list[tuple[int, int, int]] = []  # a heap of (priority, number, key); entries may be out of date
        self._asked: dict[int, tuple[int, int, int]] = {}  # waiting transfers: key -> (priority, number, size)
        self._number = 0
        self._key = 0
        self._size = 0
        self._began = 0.0
        self.next_end = inf

    def ask(self, key: int, size: int, priority: int, now: float) -> None:
        """A transfer is wanted from `now` on. All that have ended before must have been taken."""
        self._number += 1
        self._asked[key] = (priority, self._number, size)
        heappush(self._waiting, (priority, self._number, key))
        if self.next_end == inf:
            self._begin(now)

    def urge(self, key: int, priority: int) -> None:
        """One that waits goes before those of a higher number; nothing, if it is under way or has ended."""
        entry = self._asked.get(key)
        if entry is not None and priority < entry[0]:
            self._asked[key] = (priority, entry[1], entry[2])
            heappush(self._waiting, (priority, entry[1], key))

    def take(self, now: float) -> list[Ended]:
        """Take the transfers that have ended by `now`, in order; waiting transfers follow at once."""
        found: list[Ended] = []
        while self.next_end <= now:
            at = self.next_end
            found.append(Ended(self._key, self._size, at, at - self._began))
            self.next_end = inf
            self._begin(at)
        return found

    def ends(self, key: int) -> float | None:
        """When a transfer will have ended if nothing more urgent comes; None: it has ended already."""
        if self.next_end != inf and self._key == key:
            return self.next_end
        mine = self._asked.get(key)
        if mine is None:
            return None
        return self.next_end + sum(self.seconds(other[2]) for other in self._asked.values() if other[:2] <= mine[:2])

    def seconds(self, size: int) -> float:
        """What a transfer takes that has the link for itself."""
        return self.latency + size / self.bandwidth

    def _begin(self, now: float) -> None:
        while self._waiting:
            priority, number, key = heappop(self._waiting)
            entry = self._asked.get(key)
            if entry is None or entry[:2] != (priority, number):
                continue  # it was urged, and has gone before
            del self._asked[key]
            seconds = self.seconds(entry[2])
            self._key, self._size, self._began, self.next_end = key, entry[2], now, now + seconds
            self.bytes += entry[2]
            self.busy += seconds
            return


class Pipe:
    """A link whose transfers are only ever taken in the order in which they were asked for."""

    def __init__(self, bandwidth: float) -> None:
        self.bandwidth = bandwidth
        self.bytes = 0
        self.free = 0.0  # when all that was asked for has passed

    def carry(self, size: int, now: float) -> float:
        """When `size` bytes that are there from `now` on have passed."""
        self.bytes += size
        self.free = max(self.free, now) + size / self.bandwidth
        return self.free
