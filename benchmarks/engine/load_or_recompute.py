"""Load or recompute: the disk's speed swept over three orders of magnitude.

At each speed a turn's history lies on disk. It is loaded, recomputed, or whichever way the engine predicts to be faster, also
in part. Promised: the time to the first token is at most 1.1 times the better of the two pure ways, at every speed.

    python -m benchmarks.engine.load_or_recompute [--quick] [--json FILE]
"""

from __future__ import annotations

import random
import statistics
import sys
from typing import Any, cast

from afterglow.bench.report import arguments, finish, goal, show, spread
from afterglow.bench.timed_requests import asked, words
from afterglow.choices import KVSource
from afterglow.engine.engine import Engine
from afterglow.store.extents.throttle import Throttle
from benchmarks.common.engines import engine_of

HISTORY, NEW = 2048, 64
SOURCES = ("load", "recompute", "auto")
MB = 1e6


def main(args: list[str]) -> int:
    parser = arguments("python -m benchmarks.engine.load_or_recompute", __doc__ or "")
    parser.add_argument("--model", default="bench-100m", help="preset or model directory (default bench-100m)")
    options = parser.parse_args(args)
    speeds = [10, 30, 100, 1000] if options.quick else [8, 16, 24, 32, 48, 64, 128, 512, 2048, 8192]  # MB/s
    repeats = 2 if options.quick else 5
    rows = []
    for speed in speeds:
        throttle = Throttle(read_bytes_per_s=speed * MB)
        cache = {"policy": "lru"}
        with engine_of(options.model, threads=options.threads, throttle=throttle, cache=cache) as engine:
            rows.append(_point(engine, random.Random(options.seed), speed, repeats))
    show(
        f"TTFT of {NEW} new tokens with {HISTORY} tokens of history on a disk of so many MB/s, {options.model}, ms",
        ("MB/s", *SOURCES, "auto / better", "loaded tokens", "spread"),
        [
            (
                r["mb_per_s"],
                *(r["ttft_ms"][s] for s in SOURCES),
                r["ratio"],
                r["loaded"],
                f"{100 * max(r['spread'].values()):.0f} %",
            )
            for r in rows
        ],
    )
    goals = [
        goal(
            f"auto / better way at {r['mb_per_s']} MB/s",
            r["ratio"],
            1.1,
            least=False,
            spread=max(r["spread"].values()),
        )
        for r in rows
    ]
    finish(options, rows, goals, model=options.model)
    return 0


def _point(engine: Engine, rng: random.Random, speed: float, repeats: int) -> dict[str, Any]:
    """One speed. First it is learned what loading and computing take, as in any server that has run for a while."""
    for number in (300, 1100, 600, 900):
        _turn(engine, rng, "load", number)
        _turn(engine, rng, "recompute", number)
    found: dict[str, list[float]] = {source: [] for source in SOURCES}
    loaded = 0
    for _ in range(repeats):
        for source in SOURCES:
            ttft, disk = _turn(engine, rng, source, HISTORY)
            found[source].append(ttft)
            if source == "auto":
                loaded = disk
    ttft_ms = {source: round(statistics.median(samples) * 1e3, 1) for source, samples in found.items()}
    return {
        "mb_per_s": speed,
        "ttft_ms": ttft_ms,
        "ratio": round(ttft_ms["auto"] / min(ttft_ms["load"], ttft_ms["recompute"]), 4),
        "loaded": loaded,
        "spread": {source: round(spread(samples), 4) for source, samples in found.items()},
    }


def _turn(engine: Engine, rng: random.Random, source: str, number: int) -> tuple[float, int]:
    """Seconds to the first token, and tokens that came from disk."""
    engine.baseline(source=cast(KVSource, source))
    history = words(rng, engine, number)
    asked(engine, history)
    engine.settle()
    engine.demote("disk")
    turn = asked(engine, [*history, *words(rng, engine, NEW)])
    return turn.ttft, turn.cached.disk


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
