"""Copies what lists a model's extents from the object store into a directory."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final

from afterglow.errors import StoreError
from afterglow.store.shared.counters import SharedCounters
from afterglow.store.shared.directory_names import DirectoryNames
from afterglow.store.shared.directory_scripts import ADD, STATE
from afterglow.store.shared.lease import Lease
from afterglow.store.shared.objects import Listed, Objects, get_all

log = logging.getLogger("afterglow.store")

COPIED: Final = 64  # extents in a call of the copy
MAX_UNREAD: Final = 8  # of these: more, and the store fails
KID: Final = re.compile(r"([0-9a-f]+)/kids/[0-9a-f]{2}/[0-9a-f]{40}/([0-9a-f]{40})-[0-9-]+")


class DirectoryCopy:
    """The copy of one server, which may be stopped. `redis`: a client that has time; `most`: extents that a block leads to at most."""

    def __init__(self, objects: Objects, redis: Any, counters: SharedCounters) -> None:
        self._objects = objects
        self._redis = redis
        self._counters = counters
        self._stops = threading.Event()
        self._warned = False

    def stop(self) -> None:
        """End a copy that is under way, and all later ones."""
        self._stops.set()

    def run(self, model: str, names: DirectoryNames, lease: Lease, whole_s: int, most: int, lacks: bool) -> bool:
        """Copy all of a model, unless the lease is lost or the copy is stopped; tell whether the directory is whole then.

        Where it was whole, and neither restarted nor short of memory since, that is what it lacks alone; and nothing, where another copy has
        ended since this one was asked for: unless it `lacks` what that need not have found.

        Raises:
            StoreError: the store fails.
            Exception: what the client of the directory raises.
        """
        whole, state = names.whole(model), self._state(names.whole(model))
        adds = self._redis.get(whole) == state
        if adds and not lacks and self._redis.ttl(whole) >= whole_s:
            return True
        for some in self._list(f"{model}/kids"):
            found = {each.path: each.modified for each in some if KID.fullmatch(each.path) is not None}
            paths = [*found]
            for start in range(0, len(paths), COPIED):
                part = paths[start : start + COPIED]
                calls = self._redis.pipeline(transaction=False)
                for path, data in self._read(self._lacking(part, names) if adds else part).items():
                    if (added := names.added(path, data, found[path], most)) is not None:
                        calls.eval(ADD, 1, names.entry(path), *added)
                calls.execute()
                if self._stops.is_set() or not lease.renew():
                    return False
        self._redis.set(whole, state, ex=2 * whole_s)
        return True

    def _state(self, whole: str) -> str:
        """Say which run of the server that has this name this is, and how much it has evicted; it has what was copied while that is the same. Warns of
        a server that evicts.
        """
        run, evicted, memory, policy = self._redis.eval(STATE, 1, whole)
        if memory not in ("0", "-") and policy != "noeviction" and not self._warned:
            self._warned = True
            log.warning(
                "the directory evicts keys when its memory is full (maxmemory-policy %s), which hides prompts for up to a day; "
                "give it more memory, or set maxmemory-policy noeviction",
                policy,
            )
        return f"{run} {evicted}"

    def _list(self, folder: str) -> Iterator[list[Listed]]:
        try:
            yield from self._objects.list(folder)
        except Exception as error:
            raise StoreError(f"copying to the directory: {type(error).__name__}") from error

    def _read(self, paths: Sequence[str]) -> dict[str, bytes]:
        """Read objects; a few that cannot be read are left out, and counted: the next copy tries them again."""
        failed: list[Exception] = []
        found = get_all(paths, self._objects, failed, lambda: self._stops.is_set() or len(failed) > MAX_UNREAD)
        for each in failed:
            error = StoreError(f"copying to the directory: {type(each).__name__}")
            error.__cause__ = each
            self._counters.failed(error)
        if len(failed) > MAX_UNREAD:
            raise StoreError(f"copying to the directory: {len(failed)} objects cannot be read") from failed[0]
        return found

    def _lacking(self, paths: Sequence[str], names: DirectoryNames) -> Sequence[str]:
        """Return those of the paths of what lists extents that are not in the directory."""
        calls = self._redis.pipeline(transaction=False)
        for path in paths:
            calls.exists(names.entry(path))
        return [path for path, there in zip(paths, calls.execute(), strict=True) if not there]
