"""Files and folders in a cache folder, which only their owner reads. Anything else in their places (a link, a FIFO, a
folder where a file should be) is damage: it is never followed, never waited for, and put out of the way.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

from afterglow.errors import DamageError

log = logging.getLogger("afterglow.store")

FILE_MODE: Final = 0o600
FOLDER_MODE: Final = 0o700
RELIC: Final = ".damaged"
# Error numbers of opening a link, a FIFO or socket without a reader, and a folder.
_STRANGE: Final = (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENOTDIR)

Kind = Literal["absent", "file", "folder", "other"]


def kind_at(path: str | Path) -> Kind:
    """Return the kind of entry at `path`, without following a link.

    Raises:
        OSError: the entry cannot be looked at.
    """
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "absent"
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "other"


def open_file(path: str | Path, flags: int) -> int:
    """Open a regular file, made with FILE_MODE where `flags` say so; return the file descriptor.

    Raises:
        DamageError: anything else lies in the file's place.
        OSError: the file cannot be opened.
    """
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, FILE_MODE)
    except OSError as error:
        if error.errno in _STRANGE:
            raise DamageError(f"{path} is no regular file") from error
        raise
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise DamageError(f"{path} is no regular file")


def read_file(path: Path, most: int = 1 << 20) -> bytes:
    """Return the contents of a small regular file, at most `most` bytes.

    Raises:
        DamageError: anything else lies in the file's place.
        OSError: the file cannot be read.
    """
    fd = open_file(path, os.O_RDONLY)
    try:
        return os.pread(fd, most, 0)
    finally:
        os.close(fd)


def set_aside(path: Path) -> None:
    """Rename the entry at `path` to `NAME.damaged`; the newest such relic is kept.

    Raises:
        OSError: the entry cannot be renamed, or an older relic not removed.
    """
    relic = path.with_name(path.name + RELIC)
    remove(relic)
    os.rename(path, relic)
    log.warning("%s is not what belongs there: it is now %s", path, relic.name)


def remove(path: Path) -> None:
    """Remove the entry at `path`, with all its contents.

    Raises:
        OSError: the entry, or one of its contents, cannot be removed.
    """
    found = kind_at(path)
    if found == "folder":
        shutil.rmtree(path)  # which follows no links
    elif found != "absent":
        os.unlink(path)


def make_folder(path: Path) -> bool:
    """Make a folder of this user alone, where there is none; set any other entry aside. Return whether there was one.

    Raises:
        OSError: the folder cannot be made, or the other entry not set aside.
    """
    found = kind_at(path)
    if found == "folder":
        return False
    if found != "absent":
        set_aside(path)
    os.makedirs(path, FOLDER_MODE, exist_ok=True)
    return found != "absent"


def make_file(path: Path) -> bool:
    """Make an empty file of this user alone, where there is none; set any other entry aside. Return whether there was one.

    Raises:
        OSError: the file cannot be made, or the other entry not set aside.
    """
    found = kind_at(path)
    if found == "file":
        return False
    if found != "absent":
        set_aside(path)
    os.close(open_file(path, os.O_WRONLY | os.O_CREAT))
    return found != "absent"


def tighten(folder: Path) -> None:
    """Take other users' rights to a folder and to its entries, not to anything further below.

    A failure (another owner, a file system without rights) is only logged.
    """
    try:
        os.chmod(folder, FOLDER_MODE)
        for entry in list(os.scandir(folder)):
            mode = entry.stat(follow_symlinks=False).st_mode
            if stat.S_ISREG(mode) and stat.S_IMODE(mode) & 0o077:
                os.chmod(entry.path, FILE_MODE)
            elif stat.S_ISDIR(mode) and stat.S_IMODE(mode) & 0o077:
                os.chmod(entry.path, FOLDER_MODE)
    except OSError as error:
        log.info("who may read %s is left as it is: %s", folder, error.strerror)


def bytes_below(folder: Path) -> int:
    """Count the bytes of all regular files below a folder, as a budget counts them; links are not followed.

    Entries that vanish meanwhile, or cannot be read, do not count.
    """
    return sum(_sizes(str(folder)))


def _sizes(folder: str) -> Iterator[int]:
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        try:
            if entry.is_dir(follow_symlinks=False):
                yield from _sizes(entry.path)
            elif entry.is_file(follow_symlinks=False):
                yield entry.stat(follow_symlinks=False).st_size
        except OSError:
            continue
