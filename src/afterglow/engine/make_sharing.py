"""Make the tier that engines share. Nothing of it is imported before it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from afterglow.config import SHARED_CACHE, CacheConfig
from afterglow.engine.inbox import Inbox
from afterglow.plan.options import Capacity
from afterglow.plan.scheduler import Scheduler
from afterglow.store.database.conversations import Conversations
from afterglow.store.extents.disk_tier import DiskTier
from afterglow.store.kvstore import KVStore

if TYPE_CHECKING:
    from afterglow.engine.sharing import Sharing
    from afterglow.store.shared.shared_store import SharedStore


def shared_tier(cache: CacheConfig) -> Callable[[DiskTier], SharedStore] | None:
    """Return what makes the tier that engines share, over the disk tier; None: there is to be none.

    The store itself is opened by its first call, from a thread of its own. Raises: ConfigError, for a URL that names none.
    """
    url, directory = cache.shared, cache.shared_directory
    if url is None:
        return None
    from afterglow.store.shared.counters import SharedCounters
    from afterglow.store.shared.objects import Objects, ObstoreObjects, check_url
    from afterglow.store.shared.shared_store import SharedStore

    check_url(url)
    if directory is not None:
        from afterglow.store.shared.directory import check_directory

        check_directory(directory)
    counters = SharedCounters()

    def open_objects() -> Objects:
        objects = ObstoreObjects(url)
        if directory is None:
            return objects
        from afterglow.store.shared.directory import DirectoryObjects

        return DirectoryObjects(objects, directory, counters)

    size = SHARED_CACHE if cache.shared_cache is None else cache.shared_cache
    return lambda disk: SharedStore(open_objects, disk, size, counters)


def make_sharing(
    scheduler: Scheduler, store: KVStore, tiers: Capacity, inbox: Inbox, clock: Callable[[], float]
) -> Sharing | None:
    """Join the plan and the tier that engines share, if there is one."""
    if store.shared is None:
        return None
    from afterglow.engine.sharing import Sharing

    return Sharing(scheduler, store, tiers, inbox, clock)


def shared_conversations(shared: SharedStore, folder: Path, max_bytes: int) -> Conversations:
    """Open the responses that clients go on from by id on any engine."""
    from afterglow.store.shared.shared_responses import SharedConversations

    return SharedConversations(folder, shared.records, max_bytes=max_bytes)
