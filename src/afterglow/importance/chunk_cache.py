"""Cache chunks of prefixes on the device and in host memory (SPEC, IV-D).

All chunks are on disk for good; the two caches above hold no chunk twice. A chunk's score is its frequency times the share
of rows that requests wanted. A chunk moves up when its score is higher than the lowest ones in the cache above. The
caches' budgets are their own, apart from those of conversations. Chunks that are in neither cache are remembered in
bounded number; those that were asked for longest ago are forgotten.

`ChunkPlacement` decides, in moves, and does no I/O. The moves of one access can be carried out in their order: the asking
request holds the chunk, so the chunk's old place is free from the beginning. `ChunkCache` holds the bytes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

from afterglow.errors import ConfigError

MAX_REMEMBERED = 16_384  # chunks in neither cache
MAX_WEIGHT = 2.0**500  # of a request; then all weights are scaled down

C = TypeVar("C", bound=Hashable)
Place = Literal["device", "host", "disk"]


class ChunkMove(NamedTuple, Generic[C]):
    """Move one chunk. To `disk` means that the copy is given up: the file has the chunk."""

    chunk: C
    source: Place
    target: Place
    size: int  # bytes


@dataclass(slots=True, eq=False)
class ChunkRecord(Generic[C]):
    """Remember a chunk that requests have asked for.

    `wanted`: rows that they wanted, summed with the requests' weights. `ratio`: the share of the chunk's `tokens` rows that they
    wanted, a moving average. Later requests weigh more, instead of earlier ones less.
    """

    name: C
    size: int  # bytes
    tokens: int
    place: Place = "disk"
    asked: float = 0.0  # sum of the requests' weights
    wanted: float = 0.0
    ratio: float = 0.0
    last: int = 0  # number of the last request
    score: float = 0.0


# The scores by which chunks are compared. All but `lru` age: theirs are of weighted requests.
CHUNK_POLICIES: dict[str, Callable[[ChunkRecord[Any]], float]] = {
    "score": lambda chunk: (
        chunk.wanted / chunk.tokens
    ),  # frequency x mean ratio; a sum of rows is exact, so equal scores are equal
    "ema": lambda chunk: chunk.asked * chunk.ratio,
    "lru": lambda chunk: chunk.last,
    "lfu": lambda chunk: chunk.asked,
}


@dataclass(slots=True)
class _Cache(Generic[C]):
    """Hold the chunks of one place, and a heap whose top is the lowest score; of equals the one asked for longest ago."""

    place: Place
    capacity: int
    used: int = 0
    chunks: dict[C, ChunkRecord[C]] = field(default_factory=dict)
    _heap: list[tuple[float, int, C]] = field(default_factory=list)

    @property
    def free(self) -> int:
        return self.capacity - self.used

    def put(self, chunk: ChunkRecord[C]) -> None:
        chunk.place = self.place
        self.chunks[chunk.name] = chunk
        self.used += chunk.size
        self.scored(chunk)

    def take(self, chunk: ChunkRecord[C]) -> None:
        del self.chunks[chunk.name]
        self.used -= chunk.size
        chunk.place = "disk"

    def scored(self, chunk: ChunkRecord[C]) -> None:
        """Note that a member's score has changed. Its old heap entry is outdated, and is dropped when it comes up."""
        heapq.heappush(self._heap, (chunk.score, chunk.last, chunk.name))  # no two have the same `last`
        if len(self._heap) > 64 + 2 * len(self.chunks):
            self.sort()

    def sort(self) -> None:
        self._heap = [(chunk.score, chunk.last, name) for name, chunk in self.chunks.items()]
        heapq.heapify(self._heap)

    def losers(self, score: float, size: int) -> list[ChunkRecord[C]] | None:
        """List the lowest members that have to leave to make room for `size` bytes; None if that takes one with `score` or more."""
        if size > self.capacity:
            return None
        found: list[ChunkRecord[C]] = []
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

    def lowest(self) -> ChunkRecord[C] | None:
        """Find the member with the lowest score."""
        while self._heap:
            score, last, name = self._heap[0]
            chunk = self.chunks.get(name)
            if chunk is not None and (chunk.score, chunk.last) == (score, last):
                return chunk
            heapq.heappop(self._heap)
        return None


