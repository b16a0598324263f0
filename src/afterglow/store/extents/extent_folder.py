"""The folder of extents: where the file of each lies, and what else is found there. Knows no contents.

extents/ab/abcdef….safetensors
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Final

from afterglow.errors import DamageError, StoreError
from afterglow.store.extents.files import open_direct, supports_direct
from afterglow.store.places import FOLDER_MODE, kind_at, make_folder, remove

log = logging.getLogger("afterglow.store")

SUFFIX: Final = ".safetensors"
TEMPORARY: Final = ".tmp-"
_FOLDER: Final = re.compile(r"[0-9a-f]{2}")


class ExtentFolder:
    """Files of extents in folders that are named by the first two digits of their ids."""

    def __init__(self, path: Path, remake: Callable[[], object] | None = None) -> None:
        """`remake`: makes the folder around this one, if it is gone."""
        self.path = path
        self.direct = False  # whether files bypass the page cache
        self._remake = remake
        self._numbers = count()

    def open(self) -> int:
        """Make the folder, and remove temporary files of dead processes; return how much was found that does not belong there.

        Raises:
            StoreError: the folder cannot be used.
        """
        strange = 0
        try:
            strange += make_folder(self.path)
            self.direct = supports_direct(self.path)
            for leftover in self.leftovers():
                strange += not leftover.name.startswith(TEMPORARY)
                if kind_at(leftover) == "folder":
                    log.warning("%s is none of the cache's folders: it is left alone", leftover)
                else:
                    leftover.unlink(missing_ok=True)
            return strange
        except OSError as error:
            raise StoreError(f"cannot use {self.path}: {error.strerror}") from error

    def file(self, extent: str) -> Path:
        """Name the file of an extent, whether it is there or not."""
        return self.path / extent[:2] / f"{extent}{SUFFIX}"

    def file_name(self, extent: str) -> str:
        """Return `file` as a string, for reads: a Path takes a while to make."""
        return f"{self.path}/{extent[:2]}/{extent}{SUFFIX}"

    def temporary(self, extent: str) -> str:
        """Choose a new name for the file of an extent until it is complete."""
        return f"{self.path}/{extent[:2]}/{TEMPORARY}{os.getpid()}-{next(self._numbers)}"

    def create(self, extent: str, name: str, direct: bool = True) -> tuple[int, bool]:
        """Create a file of this name in the extent's folder: its descriptor, and whether it bypasses the page cache.

        `direct`: it is to bypass the page cache if files in this folder can.

        Raises:
            OSError: it cannot be created.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        folder = self.path / extent[:2]
        if kind_at(self.path) == "other":
            make_folder(self.path)
        found = kind_at(folder)
        if found == "folder":
            return open_direct(name, flags, direct=self.direct and direct)
        if found != "absent":
            self._out_of_the_way(folder)
        try:
            folder.mkdir(FOLDER_MODE, exist_ok=True)
        except FileNotFoundError:  # another process has removed the whole folder
            log.warning("%s was removed: it is made again", self.path)
            if self._remake is not None:
                self._remake()
            make_folder(self.path)
            folder.mkdir(FOLDER_MODE, exist_ok=True)
        return open_direct(name, flags, direct=self.direct and direct)

    def publish(self, name: str, extent: str) -> None:
        """Give a complete file the name of its extent.

        Raises:
            OSError: it cannot be renamed.
        """
        try:
            os.rename(name, self.file_name(extent))
        except IsADirectoryError:
            self._out_of_the_way(self.file(extent))
            os.rename(name, self.file_name(extent))

    def delete(self, extent: str) -> None:
        """Remove the file of an extent; a file that is not there is no error.

        Raises:
            StoreError: it cannot be removed.
        """
        path = self.file(extent)
        try:
            found = kind_at(path.parent) if kind_at(self.path) == "folder" else "absent"
            if found == "folder" and kind_at(path) == "folder":
                self._out_of_the_way(path)
            elif found == "folder":
                path.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"removing extent {extent[:16]}: {error.strerror}") from error

    def check(self, extent: str) -> None:
        """Check that an extent's folder is one.

        Raises:
            DamageError: it is a link, or anything else that is no folder.
        """
        folder = f"{self.path}/{extent[:2]}"
        if kind_at(folder) == "other" or kind_at(self.path) == "other":
            raise DamageError(f"{folder} is no folder")

    def leftovers(self) -> list[Path]:
        """List all entries that are no extents, or lie where no extent is looked for: files, links, folders.

        Where no process writes, the temporary files were left by a killed one.
        """
        beside = [Path(entry.path) for entry in self._entries(self.path) if not _is_ours(entry)]
        return sorted([*beside, *(Path(file.path) for file in self._files() if not _in_place(file))])

    def clean(self) -> None:
        """Remove all leftovers, folders too.

        Raises:
            StoreError: one cannot be removed.
        """
        try:
            for leftover in self.leftovers():
                remove(leftover)
        except OSError as error:
            raise StoreError(f"cannot clean {self.path}: {error.strerror}") from error

    def extents(self) -> Iterator[str]:
        """Yield the ids of all files that look like extents, by name."""
        return (file.name[: -len(SUFFIX)] for file in self._files() if _in_place(file))

    def _out_of_the_way(self, path: Path) -> None:
        """Clear a place where an extent's file or folder should be. A folder is renamed: its contents are not the cache's."""
        log.warning("%s is not what belongs there: it is put out of the way", path)
        if kind_at(path) == "folder":
            os.rename(path, self.path / f"strange-{os.getpid()}-{next(self._numbers)}-{path.name}")
        else:
            path.unlink(missing_ok=True)

    def _files(self) -> Iterator[os.DirEntry[str]]:
        for folder in self._entries(self.path):
            if _is_ours(folder):
                yield from self._entries(folder.path)

    def _entries(self, folder: str | Path) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as entries:
                return list(entries) if kind_at(folder) == "folder" else []
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise StoreError(f"listing {folder}: {error.strerror}") from error


def _is_ours(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder for extents."""
    return _FOLDER.fullmatch(entry.name) is not None and entry.is_dir(follow_symlinks=False)


def _in_place(file: os.DirEntry[str]) -> bool:
    """Whether a file has an extent's name and lies where that extent is looked for."""
    folder = os.path.basename(os.path.dirname(file.path))
    return file.name.endswith(SUFFIX) and file.name[:2] == folder and file.is_file(follow_symlinks=False)
