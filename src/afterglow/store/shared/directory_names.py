"""Names of what a directory holds. All hold the id of the object store, so that stores never meet in one database.

It is in braces, by which a cluster keeps a store's names on one node: programs reach names that their call does not name.
"""

from __future__ import annotations

import re
import time
import uuid
from typing import Final

from afterglow.errors import StoreError
from afterglow.plan.prefix.block_keys import Lead
from afterglow.store.shared.objects import Objects
from afterglow.store.shared.paths import published_at

STORE_ID: Final = "directory-id"  # the object that has it
KEEP_S: Final = 30 * 24 * 3600  # extents that are neither written nor used for so long are forgotten


def store_id(objects: Objects) -> str:
    """Read the id of a store, 32 hexadecimal digits; a store that has none gets one.

    Raises:
        StoreError: the object that has it is damaged.
        Exception: what the store raises.
    """
    try:
        found = objects.get(STORE_ID, 0, 64)
    except FileNotFoundError:
        objects.put(STORE_ID, uuid.uuid4().hex.encode())
        found = objects.get(STORE_ID, 0, 64)  # another server may have been first
    text = found.decode("ascii", "replace")
    if re.fullmatch("[0-9a-f]{32}", text) is None:
        raise StoreError(f"the shared store's object {STORE_ID!r} is damaged; remove it, and start all servers again")
    return text


class DirectoryNames:
    """Names of one store's keys (see `directory_scripts`)."""

    def __init__(self, store: str) -> None:
        self._store = store

    def within(self, name: str) -> str:
        """Name what is the store's own, a lease for example."""
        return f"{{{self._store}}}/{name}"

    def prefix(self, model: str) -> str:
        """Return what the names of a model's extents and blocks begin with."""
        return f"afterglow:{self.within(model)}/"

    def whole(self, model: str) -> str:
        """Name the key that is there while the directory has all of a model's extents."""
        return f"afterglow:whole:{self.within(model)}"

    def used(self, model: str) -> str:
        """Name the bytes that a model takes (see `ledger`)."""
        return f"afterglow:used:{self.within(model)}"

    def entry(self, path: str) -> str:
        """Name the entry of an extent, by the path of its object or of what lists it."""
        model, _, _, rest = path.split("/", 3)
        return f"{self.prefix(model)}extent/{rest.rsplit('/', 1)[-1][:40]}"

    def added(self, path: str, data: bytes, used: float, most: int) -> tuple[object, ...] | None:
        """Return the arguments of `ADD` that enter an extent: what lists it, when it was used, and how many extents a block leads to at most.
        None: it has no lead, or has expired.
        """
        published, lead = published_at(path), Lead.parse(data.decode("ascii", "replace"))
        if published is None or lead is None or not published.lives(now := time.time()):
            return None
        lives = min(KEEP_S, published.expires - now) if published.expires else KEEP_S
        model, _, folder = path.split("/", 2)
        entry = f"{folder} {lead.parent or '-'} {int(used)}"
        return (self.prefix(model), published.id, entry, _ms(lives), used, most, *lead.blocks)


def _ms(seconds: float) -> int:
    return max(1, int(1000 * seconds))
