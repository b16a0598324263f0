"""A replica's folder for its disk tier, the first of its machine that no process holds; and the choice of a replica for a conversation by
these folders. Needs no Ray."""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

LOCK = "lock"


@contextmanager
def own_folder(parent: Path) -> Iterator[Path]:
    """Hold the folder `replica-N` below `parent` with the lowest number that is free.

    The lock ends with its process, even with a killed one. So a replica that is started again finds what it had.
    """
    for number in itertools.count(1):
        folder = parent / f"replica-{number}"
        folder.mkdir(0o700, parents=True, exist_ok=True)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        try:
            yield folder
        finally:
            os.close(lock)
        return


def ranked(session: str, places: Iterable[str]) -> list[str]:
    """Order places for a conversation, its own first, by rendezvous hashing. A place that comes or goes moves only the conversations whose own it is."""

    def weight(place: str) -> bytes:
        return blake2b(f"{place}\0{session}".encode("utf-8", "surrogatepass"), digest_size=8).digest()

    return sorted(places, key=lambda place: (weight(place), place))
