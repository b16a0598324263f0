"""Layer-wise pre-loading with a read buffer: Figures 18 and 19 of CachedAttention, and the disk of this machine.

A conversation's history lies on a disk that is made slow, so that loading it takes longer than computing the new turn, by
the ratio of the paper's Figure 19. Another request runs before it. Variants: loading all before computing (no pre-loading),
layer by layer when its turn comes (PL-B0), and with the first k layers loaded while the other request runs (PL-Bk). The engine also chooses k itself,
by the paper's formula or the exact one, from what it has measured (`--read-buffer paper`, `auto`).

Then the disk as it is: time to first token with the history on disk, against the bound of layer-wise loading, which is the longer of
loading and computing, and one layer of the other. Histories of 1,024 and 2,048 tokens, of `bench-100m` and of a 1.1 B shape in Q4_0.

    python -m benchmarks.papers.cachedattention.preload [--quick] [--json FILE]
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from afterglow.bench.report import COUNTED, arguments, finish, goal, show, spread
from afterglow.bench.timed_requests import ask, asked, words
from afterglow.choices import ReadBuffer, ReadBufferForm
from afterglow.engine.engine import Engine
from afterglow.plan.step import MoveDone
from afterglow.plan.tiers.buffers import read_buffer_layers
from afterglow.store.extents.throttle import Throttle
from afterglow.store.kvstore import KVStore
from afterglow.store.moving.task import Task
from benchmarks.common.engines import engine_of
from benchmarks.papers.cachedattention.read_buffer import stall
from benchmarks.peers.random_gguf import SHAPE_1B, write_random

RATIO = 0.6376  # compute over load, per layer, that fits Figure 19
PAPER_LAYERS = 40
HISTORY, NEW = 1024, 100
TIERS: tuple[Literal["host", "disk"], ...] = ("host", "disk")
HISTORIES = (1024, 2048)  # on the disk as it is
FORMS: dict[str, ReadBufferForm] = {"PL, the paper's formula": "paper", "PL, the exact formula": "auto"}
BEFORE = 320  # tokens of the request before, which computes for longer than the history loads


def main(args: list[str]) -> int:
    options = arguments("python -m benchmarks.papers.cachedattention.preload", __doc__ or "").parse_args(args)
    repeats = 3 if options.quick else 7
    rng = random.Random(options.seed)
    with engine_of("bench-100m", threads=options.threads, cache={"source": "load"}) as engine:
        computing = _computing(engine, rng, repeats)
        real = [_real_disk(engine, rng, repeats, "bench-100m", history) for history in HISTORIES]
        layers, size = engine.capacity.layers, engine.capacity.file_size(HISTORY)
    with tempfile.TemporaryDirectory(prefix="afterglow-bench-") as folder:
        large = Path(folder) / "large.gguf"
        write_random(large, replace(SHAPE_1B, max_positions=max(HISTORIES) + NEW + 32), "Q4_0", seed=options.seed)
        with engine_of(str(large), threads=options.threads, cache={"source": "load"}) as engine:
            real += [_real_disk(engine, rng, repeats, "1.1 B, Q4_0", history) for history in HISTORIES]
    loading = computing / RATIO
    throttle = Throttle(read_bytes_per_s=size / loading)
    exact = read_buffer_layers(layers, loading / layers, computing / layers)
    buffers = sorted({0, 1, 2, exact - 1, exact, exact + 1, layers} & set(range(layers + 1)))
    cache = {"source": "load", "policy": "lru"}
    with engine_of("bench-100m", threads=options.threads, throttle=throttle, max_batch=1, cache=cache) as engine:
        rows = _variants(engine, rng, buffers, repeats, computing, loading)
    for row in rows:
        row["predicted_ms"] = round(_predicted(row["variant"], layers, computing, loading) * 1e3, 1)
        row["reduction"] = round(1 - row["ttft_ms"] / rows[0]["ttft_ms"], 4)
        row["predicted_reduction"] = round(1 - row["predicted_ms"] / rows[0]["predicted_ms"], 4)
    show(
        f"first token after the request before it has ended: {HISTORY} tokens of history on disk, {NEW} new, {layers}"
        f" layers; loading alone {loading * 1e3:.0f} ms, computing alone {computing * 1e3:.0f} ms",
        ("variant", "ms", "predicted", "reduction", "predicted", "spread"),
        [
            (
                r["variant"],
                r["ttft_ms"],
                r["predicted_ms"],
                f"{100 * r['reduction']:.0f} %",
                f"{100 * r['predicted_reduction']:.0f} %",
                f"{100 * r['spread']:.0f} %",
            )
            for r in rows
        ],
    )
    show(
        "the disk of this machine: ms",
        ("model", "history", "from disk", "load", "compute", "bound", "over the bound", "spread"),
        [
            (
                r["model"],
                r["history"],
                r["disk"],
                r["load"],
                r["compute"],
                r["bound"],
                r["disk"] / r["bound"],
                r["spread"],
            )
            for r in real
        ],
    )
    goals = _paper() + [
        goal(
            f"{row['variant']}: reduction - predicted, points",
            100 * abs(row["reduction"] - row["predicted_reduction"]),
            8,
            least=False,
            spread=100 * row["spread"] / 8,
        )
        for row in rows[1:]
    ]
    goals += [
        goal(
            f"TTFT from disk / bound, {each['model']}, {each['history']} tokens",
            each["disk"] / each["bound"],
            1.10,
            least=False,
            spread=each["spread"],
        )
        for each in real
    ]
    finish(options, rows, goals, real_disk=real, layers=layers)
    return 0


def _paper() -> list[dict[str, Any]]:
    """The paper's Figure 19 event by event: 40 layers, and the reductions it prints."""
    load = 1.0 / PAPER_LAYERS
    compute = RATIO * load
    whole = PAPER_LAYERS * (load + compute)

    def reduction(buffered: int) -> float:
        return 1 - (PAPER_LAYERS * compute + stall(PAPER_LAYERS, load, compute, buffered)) / whole

    exact = read_buffer_layers(PAPER_LAYERS, load, compute)
    return [
        goal("Fig. 19, event simulation: PL-B0", reduction(0), 0.35, least=True, spread=COUNTED),
        goal("Fig. 19, event simulation: PL-B15", reduction(15), 0.60, least=True, spread=COUNTED),
        goal(
            f"stall with the exact buffer ({exact} layers)",
            stall(PAPER_LAYERS, load, compute, exact),
            1e-9,
            least=False,
            spread=COUNTED,
        ),
        goal(
            "stall with one layer less", stall(PAPER_LAYERS, load, compute, exact - 1), 1e-9, least=True, spread=COUNTED
        ),
    ]


