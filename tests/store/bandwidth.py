"""Not a test: bandwidth of Loads and Stores beside a plain O_DIRECT loop over the same files.

    python -m tests.store.bandwidth [FOLDER] [--rows 1024] [--json FILE]

Variants are interleaved and the median of several rounds is printed. The plain loop reads 1 MiB at a time
with one thread and checks nothing.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from afterglow.plan.step import ExtentRecord, Load, Store
from afterglow.store.extents.layout import KVLayout
from afterglow.store.extents.tier import arena_bytes
from afterglow.store.kvstore import KVStore
from afterglow.store.namespace.namespace import Namespace
from tests.store.store_kit import rest

EXTENTS = 8


def plain_read(paths: list[Path], piece: int = 1 << 20) -> int:
    buffer = mmap.mmap(-1, piece)
    total = 0
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        while n := os.readv(fd, [buffer]):
            total += n
        os.close(fd)
    return total


def plain_read_into(paths: list[Path], memory: np.ndarray, piece: int = 1 << 20) -> int:
    """The same into fresh memory on huge pages, as the engine's arena has them: faster."""
    total = 0
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        at = total
        while n := os.preadv(fd, [memory[at : at + piece]], at - total):
            at += n
        total = at
        os.close(fd)
    return total


def plain_write(paths: list[Path], num_bytes: int) -> int:
    piece = min(4 << 20, num_bytes)
    buffer = mmap.mmap(-1, piece)
    buffer.write(os.urandom(piece))
    for path in paths:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
        for _ in range(num_bytes // piece):
            os.writev(fd, [buffer])
        os.close(fd)
        path.unlink()
    return num_bytes // piece * piece * len(paths)


def measure(folder: Path, rows: int, rounds: int) -> dict[str, float]:
    """MB/s of each variant."""
    layout = KVLayout(12, 8, 64, "F32")
    blocks = layout.blocks(rows)
    slots = blocks * EXTENTS
    arena = mmap.mmap(-1, arena_bytes(layout, slots), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    arena.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(arena, np.uint8)[:] = np.random.default_rng(0).integers(0, 256, len(arena), np.uint8)
    namespace = Namespace.open(folder, "bandwidth", "0" * 64, layout)
    store = KVStore(layout, slots, arena, namespace=namespace, notify=lambda: None)
    tokens = np.arange(rows, dtype=np.uint32).tobytes()
    ids = [f"{n:02x}" * 32 for n in range(EXTENTS)]
    records = [ExtentRecord(i, None, 0, "", "exact", tokens, 0, 0.0) for i in ids]
    own = [tuple(range(n * blocks, (n + 1) * blocks)) for n in range(EXTENTS)]
    order = np.random.default_rng(1).permutation(slots)
    mixed = [tuple(int(s) for s in order[n * blocks : (n + 1) * blocks]) for n in range(EXTENTS)]
    paths = [namespace.extents / i[:2] / f"{i}.safetensors" for i in ids]
    move = 0

    def stores() -> int:
        nonlocal move
        move += EXTENTS
        store.start([Store(move + n, r, s) for n, (r, s) in enumerate(zip(records, own, strict=True))])
        return collect()

    def loads(where: list[tuple[int, ...]], at_once: int) -> int:
        nonlocal move
        total = 0
        for start in range(0, EXTENTS, at_once):
            move += at_once
            some = range(start, start + at_once)
            store.start([Load(move + k, ids[n], rows, where[n]) for k, n in enumerate(some)])
            total += collect()
        return total

    def collect() -> int:
        assert rest(store, 60)
        done = store.finished()
        assert all(d.ok for d in done), done
        return sum(d.bytes for d in done)

    file_bytes = layout.file_bytes(rows)
    spare_memory = np.ones(EXTENTS * file_bytes + (2 << 20), np.uint8)
    spare_memory = spare_memory[-spare_memory.ctypes.data % 4096 :]
    spare = [folder / f"plain-{n}" for n in range(EXTENTS)]
    variants = {
        "plain write": lambda: plain_write(spare, file_bytes),
        "store": stores,
        "plain read": lambda: plain_read(paths),
        "plain read, fresh memory": lambda: plain_read_into(paths, spare_memory),
        "load, one at a time": lambda: loads(own, 1),
        "load, two at a time": lambda: loads(own, 2),
        "load into scattered slots": lambda: loads(mixed, 1),
    }
    speeds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            start = time.perf_counter()
            moved = run()
            speeds[name].append(moved / (time.perf_counter() - start) / 1e6)
    store.close()
    return {name: statistics.median(values) for name, values in speeds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("/var/tmp"))
    parser.add_argument("--rows", type=int, nargs="*", default=[64, 256, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = {}
    for rows in args.rows:
        folder = Path(tempfile.mkdtemp(dir=args.folder))
        try:
            results[rows] = measure(folder, rows, args.rounds)
        finally:
            shutil.rmtree(folder)
        for name, speed in results[rows].items():
            base = results[rows]["plain write" if name in ("store", "plain write") else "plain read"]
            print(f"{rows:5} rows  {name:26} {speed:7.0f} MB/s  {speed / base:5.2f}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
