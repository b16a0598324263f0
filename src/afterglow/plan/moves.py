"""Moves that are planned and under way, and whose they are. It knows no tier and no budget."""

from __future__ import annotations

from typing import NamedTuple

from afterglow.plan.extent import Extent
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
        """How many are under way."""
        return len(self._flights)

    @property
    def planned(self) -> bool:
        """Are there any to be handed out?"""
        return bool(self._planned)

    def number(self) -> int:
        """For the next move."""
        self._last += 1
        return self._last

    def start(self, move: Move, extent: Extent) -> None:
        """An extent moves, from now until `end`."""
        self._planned.append(move)
        self._flights[move.move] = Flight(move, extent)

    def plan(self, move: Move) -> None:
        """A move that whoever asks for it keeps an eye on."""
        self._planned.append(move)

    def take(self) -> list[Move]:
        """Those planned since the last call, in order."""
        planned, self._planned = self._planned, []
        return planned

    def is_under_way(self, move: int) -> bool:
        """Has a move not ended yet?"""
        return move in self._flights

    def end(self, move: int) -> Flight | None:
        """A move has ended. None: nothing is known of it."""
        return self._flights.pop(move, None)

    def dropping(self) -> list[Extent]:
        """Whose files are being removed. For checks."""
        return [flight.extent for flight in self._flights.values() if isinstance(flight.move, Drop)]
