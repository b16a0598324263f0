"""Why something is not cached: what has been forgotten lately, and for what reason. For counting misses only.

A ghost is named by what it hung below and by its first tokens, so that a match that ends where it began finds it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

from afterglow.plan.extent import Extent
from afterglow.plan.index import Index, Match

Reason = Literal["cold", "evicted", "expired", "damaged", "deleted", "salt"]

MOST = 65_536
HEAD = 4 * 4  # bytes of tokens by which a ghost is told from its siblings
SALTS = 64  # other tenants that are looked at, to say that only the salt differs


class Ghosts:
    """The last extents that were forgotten."""

    def __init__(self) -> None:
        self._reasons: OrderedDict[tuple[str, int, bytes], Reason] = OrderedDict()

    def add(self, extent: Extent, why: Reason) -> None:
        """An extent has left all tiers."""
        parent = extent.parent if extent.parent is not None else extent.salt
        self._reasons[(parent, extent.parent_rows, extent.tokens[:HEAD])] = why
        if len(self._reasons) > MOST:
            self._reasons.popitem(last=False)

    def why(self, salt: str, tokens: bytes, match: Match, index: Index) -> Reason:
        """Why does a match end where it ends?"""
        view = match.views[-1] if match.views else None
        place = (view.extent.id, view.stop) if view is not None else (salt, 0)
        following = tokens[4 * match.rows : 4 * match.rows + HEAD]
        for size in range(len(following), 0, -4):  # some are shorter than a head
            found = self._reasons.get((*place, following[:size]))
            if found is not None:
                return found
        if view is None and index.elsewhere(salt, tokens, HEAD // 4, SALTS):
            return "salt"
        return "cold"
