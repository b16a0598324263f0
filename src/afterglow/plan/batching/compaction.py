"""What survives a truncation becomes extents of its own: rows are copied in host, without their positions.

It knows where surviving rows lie and where they go; not why they survive (`truncation`), not how they are used.
A copy pins the extents that it reads until it has ended; its extents can be matched when all their bytes are
there, never before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from afterglow.plan.batching.job import Job
from afterglow.plan.cache import Cache
from afterglow.plan.prefix.extent import Extent, View
from afterglow.plan.prefix.ranges import Rows
from afterglow.plan.prefix.tree import common_rows
from afterglow.plan.step import JobSpec, MoveDone


@dataclass(eq=False, slots=True)
class _Copying:
    extent: Extent
    prefix: bytes
    slots: tuple[int, ...]
    sources: list[Extent]
    ttl: float | None


class Compaction:
    """Copies under way."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._copies: dict[int, _Copying] = {}  # by move

    def __len__(self) -> int:
        return len(self._copies)

    def knows(self, salt: str, tokens: bytes, others: Iterable[Job]) -> bool:
        """Are there any rows of these tokens, or about to be?"""
        return self._cache.match(salt, tokens).rows > 0 or self._more(salt, tokens, 0, others)

    def is_promised(self, job: Job, others: Iterable[Job]) -> bool:
        """Are more rows that a job could keep about to be in the index, so that it pays to wait before copying?"""
        origin = job.origin
        if origin is None or not origin.kept or job.copies or not job.spec.read:
            return False
        tokens = origin.tokens[: 4 * origin.kept[-1][1]]
        known = self._cache.match(origin.salt, tokens).rows
        return 4 * known < len(tokens) and self._more(origin.salt, tokens, known, others)

    def _more(self, salt: str, tokens: bytes, known: int, others: Iterable[Job]) -> bool:
        """Will one of these jobs put more than the `known` rows of these tokens into the index?"""
        return any(
            common_rows(other.tokens, 0, tokens, 0, other.promised) > known
            for other in others
            if other.salt == salt and other.tokens[:4] == tokens[:4]
        )

    def surviving(self, salt: str, tokens: bytes, kept: tuple[Rows, ...]) -> list[View]:
        """Views of the kept rows, up to the first that is not cached."""
        views: list[View] = []
        row = 0
        ranges = list(kept)
        for view in self._cache.match(salt, tokens).views:
            stop = row + view.stop - view.start
            while ranges and ranges[0][0] < stop:
                a, b = max(ranges[0][0], row), min(ranges[0][1], stop)
                views.append(View(view.extent, view.start + a - row, view.start + b - row))
                if b < ranges[0][1]:
                    break
                ranges.pop(0)
            row = stop
        return views

    def begin(self, spec: JobSpec, prompt: bytes, views: list[View], now: float) -> list[int]:
        """Copy these rows (all in host) into extents for the head of a prompt, without those of a registered prefix that
        it begins with: they stay where they are. The moves; fewer where room is short."""
        moves: list[int] = []
        salt = spec.salt
        rows = sum(view.stop - view.start for view in views)
        registered = self._cache.registered_prefix(salt, prompt)
        begin = registered.rows if registered is not None else 0
        if begin and self._cache.match(salt, prompt).rows < begin:
            return []
        for first in range(begin, rows, self._cache.capacity.max_extent_rows):
            count = min(self._cache.capacity.max_extent_rows, rows - first)
            slots = self._cache.host.urge_slots(self._cache.capacity.blocks(count), now)
            if slots is None:
                break
            pieces = _cut(views, first, first + count)
            own, prefix = prompt[4 * first : 4 * (first + count)], prompt[: 4 * first]
            extent = self._cache.new_extent(salt, prefix, own, spec.volatile, now)
            sources = [view.extent for view in pieces]
            for source in sources:
                self._cache.pin(source)
            move = self._cache.placement.copy([(v.extent.slots, v.start, v.stop) for v in pieces], slots, count)
            self._copies[move] = _Copying(extent, prefix, slots, sources, spec.ttl)
            moves.append(move)
        return moves

    def ended(self, done: MoveDone, now: float) -> bool:
        """Take note that a move has ended. Was it a copy of a compaction?"""
        copying = self._copies.pop(done.move, None)
        if copying is None:
            return False
        for source in copying.sources:
            self._cache.unpin(source)
        size = copying.extent.file_bytes
        room = done.ok and self._cache.within_quota(copying.extent.salt, size)
        inserted = room and self._cache.insert(copying.extent, copying.prefix).outcome == "inserted"
        if done.slots_busy:
            self._cache.host.quarantine(done.move, copying.slots)
        elif inserted:
            self._cache.need(copying.extent, now, copying.ttl, copying.extent.volatile)
            self._cache.add(copying.extent, copying.slots, now)
        else:
            self._cache.host.pool.give(copying.slots)
        return True

    def under_way(self, moves: list[int]) -> bool:
        """Is one of these copies still going on?"""
        return any(move in self._copies for move in moves)

    def slots(self) -> list[int]:
        """List the slots that are being copied to."""
        return [slot for copying in self._copies.values() for slot in copying.slots]

    def pins(self) -> list[Extent]:
        """List the extents that are being copied from, once per pin."""
        return [source for copying in self._copies.values() for source in copying.sources]


def _cut(views: list[View], start: int, stop: int) -> list[View]:
    """Return the parts of views that show rows [start, stop)."""
    found, row = [], 0
    for view in views:
        size = view.stop - view.start
        a, b = max(start - row, 0), min(stop - row, size)
        if a < b:
            found.append(View(view.extent, view.start + a, view.start + b))
        row += size
    return found
