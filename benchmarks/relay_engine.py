"""Throughput with a shared system prompt: Figures 6 and 8 of RelayAttention, small, on the real engine.

Requests with ShareGPT-like lengths (divided by 8 by default) behind one system prompt, all at once: recomputed by each
("recompute"), cached and read by each ("shared"), read once for all ("relay"), and as the engine decides ("auto"). Variants
take turns in one run on engines of equal weights.

    python benchmarks/relay_engine.py [--quick] [--json FILE]
"""

from __future__ import annotations

import contextlib
import random
import statistics
import sys
import time
from typing import Any

from afterglow.bench.report import arguments, finish, goal, show, spread
from afterglow.engine.engine import Engine
from asking import ask, engine_of, words

VARIANTS = {"recompute": "off", "shared": "off", "relay": "on", "auto": "auto"}


def main(args: list[str]) -> int:
    parser = arguments("relay_engine", __doc__ or "")
    parser.add_argument("--model", default="bench-100m", help="preset or model directory (default bench-100m)")
    parser.add_argument("--requests", type=int, default=32, help="requests of a round (default 32)")
    parser.add_argument("--divide", type=int, default=8, help="lengths are divided by it (default 8)")
    options = parser.parse_args(args)
    prefixes = [0, 512] if options.quick else [0, 64, 512, 2048]
    batches = [8] if options.quick else [1, 8, 32]
    with contextlib.ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                engine_of(
                    options.model,
                    threads=options.threads,
                    cache={"disk_cache": 0, "device_cache": 4 * 2**30, "host_cache": 2**30},
                    relay=relay,
                    max_batch=max(batches),
                    max_model_len=4096,
                )
            )
            for name, relay in VARIANTS.items()
            if name != "recompute"
        }
        engines["recompute"] = engines["shared"]
        rows = [_point(engines, options, batch, prefix) for batch in batches for prefix in prefixes]
    show(
        f"output tokens per second, {options.model}, lengths / {options.divide}",
        ("batch", "system prompt", *VARIANTS, "relay : shared", "auto : better", "spread"),
        [
            (
                r["batch"],
                r["prefix"],
                *(f"{r['rate'][name]:.1f}" for name in VARIANTS),
                r["rate"]["relay"] / r["rate"]["shared"],
                r["auto"],
                f"{100 * r['spread']:.0f} %",
            )
            for r in rows
        ],
    )
    goals = [
        goal(
            f"auto : better of on and off, batch {r['batch']}, prefix {r['prefix']}",
            r["auto"],
            0.98,
            least=True,
            tolerance=r["spread"],
        )
        for r in rows
    ]
    finish(options.json, options.seed, rows, goals, model=options.model)
    return 0


def _point(engines: dict[str, Engine], options: Any, batch: int, prefix: int) -> dict[str, Any]:
    rng = random.Random(f"{options.seed} {batch} {prefix}")
    system = words(rng, engines["shared"], prefix)
    count = max(batch, options.requests if batch > 1 else options.requests // 8)
    lengths = [_lengths(rng, options.divide) for _ in range(count)]
    found: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(2 if options.quick else 4):
        asked = [([*system, *words(rng, engines["shared"], question)], reply) for question, reply in lengths]
        for name in VARIANTS:
            found[name].append(_rate(engines[name], asked, batch, reuse=name != "recompute"))
    rates = {name: statistics.median(values) for name, values in found.items()}
    noise = max(spread(found[name]) for name in ("shared", "relay", "auto"))
    return {
        "batch": batch,
        "prefix": prefix,
        "rate": rates,
        "auto": rates["auto"] / max(rates["shared"], rates["relay"]),
        "spread": noise,
    }


def _lengths(rng: random.Random, divide: int) -> tuple[int, int]:
    """Question and reply, as of ShareGPT: means 240 and 235 tokens within 4 to 1,024 (RelayAttention Table 1)."""
    return tuple(max(4, min(1024, int(rng.lognormvariate(5.0, 0.9)))) // divide + 1 for _ in range(2))  # type: ignore[return-value]


def _rate(engine: Engine, asked: list[tuple[list[int], int]], batch: int, reuse: bool) -> float:
    """All requests, `batch` at a time; output tokens per second."""
    began = time.perf_counter()
    running, waiting = [], list(asked)
    tokens = 0
    while waiting or running:
        while waiting and len(running) < batch:
            prompt, reply = waiting.pop(0)
            running.append(ask(engine, prompt, reply, reuse=reuse))
        running[0].ended.wait()
        tokens += sum(len(turn.tokens) for turn in running if turn.ended.is_set())
        running = [turn for turn in running if not turn.ended.is_set()]
    return tokens / (time.perf_counter() - began)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
