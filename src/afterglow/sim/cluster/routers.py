"""Which of several engines gets a turn."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from random import Random
from typing import Protocol
from zlib import crc32

from afterglow.sim.scenario_options import RouterName
from afterglow.sim.workload.turns import TraceTurn, token_bytes

BLOCK = 64  # tokens whose engine is remembered together
REMEMBERED = 1_000_000  # blocks; those that were sent longest ago are forgotten
BUSIER = 24  # turns more than the least loaded engine has: then it goes before the prefix


class Router(Protocol):
    """`loads[i]`: turns that engine i was sent and has not answered."""

    def choose(self, turn: TraceTurn, loads: list[int]) -> int: ...


def router(name: RouterName, seed: int) -> Router:
    """A router by its name."""
    if name == "random":
        return _Random(seed)
    if name == "least-loaded":
        return _LeastLoaded(seed)
    return _Conversation() if name == "conversation" else _Prefix(seed)


class _Random:
    def __init__(self, seed: int) -> None:
        self._rng = Random(f"{seed} router")

    def choose(self, turn: TraceTurn, loads: list[int]) -> int:
        return self._rng.randrange(len(loads))


class _LeastLoaded:
    """Of several, any."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(f"{seed} router")

    def choose(self, turn: TraceTurn, loads: list[int]) -> int:
        least = min(loads)
        return self._rng.choice([engine for engine, load in enumerate(loads) if load == least])


class _Conversation:
    """By a hash of its name: nothing has to be remembered."""

    def choose(self, turn: TraceTurn, loads: list[int]) -> int:
        return crc32(turn.session.encode()) % len(loads)


class _Prefix:
    """The engine that was sent the longest beginning of the prompt last, unless it is much busier than the least
    loaded one. It knows what it has sent, and not what engines still have."""

    def __init__(self, seed: int) -> None:
        self._sent: OrderedDict[bytes, int] = OrderedDict()  # chained hash of whole blocks -> engine
        self._otherwise = _LeastLoaded(seed)

    def choose(self, turn: TraceTurn, loads: list[int]) -> int:
        chain = _chain(token_bytes(turn.prompt))
        known = next((self._sent[key] for key in reversed(chain) if key in self._sent), None)
        if known is None or loads[known] > min(loads) + BUSIER:
            known = self._otherwise.choose(turn, loads)
        for key in chain:
            self._sent[key] = known
            self._sent.move_to_end(key)
        while len(self._sent) > REMEMBERED:
            self._sent.popitem(last=False)
        return known


def _chain(tokens: bytes) -> list[bytes]:
    """Of each whole block, a hash of all tokens up to its end."""
    found: list[bytes] = []
    before = b""
    size = 4 * BLOCK
    for at in range(0, len(tokens) - size + 1, size):
        before = blake2b(before + tokens[at : at + size], digest_size=12).digest()
        found.append(before)
    return found