class ChunkPlacement(Generic[C]):
    """Decide which chunk is cached where. For one thread; `C` names a chunk (extent, layer, keys or values, number)."""

    def __init__(self, device: int, host: int, policy: str = "score", *, beta: float = 0.2) -> None:
        """`device`, `host`: budgets in bytes. `policy`: `score`; `ema`, a score with a moving average of the wanted share, in
        which the last request weighs `beta`; to compare with, `lru` and `lfu`.

        Raises: ConfigError, for another policy and for budgets or a `beta` out of range.
        """
        if policy not in CHUNK_POLICIES:
            raise ConfigError(f"there is no chunk policy {policy!r}; choose one of {', '.join(CHUNK_POLICIES)}")
        if device < 0 or host < 0:
            raise ConfigError(f"budgets must be 0 or more bytes, got {device} for device and {host} for host")
        if not 0 < beta <= 1:
            raise ConfigError(f"beta must be more than 0 and at most 1, got {beta:g}")
        self.policy, self._rule, self._beta = policy, CHUNK_POLICIES[policy], beta
        self.device: _Cache[C] = _Cache("device", device)
        self.host: _Cache[C] = _Cache("host", host)
        self._chunks: dict[C, ChunkRecord[C]] = {}
        self._apart: dict[C, None] = {}  # chunks in neither cache, the last asked for at the end
        self._weight = 1.0  # of a request
        self.forgot: Callable[[C], object] = lambda chunk: None  # called with chunks that are forgotten
        self._requests = 0
        # Rows that requests wanted, by where they were.
        self.rows: dict[Place, int] = dict.fromkeys(get_args(Place), 0)

    def __len__(self) -> int:
        """Count the remembered chunks, wherever they are."""
        return len(self._chunks)

    def place(self, chunk: C) -> Place:
        """Tell where a chunk is."""
        known = self._chunks.get(chunk)
        return "disk" if known is None else known.place

    def score(self, chunk: C) -> float:
        """Return a chunk's score, as if a request now weighed 1; 0 for a chunk that was never asked for."""
        known = self._chunks.get(chunk)
        if known is None:
            return 0.0
        return known.score if self.policy == "lru" else known.score / self._weight

    def access(self, chunk: C, size: int, tokens: int, wanted: int) -> tuple[Place, list[ChunkMove[C]]]:
        """Count that a request reads `wanted` of a chunk's `tokens` rows. `size`: the chunk's bytes.

        Returns where the chunk was, and the moves that follow. Chunks that give way move before the chunk that takes their
        place.
        """
        if tokens < 1 or not 0 <= wanted <= tokens or size < 0:
            raise ValueError(f"{wanted} of {tokens} rows in {size} bytes")
        known = self._chunks.get(chunk)
        if known is None:
            known = self._chunks[chunk] = ChunkRecord(chunk, size, tokens)
        was = known.place
        self.rows[was] += wanted
        self._count(known, wanted)
        if was == "device":
            self.device.scored(known)
            return was, []
        if was == "host":
            self.host.take(known)
        moves: list[ChunkMove[C]] = []
        if not self._enter_device(known, was, moves) and not self._enter_host(known, was, moves):
            assert was == "disk"  # a chunk that was in host has its room there
        for name in (chunk, *(move.chunk for move in moves)):
            self._apart.pop(name, None)
            if self._chunks[name].place == "disk":
                self._apart[name] = None
        while len(self._apart) > MAX_REMEMBERED:
            oldest = next(iter(self._apart))
            del self._apart[oldest], self._chunks[oldest]
            self.forgot(oldest)
        return was, moves

    def age(self) -> None:
        """Halve the weight of the past, of all chunks alike (at each reordering). The order of scores stays. `lru` has no
        weights."""
        self._weight *= 2
        if self._weight < MAX_WEIGHT:
            return
        for chunk in self._chunks.values():
            chunk.asked /= self._weight
            chunk.wanted /= self._weight
            chunk.score = self._rule(chunk)
        self._weight = 1.0
        self.device.sort()
        self.host.sort()

    def forget(self, chunk: C) -> ChunkMove[C] | None:
        """Forget a chunk, because its extent was deleted, or rewritten in another order. Returns the move that gives up a
        cached copy, if there was one."""
        known = self._chunks.pop(chunk, None)
        self._apart.pop(chunk, None)
        if known is None or known.place == "disk":
            return None
        cache = self.device if known.place == "device" else self.host
        move = ChunkMove(chunk, known.place, "disk", known.size)
        cache.take(known)
        return move

    def members(self, place: Literal["device", "host"]) -> Iterator[C]:
        """Iterate over the chunks that are cached in a place."""
        return iter(self.device.chunks if place == "device" else self.host.chunks)

    def check(self) -> None:
        """Assert that the caches are disjoint and within their budgets, and their heaps in order."""
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
        assert len(self._apart) <= MAX_REMEMBERED

    def _count(self, chunk: ChunkRecord[C], wanted: int) -> None:
        self._requests += 1
        share = wanted / chunk.tokens
        chunk.ratio = share if not chunk.last else chunk.ratio + self._beta * (share - chunk.ratio)
        chunk.asked += self._weight
        chunk.wanted += wanted * self._weight
        chunk.last = self._requests
        chunk.score = self._rule(chunk)

    def _enter_device(self, chunk: ChunkRecord[C], was: Place, moves: list[ChunkMove[C]]) -> bool:
        """Put a chunk on the device if there is room, or its score is higher than the lowest there. These go to host if their
        scores are higher than the lowest in host."""
        losers = self.device.losers(chunk.score, chunk.size)
        if losers is None:
            return False
        for loser in losers:
            self.device.take(loser)
        for loser in reversed(losers):  # the best first
            if not self._enter_host(loser, "device", moves):
                moves.append(ChunkMove(loser.name, "device", "disk", loser.size))
        self.device.put(chunk)
        moves.append(ChunkMove(chunk.name, was, "device", chunk.size))
        return True

    def _enter_host(self, chunk: ChunkRecord[C], was: Place, moves: list[ChunkMove[C]]) -> bool:
        losers = self.host.losers(chunk.score, chunk.size)
        if losers is None:
            return False
        for loser in losers:
            self.host.take(loser)
            moves.append(ChunkMove(loser.name, "host", "disk", loser.size))
        self.host.put(chunk)
        if was != "host":
            moves.append(ChunkMove(chunk.name, was, "host", chunk.size))
        return True


