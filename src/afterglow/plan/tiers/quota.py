"""Bytes of extents that a tenant may have, in whatever tier: who is over that forgets what it has used least recently.

It knows extents by their salt; not where they lie. The operator's registered rows count for no tenant.

Pins are extents that stay in the last tier whatever happens. Pinned conversations and registered prompts share one allowance per
tenant, a part of the last tier (of the disk, or of host where there is none), so that no tenant can pin others out of the cache.
The operator's own prompts are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from afterglow.plan.options import Capacity
from afterglow.plan.prefix.extent import Extent
from afterglow.plan.prefix.salts import client_salt, tenant_of
from afterglow.plan.prefix.shared_prefixes import OPERATOR
from afterglow.plan.tiers.policy import POLICIES, Forget, Ranking


class Quota:
    """Whose extents are whose, if there is a limit (bytes; None: there is not, and nothing is counted)."""

    def __init__(self, limit: int | None, forget: Forget) -> None:
        self._limit = limit
        self._forget = forget
        self._tenants: dict[str, Ranking] = {}
        self._bytes: dict[str, int] = {}

    def add(self, extent: Extent) -> None:
        """Count a new extent."""
        if self._limit is not None and extent.salt != OPERATOR:
            tenant = tenant_of(extent.salt)
            self._tenants.setdefault(tenant, Ranking(POLICIES["lru"], lambda _: True)).set(extent, member=True)
            self._bytes[tenant] = self._bytes.get(tenant, 0) + extent.file_bytes

    def remove(self, extent: Extent) -> None:
        """Count a forgotten extent no more."""
        if self._limit is not None and extent.salt != OPERATOR:
            tenant = tenant_of(extent.salt)
            self._tenants[tenant].set(extent, member=False)
            self._bytes[tenant] -= extent.file_bytes
            if not self._tenants[tenant]:
                del self._tenants[tenant], self._bytes[tenant]

    def update(self, extent: Extent) -> None:
        """Look again at an extent's order."""
        if self._tenants and (own := self._tenants.get(tenant_of(extent.salt))) is not None and extent.salt != OPERATOR:
            own.update(extent)

    def make_room(self, salt: str, size: int) -> bool:
        """Make room for `size` more bytes of a tenant, at the cost of its own least recently used, what is marked last.
        False: there is none."""
        tenant = tenant_of(salt)
        if self._limit is None or client_salt(salt) == OPERATOR or self._bytes.get(tenant, 0) + size <= self._limit:
            return True

        limit, gone = self._limit, True

        def more(spare: bool, extent: Extent) -> bool:
            nonlocal gone
            if spare and extent.mark is not None:
                return False
            if not (extent.ref_count or extent.pins or extent.pin_count or extent.has_children):
                self._forget(extent, "evicted")
                gone = True
            return self._bytes.get(tenant, 0) + size > limit

        for spare in (True, False):
            gone = True
            while gone and size <= limit < self._bytes.get(tenant, 0) + size:
                gone = False  # parents are looked at again, now without children
                self._tenants[tenant].visit(partial(more, spare))
        return self._bytes.get(tenant, 0) + size <= limit

    def shrink(self) -> None:
        """Bring tenants below the limit: before a restart it may have been larger."""
        for tenant in list(self._tenants):
            self.make_room(f"{tenant}.", 0)

    def check(self, extents: Sequence[Extent], restored: bool) -> None:
        """Assert that bytes of the live `extents` add up; `restored`: the limit may have been larger."""
        for tenant, used in self._bytes.items():
            own = [e for e in extents if tenant_of(e.salt) == tenant and e.salt != OPERATOR]
            assert used == sum(e.file_bytes for e in own)
            assert restored or self._limit is None or used <= self._limit or any(e.pin_count for e in own)


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
