"""What a shared store adds to a request: a turn after a change of replica against one from the own disk, and what it costs where it is not used."""

from __future__ import annotations

import random
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from afterglow.bench.report import interleaved, spread
from afterglow.bench.timed_requests import asked, words
from afterglow.engine.engine import Engine
from afterglow.store.extents.throttle import Throttle
from benchmarks.cluster.replicas import patient, replicas, slow_store, turn

ROWS, NEW = 1024, 16  # tokens of a conversation's history, and of its next turn
RATE = 100e6  # bytes/s of the store, and of the disk
BIG = {"device_cache": 512 << 20, "host_cache": 512 << 20, "disk_cache": 4 << 30, "source": "load"}
SMALL = {"device_cache": 64 << 20, "host_cache": 64 << 20, "disk_cache": 1 << 30, "write_policy": "write_through"}
COLD = 128  # tokens of a prompt that is found nowhere


def moving(model: str, repeats: int, folder: Path, seed: int, threads: int | None) -> dict[str, Any]:
    """One row: the time to the first token of a turn behind 1,024 rows, from the own disk, again, and from the store.

    Each round has a conversation of its own: one replica computes it and asks twice more from its disk; then the other asks.
    """
    rng = random.Random(seed)
    with (
        slow_store(RATE),
        patient(),
        replicas(
            2, model, folder / "moving", BIG, threads=threads, throttle=Throttle(read_bytes_per_s=RATE)
        ) as engines,
    ):
        here, there = engines
        for engine in engines:  # the first pass of each, and of its disk and its store
            first = words(rng, engine, ROWS)
            turn(engine, first)
            for other in engines:
                other.demote("disk")
                asked(other, [*first, *words(rng, engine, NEW)])
        text: list[int] = []

        def own() -> float:
            here.demote("disk")
            done = turn(here, [*text, *words(rng, here, NEW)])
            if done.cached.disk < ROWS - 1:
                raise RuntimeError(f"{done.cached} instead of {ROWS} tokens from the own disk")
            return done.ttft

        def moved() -> float:
            done = turn(there, [*text, *words(rng, there, NEW)])
            if done.cached.shared < ROWS - 1:
                raise RuntimeError(f"{done.cached} instead of {ROWS} tokens from the store")
            return done.ttft

        def computed() -> float:
            text[:] = words(rng, here, ROWS)
            return turn(here, text).ttft

        found = interleaved({"computed": computed, "own disk": own, "own disk again": own, "moved": moved}, repeats)
    return {"what": "moving", "rows": ROWS, "bytes_per_s": RATE, **_medians(found)}


def cold(model: str, repeats: int, folder: Path, seed: int, threads: int | None) -> dict[str, Any]:
    """One row: the time to the first token of prompts that are found nowhere, without a store, again, and with one, which is asked."""
    rng = random.Random(seed)
    with (
        replicas(2, model, None, SMALL, threads=threads) as plain,
        replicas(1, model, folder / "cold", SMALL, threads=threads) as shared,
    ):
        arms = dict(zip(("without", "without again", "with"), (*plain, *shared), strict=True))
        found = interleaved({name: partial(_cold, engine, rng) for name, engine in arms.items()}, repeats)
    return {"what": "cold", "unit": "s", "prompt": COLD, **_medians(found), "later": _later(found)}


def _later(found: dict[str, list[float]]) -> dict[str, float]:
    """Medians over the rounds of the seconds by which an arm is later than the first one; `spread`: half the interquartile range of what
    the same thing differs by from itself.
    """
    with_store, again = (
        [b - a for a, b in zip(found["without"], found[arm], strict=True)] for arm in ("with", "without again")
    )
    low, _, high = statistics.quantiles(again, n=4)
    return {"with": statistics.median(with_store), "again": statistics.median(again), "spread": (high - low) / 2}


def _cold(engine: Engine, rng: random.Random) -> float:
    """Seconds to the first token of a prompt that is found nowhere."""
    return turn(engine, words(rng, engine, COLD)).ttft


def _medians(found: dict[str, list[float]]) -> dict[str, Any]:
    return {name: {"median": statistics.median(values), "spread": spread(values)} for name, values in found.items()}
