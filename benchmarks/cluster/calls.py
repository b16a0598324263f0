"""How many functions an engine calls for each token, with a shared store that nothing is found in, and without one.

Calls, of Python's and of C's functions, in all threads of the engine, are nearly the same in each run, whatever else the machine does; times
differ by more than such a store may cost. No tokens are guessed: how many are depends on times.
"""

from __future__ import annotations

import itertools
import random
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.cluster.replicas import replicas, turn

REQUESTS, PROMPT, REPLY = 20, 32, 96  # tokens of each: too few to be looked up
FIRST = 3  # requests, for what is loaded late
CACHE: dict[str, Any] = {
    "device_cache": 64 << 20,
    "host_cache": 64 << 20,
    "disk_cache": 1 << 30,
    "write_policy": "write_through",
}


def measure(model: str, folder: Path, seed: int) -> dict[str, Any]:
    """Count an engine's calls without a store, again, and with one. Nothing is published: rows stay in memory."""
    stores = {"without": None, "without again": None, "with": folder / "calls"}
    return {"what": "calls", "calls_per_token": {name: _calls(model, store, seed) for name, store in stores.items()}}


def _calls(model: str, store: Path | None, seed: int) -> float:
    counted, counts = itertools.count(), False

    def count(_frame: FrameType, event: str, _what: object) -> None:
        if counts and event in ("call", "c_call"):
            next(counted)

    rng = random.Random(seed)
    threading.setprofile(count)  # of threads that begin from now on
    try:
        with replicas(1, model, store, CACHE, threads=1, speculate="off") as (engine,):
            for number in range(FIRST + REQUESTS):
                counts = number >= FIRST
                turn(engine, [rng.randrange(6, 2000) for _ in range(PROMPT)], REPLY, volatile=True)
            counts = False
    finally:
        threading.setprofile(None)
    return next(counted) / (REQUESTS * REPLY)
