"""Moves that are planned and under way, and whose they are. It knows no tier and no budget."""

from __future__ import annotations

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
