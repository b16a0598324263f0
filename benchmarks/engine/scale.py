"""A large cache: start-up, memory, matching and eviction with a million extents in the catalog.

Conversations of about 8 extents of 64 to 256 tokens hang below shared system prompts. Their catalog is a real file; there
are no extents, only their names in a listing. Each size is measured in a process of its own. Start-up is what a server
does between opening the catalog and being able to match.

    python -m benchmarks.engine.scale [--extents 1000000] [--quick] [--json FILE]
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from afterglow.bench.report import arguments, finish, goal, show, spread
from afterglow.engine.undisturbed import undisturbed
from afterglow.plan.options import Capacity, SchedulerOptions
from afterglow.plan.prefix.extent import Extent
from afterglow.plan.prefix.index import extent_id
from afterglow.plan.scheduler import Scheduler
from afterglow.plan.step import ExtentRecord
from afterglow.store.database.recovery import create, file_name, open_catalog
from afterglow.store.extents.disk_tier import DiskTier
from afterglow.store.extents.layout import KVLayout
from benchmarks.common.paths import ROOT

DIGEST = "5ca1e" * 8
SALTS = 16
PROMPTS_PER_SALT = 8
PROMPT_ROWS = 256
TURNS = 8
VOCABULARY = 50_000
LAYOUT = KVLayout(24, 2, 64, "BF16")
SMALLEST = 10_000  # extents of the smallest catalog, which the others are compared with
ASKED = 2000  # prompts that are matched
VICTIMS = 1000
FLAT = 2.0  # how much slower than with the smallest size still counts as flat: a larger index misses the processor's caches more often

Told = dict[str, Any]


class Listing(DiskTier):
    """A folder of extents that is nothing but its listing."""

    def __init__(self, names: Path) -> None:
        super().__init__(names.parent, LAYOUT, DIGEST, inspect=True)
        self._names = names

    def extents(self) -> Iterator[str]:
        with open(self._names) as lines:
            for line in lines:
                yield line[:-1]


def main(args: list[str]) -> int:
    parser = arguments("python -m benchmarks.engine.scale", __doc__ or "")
    parser.add_argument("--extents", type=int, default=1_000_000, help="of the largest catalog (default 1,000,000)")
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to make the catalogs (default: a temporary one)"
    )
    parser.add_argument("--measure", type=Path, default=None, help="measure a folder that was made, and nothing else")
    options = parser.parse_args(args)
    if options.measure is not None:
        print(json.dumps(measured(options.measure, options.seed)))
        return 0
    if options.extents < SMALLEST:
        parser.error(f"--extents must be {SMALLEST} or more, the smallest size, got {options.extents}")
    largest = min(50_000, options.extents) if options.quick else options.extents
    sizes = sorted({size for size in (SMALLEST, largest // 10, largest) if size >= SMALLEST})
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as made:
        for size in sizes:
            folder = Path(made) / str(size)
            folder.mkdir()
            begun = time.perf_counter()
            make(folder, size, options.seed)
            print(f"{size} extents: catalog made in {time.perf_counter() - begun:.0f} s", file=sys.stderr)
            command = [
                sys.executable,
                "-m",
                "benchmarks.engine.scale",
                "--measure",
                str(folder),
                "--seed",
                str(options.seed),
            ]
            runs = [
                subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
                for _ in range(REPEATS)
            ]
            rows.append(_middle([json.loads(run) for run in runs]))
            for file in folder.iterdir():
                file.unlink()
    show(
        "a cache of so many extents",
        ("extents", "start s", "CPU s", "B / extent", "and tokens B", "match µs", f"evict {VICTIMS} ms"),
        [
            (
                r["extents"],
                r["start_s"],
                r["start_cpu_s"],
                round(r["bytes_per_extent"]),
                round(r["token_bytes_per_extent"]),
                r["match_us"],
                r["evict_ms"],
            )
            for r in rows
        ],
    )
    first, last = rows[0], rows[-1]
    goals = [
        _goal(f"seconds to start with {largest} extents", "start_s", last, 30 * largest / 1_000_000),
        _goal("bytes of memory per extent, tokens aside", "bytes_per_extent", last, 1024),
        _goal("match: slower than the smallest size by", "match_us", last, FLAT, first),
        _goal("evict: slower than the smallest size by", "evict_ms", last, FLAT, first),
    ]
    finish(options, rows, goals)
    return 0


def make(folder: Path, count: int, seed: int) -> None:
    """A catalog of `count` extents, and the listing of their names."""
    with open(folder / "names", "w") as names:

        def told() -> Iterator[ExtentRecord]:
            for record in generated(count, seed):
                names.write(f"{record.id}\n")
                yield record

        create(folder / "catalog.sqlite", told(), file_name)


def generated(count: int, seed: int) -> Iterator[ExtentRecord]:
    """System prompts, then conversations below them, each used as a whole at some time."""
    draw, rng = random.Random(seed), np.random.default_rng(seed)
    prompts: list[ExtentRecord] = []
    made = 0

    def record(parent: ExtentRecord | None, before: bytes, salt: str, rows: int, used: float) -> ExtentRecord:
        tokens = rng.integers(0, VOCABULARY, rows, dtype=np.uint32).tobytes()
        name = extent_id(DIGEST, salt, before, tokens)
        above, above_rows = (parent.id, parent.rows) if parent is not None else (None, 0)
        return ExtentRecord(name, above, above_rows, salt, "exact", tokens, LAYOUT.file_bytes(rows), used, 1)

    for prompt in range(min(SALTS * PROMPTS_PER_SALT, count // TURNS)):
        prompts.append(record(None, b"", f"{prompt % SALTS:064x}", PROMPT_ROWS, 1e9))
        yield prompts[-1]
        made += 1
    while made < count:
        parent = draw.choice(prompts)
        before, used = parent.tokens, 1e9 * draw.random()
        for _ in range(min(draw.randint(TURNS - 4, TURNS + 4), count - made)):
            parent = record(parent, before, parent.salt, draw.randint(64, 256), used)
            before += parent.tokens
            yield parent
            made += 1


REPEATS = 2  # of each size


def _middle(runs: list[Told]) -> Told:
    """Take the median of each figure, and how far the runs are apart."""
    found = {key: statistics.median([run[key] for run in runs]) for key in runs[0]}
    found["extents"] = runs[0]["extents"]
    return found | {"spread": {key: round(spread([run[key] for run in runs]), 4) for key in runs[0]}}


def _goal(name: str, key: str, row: Told, wanted: float, base: Told | None = None) -> Told:
    """At most `wanted` for a figure, or for its ratio to the one in `base`."""
    noise = max(each["spread"][key] for each in (row, base) if each is not None)
    return goal(name, row[key] / (base[key] if base is not None else 1), wanted, least=False, spread=noise)


def measured(folder: Path, seed: int) -> Told:
    """Everything of one size, in a process that has done nothing else."""
    before = resident()
    wall, cpu = time.perf_counter(), time.process_time()
    with undisturbed():
        opened = open_catalog(folder / "catalog.sqlite", Listing(folder / "names"))
    catalog_s = time.perf_counter() - wall
    records = opened.records
    count, token_bytes = len(records), sum(len(record.tokens) for record in records)
    rows = {record.id: record.rows for record in records}  # as the store keeps them
    capacity = Capacity(
        device_rows=65_536,
        host_slots=sum(-(-number // 64) for number in rows.values()),
        disk_bytes=2**60,
        file_bytes=tuple(LAYOUT.file_bytes(64 * blocks) for blocks in range(1, 17)),
        layers=LAYOUT.layers,
    )
    scheduler = Scheduler(
        capacity, SchedulerOptions(policy="lookahead", digest=DIGEST)
    )  # the policy is the default one of a server
    restored = time.perf_counter()
    with undisturbed():
        useless = scheduler.restore(records, 2e9)
    ended = time.perf_counter()
    start_cpu_s = time.process_time() - cpu
    assert not useless, f"{len(useless)} extents were not taken over"
    opened.records.clear()
    del records
    opened.catalog.close()
    memory = resident() - before
    extents = list(scheduler.cache.index.extents.values())
    return {
        "extents": count,
        "start_s": ended - wall,
        "start_cpu_s": start_cpu_s,
        "catalog_s": catalog_s,
        "restore_s": ended - restored,
        "bytes_per_extent": (memory - token_bytes) / count,
        "token_bytes_per_extent": token_bytes / count,
        "match_us": 1e6 * matching(scheduler, extents, random.Random(seed)),
        "evict_ms": 1e3 * evicting(scheduler, extents),
    }


def matching(scheduler: Scheduler, extents: list[Extent], draw: random.Random) -> float:
    """Seconds to match a prompt, the median: a conversation up to some turn, and tokens that are new."""
    by_name = scheduler.cache.index.extents
    asked = []
    for extent in draw.choices(extents, k=ASKED):
        tokens, rows, above = extent.tokens, extent.rows, extent.parent
        while above is not None:
            tokens = by_name[above].tokens + tokens
            rows += by_name[above].rows
            above = by_name[above].parent
        asked.append((extent.salt, tokens + b"\xff" * 256, rows))
    spent = []
    for salt, tokens, rows in asked:
        begun = time.perf_counter()
        match = scheduler.cache.index.match(salt, tokens)
        spent.append(time.perf_counter() - begun)
        assert match.rows == rows
    return statistics.median(spent)


def evicting(scheduler: Scheduler, extents: list[Extent]) -> float:
    """Seconds to let 1,000 extents go from a host tier that holds them all, the median."""
    placement = scheduler.cache.placement
    for extent in extents:
        slots = placement.host.pool.take(scheduler.capacity.blocks(extent.rows))
        assert slots is not None
        placement.add(extent, slots, write_through=False, now=0.0)
    return statistics.median(_timed(lambda: _evict(scheduler)) for _ in range(5))


def _evict(scheduler: Scheduler) -> None:
    gone = scheduler.cache.counters.evicted_host + VICTIMS
    while scheduler.cache.counters.evicted_host < gone:
        scheduler.cache.placement.host.evict(scheduler.cache.placement.host.pool.free + 64, 2e9)


def _timed(call: Callable[[], None]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
