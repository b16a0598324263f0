"""Small JSON texts that engines share: found by whose they are and by name, which a path shows as keyed hashes only.

DIGEST/ids/KIND/abcd…/1234…    the first hash is of the owner, the second of the name, keyed by the owner

A record carries a keyed digest of itself and of its path. So one that is damaged, cut, or another's under this name counts as missing.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import methodcaller
from typing import Any, Final

from afterglow.errors import StoreError
from afterglow.store.shared.counters import SharedCounters
from afterglow.store.shared.objects import Listed, Objects, get_all
from afterglow.store.shared.remote import Remote

CALL_S: Final = 2.0  # for a call, and
RATE: Final = 1 << 20  # bytes/s that a store has at least to take
LIST_S: Final = 10.0  # for some records of a listing of a kind, a thousand at most
DAY_S: Final = 24 * 3600.0
LIVES_S: Final = {
    "responses": 30 * DAY_S,
    "deleted": 30 * DAY_S,
    "sessions": 30 * DAY_S,
    "events": 7 * DAY_S,
}  # by kind
BATCH: Final = 64  # records read in a call


class Records:
    """One model's records. Every method may be called from any thread, and raises StoreError where the store fails or is slow."""

    def __init__(self, remote: Remote, digest: str, counters: SharedCounters) -> None:
        self._remote = remote
        self._root = f"{digest}/ids"
        self._counters = counters

    def get(self, kind: str, owner: str, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return the records of these names that are there and sound, by name."""
        marks = {self.mark(owner, name): name for name in names}
        return {marks[mark]: value for mark, value in self.load(kind, owner, marks).items()}

    def load(self, kind: str, owner: str, marks: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Return the records that are listed as these marks, and are sound, by mark."""
        paths = {f"{self._folder(kind, owner)}/{mark}": mark for mark in marks}
        raw: dict[str, bytes] = {}
        wanted = [*paths]
        for start in range(0, len(wanted), BATCH):  # each with a deadline of its own
            raw |= self._call("reading a record", partial(_read, wanted[start : start + BATCH]), CALL_S)
        found = {mark: self._decoded(raw[path], owner, path) for path, mark in paths.items() if path in raw}
        return {mark: value for mark, value in found.items() if value is not None}

    def put(self, kind: str, owner: str, name: str, value: Mapping[str, Any]) -> None:
        """Write a record, in the place of one that is there."""
        path = f"{self._folder(kind, owner)}/{self.mark(owner, name)}"
        data = _encoded(value, owner, path)
        self._call("writing a record", methodcaller("put", path, data, replace=True), CALL_S + len(data) / RATE)

    def delete(self, kind: str, owner: str, name: str) -> None:
        """Remove a record; one that is not there is no error."""
        self.drop(kind, owner, self.mark(owner, name))

    def drop(self, kind: str, owner: str, mark: str) -> None:
        """Remove the record that is listed as this mark; one that is not there is no error."""
        self._call("removing a record", methodcaller("delete", f"{self._folder(kind, owner)}/{mark}"), CALL_S)

    def marks(self, kind: str, owner: str) -> set[str]:
        """List the names of an owner's records, as `mark` writes them."""
        found = self._list("listing records", self._folder(kind, owner), CALL_S)
        return {each.path.rsplit("/", 1)[-1] for each in found}

    def clean(self) -> None:
        """Remove the records that have expired."""
        for kind, seconds in LIVES_S.items():
            self.drop_older(kind, time.time() - seconds)

    def drop_older(self, kind: str, end: float) -> None:
        """Remove all records of a kind, or of a folder of a kind, that were written until `end`, seconds since 1970."""
        found = self._list("listing old records", f"{self._root}/{kind}", LIST_S)
        for path in [each.path for each in found if each.modified <= end]:
            self._call("removing an old record", methodcaller("delete", path), CALL_S)

    def mark(self, owner: str, name: str) -> str:
        """Hash a name, keyed by its owner: 32 hexadecimal digits."""
        return hashlib.blake2b(_bytes(name), digest_size=16, key=_key(owner), person=b"afterglow name").hexdigest()

    def folder_of(self, owner: str) -> str:
        """Hash an owner: the folder of its records, in that of their kind."""
        return hashlib.blake2b(_key(owner), digest_size=16, person=b"afterglow owner").hexdigest()

    def _folder(self, kind: str, owner: str) -> str:
        return f"{self._root}/{kind}/{self.folder_of(owner)}"

    def _list(self, what: str, folder: str, seconds: float) -> Iterator[Listed]:
        """Yield all objects below a folder."""
        try:
            for some in self._remote.list(what, folder, seconds):
                yield from some
        except StoreError as error:
            self._counters.failed(error)
            raise

    def _call(self, what: str, work: Any, seconds: float) -> Any:
        try:
            return self._remote.call(what, work, seconds)
        except StoreError as error:
            self._counters.failed(error)
            raise

    def _decoded(self, raw: bytes, owner: str, path: str) -> dict[str, Any] | None:
        """Read a record; None, and a counter, where it is not sound."""
        seal, _, text = raw.partition(b"\n")
        if seal == _seal(text, owner, path):
            value = json.loads(text)
            if isinstance(value, dict):
                return value
        self._counters.count(bad_records=1)
        return None


def _encoded(value: Mapping[str, Any], owner: str, path: str) -> bytes:
    text = json.dumps(value, separators=(",", ":")).encode()
    return _seal(text, owner, path) + b"\n" + text


def _seal(text: bytes, owner: str, path: str) -> bytes:
    """Digest a record and its path, keyed by the owner, in hexadecimal digits."""
    digest = hashlib.blake2b(path.encode() + b"\n" + text, digest_size=20, key=_key(owner), person=b"afterglow record")
    return digest.hexdigest().encode()


def _key(owner: str) -> bytes:
    return hashlib.blake2b(_bytes(owner), digest_size=32, person=b"afterglow ids").digest()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _read(paths: Sequence[str], objects: Objects) -> dict[str, bytes]:
    """Read records by path; those that are not there are left out. Raises: the first error."""
    failed: list[Exception] = []
    found = get_all(paths, objects, failed, lambda: bool(failed))
    if failed:
        raise failed[0]
    return found
