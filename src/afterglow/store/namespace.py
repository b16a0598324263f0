"""One folder per model digest, owned by the one process that holds its lock.

CACHE_DIR/NAME-DIGEST/    afterglow.json · lock · catalog.sqlite · extents/
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from afterglow.config import BLOCK_ROWS
from afterglow.errors import ConfigError, StoreError
from afterglow.store.extent import FORMAT_VERSION
from afterglow.store.layout import KVLayout

DESCRIPTION: Final = "afterglow.json"
LOCK: Final = "lock"
CATALOG: Final = "catalog.sqlite"
EXTENTS: Final = "extents"
_DIGEST_DIGITS: Final = 16  # of the folder's name; the whole digest is in afterglow.json


@dataclass(frozen=True, slots=True)
class Description:
    """What `afterglow.json` says."""

    name: str
    digest: str
    layout: KVLayout


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a namespace."""

    pid: int
    host: str
    started: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (since {self.started})"


class Namespace:
    """A locked namespace; `open` makes or finds it, `close` gives it back."""

    def __init__(self, path: Path, description: Description, lock: int) -> None:
        self.path = path
        self.description = description
        self._lock: int | None = lock

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
        """The namespace of a model digest, made where it is new.

        Raises ConfigError when another process holds it or another version or layout wrote it, StoreError
        when the folder cannot be made or written.
        """
        path = folder_of(cache_dir, name, digest)
        wanted = Description(name, digest, layout)
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = _take_lock(path)
        except OSError as error:
            raise StoreError(f"cannot use {path}: {error.strerror}") from error
        try:
            if (path / DESCRIPTION).exists():
                _compare(path, read_description(path), wanted)
            else:
                _write_description(path, wanted)
        except OSError as error:
            os.close(lock)
            raise StoreError(f"cannot use {path}: {error.strerror}") from error
        except BaseException:
            os.close(lock)
            raise
        return cls(path, wanted, lock)

    @classmethod
    def open_existing(cls, path: Path) -> Namespace:
        """Lock a namespace that is there, for maintenance. Errors as `open`."""
        description = read_description(path)
        try:
            return cls(path, description, _take_lock(path))
        except OSError as error:
            raise StoreError(f"cannot use {path}: {error.strerror}") from error

    def close(self) -> None:
        """Give the lock back; may be called twice."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._lock, 0)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Namespace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def folder_of(cache_dir: Path, name: str, digest: str) -> Path:
    """The folder of a namespace: `NAME-DIGEST`, the name made safe for file systems."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name.rstrip("/").rsplit("/", 1)[-1]).strip("-.") or "model"
    return cache_dir / f"{safe[:64]}-{digest[:_DIGEST_DIGITS]}"


def read_description(path: Path) -> Description:
    """What `afterglow.json` in the folder `path` says.

    Raises ConfigError when there is none, when it cannot be understood, and when it has another format
    version.
    """
    file = path / DESCRIPTION
    try:
        found = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} is no cache namespace: {DESCRIPTION}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON; delete {path} or choose another --cache-dir") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT_VERSION:
        version = found.get("format") if isinstance(found, dict) else None
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
        shape = KVLayout(*sizes, probe_heads=layout.get("probe_heads", 0))
        return Description(str(found["name"]), str(found["digest"]), shape)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{file} is incomplete ({error!r}); delete {path} or choose another --cache-dir") from error


def holder(path: Path) -> Holder | None:
    """Who holds the namespace in the folder `path`; None when nobody does."""
    try:
        fd = os.open(path / LOCK, os.O_RDONLY)
    except OSError:
        return None
    try:
        # A shared lock is enough to find out, and two curious processes do not take each other for a holder.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except OSError:
        return _read_holder(fd)
    finally:
        os.close(fd)


def _held(path: Path, who: Holder) -> ConfigError:
    return ConfigError(f"{path} is in use by {who}; stop that process or choose another --cache-dir")


def _take_lock(path: Path) -> int:
    # The file stays for ever: removing it would let two processes lock two different files of one name.
    fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        for attempt in range(5):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                if attempt == 4:  # `holder` in another process may have had it for an instant
                    raise _held(path, _read_holder(fd)) from error
                time.sleep(0.02)
        me = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(me).encode(), 0)
        return fd
    except BaseException:
        os.close(fd)
        raise


def _read_holder(fd: int) -> Holder:
    try:
        found: dict[str, Any] = json.loads(os.pread(fd, 4096, 0))
        return Holder(int(found["pid"]), str(found["host"]), str(found["started"]))
    except (OSError, ValueError, KeyError, TypeError):
        return Holder(0, "an unknown host", "an unknown time")


def _write_description(path: Path, description: Description) -> None:
    content = {
        "format": FORMAT_VERSION,
        "name": description.name,
        "digest": description.digest,
        "layout": description.layout.as_dict(),
        "created": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    temporary = path / f".tmp-{DESCRIPTION}"
    with open(temporary, "w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())  # the one file whose loss could not be told from damage
    os.replace(temporary, path / DESCRIPTION)


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
