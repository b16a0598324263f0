"""A directory (Redis, Valkey) in front of an object store: it answers where extents are, faster than listings do.

It holds the same names as the objects that list extents, in a sorted set for each folder, by when they were last used. It is a copy: all of
it may be lost at any time. One server, which holds a lease, copies the listings into it anew when it is empty, and once a day; until that
is done, and while the directory fails, listings are the object store's.
"""

from __future__ import annotations

import logging
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from math import inf
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from afterglow.errors import ConfigError
from afterglow.plan.prefix.published import Published
from afterglow.store.shared.counters import SharedCounters
from afterglow.store.shared.objects import Listed, Objects

log = logging.getLogger("afterglow.store")
T = TypeVar("T")

CALL_S: Final = 0.1  # for each answer
COPY_S: Final = 5.0  # for each while listings are copied
REST_S: Final = 30.0  # for so long a directory that has failed is left alone
LEASE_S: Final = 30  # a server that copies listings and says nothing for so long has gone
WHOLE_S: Final = 24 * 3600  # until the listings are copied again
KEEP_S: Final = 30 * 24 * 3600  # names that are neither written nor used for so long are forgotten
MAX_LISTED: Final = 1000
_FOLDER: Final = re.compile(r"([0-9a-f]+)/kids/[0-9a-f]{2}/[0-9a-f]{40}")


def check_directory(url: str) -> None:
    """Check that a URL names a directory that can be used here.

    Raises:
        ConfigError: it does not, or the package that speaks to such servers is missing. The URL, which may hold a password, is not shown.
    """
    if not _names_server(url):
        raise ConfigError(
            "--shared-directory is no URL of a Redis or Valkey server (not shown: it may hold a password); write redis://host:6379/0, "
            "rediss://host:6379/0 or unix:///path/of/socket, with %2F for / in a password"
        )
    if find_spec("redis") is None:
        raise ConfigError("--shared-directory needs the package redis: pip install 'afterglow-llm[shared]'")


class DirectoryObjects:
    """An object store whose listings of extents come from a directory, as long as that answers. See `Objects`."""

    def __init__(self, objects: Objects, url: str, counters: SharedCounters) -> None:
        """Connects with the first call."""
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        self._objects = objects
        self._redis: Any  # for calls that a request waits for
        self._patient: Any  # for copies
        self._redis, self._patient = (
            redis.Redis.from_url(
                url,
                socket_timeout=seconds,
                socket_connect_timeout=seconds,
                retry=Retry(NoBackoff(), 0),
                decode_responses=True,
            )
            for seconds in (CALL_S, COPY_S)
        )
        self._counters = counters
        self._rests_until = 0.0
        self._lacks: set[str] = set()  # models with names that could not be written
        self._lock = threading.Lock()
        self._copying = False

    def get(self, path: str, start: int, length: int) -> bytes:
        return self._objects.get(path, start, length)

    def put(self, path: str, data: bytes, *, replace: bool = False) -> bool:
        written = self._objects.put(path, data, replace=replace)
        folder, _, name = path.rpartition("/")
        if (found := _FOLDER.fullmatch(folder)) is not None:
            self._change(found[1], lambda: _add(self._redis, [(folder, name, time.time())]))
        return written

    def list(self, prefix: str) -> Iterator[list[Listed]]:
        found = _FOLDER.fullmatch(prefix)
        listed = self._ask(lambda: self._names(found[1], prefix)) if found is not None else None
        if listed is not None:
            yield [*listed]
        else:
            yield from self._objects.list(prefix)

    def delete(self, path: str) -> None:
        self._objects.delete(path)
        folder, _, name = path.rpartition("/")
        if (found := _FOLDER.fullmatch(folder)) is not None:
            self._change(found[1], lambda: self._redis.zrem(_key(folder), name))

    def close(self) -> None:
        """Close the connections; the directory is asked no more."""
        self._rests_until = inf
        for client in (self._redis, self._patient):
            client.close()

    # -------------------------------------------------------------------------------------------- the directory

    def _names(self, model: str, folder: str) -> Sequence[Listed] | None:
        """Ask for a folder's names, the last used first; None where the directory does not have all of the model's."""
        calls = self._redis.pipeline(transaction=False)
        calls.get(_whole(model)).zrevrange(_key(folder), 0, MAX_LISTED - 1, withscores=True)
        whole, names = calls.execute()
        if whole is None or model in self._lacks:
            self._copy_later(model)
            return None
        self._counters.count(directory_lookups=1)
        return [Listed(f"{folder}/{name}", 0, float(used)) for name, used in names if Published.parse(name) is not None]

    def _copy_later(self, model: str) -> None:
        """Copy a model's listings in the background, unless this server or another does so already."""
        with self._lock:
            if self._copying:
                return
            self._copying = True
        threading.Thread(target=self._copy, args=(model,), name="afterglow-directory", daemon=True).start()

    def _copy(self, model: str) -> None:
        lease, mine = f"afterglow:lease:{model}", uuid.uuid4().hex
        try:
            if self._patient.set(lease, mine, nx=True, ex=LEASE_S) is None:
                return
            self._lacks.discard(model)
            for some in self._objects.list(f"{model}/kids"):
                _add(self._patient, ((*_split(each.path), each.modified) for each in some))
                self._patient.set(lease, mine, ex=LEASE_S)
            self._patient.set(_whole(model), mine, ex=WHOLE_S)
            self._patient.delete(lease)
        except Exception as error:
            self._lacks.add(model)
            self._failed(error)
        finally:
            with self._lock:
                self._copying = False

    def _change(self, model: str, work: Callable[[], object]) -> None:
        """Change names; what fails is made up for by the next copy."""
        if self._ask(lambda: (work(),)) is None:
            self._lacks.add(model)
        elif model in self._lacks:
            self._copy_later(model)

    def _ask(self, work: Callable[[], T | None]) -> T | None:
        """Return what `work` returns; None, and a counter, where the directory fails, or has failed not long ago."""
        if time.monotonic() < self._rests_until:
            return None
        try:
            return work()
        except Exception as error:
            self._failed(error)
            return None

    def _failed(self, error: Exception) -> None:
        """Leave the directory alone for a while. Its errors never hold its URL."""
        self._counters.count(directory_failures=1)
        self._rests_until = max(self._rests_until, time.monotonic() + REST_S)
        log.warning("the directory fails, and is left alone for %g s: %s: %.200s", REST_S, type(error).__name__, error)


def _names_server(url: str) -> bool:
    """Tell whether a URL names a server; what cannot be read as a port or a database could be part of a password."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # a port that is no number, or an address that is none
        return False
    if parts.scheme == "unix":
        return parts.path not in ("", "/")
    database = parts.path.strip("/")
    return (
        parts.scheme in ("redis", "rediss")
        and bool(parts.hostname)
        and port != 0
        and (not database or database.isdecimal())
    )


def _add(redis: Any, names: Iterable[tuple[str, str, float]]) -> None:
    """Write names, by folder and when they were used."""
    calls = redis.pipeline(transaction=False)
    for folder, name, used in names:
        calls.zadd(_key(folder), {name: used})
        calls.expire(_key(folder), KEEP_S)
    calls.execute()


def _key(folder: str) -> str:
    return f"afterglow:{folder}"


def _whole(model: str) -> str:
    return f"afterglow:whole:{model}"


def _split(path: str) -> tuple[str, str]:
    folder, _, name = path.rpartition("/")
    return folder, name
