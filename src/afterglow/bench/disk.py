"""Bandwidth of whole extents between disk and host slots, beside plain O_DIRECT loops over the same bytes.

A plain loop moves the same files, or files of the same size, in calls of several sizes, checks nothing, and has its
buffer ready: one that every call uses again ("reused"), or one as large as all files ("kept"). Only the second does what
a load has to do; the first may be faster because its buffer stays in the CPU's cache. `ratio` is to the fastest of all
these loops in the same run, `ratio_kept` to the fastest that keeps the bytes.
"""

from __future__ import annotations

import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from afterglow.bench.report import arguments, finish, goal, interleaved, show, spread, writable_folder
from afterglow.errors import ConfigError
from afterglow.memory.pages import allocate
from afterglow.model.presets import PRESETS
from afterglow.plan.step import ExtentRecord
from afterglow.store.extents.disk_tier import DiskTier
from afterglow.store.extents.files import open_direct
from afterglow.store.extents.layout import KVLayout
from afterglow.store.extents.tier import ExtentRead, HostArena, arena_bytes

MODEL: Final = "bench-100m"
CALLS: Final = (1 << 20, 2 << 20, 4 << 20, 1 << 40)  # bytes per call of the plain loops; the last is a whole file
BUFFERS: Final = ("reused", "kept")
THREADS: Final = (1, 2)  # two are what the mover has

What = Literal["read", "write"]


def main(args: Sequence[str]) -> int:
    """`afterglow bench disk`."""
    parser = arguments("afterglow bench disk", (__doc__ or "").splitlines()[0], threads=False)
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 256, 64], help="rows of an extent")
    parser.add_argument("--mib", type=int, default=192, help="what each measurement moves, in MiB (default 192)")
    parser.add_argument(
        "--cache-dir", type=writable_folder, help="folder on the disk to measure (default: a temporary one)"
    )
    options = parser.parse_args(args)
    load = [os.getloadavg()[0]]
    rows: list[dict[str, Any]] = []
    for count in options.rows:
        with tempfile.TemporaryDirectory(prefix="afterglow-bench-", dir=options.cache_dir) as folder:
            files = PlainFiles(Path(folder), count, options.mib << 20, options.seed)
            rows += files.measured(4 if options.quick else 20)
    load.append(os.getloadavg()[0])
    show(
        f"whole extents of {MODEL}, MB/s, medians; load before and after: {load[0]:.1f}, {load[1]:.1f}",
        ("", "rows", "threads", *BUFFERS, "extents", "ratio", "to kept", "A / A", "spread"),
        [
            (
                r["what"],
                r["rows"],
                r["threads"],
                *(f"{r[buffer]['mb_per_s']:.0f}" for buffer in BUFFERS),
                f"{r['mb_per_s']:.0f}",
                f"{r['ratio']:.2f}",
                f"{r['ratio_kept']:.2f}",
                f"{r['a_a']:.2f}",
                f"{100 * r['spread']:.0f} %",
            )
            for r in rows
        ],
    )
    plain = {"ratio": "fastest plain loop", "ratio_kept": "fastest that keeps the bytes"}
    goals = [
        goal(
            f"{r['what']} / {loop}, {r['rows']} rows, threads: {r['threads']}",
            r[key],
            0.8,
            least=True,
            spread=r["spread"],
        )
        for key, loop in plain.items()
        for r in rows
        if r["what"] == "read" or (r["what"] == "write" and key == "ratio")
    ]
    finish(options, rows, goals, model=MODEL, mib=options.mib, load=load)
    return 0


