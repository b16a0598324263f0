"""Warm start: after a restart, the most used extents are brought back to host before a job asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from afterglow.plan.options import Capacity
from afterglow.plan.prefix.extent import Extent
from afterglow.plan.tiers.host import Host
from afterglow.plan.tiers.loading import Loading
from afterglow.plan.tiers.moves import Moves


class WarmStart:
    """At most half of host is filled."""

    def __init__(
        self,
        capacity: Capacity,
        known: Callable[[], Iterable[Extent]],
        host: Host,
        loading: Loading,
        moves: Moves,
    ) -> None:
        """`known`: all extents that there are."""
        self._capacity = capacity
        self._known = known
        self._pool = host.pool
        self._loading = loading
        self._moves = moves
        self._chosen: list[Extent] = []  # to be brought back, the first one last

    def choose(self) -> None:
        """Choose the most used extents after a restart, to bring them back to host when there is nothing else to do."""
        cold = [extent for extent in self._known() if extent.disk == "ready" and extent.host == "absent"]
        cold.sort(key=lambda e: (-e.hits, -e.last_used, e.first_row, e.serial))
        room = self._pool.total // 2
        chosen: dict[Extent, None] = {}
        for extent in cold:
            for part in _unchosen(extent, chosen):
                room -= self._capacity.blocks(part.rows)
                if room >= 0:
                    chosen[part] = None
            if room < 0:
                break
        self._chosen = list(reversed(chosen))

    def go_on(self, now: float) -> None:
        """Bring a chosen extent back, if nothing moves and at most half of host is full then."""
        while self._chosen and not len(self._moves):
            extent = self._chosen.pop()
            full = self._pool.total - self._pool.free + self._capacity.blocks(extent.rows)
            if not extent.dead and extent.host == "absent" and full <= self._pool.total // 2:
                self._loading.bring_back(extent, now)


def _unchosen(extent: Extent, chosen: dict[Extent, None]) -> list[Extent]:
    """List an extent and the extents that it is reached through, from the top: a parent was perhaps used less lately."""
    path: list[Extent] = []
    above: Extent | None = extent
    while above is not None and above not in chosen:
        path.append(above)
        above = above.above
    return path[::-1]
