"""TTFT of a next turn whose history was recomputed, or lay on device, in host memory, on disk."""

from __future__ import annotations

import functools
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

from afterglow.bench.report import arguments, finish, goal, interleaved, show, spread, writable_folder
from afterglow.bench.timed_requests import greedy, running, words
from afterglow.config import CacheConfig, EngineConfig
from afterglow.engine.engine import Engine

VARIANTS = ("recompute", "device", "host", "disk")


def main(args: Sequence[str]) -> int:
    """`afterglow bench multiturn`."""
    parser = arguments("afterglow bench multiturn", __doc__ or "")
    parser.add_argument("--model", default="bench-100m", help="preset or model directory (default bench-100m)")
    parser.add_argument(
        "--histories",
        type=int,
        nargs="+",
        default=[256, 1024, 2048],
        metavar="TOKENS",
        help="lengths of the history (default 256 1024 2048)",
    )
    parser.add_argument("--new", type=int, default=64, help="new tokens of the turn (default 64)")
    parser.add_argument("--cache-dir", type=writable_folder, help="folder of the disk tier (default: a temporary one)")
    options = parser.parse_args(args)
    repeats = 3 if options.quick else 9
    with tempfile.TemporaryDirectory(prefix="afterglow-bench-", dir=options.cache_dir) as folder:
        cache = CacheConfig(cache_dir=Path(folder), source="load", warm_start=False)
        config = EngineConfig(cache=cache, max_model_len=4096, threads=options.threads)
        with running(options.model, config) as engine:
            rng = random.Random(options.seed)
            rows = [_history(engine, rng, h, options.new, repeats) for h in options.histories]
    show(
        f"TTFT of a turn of {options.new} new tokens, {options.model}, ms (median of {repeats})",
        ("history", *VARIANTS, "host / recompute", "disk / recompute", "host / device", "spread"),
        [
            (
                r["history"],
                *(r["ttft_ms"][v] for v in VARIANTS),
                *(f"1/{r['ttft_ms']['recompute'] / r['ttft_ms'][v]:.1f}" for v in ("host", "disk")),
                r["ttft_ms"]["host"] / r["ttft_ms"]["device"],
                f"{100 * max(r['spread'].values()):.0f} %",
            )
            for r in rows
        ],
    )
    finish(options, rows, _goals(rows), model=options.model)
    return 0


def _goals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    row = rows[-1]
    ttft, noise = row["ttft_ms"], row["spread"]
    return [
        goal(
            f"{ours} / {other} at {row['history']} tokens",
            ttft[ours] / ttft[other],
            wanted,
            least=False,
            spread=max(noise[ours], noise[other]),
        )
        for ours, other, wanted in (
            ("host", "recompute", 1 / 10),
            ("disk", "recompute", 1 / 8),
            ("host", "device", 1.3),
        )
    ]


def _history(engine: Engine, rng: random.Random, history: int, new: int, repeats: int) -> dict[str, Any]:
    """All variants of one history length, taking turns; each turn brings new tokens of its own."""
    past = words(rng, engine, history + 1)

    def ask(prompt: list[int], reuse: bool = True) -> tuple[float, dict[str, int]]:
        (done,) = engine.generate([greedy(prompt, reuse=reuse)])
        cached = done.cached
        return done.ttft_s * 1e3, {"device": cached.device, "host": cached.host, "disk": cached.disk}

    def turn() -> list[int]:
        return past + words(rng, engine, new - 1)

    def measured(variant: str) -> float:
        if variant == "recompute":
            return ask(turn(), reuse=False)[0]
        ask(past)
        engine.settle()
        if variant != "device":
            engine.demote(cast(Literal["host", "disk"], variant))
        ms, cached = ask(turn())
        if cached[variant] < history:
            raise RuntimeError(f"{history} tokens of history should have been in {variant}, but were: {cached}")
        engine.settle()
        return ms

    found = interleaved({v: functools.partial(measured, v) for v in VARIANTS}, repeats + 1)
    kept = {v: samples[1:] for v, samples in found.items()}  # the first round warms memory and caches
    return {
        "history": history,
        "new": new,
        "ttft_ms": {v: round(statistics.median(s), 3) for v, s in kept.items()},
        "spread": {v: round(spread(s), 4) for v, s in kept.items()},
    }
