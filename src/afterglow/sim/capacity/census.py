"""How much there is to keep: distinct conversations, and distinct keys and values, per unit time."""

from __future__ import annotations

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
    """Distinct tokens of some turns: of each stream, up to where it was seen."""

    def __init__(self, window: int) -> None:
        self.sessions: dict[str, None] = {}
        self._window = window
        self._ends: dict[str, int] = {}

    @property
    def rows(self) -> int:
        rows = sum(min(end, self._window) for end in self._ends.values())
        return min(rows, len(self.sessions) * self._window)

    def add(self, turn: TraceTurn) -> None:
        self.sessions[turn.session] = None
        for segment in (*turn.prompt, *turn.reply):
            end = segment.start + segment.length
            if end > self._ends.get(segment.stream, 0):
                self._ends[segment.stream] = end
