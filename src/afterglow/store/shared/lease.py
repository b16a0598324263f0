"""A lease in a directory: one server at a time does what all need done once."""

from __future__ import annotations

import uuid
from typing import Any, Final

from afterglow.store.shared.directory_scripts import GIVE_BACK, RENEW, TAKE

LEASE_S: Final = 30.0  # a holder that says nothing for so long has gone


class Lease:
    """A lease by its name. Calls raise what the client of the directory raises."""

    def __init__(self, redis: Any, name: str, seconds: float = LEASE_S) -> None:
        self._redis = redis
        self._name = f"afterglow:lease:{name}"
        self._mine = uuid.uuid4().hex
        self._ms = int(1000 * seconds)

    def take(self) -> bool:
        """Take the lease; False: another has it."""
        return bool(self._redis.eval(TAKE, 1, self._name, self._mine, self._ms))

    def renew(self) -> bool:
        """Keep the lease for longer; False: it was lost."""
        return bool(self._redis.eval(RENEW, 1, self._name, self._mine, self._ms))

    def give_back(self) -> None:
        """End the lease; one that was lost is left to its holder."""
        self._redis.eval(GIVE_BACK, 1, self._name, self._mine)
