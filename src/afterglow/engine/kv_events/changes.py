"""Which extents have changed since the last step. Runs on the engine's thread, and does no more than note them."""

from __future__ import annotations

from dataclasses import dataclass

from afterglow.plan.cache import Cache
from afterglow.plan.prefix.extent import Extent
from afterglow.plan.prefix.index import common_rows
from afterglow.plan.step import ExtentId


@dataclass(frozen=True, slots=True)
class ExtentState:
    """Where the rows of one extent lie, as far as matches go through them.

    The rows are `tokens` from byte 4 * `first` on, the first of which is row `start` of the path. `above`: the extent with
    the row before, None at the root. `device_end`: contexts on the device have the path's rows up to there.
    """

    id: ExtentId
    above: ExtentId | None
    salt: str
    tokens: bytes
    first: int
    start: int
    device_end: int
    host: bool
    disk: bool


@dataclass(frozen=True, slots=True)
class Changes:
    """What one step has changed: extents that left the index, then those that came or whose tiers changed, heads of paths
    first. `anew`: forget all that was known before."""

    gone: tuple[ExtentId, ...]
    states: tuple[ExtentState, ...]
    anew: bool = False


class ChangedExtents:
    """Collects changed extents. Truncated and selected rows are left out: no prompt of a client matches them by itself."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._changed: dict[Extent, None] = {}
        self._known: dict[ExtentId, Extent] = {}
        cache.placement.candidates.watch = self._note
        cache.device.watch = self._note

    def take(self) -> Changes | None:
        """Return the changes since the last call; None without any."""
        if not self._changed:
            return None
        changed, self._changed = self._changed, {}
        gone = tuple(each.id for each in changed if each.dead and self._known.get(each.id) is each)
        for name in gone:
            del self._known[name]
        return Changes(gone, self._states(changed))

    def everything(self) -> Changes:
        """Return the whole index."""
        self._changed.clear()
        self._known.clear()
        return Changes((), self._states(dict.fromkeys(self._cache.index.extents.values())), anew=True)

    def _note(self, extent: Extent) -> None:
        if extent.kind == "exact":
            self._changed[extent] = None

    def _states(self, extents: dict[Extent, None]) -> tuple[ExtentState, ...]:
        live = {each: None for each in extents if each.nodes and each.kind == "exact"}
        for extent in tuple(live):
            if extent.id not in self._known:  # it may have taken the place of others, which something hung below
                below = (child.extent for node in extent.nodes for child in node.children())
                live.update((child, None) for child in below if child is not None)
        self._known.update((each.id, each) for each in live)
        return tuple(self._state(each) for each in sorted(live, key=lambda each: each.first_row + each.nodes[0].start))

    def _state(self, extent: Extent) -> ExtentState:
        first = extent.nodes[0].start
        above = extent.above
        if above is None and extent.parent is not None:  # it hangs below a registered prefix of another tenant
            above = self._cache.index.extents.get(extent.parent)
        return ExtentState(
            extent.id,
            above.id if above is not None else None,
            extent.salt,
            extent.tokens,
            first,
            extent.first_row + first,
            self._device_end(extent),
            extent.host == "ready",
            extent.disk == "ready",
        )

    def _device_end(self, extent: Extent) -> int:
        """Return the row up to which a context on the device has the path through an extent; its first row: none has."""
        most = 0
        for number in extent.contexts:
            context = self._cache.device.contexts[number]
            if not context.doomed:
                begin = extent.first_row
                rows = context.rows - begin
                most = max(most, common_rows(context.tokens, begin, extent.tokens, 0, min(rows, extent.rows)))
        return extent.first_row + most