class PlainFiles:
    """Extents of one row count, their slots, and buffer and files of the plain loops."""

    def __init__(self, folder: Path, rows: int, num_bytes: int, seed: int) -> None:
        """Make the extents. Raises: ConfigError where the file system refuses O_DIRECT."""
        spec = PRESETS[MODEL]
        layout = KVLayout(spec.layers, spec.kv_heads, spec.head_dim, "F32")
        self.rows = rows
        self.file_bytes = layout.file_bytes(rows)
        self.count = max(4, num_bytes // self.file_bytes)
        self.tier = DiskTier(folder / "extents", layout, "0" * 64)
        if not self.tier.direct:
            raise ConfigError(f"the file system of {folder} refuses O_DIRECT; its page cache would be measured instead")
        blocks = layout.blocks(rows)
        slots = self.count * blocks
        rng = np.random.default_rng(seed)
        arena = allocate(arena_bytes(layout, slots))
        arena[:] = rng.integers(0, 256, arena.nbytes, np.uint8)
        self.arena = HostArena(layout, slots, arena)
        self.own = [range(n * blocks, (n + 1) * blocks) for n in range(self.count)]
        mixed = rng.permutation(slots).tolist()
        self.mixed = [mixed[n * blocks : (n + 1) * blocks] for n in range(self.count)]
        tokens = np.arange(rows, dtype=np.uint32).tobytes()
        names = [f"{n % 256:02x}{n:062x}" for n in range(self.count)]
        self.records = [ExtentRecord(name, None, 0, "", "exact", tokens, 0, 0.0) for name in names]
        self.plain = [folder / f"plain-{n}" for n in range(self.count)]
        self.memory = allocate(self.count * self.file_bytes)
        self.memory[:] = 1

    def measured(self, repeats: int) -> list[dict[str, Any]]:
        """A row for each direction and number of threads; all variants take turns."""
        calls = sorted({min(call, self.file_bytes) for call in CALLS})
        variants: dict[str, Callable[[], float]] = {}
        for n in THREADS:
            for what in ("write", "read"):  # in this order: the plain loops read the extents
                for buffer in BUFFERS:
                    for call in calls:
                        loop = functools.partial(self.loop, what, n, call, buffer == "kept")
                        variants[f"{what} {n} {buffer} {call}"] = loop
                variants[f"{what} {n}"] = functools.partial(getattr(self, what), n)
            variants[f"read, scattered {n}"] = functools.partial(self.read, n, scattered=True)
        self.write(1)
        found = {name: samples[1:] for name, samples in interleaved(variants, repeats + 1).items()}
        return [self._row(what, n, calls, found) for what in ("read", "read, scattered", "write") for n in THREADS]

    def _row(self, what: str, threads: int, calls: Sequence[int], found: dict[str, list[float]]) -> dict[str, Any]:
        ours = found[f"{what} {threads}"]
        row: dict[str, Any] = {"what": what, "rows": self.rows, "threads": threads}
        best: list[float] = [0.0]
        for buffer in BUFFERS:
            loops = {call: found[f"{what.split(',')[0]} {threads} {buffer} {call}"] for call in calls}
            call, samples = max(loops.items(), key=lambda item: statistics.median(item[1]))
            row[buffer] = {"mb_per_s": round(statistics.median(samples), 1), "call_bytes": call}
            best = max(best, samples, key=statistics.median)
        speed = statistics.median(ours)
        a_a = [statistics.median(s[::2]) / statistics.median(s[1::2]) - 1 for s in (ours, best)]
        return row | {
            "mb_per_s": round(speed, 1),
            "ratio": round(speed / statistics.median(best), 4),
            "ratio_kept": round(speed / row["kept"]["mb_per_s"], 4),
            "a_a": round(1 + max(a_a, key=abs), 4),  # every second repeat against the others; of both, the worse
            "spread": round(max(spread(ours), spread(best)), 4),
        }

    # ---------------------------------------------------------------- the variants: each returns MB/s

    def read(self, threads: int, scattered: bool = False) -> float:
        """Read all extents into slots: each into consecutive slots, or into scattered ones. Returns bytes per second."""
        slots: Sequence[Sequence[int]] = self.mixed if scattered else self.own

        def one(n: int) -> None:
            self.tier.read(ExtentRead(self.records[n].id, self.rows, self.arena, slots[n]), _nothing)

        return self._speed(threads, one)

    def write(self, threads: int) -> float:
        """Write all extents anew. Returns bytes per second."""

        def one(n: int) -> None:
            self.tier.write(self.records[n], self.arena, self.own[n], _nothing)

        for record in self.records:
            self.tier.delete(record.id)
        return self._speed(threads, one)

    def loop(self, what: What, threads: int, call: int, keep: bool) -> float:
        """Read all extents' files, or write as many new ones."""

        def one(n: int) -> None:
            if what == "read":
                fd, direct = open_direct(str(self.tier.path(self.records[n].id)), os.O_RDONLY, direct=True)
            else:
                fd, direct = open_direct(str(self.plain[n]), os.O_WRONLY | os.O_CREAT | os.O_EXCL, direct=True)
            assert direct
            start = n * self.file_bytes if keep else n % threads * call
            for offset in range(0, self.file_bytes, call):
                at = start + offset if keep else start
                piece: Any = self.memory[at : at + min(call, self.file_bytes - offset)]
                moved = os.preadv(fd, [piece], offset) if what == "read" else os.pwritev(fd, [piece], offset)
                assert moved == piece.nbytes
            os.close(fd)

        if what == "write":
            for path in self.plain:
                path.unlink(missing_ok=True)
        return self._speed(threads, one)

    def _speed(self, threads: int, one: Callable[[int], None]) -> float:
        """MB/s of `one(n)` for every file n, dealt out to threads."""

        def deal(first: int) -> None:
            for n in range(first, self.count, threads):
                one(n)

        start = time.perf_counter()
        with ThreadPoolExecutor(threads) as others:
            ended = [others.submit(deal, first) for first in range(1, threads)]
            deal(0)
            for each in ended:
                each.result()
        return self.count * self.file_bytes / (time.perf_counter() - start) / 1e6


def _nothing(layers: int = 0) -> None:
    pass
