"""Why rows are not cached: extents forgotten lately, and for what reason. For counting misses only.

A ghost is named by what it hung below and by its first tokens, so that a match that ends where it began finds it.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from hashlib import blake2b
from typing import Final, Literal

from afterglow.plan.prefix.extent import Extent
from afterglow.plan.prefix.index import Index, Match

Reason = Literal["cold", "evicted", "expired", "damaged", "deleted", "salt"]
REMEMBERED: Final[tuple[Reason, ...]] = ("evicted", "expired", "damaged", "deleted")
_Place = tuple[str, int, bytes]  # what it hung below, after how many rows, and its first tokens

MAX_GHOSTS = 65_536
HEAD_BYTES = 4 * 4  # bytes of tokens by which a ghost is told from its siblings
MAX_NOTED = 2048  # that are remembered over a restart
GHOSTS_PER_NOTE = 128  # ghosts in a note
GHOST_DIGITS = 12  # of a hash that stands for a ghost then
MAX_OTHER_SALTS = 64  # other tenants that are looked at, to say that only the salt differs


class Ghosts:
    """The last extents that were forgotten."""

    def __init__(self) -> None:
        self._reasons: OrderedDict[_Place, Reason] = OrderedDict()
        self._recalled: dict[str, Reason] = {}  # by hash: of before a restart

    def add(self, extent: Extent, why: Reason) -> None:
        """Remember an extent that has left all tiers."""
        parent = extent.parent if extent.parent is not None else extent.salt
        self._reasons[(parent, extent.parent_rows, extent.tokens[:HEAD_BYTES])] = why
        if len(self._reasons) > MAX_GHOSTS:
            self._reasons.popitem(last=False)

    def why(self, salt: str, tokens: bytes, match: Match, index: Index) -> Reason:
        """Why does a match end where it ends?"""
        view = match.views[-1] if match.views else None
        place = (view.extent.id, view.stop) if view is not None else (salt, 0)
        following = tokens[4 * match.rows : 4 * match.rows + HEAD_BYTES]
        for size in range(len(following), 0, -4):  # some are shorter than a head
            found = self._reasons.get((*place, following[:size]))
            if found is None and self._recalled:
                found = self._recalled.get(_hash((*place, following[:size])))
            if found is not None:
                return found
        if view is None and index.elsewhere(salt, tokens, HEAD_BYTES // 4, MAX_OTHER_SALTS):
            return "salt"
        return "cold"

    def take_notes(self) -> list[tuple[str, str | None]]:
        """Those that went last, to be remembered over a restart; asked for when the plan ends. In several notes: a small
        disk takes no long ones."""
        names = {_hash(place): why for place, why in list(self._reasons.items())[-MAX_NOTED:]}
        older = [item for item in self._recalled.items() if item[0] not in names]
        all_of_them = [*older, *names.items()][-MAX_NOTED:]
        notes: list[tuple[str, str | None]] = []
        for number in range(MAX_NOTED // GHOSTS_PER_NOTE):
            some: dict[str, str] = {}
            for name, why in all_of_them[number * GHOSTS_PER_NOTE : (number + 1) * GHOSTS_PER_NOTE]:
                some[why] = some.get(why, "") + name
            notes.append((f"{number:02d}", json.dumps(some) if some else None))
        return notes

    def recall(self, notes: Mapping[str, str]) -> None:
        """After a restart. What cannot be read is ignored: a miss is called cold then."""
        for _, text in sorted(notes.items()):
            try:
                found = json.loads(text)
                names = {why: str(found.get(why, "")) for why in REMEMBERED}
            except (ValueError, AttributeError):
                continue
            for why, some in names.items():
                self._recalled |= {some[at : at + GHOST_DIGITS]: why for at in range(0, len(some), GHOST_DIGITS)}


def _hash(place: _Place) -> str:
    parent, rows, tokens = place
    return blake2b(
        f"{parent} {rows} ".encode("utf-8", "surrogatepass") + tokens, digest_size=GHOST_DIGITS // 2
    ).hexdigest()
