"""One folder per model digest, owned by the one process that holds its locks: that of the file `lock`, which names the
process, and that of the folder itself, which holds when the file is deleted.

CACHE_DIR/NAME-DIGEST/    afterglow.json · lock · catalog.sqlite · extents/
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from afterglow.config import BLOCK_ROWS
from afterglow.errors import ConfigError, DamageError, StoreError
from afterglow.store.extents.head import FORMAT_VERSION, crc32c
from afterglow.store.extents.layout import KVLayout
from afterglow.store.places import (
    FOLDER_MODE,
    kind_at,
    make_file,
    make_folder,
    open_file,
    read_file,
    set_aside,
    tighten,
)

log = logging.getLogger("afterglow.store")

DESCRIPTION: Final = "afterglow.json"
LOCK: Final = "lock"
CATALOG: Final = "catalog.sqlite"
EXTENTS: Final = "extents"
_CRC: Final = "crc32c"  # of all else in a description, in this format and in those to come
_DIGEST_DIGITS: Final = 16  # of the folder's name; the whole digest is in afterglow.json


@dataclass(frozen=True, slots=True)
class Description:
    """Holds the contents of `afterglow.json`."""

    name: str
    digest: str
    layout: KVLayout


@dataclass(frozen=True, slots=True)
class Holder:
    """Names the process that holds a namespace."""

    pid: int
    host: str
    started: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (since {self.started})"


class Namespace:
    """Holds a locked namespace. `damaged` counts the entries that were set aside or written anew when it was opened."""

    def __init__(self, path: Path, description: Description, locks: Sequence[int], damaged: int = 0) -> None:
        self.path = path
        self.description = description
        self.damaged = damaged
        self._locks = list(locks)

    @property
    def catalog(self) -> Path:
        return self.path / CATALOG

    @property
    def extents(self) -> Path:
        return self.path / EXTENTS

    @classmethod
    def open(
        cls,
        cache_dir: Path,
        name: str,
        digest: str,
        layout: KVLayout,
    ) -> Namespace:
        """Open the namespace of a model digest, made where it is new.

        A damaged description is written anew: all its contents are known. Other users lose their rights to the folder.

        Raises:
            ConfigError: another process holds the namespace, or another version or layout wrote it.
            StoreError: the folder cannot be made or written.
        """
        path = folder_of(cache_dir, name, digest)
        wanted = Description(name, digest, layout)
        try:
            cache_dir.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
            damaged = int(make_folder(path))
            locks, strange = _take_locks(path)
        except OSError as error:
            raise StoreError(f"cannot use {path}: {error.strerror}") from error
        try:
            damaged += strange + _describe(path, wanted)
        except BaseException as error:
            _close(locks)
            if isinstance(error, OSError):
                raise StoreError(f"cannot use {path}: {error.strerror}") from error
            raise
        tighten(path)
        return cls(path, wanted, locks, damaged)

    @classmethod
    def open_existing(cls, path: Path) -> Namespace:
        """Lock a namespace that is there, for maintenance.

        Raises:
            ConfigError: there is no namespace of this version, or another process holds it.
            StoreError: the description is damaged, or the folder cannot be used.
        """
        description = read_description(path)
        try:
            locks, damaged = _take_locks(path)
            return cls(path, description, locks, damaged)
        except OSError as error:
            raise StoreError(f"cannot use {path}: {error.strerror}") from error

    def close(self) -> None:
        """Give the locks back; may be called twice."""
        locks, self._locks = self._locks, []
        _close(locks)

    def remake(self) -> None:
        """Make the folder again that was removed under a running process, or moved away; the old one stays locked.

        Raises:
            StoreError: the folder cannot be made or written, or another process holds it.
        """
        try:
            self.path.parent.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
            make_folder(self.path)
            if not self._is_locked():
                locks, _ = _take_locks(self.path)
                self._locks += locks
            _describe(self.path, self.description)
        except OSError as error:
            raise StoreError(f"cannot use {self.path}: {error.strerror}") from error
        except ConfigError as error:
            raise StoreError(str(error)) from error

    def _is_locked(self) -> bool:
        """Tell whether the folder of that name is still the one that was locked."""
        own = {(found.st_dev, found.st_ino) for found in map(os.fstat, self._locks)}
        for path in (self.path, self.path / LOCK):
            with contextlib.suppress(FileNotFoundError):
                found = os.lstat(path)
                if (found.st_dev, found.st_ino) in own:
                    return True
        return False

    def __enter__(self) -> Namespace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def folder_of(cache_dir: Path, name: str, digest: str) -> Path:
    """Return the folder of a namespace: `NAME-DIGEST`, the name made safe for file systems."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name.rstrip("/").rsplit("/", 1)[-1]).strip("-.") or "model"
    return cache_dir / f"{safe[:64]}-{digest[:_DIGEST_DIGITS]}"


