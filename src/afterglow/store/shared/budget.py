"""Keeps one model's objects within a budget, together with the other engines that do.

With a directory all engines add up there what they write, and one at a time, which holds a lease, counts: once a day, when a sixteenth of the
budget has been written, and when there is no room. Without one no engine knows what the others have written since it last counted. Each
counts when it starts to publish, and again when it has written a sixteenth of the budget, so that n engines are over it by n sixteenths at
most. The least recently used extents go first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from operator import methodcaller
from typing import Final, NamedTuple

from afterglow.plan.retention.shared_room import PARTS, Rank, SharedRoom
from afterglow.plan.step import ExtentId
from afterglow.store.shared.counters import SharedCounters
from afterglow.store.shared.ledger import Ledger, Tally
from afterglow.store.shared.objects import Listed, Objects, Tidied
from afterglow.store.shared.paths import Paths, extent_of, published_at
from afterglow.store.shared.remote import Remote

LIST_S: Final = 60.0  # for some objects of a listing, a thousand at most
DELETE_S: Final = 10.0
WAIT_S: Final = 30.0  # for room that another engine makes
POLL_S: Final = 0.5
YOUNG_S: Final = 3600.0  # an object without its counterpart may still get it


class _LostLease(Exception):
    """Another engine keeps the budget now."""


class _Found(NamedTuple):
    objects: dict[ExtentId, Listed]
    kids: dict[ExtentId, list[Listed]]


class Budget:
    """For the publisher's thread alone. `meanwhile` is called again and again while room is made, or waited for."""

    def __init__(self, remote: Remote, paths: Paths, size: int, counters: SharedCounters) -> None:
        self.meanwhile: Callable[[], object] = lambda: None
        self._remote = remote
        self._paths = paths
        self._size = size
        self._room = SharedRoom(size)
        self._counters = counters
        self._ledger = Ledger(remote, paths.digest)

    @property
    def used(self) -> int:
        """Return the bytes of all extents, as last counted, and what was written since."""
        return self._room.used

    def make_room(self, size: int) -> bool:
        """Make room for an object of so many bytes. False: there is none.

        Raises:
            StoreError: the store fails.
        """
        if size > self._size:
            return False
        room = self._room
        end = time.monotonic() + WAIT_S
        while (tally := self._ledger.read()) is not None:
            room.used = room.used if tally.used is None else tally.used
            full = tally.used is not None and tally.used + size > self._size
            if not full and tally.used is not None and tally.since <= self._size // PARTS:
                return True
            if self._ledger.lead():
                self._lead(size, tally)
                return room.fits(size)
            if not full and (tally.used is not None or not room.wrote_much):
                return True  # another engine is counting, and this one has not written much meanwhile
            if time.monotonic() > end:
                return False
            self.meanwhile()
            time.sleep(POLL_S)
        if room.counts(size):
            self._sweep(size)
        return room.fits(size)

    def wrote(self, size: int) -> None:
        """Count an object that was written."""
        self._room.wrote(size)
        self._ledger.wrote(size)

    def _lead(self, size: int, tally: Tally) -> None:
        """Count and make room for all engines, while the lease lasts."""
        try:
            self._sweep(size)
            self._ledger.counted(self._room.used, tally)
        except _LostLease:
            pass
        finally:
            self._ledger.follow()

    def _sweep(self, size: int) -> None:
        """Count all objects; remove those that have expired or that nothing leads to, and the least recently used."""
        found = self._look()
        for _ in self._remote.steps("looking for what killed writers have left", self._tidy, LIST_S):
            self._go_on()
        now = time.time()
        self._room.counted(sum(each.size for each in found.objects.values()))
        for name in [*found.kids]:
            lives = [kid for kid in found.kids[name] if (of := published_at(kid.path)) is not None and of.lives(now)]
            old = now - max(kid.modified for kid in found.kids[name]) > YOUNG_S
            if not lives or (name not in found.objects and old):
                self._remove(name, found)
        for name, each in [*found.objects.items()]:
            if name not in found.kids and now - each.modified > YOUNG_S:
                self._remove(name, found)
        for name in self._room.leaving([_rank(name, found) for name in found.objects], size):
            self._remove(name, found)

    def _look(self) -> _Found:
        extents = {extent_of(each.path): each for each in self._list(self._paths.extents)}
        kids: dict[ExtentId, list[Listed]] = {}
        for each in self._list(self._paths.kids):
            if (published := published_at(each.path)) is not None:
                kids.setdefault(published.id, []).append(each)
        return _Found(extents, kids)

    def _tidy(self, objects: Objects) -> Iterator[None]:
        return objects.tidy(self._paths.digest, YOUNG_S) if isinstance(objects, Tidied) else iter(())

    def _list(self, folder: str) -> Iterator[Listed]:
        """Yield all objects below a folder."""
        for some in self._remote.list("counting extents", folder, LIST_S):
            self._go_on()
            yield from some

    def _go_on(self) -> None:
        """Keep the lease. Raises: _LostLease."""
        self.meanwhile()
        if not self._ledger.leads():
            raise _LostLease

    def _remove(self, name: ExtentId, found: _Found) -> None:
        """Remove what lists an extent, then the extent: nothing leads to an extent that is gone."""
        self._go_on()
        paths = [kid.path for kid in found.kids.pop(name, [])]
        there = found.objects.pop(name, None)
        for path in [*paths, *([there.path] if there is not None else [])]:
            self._remote.call("removing an extent", methodcaller("delete", path), DELETE_S)
        if there is not None:
            self._room.removed(there.size)
            self._counters.count(swept=1)


def _rank(name: ExtentId, found: _Found) -> Rank:
    """Rank an extent by its last use, written beside what lists it, and by how far it is down a path."""
    kids = found.kids.get(name, [])
    used = max((kid.modified for kid in kids), default=found.objects[name].modified)
    first = max((of.first_row for kid in kids if (of := published_at(kid.path)) is not None), default=0)
    return Rank(used, -first, name)
