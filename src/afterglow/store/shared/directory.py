"""A directory (Redis, Valkey) in front of an object store: it answers in one call which extents a prompt may begin with.

It knows extents by hashes of blocks of tokens (see `plan.prefix.block_keys`), which the objects that list extents hold as well. It is a copy:
all of it may be lost at any time. One server, which holds a lease, copies what is in the store into it when it is empty, and once a day
what is not in it; until it has all, and while it fails, lookups are listings of the object store.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from math import inf
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import urlsplit

from afterglow.config import MAX_EXTENT_ROWS
from afterglow.errors import ConfigError, StoreError
from afterglow.plan.prefix.block_keys import BLOCK_ROWS
from afterglow.store.shared.counters import SharedCounters
from afterglow.store.shared.directory_changes import Change, DirectoryChanges
from afterglow.store.shared.directory_copy import KID, DirectoryCopy
from afterglow.store.shared.directory_names import DirectoryNames, store_id
from afterglow.store.shared.directory_scripts import ADD, FIND, REMOVE
from afterglow.store.shared.lease import Lease
from afterglow.store.shared.objects import Listed, Objects, Tidied

log = logging.getLogger("afterglow.store")
T = TypeVar("T")

CALL_S: Final = 0.1  # for each answer
COPY_S: Final = 5.0  # for each while extents are copied
LATE_S: Final = 10 * CALL_S  # after which a call counts as failed although it has not come back: a resolver may hang
UNKNOWN_S: Final = 0.05  # it rests for so long while the store's id is being read
REST_S: Final = 30.0  # for so long a directory that has failed is left alone
WHOLE_S: Final = 24 * 3600  # until extents are copied again; it counts as whole for as long once more
MAX_ASKED: Final = 512  # blocks that are asked for in one call
MAX_READ: Final = 6400  # extents after which a call ends: it holds up others for 20 ms
MAX_FOUND: Final = 100  # extents that a block leads to, the last used first
_EXTENT: Final = re.compile(r"([0-9a-f]+)/extents/[0-9a-f]{2}/([0-9a-f]{40})\.safetensors")
_ENTRY: Final = re.compile(
    r"([0-9a-f]{2}/[0-9a-f]{40}/[0-9a-f]{40}-[0-9]+-[0-9]+-[0-9]+) (-|[0-9a-f]{40}) ([0-9]{1,12})"
)


class Question(NamedTuple):
    """What a prompt may begin with: the hashes of its blocks from number `first` on. `patience`: how many of these may lead nowhere
    before the rest is not looked for.
    """

    first: int
    blocks: Sequence[str]
    patience: int


class Known(NamedTuple):
    """An extent that a directory knows. `agrees`: so many of the prompt's first rows are its own and its beginning's, as far as the
    directory knows; `parent`: the id of the one before it in its engine's tree, or "-".
    """

    listed: Listed
    agrees: int
    parent: str


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
    import redis

    try:
        redis.ConnectionPool.from_url(url)
    except (ValueError, TypeError):
        raise ConfigError(
            "--shared-directory has an option that the package redis does not take (behind ?; not shown: it may hold a password)"
        ) from None


class DirectoryObjects:
    """An object store, and a directory of its extents that is changed with it. See `Objects`."""

    def __init__(self, objects: Objects, url: str, counters: SharedCounters) -> None:
        """Connects with the first call."""
        from redis.exceptions import ResponseError

        from afterglow.store.shared.directory_clients import DirectoryClients

        self._objects = objects
        self._refusal = ResponseError
        self._clients = DirectoryClients(url, CALL_S, COPY_S)
        self._redis, self._patient = self._clients.quick, self._clients.patient
        self._changes = DirectoryChanges(self.change, self.missed, self.rests)
        self._copier = DirectoryCopy(objects, self._patient, counters)
        self._counters = counters
        self._names: DirectoryNames | None = None
        self._rests_until = 0.0
        self._calls: dict[object, float] = {}  # under way, and when they are late
        self._lacks: set[str] = set()  # models with names that could not be written
        self._lock = threading.Lock()
        self._busy = False  # in the background
        self._store_rests_until = 0.0  # for what is done there: the store has failed

    def get(self, path: str, start: int, length: int) -> bytes:
        return self._objects.get(path, start, length)

    def put(self, path: str, data: bytes, *, replace: bool = False) -> bool:
        written = self._objects.put(path, data, replace=replace)
        if (found := KID.fullmatch(path)) is not None:
            self._change(
                found[1],
                2 * CALL_S,
                lambda names: self._add(names.entry(path), names.added(path, data, time.time(), MAX_FOUND)),
            )
        return written

    def list(self, prefix: str) -> Iterator[list[Listed]]:
        return self._objects.list(prefix)

    def tidy(self, folder: str, seconds: float) -> Iterator[None]:
        return self._objects.tidy(folder, seconds) if isinstance(self._objects, Tidied) else iter(())

    def delete(self, path: str) -> None:
        self._objects.delete(path)
        self.forget(path, 2 * CALL_S)

    def forget(self, path: str, seconds: float = 0.0) -> None:
        """Forget an extent, by the path of its object or of what lists it. Waits for it, for so many seconds at most."""
        if (found := KID.fullmatch(path) or _EXTENT.fullmatch(path)) is not None:
            self._change(found[1], seconds, lambda names: self._remove(names.entry(path)))

    def find(self, model: str, question: Question) -> Sequence[Known] | None:
        """Ask for all extents that a prompt may begin with, in one call up to 32,768 tokens; None where the directory fails, or does not have all of the model's."""
        found = self._ask(lambda names: (self._find(model, names, question),), LATE_S)
        if found is None:
            return None
        if found[0] is None or model in self._lacks:
            self._copy_later(model)
            return None
        return found[0]

    def ask(self, work: Callable[[Any, DirectoryNames], T]) -> T | None:
        """Return what `work` returns, given a client of the directory and its names; None, where that fails. Nothing waits for it."""
        return self._ask(lambda names: work(self._patient, names), 2 * COPY_S)

    def damaged(self, what: str) -> None:
        """Count a value of the directory that cannot be."""
        self._counters.count(directory_failures=1)
        log.warning("the directory holds a damaged value, which is removed: %s", what)

    def identify(self) -> None:
        """Read the store's id, without which the directory is not asked; it is read when it is first needed, in the background, if not here.

        Raises:
            Exception: what the store raises.
        """
        self._names = DirectoryNames(store_id(self._objects))

    def close(self) -> None:
        """Close the connections; the directory is asked no more, and a copy ends."""
        self._rests_until = inf
        self._copier.stop()
        self._changes.close()
        for client in (self._redis, self._patient):
            client.close()

    # -------------------------------------------------------------------------------------------- the directory

    def _add(self, entry: str, added: tuple[object, ...] | None) -> None:
        if added is not None:
            self._redis.eval(ADD, 1, entry, *added)

    def _remove(self, entry: str) -> None:
        prefix, _, extent = entry.rpartition("extent/")
        self._redis.eval(REMOVE, 1, entry, prefix, extent)

    def _find(self, model: str, names: DirectoryNames, question: Question) -> Sequence[Known] | None:
        """Ask for the blocks of a prompt, in as many calls as it takes; what comes after `CALL_S` is left out."""
        found: dict[str, Known] = {}
        end, start, more = time.monotonic() + CALL_S, 0, True
        while more:
            reply = self._redis.eval(*_call(model, names, question, start))
            if reply is None:
                return None
            if not start:
                self._counters.count(directory_lookups=1)
                if reply[0] < WHOLE_S:  # it has them for a day more
                    self._copy_later(model)
            for known in _known(model, BLOCK_ROWS * (question.first + start - 1), reply[2:]):
                before = found.setdefault(known.listed.path, known)
                found[known.listed.path] = max(before, known, key=lambda each: each.agrees)
            start += reply[1]
            more = reply[1] > 0 and start < len(question.blocks) and time.monotonic() <= end
        return [*found.values()]

    def _copy_later(self, model: str) -> None:
        """Copy a model's listings in the background, unless another server does so already."""
        self._later(lambda: self._copy(model))

    def _later(self, work: Callable[[], None]) -> None:
        """Do something in the background, unless something is done there, or the store has failed not long ago."""
        with self._lock:
            if self._busy or time.monotonic() < self._store_rests_until:
                return
            self._busy = True
        threading.Thread(target=self._do, args=(work,), name="afterglow-directory", daemon=True).start()

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except StoreError as error:
            self._counters.failed(error)
            self._store_rests_until = time.monotonic() + REST_S
            log.warning("the directory is not used for %g s: %s", REST_S, error)
        except Exception as error:
            self._failed(error)
        finally:
            with self._lock:
                self._busy = False

    def _identify(self) -> None:
        try:
            self.identify()
        except StoreError:
            raise
        except Exception as error:
            raise StoreError(f"reading the shared store's id: {type(error).__name__}") from error

    def _copy(self, model: str) -> None:
        lacked, whole = model in self._lacks, False
        try:
            if (names := self._names) is not None and (lease := Lease(self._patient, names.within(model))).take():
                self._lacks.discard(model)
                try:
                    whole = self._copier.run(model, names, lease, WHOLE_S, MAX_FOUND, lacked)
                finally:
                    lease.give_back()
        finally:
            if lacked and not whole:
                self._lacks.add(model)

    def _change(self, model: str, seconds: float, make: Callable[[DirectoryNames], object]) -> None:
        self._changes.add(Change(model, make), seconds)
        if model in self._lacks and not self.rests():
            self._copy_later(model)

    def change(self, change: Change) -> bool:
        """Make a change; False: it has to be tried again. What the directory refuses is left to the next copy."""

        def make(names: DirectoryNames) -> bool:
            try:
                change.make(names)
            except self._refusal as error:
                self._failed(error)
                self.missed(change)
            return True

        return bool(self._ask(make, LATE_S))

    def missed(self, change: Change) -> None:
        """Have a model copied, since a change of it is not made."""
        self._lacks.add(change.model)

    def rests(self) -> float:
        """Return for how many seconds the directory is left alone. A call that is late is its failure."""
        now = time.monotonic()
        with self._lock:
            late = [call for call, until in self._calls.items() if until < now]
            for call in late:
                del self._calls[call]
        if late:
            self._failed(TimeoutError("no answer"))
        if self._names is None:
            return max(UNKNOWN_S, self._rests_until - now, self._store_rests_until - now)
        return max(0.0, self._rests_until - now)

    def _ask(self, work: Callable[[DirectoryNames], T | None], seconds: float) -> T | None:
        """Return what `work` returns; None, and a counter, where the directory fails, or has failed not long ago; None while the store's id
        is not known. While a call takes longer than its `seconds`, no other is made.
        """
        if (names := self._names) is None and time.monotonic() >= self._rests_until:
            self._later(self._identify)
        if names is None or self.rests():
            return None
        call = object()
        with self._lock:
            self._calls[call] = time.monotonic() + seconds
        try:
            return work(names)
        except Exception as error:
            if call in self._calls:
                self._failed(error)
            return None
        finally:
            with self._lock:
                self._calls.pop(call, None)

    def _failed(self, error: Exception) -> None:
        """Leave the directory alone for a while. Its errors never hold its URL."""
        self._counters.count(directory_failures=1)
        self._clients.return_home()
        self._rests_until = max(self._rests_until, time.monotonic() + REST_S)
        log.warning("the directory fails, and is left alone for %g s: %s: %.200s", REST_S, type(error).__name__, error)


def _call(model: str, names: DirectoryNames, question: Question, start: int) -> tuple[object, ...]:
    """Return what asks for the blocks of a prompt from one on: parents matter within as many rows before it as an extent has at most."""
    row = BLOCK_ROWS * question.first
    parents = max(row, row + BLOCK_ROWS * start - MAX_EXTENT_ROWS) if start else row
    hashes = "".join(question.blocks[start : start + MAX_ASKED])
    patience = question.patience - start
    return FIND, 1, names.whole(model), names.prefix(model), MAX_FOUND, patience, parents, MAX_READ, hashes


def _known(model: str, row: int, reply: Sequence[Any]) -> Iterator[Known]:
    """Read what a directory says of blocks, the first of which ends a block after `row`."""
    for entry, block in zip(reply[::2], reply[1::2], strict=True):
        if (read := _ENTRY.fullmatch(entry)) is not None:
            listed = Listed(f"{model}/kids/{read[1]}", 0, float(read[3]))
            yield Known(listed, row + BLOCK_ROWS * block if block else 0, read[2])


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
