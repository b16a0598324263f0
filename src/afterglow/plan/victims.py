"""Who goes first, tier by tier, and who must not go at all. It knows extents and the policy; not why room is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from afterglow.plan.extent import Extent, Key
from afterglow.plan.ghosts import Reason
from afterglow.plan.policy import Policy, Ranking

Forget: TypeAlias = Callable[[Extent, Reason], None]  # how an extent leaves all tiers, and what hangs below it


class Victims:
    """The extents that have a state in which they can be asked to go, in the order of one policy."""

    def __init__(self, policy: Policy) -> None:
        self.in_order = policy.looks_ahead  # what jobs wait for goes last, and what the first job waits for at the end
        self.host = Ranking(policy)  # ready in host
        self.clean = Ranking(policy)  # ready in both
        self.cold = Ranking(policy)  # ready on disk only, and nothing hangs below
        self.horizon: Key | None = None  # what jobs up to this one wait for does not leave the last tier

    def place(self, extent: Extent) -> None:
        """Its state in a tier has changed, or what hangs below it."""
        live = not extent.dead
        host, disk = extent.host == "ready", extent.disk == "ready"
        self.host.set(extent, live and host)
        self.clean.set(extent, live and host and disk)
        self.cold.set(extent, live and disk and extent.host == "absent" and not extent.has_children)

    def update(self, extent: Extent) -> None:
        """Something has changed that the policy's order may depend on."""
        self.host.update(extent)
        self.clean.update(extent)
        self.cold.update(extent)

    def must_stay(self, extent: Extent) -> bool:
        """May it not leave the last tier? It is in use or to be kept, something is matched through it only, or a job
        within the eviction window waits for it (A11)."""
        if extent.users or extent.kept or extent.has_children:
            return True
        return extent.rank is not None and self.horizon is not None and extent.rank <= self.horizon
