"""How much there is to keep: distinct conversations, and distinct keys and values, per unit time."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from afterglow.sim.workload.turns import Arrival, TraceTurn


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """Of the busiest unit time of `unit` seconds. CachedAttention 4.3.6's DSpUT, CCpS and CCpUT; rows are tokens.

    `rows`: distinct tokens of all prompts and replies then, no conversation's more than a context holds; `all_rows`: of
    the whole workload.
    """

    unit: float
    sessions: int
    rows: int
    all_rows: int
    window: int
    row_bytes: int

    @property
    def session_bytes(self) -> int:
        """CCpS: the most that one conversation needs."""
        return self.window * self.row_bytes

    @property
    def most_bytes(self) -> int:
        """CCpUT = DSpUT * CCpS: with room for so much, and rows kept for the unit time, everything hits."""
        return self.sessions * self.session_bytes

    @property
    def bytes(self) -> int:
        """The working set without duplicates."""
        return self.rows * self.row_bytes


class Census:
    """Counts turns as they arrive, in windows of `unit` seconds one after the other."""

    def __init__(self, unit: float, window: int, row_bytes: int) -> None:
        self.unit = unit
        self.window = window
        self.row_bytes = row_bytes
        self._number = 0  # of the window
        self._now = _Tokens(window)
        self._all = _Tokens(window)
        self._sessions = 0
        self._rows = 0

    def add(self, arrival: Arrival) -> None:
        """A turn has arrived; they come in order of time."""
        number = int(arrival.time // self.unit)
        if number != self._number:
            self._close()
            self._number = number
        self._now.add(arrival.turn)
        self._all.add(arrival.turn)

    def result(self) -> WorkingSet:
        """Return the counts so far."""
        self._close()
        return WorkingSet(self.unit, self._sessions, self._rows, self._all.rows, self.window, self.row_bytes)

    def _close(self) -> None:
        self._sessions = max(self._sessions, len(self._now.sessions))
        self._rows = max(self._rows, self._now.rows)
        self._now = _Tokens(self.window)


class _Tokens:
    """Distinct tokens of some turns: of each stream, the parts that were seen."""

    def __init__(self, window: int) -> None:
        self.sessions: dict[str, None] = {}
        self._window = window
        self._seen: dict[str, _Seen] = {}

    @property
    def rows(self) -> int:
        # A stream of several sessions may hold many contexts: a trace's blocks are one stream. So it is not cut to one.
        each = (seen.rows if seen.session is None else min(seen.rows, self._window) for seen in self._seen.values())
        return min(sum(each), len(self.sessions) * self._window)

    def add(self, turn: TraceTurn) -> None:
        self.sessions[turn.session] = None
        for segment in (*turn.prompt, *turn.reply):
            seen = self._seen.get(segment.stream)
            if seen is None:
                seen = self._seen[segment.stream] = _Seen(turn.session)
            elif seen.session != turn.session:
                seen.session = None
            seen.add(segment.start, segment.start + segment.length)


class _Seen:
    """Parts of a stream. `session`: whose stream it is, None where several sessions have it."""

    __slots__ = ("_parts", "session")

    def __init__(self, session: str) -> None:
        self.session: str | None = session
        self._parts: list[tuple[int, int]] = []  # start and end, in order; they do not touch

    @property
    def rows(self) -> int:
        return sum(end - start for start, end in self._parts)

    def add(self, start: int, end: int) -> None:
        """Join [start, end) with the parts that it touches."""
        parts = self._parts
        first = bisect_left(parts, start, key=lambda part: part[1])
        stop = bisect_right(parts, end, key=lambda part: part[0])
        if first < stop:
            start, end = min(start, parts[first][0]), max(end, parts[stop - 1][1])
        parts[first:stop] = [(start, end)]
