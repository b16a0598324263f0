"""What the store's tests share: layouts, an arena full of noise, a store that closes itself, an extent
record.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from afterglow.plan.step import ExtentRecord, Load, MoveDone, Store, TransferDone
from afterglow.store.extents import pieces
from afterglow.store.extents.layout import KVLayout
from afterglow.store.extents.tier import HostArena, arena_bytes
from afterglow.store.kvstore import KVStore
from afterglow.store.namespace.namespace import Namespace

ALIGNED = KVLayout(2, 2, 8, "F32")  # chunks of 4096 bytes: transfers go straight to the slots
ODD = KVLayout(3, 1, 6, "BF16")  # chunks of 768 bytes: transfers pass through a bounce buffer
EIGHT_BITS = KVLayout(3, 2, 7, "I8")  # rows of 22 bytes: tensors start anywhere
DIGEST = "5eed" * 16


def extent_name(number: int) -> str:
    return hashlib.sha256(b"%d" % number).hexdigest()


def name_of(digest: str, salt: str, prefix: bytes, own: bytes) -> str:
    """In place of `extent_id`: a record's first token is its number."""
    return extent_name(int.from_bytes(own[:4], "little"))


def record(number: int, rows: int, **more: Any) -> ExtentRecord:
    drawn = np.random.default_rng(number).integers(0, 50_000, rows, dtype=np.uint32)
    drawn[0] = number
    tokens = drawn.tobytes()
    values: dict[str, Any] = {
        "parent": None,
        "parent_rows": 0,
        "salt": "s",
        "kind": "exact",
        "last_used": 1.0,
    }
    return ExtentRecord(id=extent_name(number), tokens=tokens, file_bytes=0, **{**values, **more})


def noise(num_bytes: int, seed: int) -> mmap.mmap:
    """Page-aligned memory full of random bytes."""
    memory = mmap.mmap(-1, num_bytes)
    np.frombuffer(memory, np.uint8)[:] = np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)
    return memory


def arena_of(layout: KVLayout, slots: int, seed: int = 0) -> HostArena:
    return HostArena(layout, slots, noise(arena_bytes(layout, slots), seed))


def contents(arena: HostArena, slots: Sequence[int], rows: int) -> np.ndarray:
    """uint8 [layers, 2, rows, row_bytes]: a copy of what the slots hold."""
    blocks = arena.rows[:, :, list(slots)]
    return blocks.reshape(arena.layout.layers, 2, -1, arena.layout.row_bytes)[:, :, :rows].copy()


class Kit:
    """A KVStore over noise, in a namespace of `folder`; a context manager."""

    def __init__(self, folder: Path | None, layout: KVLayout = ALIGNED, slots: int = 64, **more: Any) -> None:
        memory = noise(arena_bytes(layout, slots), seed=7)
        self.namespace = None if folder is None else Namespace.open(folder, "m", DIGEST, layout)
        self.notified = 0
        self.moves = 0
        try:
            self.store = KVStore(layout, slots, memory, namespace=self.namespace, notify=self._notify, **more)
        except BaseException:
            if self.namespace is not None:
                self.namespace.close()
            raise

    def _notify(self) -> None:
        self.notified += 1

    def __enter__(self) -> Kit:
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()

    @property
    def path(self) -> Path:
        assert self.namespace is not None
        return self.namespace.path

    def file(self, number: int) -> Path:
        name = extent_name(number)
        return self.path / "extents" / name[:2] / f"{name}.safetensors"

    def put(self, number: int, rows: int, slots: Sequence[int], **more: Any) -> MoveDone:
        self.moves += 1
        return self.move(Store(self.moves, record(number, rows, **more), tuple(slots)))

    def get(self, number: int, rows: int, slots: Sequence[int]) -> MoveDone:
        self.moves += 1
        return self.move(Load(self.moves, extent_name(number), rows, tuple(slots)))

    def move(self, move: Any) -> MoveDone:
        self.store.start([move])
        (done,) = self.settle()
        assert isinstance(done, MoveDone)
        assert done.move == move.move
        return done

    def settle(self, timeout: float = 20.0) -> list[TransferDone]:
        assert rest(self.store, timeout)
        return self.store.finished()


def rest(thing: Any, timeout: float) -> bool:
    """Wait until a store, mover or saver has nothing to do, and nothing hangs; False when that takes too long."""
    deadline = time.monotonic() + timeout
    while True:
        if isinstance(thing, KVStore):
            stats = thing.stats()
            busy = stats.queue or stats.hung
        else:
            busy = thing.pending() or getattr(thing, "hung", 0)
        if not busy:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)


def patch_reads(monkeypatch: Any, wrap: Callable[[Callable[..., int]], Callable[..., int]]) -> None:
    """Put `wrap(call)` in place of both calls that read files: the system's, and that of the compiled kernels. Both take a
    descriptor, buffers and an offset, and return bytes.
    """
    monkeypatch.setattr(os, "preadv", wrap(os.preadv))
    monkeypatch.setattr(pieces, "preadv", wrap(pieces.preadv))


def limit_reads(monkeypatch: Any, num_bytes: int) -> None:
    """Let one call read so many bytes, but at least a layer."""
    monkeypatch.setattr(pieces, "READ_BYTES", num_bytes)
    monkeypatch.setattr(pieces, "SUMMED_READ_BYTES", num_bytes)