def _predicted(variant: str, layers: int, computing: float, loading: float) -> float:
    if variant == "no pre-loading":
        return computing + loading
    load, compute = loading / layers, computing / layers
    if variant in FORMS:
        buffered = read_buffer_layers(layers, load, compute, exact=FORMS[variant] == "auto")
    else:
        buffered = int(variant.removeprefix("PL-B"))
    return computing + stall(layers, load, compute, buffered)


def _computing(engine: Engine, rng: random.Random, repeats: int) -> float:
    """Seconds to the first token with the history in host: what pre-loading cannot hide."""
    found = []
    for _ in range(repeats + 1):
        history = words(rng, engine, HISTORY)
        asked(engine, history)
        engine.settle()
        engine.demote("host")
        found.append(asked(engine, [*history, *words(rng, engine, NEW)]).ttft)
    return statistics.median(found[1:])


class Reads:
    """Watch a store's reads of extents, several at once: when each began and ended."""

    def __init__(self, store: KVStore) -> None:
        self.begins: list[float] = []
        self.ends: list[float] = []
        run, count = store._mover._run, store._counters.moved

        def begin(task: Task) -> bool:
            if task.label == "load":
                self.begins.append(time.perf_counter())
            return run(task)

        def end(task: Task, done: MoveDone, kind: str | None) -> None:
            if task.label == "load":
                self.ends.append(time.perf_counter())
            count(task, done, kind)

        store._mover._run = begin  # type: ignore[method-assign]
        store._counters.moved = end  # type: ignore[method-assign]

    def take(self) -> float:
        """Return the seconds from the first begin to the last end, and forget them."""
        found = max(self.ends, default=0.0) - min(self.begins, default=0.0)
        self.begins.clear()
        self.ends.clear()
        return found


def _real_disk(engine: Engine, rng: random.Random, repeats: int, model: str, rows: int) -> dict[str, Any]:
    """TTFT from the disk as it is, against loading alone and computing alone, taking turns; ms."""
    found: dict[str, list[float]] = {"disk": [], "compute": [], "load": []}
    reads = Reads(engine.parts.store)
    for _ in range(repeats + 1):
        for tier in TIERS:
            history = words(rng, engine, rows)
            asked(engine, history)
            engine.settle()
            engine.demote(tier)
            reads.take()
            turn = asked(engine, [*history, *words(rng, engine, NEW)])
            found["disk" if tier == "disk" else "compute"].append(turn.ttft * 1e3)
            if tier == "disk":
                found["load"].append(reads.take() * 1e3)
    kept = {name: samples[1:] for name, samples in found.items()}
    times = {name: statistics.median(samples) for name, samples in kept.items()}
    shorter, longer = sorted((times["load"], times["compute"]))
    bound = longer + shorter / engine.capacity.layers
    return {"model": model, "history": rows, **times, "bound": bound, "spread": spread(kept["disk"])}


def _variants(
    engine: Engine, rng: random.Random, buffers: list[int], repeats: int, computing: float, loading: float
) -> list[dict[str, Any]]:
    """All variants, taking turns on one engine."""
    variants: dict[str, ReadBuffer] = {"no pre-loading": None, **{f"PL-B{k}": k for k in buffers}, **FORMS}
    found: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats + 1):
        for name, buffered in variants.items():
            engine.baseline(preload="whole" if buffered is None else "layerwise", read_buffer=buffered)
            history = words(rng, engine, HISTORY)
            asked(engine, history)
            engine.settle()
            engine.demote("disk")
            first = ask(engine, words(rng, engine, BEFORE))
            then = ask(engine, [*history, *words(rng, engine, NEW)])
            first.ended.wait()
            then.ended.wait()
            if then.cached.total < HISTORY:
                raise RuntimeError(f"{name}: the history was not reused: {then.cached}")
            found[name].append(then.first - first.last)
    return [
        {
            "variant": name,
            "ttft_ms": round(statistics.median(samples[1:]) * 1e3, 1),
            "spread": round(spread(samples[1:]), 4),
        }
        for name, samples in found.items()
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
