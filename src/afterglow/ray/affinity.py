"""The choice of a replica for a conversation, by rendezvous hashing. Needs no Ray."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b


def ranked(session: str, places: Iterable[str]) -> list[str]:
    """Order places for a conversation, its own first. A place that comes or goes moves only the conversations whose own it is."""

    def weight(place: str) -> bytes:
        return blake2b(f"{place}\0{session}".encode("utf-8", "surrogatepass"), digest_size=8).digest()

    return sorted(places, key=lambda place: (weight(place), place))
