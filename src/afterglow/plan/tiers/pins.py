"""Pins: extents that stay in the last tier whatever happens, and how much of the tier one tenant may pin.

Pinned conversations and registered prompts share one allowance per tenant, a part of the last tier (of the disk, or of host
where there is none), so that no tenant can pin others out of the cache. The operator's own prompts are not counted.
"""

from __future__ import annotations

from afterglow.plan.options import Capacity
from afterglow.plan.prefix.extent import Extent
from afterglow.plan.prefix.salts import tenant_of
from afterglow.plan.prefix.shared_prefixes import OPERATOR

NO_LIMIT = 2**62


class Pins:
    """Bytes that are pinned, by tenant (blocks, where there is no disk). A tenant may pin a `share` of the tier (None: all)."""

    def __init__(self, capacity: Capacity, share: float | None) -> None:
        self._capacity = capacity
        self._in_host = int(capacity.host_slots * share) if share is not None else NO_LIMIT
        self.changes = 0  # of what is pinned or promised: how often there was any
        self.most = int((capacity.disk_bytes or capacity.host_slots) * share) if share is not None else NO_LIMIT
        self.promised: dict[str, int] = {}  # for registered prompts
        self._kept: dict[str, int] = {}

    def size(self, rows: int) -> int:
        """Return what an extent of so many rows counts."""
        return self._capacity.file_size(rows) if self._capacity.disk_bytes else self._capacity.blocks(rows)

    def room(self, salt: str) -> int:
        """Return how much more may be pinned under a salt."""
        tenant = tenant_of(salt)
        return self.most - self._kept.get(tenant, 0) - self.promised.get(tenant, 0)

    def room_in_host(self, salt: str) -> int:
        """Return how many blocks of host a tenant's marks may keep there: beside its pins, if these keep to host."""
        return self._in_host if self._capacity.disk_bytes else self.room(salt)

    def kept(self, salt: str) -> int:
        """Return how much the tenant of a salt has pinned for conversations."""
        return self._kept.get(tenant_of(salt), 0)

    def promise(self, promised: dict[str, int]) -> None:
        """Count what registered prompts are going to take, by tenant."""
        self.promised = promised
        self.changes += 1

    def cost(self, extent: Extent) -> int:
        """Return what pinning an extent would add."""
        return 0 if extent.pin_count or extent.salt == OPERATOR else self.size(extent.rows)

    def keep(self, extent: Extent) -> None:
        """Pin an extent: it must not leave the last tier, nor end with the process, until it is released as often."""
        self._count(extent, self.cost(extent))
        extent.pin_count += 1
        extent.volatile = False

    def release(self, extent: Extent) -> None:
        """Undo one `keep`."""
        extent.pin_count -= 1
        self._count(extent, -self.cost(extent))

    def lost(self, extent: Extent) -> None:
        """Drop the pins of an extent that is forgotten (damaged, or there is no room even for pinned extents)."""
        if extent.pin_count:
            extent.pin_count = 0
            self._count(extent, -self.cost(extent))

    def _count(self, extent: Extent, change: int) -> None:
        tenant = tenant_of(extent.salt)
        self.changes += 1
        self._kept[tenant] = self._kept.get(tenant, 0) + change
        if not self._kept[tenant]:
            del self._kept[tenant]
