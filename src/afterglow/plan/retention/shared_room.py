"""How a shared store is kept within its budget: what a server knows of its bytes, when it counts them, and which extents go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Final, Generic, NamedTuple, TypeVar

from afterglow.plan.step import ExtentId

PARTS: Final = 16  # of the budget may be written before all is counted again
LOW: Final = 0.9  # of the budget is left when something has to go
MAX_LISTINGS: Final = 65536
REFRESH_S: Final = 600.0  # an extent counts as used again only so long after its last use


class Rank(NamedTuple):
    """An extent's place among those that may have to go, the smallest first: the least recently used, of a path the last."""

    used: float
    behind: int  # minus the rows before it
    id: ExtentId


T = TypeVar("T")


class LastUses(Generic[T]):
    """What lists the extents that one server published or used last, and when that was."""

    def __init__(self) -> None:
        self._known: OrderedDict[ExtentId, tuple[T, float]] = OrderedDict()

    def note(self, extent: ExtentId, listing: T, at: float) -> None:
        """Note when the use of an extent was last written down."""
        self._known[extent] = listing, at
        self._known.move_to_end(extent)
        if len(self._known) > MAX_LISTINGS:
            self._known.popitem(last=False)

    def forget(self, extent: ExtentId) -> T | None:
        """Forget an extent; returns what lists it, if that is known."""
        return self._known.pop(extent, (None, 0.0))[0]

    def again(self, extents: Iterable[ExtentId], now: float) -> Iterator[T]:
        """Yield what lists those that are known, and whose use counts again; it counts as written down."""
        for extent in extents:
            listing, at = self._known.get(extent, (None, 0.0))
            if listing is not None and is_used_again(at, now):
                self.note(extent, listing, now)
                yield listing


def is_used_again(modified: float, now: float) -> bool:
    """Does a use count, of an extent whose last use was written down at `modified`?"""
    return now - modified > REFRESH_S


class SharedRoom:
    """What one server knows of the room in a store of `size` bytes. `used`: bytes of all extents, as last counted, and what it has
    written since; `written`: these alone (None: it has never counted).
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        self.written: int | None = None

    def fits(self, more: int) -> bool:
        """Is there room for so many bytes, as far as it knows?"""
        return self.used + more <= self.size

    @property
    def wrote_much(self) -> bool:
        """Has it written more than may be written between two counts?"""
        return (self.written or 0) > self.size // PARTS

    def counts(self, more: int) -> bool:
        """Is all to be counted before so many bytes are written?"""
        return self.written is None or self.wrote_much or not self.fits(more)

    def counted(self, used: int) -> None:
        """Note how many bytes there are."""
        self.used, self.written = used, 0

    def wrote(self, size: int) -> None:
        """Note that an object was written."""
        self.used += size
        self.written = (self.written or 0) + size

    def removed(self, size: int) -> None:
        """Note that an object was removed to make room."""
        self.used -= size

    def leaving(self, ranks: Iterable[Rank], more: int) -> Iterator[ExtentId]:
        """Yield the extents that are to be removed before so many bytes are written. Tell `removed` of each before the next is asked for."""
        if self.fits(more):
            return
        for rank in sorted(ranks):
            if self.used + more <= LOW * self.size:
                return
            yield rank.id
