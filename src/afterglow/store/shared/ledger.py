"""What all servers together take of the shared store, kept in a directory. One of them at a time, which holds a lease, counts and makes room.

used:MODEL   a hash: bytes that were ever written; bytes that were there when one last counted, how many had been written by then, when, and in
             which run of the directory's server: one that was restarted may have an old snapshot
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

from afterglow.store.shared.directory import COPY_S, DirectoryObjects
from afterglow.store.shared.directory_names import DirectoryNames
from afterglow.store.shared.directory_scripts import STATE
from afterglow.store.shared.lease import Lease
from afterglow.store.shared.remote import Remote

T = TypeVar("T")

LEADS_S: Final = 120.0  # a leader that says nothing for so long has gone: a step of a listing may take half of it
OLD_S: Final = 24 * 3600.0  # after which all is counted again
KEEP_S: Final = 30 * 24 * 3600
FIELDS: Final = ("written", "there", "before", "at", "run")
NUMBER: Final = re.compile(r"[0-9]{1,18}(\.[0-9]{1,18})?")


class Tally(NamedTuple):
    """Bytes in the store (None: nothing has counted them for a day, or in this run of the directory's server), those of them that were written
    since they were counted, those that were ever written, and the run.
    """

    used: int | None
    since: int
    written: int
    run: str


class Ledger:
    """One model's bytes. Where there is no directory, or it fails, all methods return None."""

    def __init__(self, remote: Remote, model: str) -> None:
        self._remote = remote
        self._model = model
        self._lease: Lease | None = None

    def read(self) -> Tally | None:
        """Read the tally; one that is damaged is removed, and all is counted again."""

        def read(redis: Any, names: DirectoryNames) -> tuple[str, list[Any]]:
            calls = redis.pipeline(transaction=False)
            calls.type(names.used(self._model))
            calls.hmget(names.used(self._model), FIELDS)
            calls.eval(STATE, 1, names.used(self._model))
            kind, values, state = calls.execute(raise_on_error=False)
            for each in (kind, state, values if kind == "hash" else None):
                if isinstance(each, Exception):
                    raise each
            return state[0], values if kind in ("none", "hash") else []

        answer = self._ask(read)
        if answer is None:
            return None
        run, found = answer
        if len(found) < len(FIELDS) or not all(each is None or NUMBER.fullmatch(each) for each in found[:-1]):
            self._ask(lambda redis, names: redis.delete(names.used(self._model)), f"bytes in the shared store {found}")
            return Tally(None, 0, 0, run)
        written, there, before, at = (float(each) if each is not None else None for each in found[:-1])
        total = int(written or 0)
        old = at is None or abs(time.time() - at) > OLD_S or found[-1] != run
        if old or there is None or before is None or total < before:
            return Tally(None, 0, total, run)
        return Tally(int(there) + total - int(before), total - int(before), total, run)

    def wrote(self, size: int) -> None:
        """Add what was written."""
        self._ask(
            lambda redis, names: (
                redis.hincrby(key := names.used(self._model), "written", size),
                redis.expire(key, KEEP_S),
            )
        )

    def counted(self, used: int, before: Tally) -> None:
        """Say how many bytes are there. `before`: the tally before they were counted; what was written meanwhile counts twice."""
        fields = {"there": used, "before": before.written, "at": time.time(), "run": before.run}
        self._ask(lambda redis, names: redis.hset(names.used(self._model), mapping=fields))

    def lead(self) -> bool:
        """Become the server that counts; False: another is."""

        def take(redis: Any, names: DirectoryNames) -> Lease | None:
            lease = Lease(redis, names.within(f"budget:{self._model}"), LEADS_S)
            return lease if lease.take() else None

        self._lease = self._ask(take)
        return self._lease is not None

    def leads(self) -> bool:
        """Keep the lease for longer; False: another has it now. While the directory fails it counts as kept."""
        lease = self._lease
        return lease is None or self._ask(lambda *_: lease.renew()) is not False

    def follow(self) -> None:
        """Give the lease back."""
        lease, self._lease = self._lease, None
        if lease is not None:
            self._ask(lambda *_: lease.give_back())

    def _ask(self, work: Callable[[Any, DirectoryNames], T], damaged: str | None = None) -> T | None:
        """Ask the directory, if there is one. `damaged`: what of it was."""
        objects = self._remote.opened
        if not isinstance(objects, DirectoryObjects):
            return None
        if damaged is not None:
            objects.damaged(damaged)
        return self._remote.aside(lambda: objects.ask(work), 2 * COPY_S)
