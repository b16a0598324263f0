#!/usr/bin/env python3
"""Where SPEC should win: prefixes of 4K to 32K tokens on disks of 0.2 to 2 GB/s, data 7 times the caches, heads of 64 and 128.

Figures 3, 16 to 18 and 20 to 24 in one sweep: (a) the disk's rate, (b) the prefix's length, (c) rows of a chunk
(`--importance-chunk`), (d) shapes, (e) how much of the data caches hold. At each point the same requests are asked of: H2O with LFU, SPEC (twice: what these differ by is
the spread), loading everything, and an engine that chooses its way itself (`--source auto`); recomputing is measured once for
a length. Is what auto takes about as fast as the fastest of the others? Before that, auto's engine has seen whole loads at this
rate and prompts that were computed, as any server has that has run for a while.

A long prefill is what such a sweep costs. So models have 4 or 8 layers, and random weights; `heads64` is 1024 wide, and its 32K tokens
take about two minutes on two cores. What random layers find important comes from the bundled model (`traces.py`).
Prefixes are computed once for a shape and length; other rates, and chunks of 64 rows and more, use the same files.
Prefixes of 32K tokens are not recomputed: that takes minutes.

SmolLM2-135M, where its package is installed, is asked about WikiText-2 and finds important what it does. Its quality: next tokens
like the full cache's, decoded over what the request selected, as the paper decodes. It has three KV heads, and all vote:
there every key is read, and a quarter of the values.

Caches hold 15 % of the data, or 30 or 7: a third of that on the device, the rest in host. Fewer than seven prefixes are each larger than that, and an LRU of what
is smaller than one request never hits: loading everything, and what auto loads, then comes from disk each time.

Points that the JSON file has of this commit are kept, so that a run that was stopped goes on.

    python -m benchmarks.papers.spec.sweep [--data DIR] [--quick] [--json FILE] [--only TEXT]
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("COLUMNS", "150")

import argparse
import itertools
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from afterglow.bench.report import about, arguments, commit, finish, goal, show
from afterglow.bench.timed_requests import asked, words
from afterglow.choices import ChunkRows
from afterglow.engine.engine import Engine
from afterglow.errors import AfterglowError
from afterglow.library.locate import REAL, find_model
from afterglow.model.loader import load_model
from afterglow.store.extents.throttle import ArtificiallySlowTier, Throttle
from afterglow.text import Tokenizer
from benchmarks.papers.page_rates import SWEEP, sweep_lines
from benchmarks.papers.spec import prefixes
from benchmarks.papers.spec.io import Bench, make_model
from benchmarks.papers.spec.io_variants import (
    AGAIN,
    BASE,
    NEW,
    RETENTION,
    SHAPES,
    SPEC,
    VARIANTS,
    WHOLE,
    Shape,
    Variant,
    Work,
)
from benchmarks.papers.spec.runs import EXACT, run
from benchmarks.papers.spec.runs import Variant as Way
from benchmarks.papers.spec.traces import record

Row = dict[str, Any]
AUTO, RECOMPUTE = "auto", VARIANTS[0].name
ARMS = [
    VARIANTS[0],
    *(variant for variant in VARIANTS if variant.name in (WHOLE, BASE, SPEC)),
    AGAIN,
    Variant(AUTO, "auto", "score", True, "cut"),
]
RECOMPUTED = 16384  # tokens of the longest prefix that is computed anew
AT_MOST = 1.1  # times the fastest way is what auto may take
REAL_NAME = "smollm2"

_HEADS64 = Shape(head_dim=64, ffn=2816, lengths=(0, 0), device=0.05, host=0.1, layers=4, heads=16)
MODELS = {
    "heads64": _HEADS64,
    "wide": SHAPES["wide"],
    "grouped": replace(_HEADS64, ffn=5632, layers=8, heads=32, kv_heads=4, weights="Q8_0"),  # Llama-1.1B, fewer layers
    "heads128": replace(_HEADS64, head_dim=128, ffn=5632, weights="Q8_0"),
}


@dataclass(frozen=True)
class Point:
    """What is measured: a model, prefixes of so many tokens, a disk, chunks, and the percent of the data that caches hold."""

    shape: str
    tokens: int
    mb_per_s: int = 500
    chunk: ChunkRows = 64
    caches: int = 15

    @property
    def files(self) -> tuple[str, int, int]:
        """Name what points with the same files have in common."""
        return self.shape, self.tokens, min(64, self.chunk)

    @property
    def name(self) -> str:
        usual = f"{self.shape}, {self.tokens} tokens, {self.mb_per_s} MB/s, chunks of {self.chunk}"
        return usual if self.caches == 15 else f"{usual}, caches of {self.caches} %"


POINTS = [
    *(Point("heads64", 8192, rate) for rate in (200, 500, 1000, 2000)),
    *(Point("heads64", 8192, caches=percent) for percent in (30, 7)),
    *(Point("heads64", 8192, chunk=chunk) for chunk in (128, 256, 16, 32)),
    *(Point("heads64", tokens) for tokens in (4096, 16384, 32768)),
    Point("wide", 6144),
    Point("grouped", 8192),
    Point("heads128", 8192),
    *(Point(REAL_NAME, 4096, rate) for rate in (200, 500)),
    Point(REAL_NAME, 8064),  # it has 8,192 positions
]
QUICK = [Point("heads64", 2048, 200), Point("heads64", 2048), Point("heads64", 2048, chunk=16), Point(REAL_NAME, 1024)]


@dataclass
class Kept:
    """The JSON file with the points that are done. Those of another commit, seed or size of run are not."""

    options: argparse.Namespace
    rows: list[Row]

    @classmethod
    def of(cls, options: argparse.Namespace) -> Kept:
        """Read the file, if there is one."""
        path: Path | None = options.json
        found = json.loads(path.read_text()) if path is not None and path.is_file() else {}
        wanted = {"commit": commit(), "asked_quick": options.quick, "seed": options.seed}
        same = found.items() >= wanted.items()
        return cls(options, found["rows"] if same else [])

    def row(self, point: Point) -> Row | None:
        """Find what a point has shown."""
        return next((row for row in self.rows if row.items() >= asdict(point).items()), None)

    def recomputed(self, point: Point) -> float | None:
        """Find what recomputing takes at this length, if another point has measured it: milliseconds."""
        same = (row for row in self.rows if (row["shape"], row["tokens"]) == (point.shape, point.tokens))
        return next((row["recompute_ms"] for row in same if row["recompute_ms"] is not None), None)

    def add(self, row: Row) -> None:
        """Take a point, and write the file anew: it is whole at any time."""
        self.rows.append(row)
        path: Path | None = self.options.json
        if path is not None:
            facts = {**about(self.options), "rows": self.rows, "goals": goals(self.rows), **self.more()}
            path.parent.mkdir(parents=True, exist_ok=True)
            beside = path.with_name(path.name + ".part")
            beside.write_text(json.dumps(facts, indent=1) + "\n")
            beside.replace(path)

    def more(self) -> Row:
        """Return what the file holds besides. A run without all points is as good as a quick one."""
        short = self.options.quick or any(self.row(point) is None for point in POINTS)
        return {"quick": short, "asked_quick": self.options.quick}


def main(args: Sequence[str] | None = None) -> int:
    """The command."""
    options = _options(args)
    kept, skipped = Kept.of(options), []
    wanted = [point for point in (QUICK if options.quick else POINTS) if options.only in point.name]
    left = [point for point in wanted if kept.row(point) is None]
    for files, points in itertools.groupby(left, key=lambda point: point.files):
        try:
            _measure(list(points), kept, options)
        except (AfterglowError, OSError) as error:
            if files[0] != REAL_NAME:
                raise
            skipped.append(f"{REAL}, {files[1]} tokens: {error}")
    _print(kept.rows)
    for line in skipped:
        print(f"skipped: {line}")
    finish(options, kept.rows, goals(kept.rows), skipped=skipped, **kept.more())
    return 0


def arguments_with_data(command: str, about: str) -> argparse.ArgumentParser:
    """Make the parser of a benchmark that takes texts from a folder."""
    parser = arguments(command, about)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    data = os.environ.get("AFTERGLOW_DATA")
    parser.add_argument("--data", type=Path, default=data and Path(data), metavar="DIR", help="with wikitext2/")
    return parser


def _options(args: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments_with_data("python -m benchmarks.papers.spec.sweep", __doc__ or "")
    parser.add_argument("--only", default="", metavar="TEXT", help="only points whose names hold this")
    return parser.parse_args(args)


def _measure(points: list[Point], kept: Kept, options: argparse.Namespace) -> None:
    """Measure points with the same files."""
    first, rng = points[0], random.Random(options.seed)
    real = first.shape == REAL_NAME
    with tempfile.TemporaryDirectory(prefix="afterglow-bench-") as folder:
        if real:
            model, tokens = find_model(REAL), wikitext(options)
            spec = load_model(model).spec
            shape = replace(
                _HEADS64, head_dim=spec.head_dim, layers=spec.layers, heads=spec.heads, kv_heads=spec.kv_heads
            )
        else:
            shape = MODELS[first.shape]
            model = make_model(Path(folder), shape, first.tokens + NEW + 64, options.seed)
        count = prefix_count(first.tokens, shape.row_bytes, few=options.quick or real)
        quality = {"agreement": _quality(model, tokens, first.tokens, options)} if real else {}
        recorded = None if real else record(count, 1500, options.seed)
        bench = Bench(str(model), Path(folder), [first.tokens] * count, recorded, shape, options)
        bench.config["importance_chunk"] = first.chunk
        print(f"{first.shape}: {count} prefixes of {first.tokens} tokens, {bench.data / 1e6:.0f} MB", flush=True)
        work = bench.fill(rng, 3 if options.quick else 8, iter(tokens) if real else None)
        bench.prepare(work)
        for (chunk, percent), same in itertools.groupby(points, key=lambda point: (point.chunk, point.caches)):
            bench.config["importance_chunk"] = chunk
            bench.shape = replace(shape, device=percent / 300, host=percent / 150)
            bench.cold = percent * count < 100
            with bench.engines(Throttle(), auto=True) as engines:
                for point in same:
                    fresh = unseen(work, points.index(point))
                    kept.add(_point(bench, engines, fresh, point, kept) | quality)


def unseen(work: Work, point: int) -> Work:
    """Change the first new token of each request, so that rows which an earlier point has stored are of no use to this one."""

    def changed(requests: list[tuple[int, int, list[int]]]) -> list[tuple[int, int, list[int]]]:
        return [(at, number, [new[0] ^ point, *new[1:]]) for at, number, new in requests]

    return Work(work.prefixes, changed(work.warm), changed(work.judged))


def prefix_count(tokens: int, row_bytes: int, *, few: bool) -> int:
    """Say how many prefixes there are: at most 8, in all about 48K tokens and 4 GiB, but at least 3."""
    return 3 if few else max(3, min(8, 49152 // tokens, (4 << 30) // (tokens * row_bytes)))


def _point(bench: Bench, engines: dict[str, Engine], work: Work, point: Point, kept: Kept) -> Row:
    throttle = Throttle(read_bytes_per_s=1e6 * point.mb_per_s, latency_s=1e-4)
    for engine in engines.values():
        tier = engine.parts.store.on_disk.tier
        assert isinstance(tier, ArtificiallySlowTier)
        tier.change(throttle)
    teach(engines[AUTO], work)
    known = kept.recomputed(point)
    rows = bench.compare(engines, work, ARMS, int(known is None and point.tokens <= RECOMPUTED))
    print(point.name, {row["variant"]: row["ttft_ms"] for row in rows}, flush=True)
    return summary(point, rows, known, bench.data)


def teach(engine: Engine, work: Work) -> None:
    """Let an engine that chooses see what reading and computing take now."""
    rng = random.Random(0)
    engine.baseline(source="load")
    for prefix in itertools.islice(itertools.cycle(work.prefixes), 4):
        engine.demote("disk")
        asked(engine, [*prefix, *words(rng, engine, NEW)], kv_retention=1.0)
    engine.demote("disk")
    for rows in (256, 1024, 512, 1536):
        asked(engine, words(rng, engine, min(rows, len(work.prefixes[0]))), reuse=False)
    engine.baseline(source="auto")


def summary(point: Point, rows: Sequence[Row], recomputed: float | None, data: int) -> Row:
    """Make one row of the file. `rows`: of the arms; `recomputed`: milliseconds, if they lack them."""
    by_name = {row["variant"]: row for row in rows}
    whole, spec, again, auto = (by_name[name] for name in (WHOLE, SPEC, AGAIN.name, AUTO))
    recompute: float | None = by_name[RECOMPUTE]["ttft_ms"] if RECOMPUTE in by_name else recomputed
    ways = {"select": spec["ttft_ms"], "load": whole["ttft_ms"]} | (
        {} if recompute is None else {"recompute": recompute}
    )
    fastest = min(ways, key=ways.__getitem__)
    saved = (whole["read_mb"] - spec["read_mb"]) / point.mb_per_s * 1e3
    return {
        **asdict(point),
        "data_mb": round(data / 1e6),
        "arms": {"load": whole, "h2o": by_name[BASE], "spec": spec, "again": again, "auto": auto},
        "recompute_ms": recompute,
        "fastest": fastest,
        "auto_ways": auto["ways"],
        "auto_ratio": round(auto["ttft_ms"] / ways[fastest], 4),
        "predicted_saving_ms": round(saved - spec["ttft_ms"] * (spec["identifying"] + spec["mapping"]), 1),
        "spread": round(abs(again["ttft_ms"] / spec["ttft_ms"] - 1), 4),
        "spread_waiting": round(abs(again["wait_ms"] / max(0.1, spec["wait_ms"]) - 1), 4),
    }


def goals(rows: Sequence[Row]) -> list[Row]:
    """What the paper's figures and the engine's own choice ask for, point by point. Loading everything has to be beaten only where
    the bytes that are not read take longer than finding out which they are."""
    found = []
    for row in rows:
        point = Point(**{name: row[name] for name in Point.__dataclass_fields__}).name
        whole, base, spec = (row["arms"][name] for name in ("load", "h2o", "spec"))
        if row["predicted_saving_ms"] > 0:
            gain = whole["ttft_ms"] / spec["ttft_ms"]
            found.append(
                goal(f"{point}: TTFT, loading everything over SPEC", gain, 1.0, least=True, spread=row["spread"])
            )
        waits = base["wait_ms"] / max(0.1, spec["wait_ms"])
        name = f"{point}: waiting for I/O, H2O with LFU over SPEC"
        found.append(goal(name, waits, 1.5, least=True, spread=row["spread_waiting"]))
        name = f"{point}: identification, share of TTFT"
        found.append(goal(name, spec["identifying"], 0.06, least=False, spread=row["spread"]))
        name = f"{point}: TTFT, auto over the fastest way"
        found.append(goal(name, row["auto_ratio"], AT_MOST, least=False, spread=row["spread"]))
    return found


def wikitext(options: argparse.Namespace) -> list[int]:
    """WikiText-2 as SmolLM2 reads it. Raises: AfterglowError, OSError."""
    path = (options.data or Path("no --data and no AFTERGLOW_DATA")) / "wikitext2" / "wiki.test.raw"
    text = path.read_text(encoding="utf-8")
    return Tokenizer(find_model(REAL)).encode(text, add_special_tokens=False)


def _quality(model: Path, tokens: Sequence[int], rows: int, options: argparse.Namespace) -> dict[str, float]:
    """Percent of next tokens that are those of the full cache, by way: texts that go on behind prefixes of `rows` tokens."""
    each = rows + 7 * 2 * prefixes.TEXT
    parts = [tokens[at * each : (at + 1) * each] for at in range(1 if options.quick else 3)]
    ways = [EXACT, Way("spec", RETENTION), Way("h2o", RETENTION)]
    found, _ = run(load_model(model), prefixes.stories(parts, (), rows, 4), {"published": ways}, options.seed)
    alike = found["published"].text_agree.accuracy(EXACT.name)["accuracy"]
    return {way.mode: alike[way.name]["value"] for way in ways[1:]}


def _print(rows: Sequence[Row]) -> None:
    show(f"{NEW} new tokens behind a prefix, retention {RETENTION:g}", SWEEP, list(sweep_lines(rows)))


if __name__ == "__main__":
    sys.exit(main())
