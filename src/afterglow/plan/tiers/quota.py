"""Bytes of extents that a tenant may have, in whatever tier: who is over that forgets what it has used least recently.

It knows extents by their salt; not where they lie. The operator's registered rows count for no tenant.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

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
