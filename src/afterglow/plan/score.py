"""Which chunks of prefixes are cached on the device, which in host memory (SPEC, IV-D; spec S14, S15).

Everything is on disk for good; the two caches above it hold no chunk twice, and each chunk is scored by how often its
rows were wanted: frequency times the share of its rows that was. A chunk moves up when its score beats the lowest ones
of the cache above, by more than a tie. Their budgets are their own, apart from those of conversations (spec X13).

What is known of chunks that are in neither cache is bounded: those that were asked for longest ago are forgotten.

Answers in moves, and does no I/O. Moves of one access are in an order in which they can be carried out; the chunk that was
asked for is in the hands of whoever asked, so its old place is free from the beginning.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from afterglow.errors import ConfigError

REMEMBERED = 16_384  # chunks in neither cache
LARGEST = 2.0**500  # weight of a request; then all are scaled down

C = TypeVar("C", bound=Hashable)
Place = Literal["device", "host", "disk"]


class Move(NamedTuple, Generic[C]):
    """One chunk's way. To `disk` means that a copy is given up: the file has it."""

    chunk: C
    source: Place
    target: Place
    size: int  # bytes


@dataclass(slots=True, eq=False)
class Chunk(Generic[C]):
    """What is known of a chunk that has been asked for. `wanted`: sum over requests of the share of its `tokens` rows that
    they wanted, times `tokens`; `ratio`: that share, as a moving average. Requests weigh more as time goes on, instead of
    older ones less."""

    name: C
    size: int  # bytes
    tokens: int
    place: Place = "disk"
    asked: float = 0.0  # sum of the requests' weights
    wanted: float = 0.0
    ratio: float = 0.0
    last: int = 0  # number of the last request
    score: float = 0.0


class Rule(NamedTuple):
    """A row: what chunks are compared by."""

    name: str
    score: Callable[[Chunk[Any]], float]
    ages: bool = True


def _score(chunk: Chunk[Any]) -> float:
    # Frequency x mean ratio; as a sum of rows it is exact, so equal scores are equal.
    return chunk.wanted / chunk.tokens


def _ema(chunk: Chunk[Any]) -> float:
    return chunk.asked * chunk.ratio


def _lru(chunk: Chunk[Any]) -> float:
    return chunk.last


def _lfu(chunk: Chunk[Any]) -> float:
    return chunk.asked


RULES: dict[str, Rule] = {
    row.name: row for row in (Rule("score", _score), Rule("ema", _ema), Rule("lru", _lru, False), Rule("lfu", _lfu))
}


@dataclass(slots=True)
class _Cache(Generic[C]):
    """One place's chunks, and a heap whose top is the lowest score; of equals what was asked for longest ago."""

    place: Place
    capacity: int
    used: int = 0
    chunks: dict[C, Chunk[C]] = field(default_factory=dict)
    _heap: list[tuple[float, int, C]] = field(default_factory=list)

    @property
    def free(self) -> int:
        return self.capacity - self.used

    def put(self, chunk: Chunk[C]) -> None:
        chunk.place = self.place
        self.chunks[chunk.name] = chunk
        self.used += chunk.size
        self.scored(chunk)

    def take(self, chunk: Chunk[C]) -> None:
        del self.chunks[chunk.name]
        self.used -= chunk.size
        chunk.place = "disk"

    def scored(self, chunk: Chunk[C]) -> None:
        """A member's score has changed: its old entry is outdated, and dropped when it comes up."""
        heapq.heappush(self._heap, (chunk.score, chunk.last, chunk.name))  # no two have the same `last`
        if len(self._heap) > 64 + 2 * len(self.chunks):
            self.sort()

    def sort(self) -> None:
        self._heap = [(chunk.score, chunk.last, name) for name, chunk in self.chunks.items()]
        heapq.heapify(self._heap)

    def losers(self, score: float, size: int) -> list[Chunk[C]] | None:
        """The lowest members whose leaving makes room for `size` bytes; None where that takes one that `score` does not
        beat."""
        if size > self.capacity:
            return None
        found: list[Chunk[C]] = []
        free = self.free
        while free < size:
            entry = self.lowest()
            if entry is None or entry.score >= score:
                break
            found.append(entry)
            free += entry.size
            heapq.heappop(self._heap)
        enough = free >= size
        for chunk in found:  # they are members until they are taken out
            heapq.heappush(self._heap, (chunk.score, chunk.last, chunk.name))
        return found if enough else None

    def lowest(self) -> Chunk[C] | None:
        """The next to go."""
        while self._heap:
            score, last, name = self._heap[0]
            chunk = self.chunks.get(name)
            if chunk is not None and (chunk.score, chunk.last) == (score, last):
                return chunk
            heapq.heappop(self._heap)
        return None


