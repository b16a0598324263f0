"""Index, device and placement without a scheduler: extents made by hand, moves that end when the test says so."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from afterglow.choices import PolicyName
from afterglow.plan.cache import Cache
from afterglow.plan.options import Capacity, SchedulerOptions
from afterglow.plan.prefix.extent import Extent
from afterglow.plan.prefix.index import extent_id
from afterglow.plan.prefix.salts import kind_of
from afterglow.plan.step import Drop, Move, MoveDone, Store
from afterglow.plan.tiers.device import Context, DeviceSegment
from tests.plan.fake_executor import pack, unpack

BLOCK = 4
FILE_BYTES = (100, 200, 300, 400)  # files of extents of one to four blocks


def make_extent(
    tokens: Sequence[int], prefix: Sequence[int] = (), *, serial: int = 0, salt: str = "", now: float = 0.0
) -> Extent:
    """An extent that is nowhere yet."""
    size = FILE_BYTES[min(-(-len(tokens) // BLOCK), len(FILE_BYTES)) - 1]
    return Extent(
        id=extent_id("m", salt, pack(list(prefix)), pack(list(tokens))),
        salt=salt,
        kind=kind_of(salt),
        tokens=pack(list(tokens)),
        first_row=len(prefix),
        file_bytes=size,
        created_at=now,
        serial=serial,
        last_used=now,
    )


class Tiers:
    """Two tiers and the device's contexts. An extent's number is its first token, so that extents differ."""

    def __init__(self, host_slots: int = 8, disk_bytes: int = 0, policy: PolicyName = "lru", **options: Any) -> None:
        self.capacity = Capacity(
            device_rows=64,
            host_slots=host_slots,
            disk_bytes=disk_bytes,
            file_bytes=FILE_BYTES,
            max_extent_rows=BLOCK * len(FILE_BYTES),
            block_rows=BLOCK,
        )
        self.cache = Cache(self.capacity, SchedulerOptions(policy=policy, **options))
        self.counters, self.index, self.device = self.cache.counters, self.cache.index, self.cache.device
        self.placement = self.cache.placement
        self.moves: list[Move] = []  # handed out and not ended
        self._serial = 0
        self._paths: dict[Extent, list[int]] = {}

    def insert(self, number: int, blocks: int, below: Extent | None, now: float) -> Extent:
        """An extent that is matched, and nowhere yet."""
        self._serial += 1
        prefix = self._paths[below] if below is not None else []
        extent = make_extent([number] * (BLOCK * blocks), prefix, serial=self._serial, now=now)
        assert self.index.insert(extent, pack(prefix)).outcome == "inserted"
        self._paths[extent] = prefix + unpack(extent.tokens)
        return extent

    def add(
        self, number: int, now: float = 0.0, *, blocks: int = 1, below: Extent | None = None, through: bool = False
    ) -> Extent:
        """A fresh extent, in host; `through`: to be written at once."""
        slots = self.placement.host.take_slots(blocks, now)
        assert slots is not None
        extent = self.insert(number, blocks, below, now)
        self.placement.add(extent, slots, write_through=through, now=now)
        return extent

    def on_disk(self, number: int, now: float = 0.0, *, blocks: int = 1, below: Extent | None = None) -> Extent:
        """An extent found on disk."""
        extent = self.insert(number, blocks, below, now)
        self.placement.restore([extent], [inf])
        return extent

    def clean(self, number: int, now: float = 0.0, *, blocks: int = 1, below: Extent | None = None) -> Extent:
        """An extent in both tiers."""
        extent = self.on_disk(number, now, blocks=blocks, below=below)
        assert self.placement.loading.load(extent, now)
        self.end(self.planned()[-1])
        return extent

    def context(self, *extents: Extent) -> Context:
        """A retained context that contains rows of these extents."""
        tokens = pack(self._paths[extents[-1]])
        rows = len(tokens) // 4
        segment = DeviceSegment()
        assert self.device.reserve(segment, rows)
        context = self.device.retain("", tokens, rows, segment)
        self.device.contain(context, extents)
        return context

    def planned(self) -> list[Move]:
        """Hand out the moves planned since the last call."""
        moves = self.placement.moves.take()
        self.moves += moves
        return moves

    def end(self, move: Move, ok: bool = True, *, busy: bool = False, now: float = 0.0) -> None:
        self.moves.remove(move)
        self.placement.complete(MoveDone(move.move, ok, slots_busy=busy), now)
        self.check()

    def end_all(self, now: float = 0.0) -> None:
        self.planned()
        while self.moves:
            self.end(self.moves[0], now=now)
            self.planned()

    def check(self) -> None:
        self.index.check()
        self.placement.check([])
        self.device.check(())


def stores(moves: Sequence[Move]) -> list[str]:
    return [move.record.id for move in moves if isinstance(move, Store)]


def drops(moves: Sequence[Move]) -> list[str]:
    return [move.extent for move in moves if isinstance(move, Drop)]