def is_namespace(path: Path) -> bool:
    """Tell whether there is a namespace in the folder `path`, be it of another version or damaged."""
    return kind_at(path) == "folder" and kind_at(path / DESCRIPTION) != "absent"


def read_description(path: Path) -> Description:
    """Return the contents of `afterglow.json` in the folder `path`.

    Raises:
        ConfigError: there is no such file, or it has another format version.
        DamageError: the file is damaged.
    """
    file = path / DESCRIPTION
    try:
        found = _parsed(read_file(file))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is no cache namespace: {DESCRIPTION}: {error.strerror}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {DESCRIPTION}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(file, "is not valid JSON") from error
    version = found.get("format")
    if not isinstance(version, int) or (_CRC in found and found[_CRC] != _crc(found)):
        raise _damaged(file, "is not what was written")
    if version != FORMAT_VERSION:
        raise ConfigError(
            f"{path} has cache format {version!r}, this version reads {FORMAT_VERSION}; "
            "delete the folder or choose another --cache-dir"
        )
    try:
        layout = found["layout"]
        if layout["block_rows"] != BLOCK_ROWS:
            raise ConfigError(
                f"{path} has blocks of {layout['block_rows']} rows, this version uses {BLOCK_ROWS}; "
                "delete the folder or choose another --cache-dir"
            )
        sizes = (layout["layers"], layout["kv_heads"], layout["head_dim"], layout["dtype"])
        parts = layout.get("part_rows", BLOCK_ROWS)
        shape = KVLayout(*sizes, layout.get("probe_heads", 0), parts, layout.get("means", False))
        return Description(str(found["name"]), str(found["digest"]), shape)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(file, f"is incomplete ({error!r})") from error


