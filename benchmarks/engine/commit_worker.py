"""Measures the engine of one checkout, for `benchmarks.engine.commits`: run as a program with the checkout's `src` on PYTHONPATH.

Prints one line of JSON: rates (higher is better), bytes of memory in huge pages, and the folder of the package. It uses nothing of
`benchmarks`, since its checkout has others.
"""

from __future__ import annotations

import json
import random
import re
import statistics
import sys
from pathlib import Path

import afterglow
from afterglow.bench.timed_requests import ask, asked, running, words
from afterglow.config import CacheConfig, EngineConfig
from afterglow.engine.engine import Engine

MODEL, ROW = "bench-100m", 12 * 2 * 768 * 4  # bytes of KV for each token
PROMPT, SHARED, BATCH, DECODED, NEW = 1024, 1024, 8, 64, 64


def rates(repeats: int) -> dict[str, float]:
    """Measure medians: tokens/s of prefill and decode, 1/s of first tokens behind cached turns."""
    cache = CacheConfig(disk_cache=0, device_cache=12 * PROMPT * ROW, host_cache=2 * 2**30, source="load")
    config = EngineConfig(cache=cache, max_model_len=4096, relay="on", speculate="off")
    with running(MODEL, config) as engine:
        found: dict[str, list[float]] = {}
        for number in range(repeats + 1):
            for name, rate in measured(engine, random.Random(number)).items():
                found.setdefault(name, []).append(rate)
    return {name: statistics.median(each[1:]) for name, each in found.items()}  # the first round touches memory


def measured(engine: Engine, rng: random.Random) -> dict[str, float]:
    long = words(rng, engine, PROMPT)
    rates = {"prefill of 1,024 tokens": PROMPT / asked(engine, long, reuse=False).ttft}
    for batch in (1, BATCH):
        rates[f"decode, batch {batch}"] = decode(engine, [words(rng, engine, 256) for _ in range(batch)])
    head = words(rng, engine, SHARED)
    asked(engine, head)
    behind = [[*head, *words(rng, engine, 32)] for _ in range(BATCH)]
    rates[f"decode, batch {BATCH}, relay behind 1,024 tokens"] = decode(engine, behind, reuse=True)
    asked(engine, long)
    engine.settle()
    rates["second turn, from device"] = turn(engine, long + words(rng, engine, NEW), "device")
    engine.demote("host")
    rates["second turn, from host"] = turn(engine, long + words(rng, engine, NEW), "host")
    return rates


def decode(engine: Engine, prompts: list[list[int]], *, reuse: bool = False) -> float:
    """Measure tokens/s from when every prompt has its first one."""
    turns = [ask(engine, prompt, DECODED + 1, reuse=reuse) for prompt in prompts]
    for each in turns:
        each.ended.wait()
    return DECODED * len(turns) / (max(each.last for each in turns) - max(each.first for each in turns))


def turn(engine: Engine, prompt: list[int], tier: str) -> float:
    done = asked(engine, prompt)
    reused = getattr(done.cached, tier)
    if reused < PROMPT // 2:
        raise RuntimeError(f"not from {tier}: {done.cached}")
    return 1 / done.ttft


def huge_bytes() -> int:
    """Read how much of this process's memory lies in huge pages."""
    lines = Path("/proc/self/smaps_rollup").read_text()
    return int(re.findall(r"AnonHugePages:\s+(\d+)", lines)[0]) * 1024


if __name__ == "__main__":
    found = rates(int(sys.argv[1]))
    print(json.dumps({"rates": found, "huge_bytes": huge_bytes(), "package": str(Path(afterglow.__file__).parent)}))