class ChunkKey(NamedTuple):
    """Name a chunk of an extent's file, as the file was when its `edition` was read (`store.extents.chunks`).

    `tensor`: keys 0, values 1, probe keys 2, means 3. All probe keys of a layer are one chunk, number 0, and so are all means.
    """

    extent: str
    edition: str
    layer: int
    tensor: int
    chunk: int


class ChunkCache:
    """Hold rows of chunks on the device and in host memory, where `ChunkPlacement` decides (SPEC §IV-B).

    Only chunks of files as they are now are held.
    """

    def __init__(self, placement: ChunkPlacement[ChunkKey], device: torch.device) -> None:
        self.placement = placement
        placement.forgot = lambda key: self._editions[key.extent][1].pop(key, None)
        self.device = device
        self._rows: dict[ChunkKey, Tensor] = {}
        self._editions: dict[str, tuple[str, dict[ChunkKey, None]]] = {}  # by extent: its edition, and used chunks

    def look(self, key: ChunkKey) -> Tensor | None:
        """Find the rows of a chunk as they are stored, on the device or in host; None if they are not cached."""
        return self._rows.get(key)

    def now(self, extent: str, edition: str) -> None:
        """Note the edition of an extent's file. Chunks of another edition are forgotten."""
        if self._editions.get(extent, ("",))[0] != edition:
            self.forget(extent)
            self._editions[extent] = edition, {}

    def used(self, key: ChunkKey, rows: Tensor, tokens: int, wanted: int) -> Place:
        """Count that a request has used `wanted` of a chunk's `tokens` rows, and cache the chunk if it is worth that.

        `rows` are all rows of the chunk; they must not be written to afterwards. Returns where the chunk was before. Chunks
        of an extent that is gone, or whose file has another edition now, are not cached.
        """
        edition, keys = self._editions.get(key.extent, ("", None))
        if keys is None or edition != key.edition:
            return "disk"
        keys[key] = None
        size = rows.numel() * rows.element_size()
        was, moves = self.placement.access(key, size, tokens, wanted)
        for move in moves:
            if move.target == "disk":
                del self._rows[move.chunk]
            else:
                source = self._rows.get(move.chunk, rows)
                where = self.device if move.target == "device" else torch.device("cpu")
                self._rows[move.chunk] = source.to(where)
        return was

    def forget(self, extent: str) -> None:
        """Forget all chunks of an extent that is gone, or whose file was written anew."""
        for key in self._editions.pop(extent, ("", {}))[1]:
            self.placement.forget(key)
            self._rows.pop(key, None)

    @property
    def bytes(self) -> tuple[int, int]:
        """Count the bytes on the device and in host."""
        return self.placement.device.used, self.placement.host.used