def holder(path: Path) -> Holder | None:
    """Return the process that holds the namespace in the folder `path`; None when it is free."""
    lock = _open_or_none(path / LOCK, os.O_RDONLY)
    folder = _open_or_none(path, _FOLDER)
    try:
        if not any(_is_held(fd) for fd in (lock, folder) if fd is not None):
            return None
        return _NOBODY if lock is None else _read_holder(lock)
    finally:
        for fd in (lock, folder):
            if fd is not None:
                os.close(fd)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the folder `path`, with any contents.

    Raises:
        ConfigError: another process holds the folder.
        OSError: the folder cannot be locked.
    """
    locks, _ = _take_locks(path)
    try:
        yield
    finally:
        _close(locks)


_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY
_NOBODY: Final = Holder(0, "an unknown host", "an unknown time")


def _open_or_none(path: Path, flags: int) -> int | None:
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC) if flags == _FOLDER else open_file(path, flags)
    except (OSError, DamageError):
        return None


def _is_held(fd: int) -> bool:
    try:
        # A shared lock is enough to find out, and two curious processes do not take each other for a holder.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError as error:
        return error.errno in (errno.EAGAIN, errno.EACCES)


def _held(path: Path, who: Holder) -> ConfigError:
    return ConfigError(f"{path} is in use by {who}; stop that process or choose another --cache-dir")


def _take_locks(path: Path) -> tuple[list[int], int]:
    """Take the locks of a namespace; return them, that of the file last, and the number of entries set aside for them."""
    folder = os.open(path, _FOLDER | os.O_NOFOLLOW | os.O_CLOEXEC)
    locks = [folder]
    try:
        try:
            _lock(path, folder)
        except OSError as error:  # not every file system can lock folders
            log.debug("%s cannot be locked as a folder: %s", path, error.strerror)
        # The file stays for ever: removing it would let two processes lock two different files of one name.
        strange = make_file(path / LOCK)
        locks.append(open_file(path / LOCK, os.O_RDWR | os.O_CREAT))
        _lock(path, locks[-1])
        me = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        os.ftruncate(locks[-1], 0)
        os.pwrite(locks[-1], json.dumps(me).encode(), 0)
        return locks, int(strange)
    except BaseException:
        for fd in locks:
            os.close(fd)
        raise


def _lock(path: Path, fd: int) -> None:
    for attempt in range(5):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            if attempt == 4:  # `holder` in another process may have had it for an instant
                raise _held(path, holder(path) or _NOBODY) from error
            time.sleep(0.02)


def _close(locks: Sequence[int]) -> None:
    for fd in reversed(locks):
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)  # of a folder this fails
        os.close(fd)


def _read_holder(fd: int) -> Holder:
    try:
        found: dict[str, Any] = json.loads(os.pread(fd, 4096, 0))
        return Holder(int(found["pid"]), str(found["host"]), str(found["started"]))
    except (OSError, ValueError, KeyError, TypeError):
        return _NOBODY


def _describe(path: Path, wanted: Description) -> int:
    """Write the description where there is none, or a damaged one. Return 1 if it was damaged, else 0."""
    file = path / DESCRIPTION
    if kind_at(file) == "absent":
        _write_description(path, wanted)
        return 0
    try:
        _compare(path, read_description(path), wanted)
    except DamageError as error:
        log.warning("%s: it is written anew", error)
        set_aside(file)
        _write_description(path, wanted)
        return 1
    found = _parsed(read_file(file))
    if _CRC not in found:  # an earlier version wrote it
        _write(path, found)
    return 0


def _write_description(path: Path, description: Description) -> None:
    _write(
        path,
        {
            "format": FORMAT_VERSION,
            "name": description.name,
            "digest": description.digest,
            "layout": description.layout.as_dict(),
            "created": time.strftime("%Y-%m-%d %H:%M:%S"),
        },
    )


def _write(path: Path, content: dict[str, Any]) -> None:
    temporary = path / f".tmp-{DESCRIPTION}"
    make_file(temporary)
    with open(open_file(temporary, os.O_WRONLY | os.O_TRUNC), "w") as file:
        json.dump({**content, _CRC: _crc(content)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())  # the one file whose loss could not be told from damage
    os.replace(temporary, path / DESCRIPTION)


def _parsed(raw: bytes) -> dict[str, Any]:
    found = json.loads(raw)
    return found if isinstance(found, dict) else {}


def _crc(content: dict[str, Any]) -> int:
    rest = {name: value for name, value in content.items() if name != _CRC}
    return crc32c(json.dumps(rest, sort_keys=True).encode())


def _damaged(file: Path, how: str) -> DamageError:
    return DamageError(
        f"{file} {how}; a server that uses it writes it anew, and `afterglow cache clear` removes what is in {file.parent}"
    )


def _compare(path: Path, found: Description, wanted: Description) -> None:
    for what, was, now in (
        ("model digest", found.digest, wanted.digest),
        ("KV layout", str(found.layout), str(wanted.layout)),
    ):
        if was != now:
            raise ConfigError(
                f"{path} was written with another {what} ({was}, now {now}); "
                "delete the folder or choose another --cache-dir"
            )