class ScoreCache(Generic[C]):
    """What is cached where. Used by one thread; `C` names a chunk (extent, layer, keys or values, number)."""

    def __init__(self, device: int, host: int, policy: str = "score", *, beta: float = 0.2) -> None:
        """Budgets in bytes. `policy`: `score`; `ema`, the same with a moving average of the share that is wanted, in which
        the last request weighs `beta`; to compare with, `lru` and `lfu`. Errors: ConfigError for anything else."""
        if policy not in RULES:
            raise ConfigError(f"there is no chunk policy {policy!r}; choose one of {', '.join(RULES)}")
        if device < 0 or host < 0:
            raise ConfigError(f"budgets must be 0 or more bytes, got {device} for device and {host} for host")
        if not 0 < beta <= 1:
            raise ConfigError(f"beta must be more than 0 and at most 1, got {beta:g}")
        self.policy, self._rule, self._beta = policy, RULES[policy].score, beta
        self.device: _Cache[C] = _Cache("device", device)
        self.host: _Cache[C] = _Cache("host", host)
        self._chunks: dict[C, Chunk[C]] = {}
        self._apart: dict[C, None] = {}  # those in neither cache, the last asked for at the end
        self._weight = 1.0  # of a request
        self.forgot: Callable[[C], object] = lambda chunk: None  # is told of chunks that were asked for too long ago
        self._requests = 0
        self.rows: dict[Place, int] = {"device": 0, "host": 0, "disk": 0}  # wanted ones, by where they were (spec S20)

    def __len__(self) -> int:
        """Chunks that are known, wherever they are."""
        return len(self._chunks)

    def place(self, chunk: C) -> Place:
        """Where a chunk is."""
        known = self._chunks.get(chunk)
        return "disk" if known is None else known.place

    def score(self, chunk: C) -> float:
        """What it is compared by, as if a request now weighed 1; 0 for one that was never asked for."""
        known = self._chunks.get(chunk)
        if known is None:
            return 0.0
        return known.score / self._weight if RULES[self.policy].ages else known.score

    def access(self, chunk: C, size: int, tokens: int, wanted: int) -> tuple[Place, list[Move[C]]]:
        """A request reads `wanted` of a chunk's `tokens` rows; `size` is the chunk's bytes.

        Returns where it was, and what moves because of that. Moves of what gives way come before those of what takes its
        place.
        """
        if tokens < 1 or not 0 <= wanted <= tokens or size < 0:
            raise ValueError(f"{wanted} of {tokens} rows in {size} bytes")
        known = self._chunks.get(chunk)
        if known is None:
            known = self._chunks[chunk] = Chunk(chunk, size, tokens)
        was = known.place
        self.rows[was] += wanted
        self._count(known, wanted)
        if was == "device":
            self.device.scored(known)
            return was, []
        if was == "host":
            self.host.take(known)
        moves: list[Move[C]] = []
        if not self._enter_device(known, was, moves) and not self._enter_host(known, was, moves):
            assert was == "disk"  # what was in host has its room there
        for name in (chunk, *(move.chunk for move in moves)):
            self._apart.pop(name, None)
            if self._chunks[name].place == "disk":
                self._apart[name] = None
        while len(self._apart) > REMEMBERED:
            oldest = next(iter(self._apart))
            del self._apart[oldest], self._chunks[oldest]
            self.forgot(oldest)
        return was, moves

    def age(self) -> None:
        """Halve what is known of the past, of all chunks alike (at each reordering). Orders stay; what is asked for from
        now on counts more. `lru` knows no ages."""
        self._weight *= 2
        if self._weight < LARGEST:
            return
        for chunk in self._chunks.values():
            chunk.asked /= self._weight
            chunk.wanted /= self._weight
            chunk.score = self._rule(chunk)
        self._weight = 1.0
        self.device.sort()
        self.host.sort()

    def forget(self, chunk: C) -> Move[C] | None:
        """A chunk is no more: its extent has been deleted, or rewritten in another order. Where it was cached: the move
        that gives it up."""
        known = self._chunks.pop(chunk, None)
        self._apart.pop(chunk, None)
        if known is None or known.place == "disk":
            return None
        cache = self.device if known.place == "device" else self.host
        move = Move(chunk, known.place, "disk", known.size)
        cache.take(known)
        return move

    def members(self, place: Literal["device", "host"]) -> Iterator[C]:
        """What is cached there."""
        return iter(self.device.chunks if place == "device" else self.host.chunks)

    def check(self) -> None:
        """Disjoint, within the budgets, heaps in order."""
        for cache in (self.device, self.host):
            assert cache.used == sum(chunk.size for chunk in cache.chunks.values()) <= cache.capacity
            assert all(chunk.place == cache.place for chunk in cache.chunks.values())
            lowest = cache.lowest()
            scores = [(chunk.score, chunk.last) for chunk in cache.chunks.values()]
            assert (lowest is None) == (not scores)
            assert lowest is None or (lowest.score, lowest.last) == min(scores)
        assert not self.device.chunks.keys() & self.host.chunks.keys()
        cached = {*self.device.chunks, *self.host.chunks}
        assert self._chunks.keys() - cached == self._apart.keys()
        assert len(self._apart) <= REMEMBERED

    def _count(self, chunk: Chunk[C], wanted: int) -> None:
        self._requests += 1
        share = wanted / chunk.tokens
        chunk.ratio = share if not chunk.last else chunk.ratio + self._beta * (share - chunk.ratio)
        chunk.asked += self._weight
        chunk.wanted += wanted * self._weight
        chunk.last = self._requests
        chunk.score = self._rule(chunk)

    def _enter_device(self, chunk: Chunk[C], was: Place, moves: list[Move[C]]) -> bool:
        """Onto the device if there is room, or its lowest are beaten; those go to host if they beat what is there."""
        losers = self.device.losers(chunk.score, chunk.size)
        if losers is None:
            return False
        for loser in losers:
            self.device.take(loser)
        for loser in reversed(losers):  # the best of them first
            if not self._enter_host(loser, "device", moves):
                moves.append(Move(loser.name, "device", "disk", loser.size))
        self.device.put(chunk)
        moves.append(Move(chunk.name, was, "device", chunk.size))
        return True

    def _enter_host(self, chunk: Chunk[C], was: Place, moves: list[Move[C]]) -> bool:
        losers = self.host.losers(chunk.score, chunk.size)
        if losers is None:
            return False
        for loser in losers:
            self.host.take(loser)
            moves.append(Move(loser.name, "host", "disk", loser.size))
        self.host.put(chunk)
        if was != "host":
            moves.append(Move(chunk.name, was, "host", chunk.size))
        return True
