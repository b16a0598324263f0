"""An object store by its URL, through `obstore`. Calls may take for ever: `remote` gives them deadlines."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable
from urllib.parse import unquote, urlsplit

from afterglow.errors import ConfigError

SCHEMES = ("file", "s3", "gs", "az")
READ_S = 30  # after which the client gives up a call whose caller has gone
WRITE_S = 600  # and one that writes: a large object over a slow line takes its time
PARALLEL = 8  # objects read at a time
MAX_BYTES = 1 << 26  # of an object that is read whole
_STAGED = re.compile(r"#\d+$")  # in a folder an object has such a name until it is written


class Listed(NamedTuple):
    """An object of a listing. `modified`: seconds since 1970, by the store's clock."""

    path: str
    size: int
    modified: float


class Objects(Protocol):
    """Objects by path, within one folder of a store.

    Raises:
        FileNotFoundError: an object is not there.
        Exception: anything else that goes wrong, as the store names it.
    """

    def get(self, path: str, start: int, length: int) -> bytes:
        """Read bytes [start, start + length) of an object; fewer, where it ends before."""

    def put(self, path: str, data: bytes, *, replace: bool = False) -> bool:
        """Write a whole object, or nothing. Without `replace`, False: there is one of that name already."""

    def list(self, prefix: str) -> Iterator[list[Listed]]:
        """Yield the objects in a folder and below it, some at a time."""

    def delete(self, path: str) -> None:
        """Remove an object; one that is not there is no error."""


@runtime_checkable
class Closeable(Protocol):
    """What holds connections until it is closed."""

    def close(self) -> None: ...


@runtime_checkable
class Tidied(Protocol):
    """A store in which killed writers leave what no listing shows."""

    def tidy(self, folder: str, seconds: float) -> Iterator[None]:
        """Remove what was left below a folder so many seconds ago or before; yields now and then."""


def check_url(url: str) -> None:
    """Check that a URL names a store of a kind that can be used here.

    Raises:
        ConfigError: it does not, or the package that speaks to such stores is missing.
    """
    try:
        parts = urlsplit(url)
    except ValueError:  # brackets that are not closed
        parts = urlsplit("")
    if parts.scheme not in SCHEMES:
        raise ConfigError(
            f"--shared {url!r} is no URL of a store; write file:///folder, s3://bucket/folder, gs://bucket/folder or az://container/folder"
        )
    if parts.scheme == "file" and (parts.netloc or not parts.path.strip("/")):
        raise ConfigError(f"--shared {url!r} names no folder; write file:///folder/on/a/shared/disk")
    if parts.scheme != "file" and not parts.netloc:
        what = "container" if parts.scheme == "az" else "bucket"
        raise ConfigError(f"--shared {url!r} names no {what}; write {parts.scheme}://{what}/folder")
    if find_spec("obstore") is None:
        raise ConfigError("--shared needs the package obstore: pip install 'afterglow-llm[shared]'")


class ObstoreObjects:
    """Objects below a URL. Credentials come from the environment, as each provider's own tools have them."""

    def __init__(self, url: str) -> None:
        """Open the store; makes the folder of a `file://` URL."""
        import obstore
        from obstore.store import LocalStore, from_url

        self._obstore = obstore
        self._store: Any
        self._writes: Any  # the same store, for calls that write objects
        self._folder = Path(unquote(urlsplit(url).path)) if urlsplit(url).scheme == "file" else None
        if self._folder is not None:
            if not self._folder.exists():  # what is in it is for its servers alone, as are the files of their disks
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._store = self._writes = LocalStore(self._folder)
        else:
            retries: Any = {"max_retries": 1, "retry_timeout": timedelta(seconds=5)}
            options: Any = {"connect_timeout": "3s", **_client_options()}
            clients: list[Any] = [{**options, "timeout": f"{seconds}s"} for seconds in (READ_S, WRITE_S)]
            self._store, self._writes = (
                from_url(url, client_options=client, retry_config=retries) for client in clients
            )

    def get(self, path: str, start: int, length: int) -> bytes:
        try:
            return bytes(self._obstore.get_range(self._store, path, start=start, length=length))
        except self._obstore.exceptions.GenericError:
            # Does it end before `start`? Its size says so. No text would: all name the URL, which may have any word in it.
            with contextlib.suppress(Exception):
                if self._obstore.head(self._store, path)["size"] <= start:
                    return b""
            raise

    def put(self, path: str, data: bytes, *, replace: bool = False) -> bool:
        mode: Any = "overwrite" if replace else "create"
        try:
            self._obstore.put(self._writes, path, data, mode=mode, use_multipart=False)
        except FileExistsError:
            return False
        except self._obstore.exceptions.AlreadyExistsError:
            return False
        return True

    def list(self, prefix: str) -> Iterator[list[Listed]]:
        for found in self._obstore.list(self._store, prefix, chunk_size=1000):
            yield [Listed(each["path"], each["size"], each["last_modified"].timestamp()) for each in found]

    def delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._obstore.delete(self._store, path)

    def tidy(self, folder: str, seconds: float) -> Iterator[None]:
        for where, folders, files in os.walk(self._folder / folder) if self._folder is not None else ():
            if "kids" in folders:  # many, and with no text in them
                folders.remove("kids")
            for file in filter(_STAGED.search, files):
                with contextlib.suppress(OSError):  # another server has removed it, or this one may not
                    staged = Path(where, file)
                    if staged.stat().st_mtime <= time.time() - seconds:
                        staged.unlink()
            yield


def _client_options() -> dict[str, object]:
    """Read from the environment what options that are given would take the place of."""
    found: dict[str, object] = {}
    for name in ("allow_http", "allow_invalid_certificates", "proxy_url", "proxy_excludes"):
        for provider in ("AWS", "GOOGLE", "AZURE"):
            value = os.environ.get(f"{provider}_{name.upper()}")
            if value:
                found[name] = value.lower() in ("1", "true", "yes", "on") if name.startswith("allow") else value
    return found


def get_all(
    paths: Sequence[str], objects: Objects, failed: list[Exception], stops: Callable[[], bool]
) -> dict[str, bytes]:
    """Read objects by path; those that are not there are left out, and those that cannot be read: their errors are added to `failed`.
    `stops` is asked before each.
    """
    found: dict[str, bytes] = {}
    left = iter(paths)

    def work() -> None:
        for path in left:
            if stops():
                return
            try:
                found[path] = objects.get(path, 0, MAX_BYTES)
            except FileNotFoundError:
                continue
            except Exception as error:
                failed.append(error)

    if len(paths) == 1:
        work()
    else:  # daemons, not an executor's threads, for whose end the end of a process would wait
        threads = [threading.Thread(target=work, name="afterglow-objects", daemon=True) for _ in paths[:PARALLEL]]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    return found
