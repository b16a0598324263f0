"""What a directory's lookup adds to a cold prompt, by the prompt's length: seconds until its first step, and to its first token.

The model has one layer of 16 numbers, so that its own time says as little as possible of the difference. While a long prompt is
computed, the rows that are ready are published already. So the time to the first token is compared with that of the same engine which publishes, but
looks nothing up; what publishing takes is told apart.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from afterglow.bench.report import spread
from afterglow.bench.timed_requests import words
from afterglow.engine.engine import Engine
from afterglow.model.presets import PRESETS
from afterglow.plan.prefix.block_keys import BLOCK_ROWS
from afterglow.store.shared.counters import SharedStats
from benchmarks.cluster.directory_server import directory_server
from benchmarks.cluster.replicas import patient, replicas, turn

LENGTHS = (1024, 8192, 32_768)
LONGEST = max(LENGTHS) + 64
CACHE: dict[str, Any] = {
    "device_cache": 64 << 20,
    "host_cache": 64 << 20,
    "disk_cache": 1 << 30,
    "write_policy": "write_through",
}
MODEL = "one-layer"
SPEC = replace(PRESETS["tiny"], layers=1, hidden=16, heads=1, kv_heads=1, ffn=16, max_positions=LONGEST)
WITH, UNASKED = "with", "with, without lookups"  # of a store and its directory
FIRST_S = 60.0  # that the directory has to become whole


def measure(rounds: int, folder: Path, seed: int, threads: int | None) -> list[dict[str, Any]]:
    """One row for each length: prompts without a store, again, with a store and a directory, and with these but without a lookup,
    in random order.
    """
    rng = random.Random(seed)
    with (
        patch.dict(PRESETS, {MODEL: SPEC}),
        patient(),
        directory_server(folder / "directory") as url,
        replicas(2, MODEL, None, CACHE, threads=threads, max_model_len=LONGEST) as plain,
        replicas(
            1, MODEL, folder / "lookups", CACHE | {"shared_directory": url}, threads=threads, max_model_len=LONGEST
        ) as shared,
    ):
        arms = dict(zip(("without", "without again", WITH, UNASKED), (*plain, *shared, *shared), strict=True))
        _until_whole(arms[WITH], rng)
        return [_row(arms, length, rounds, rng) for length in LENGTHS]


def _row(arms: dict[str, Engine], length: int, rounds: int, rng: random.Random) -> dict[str, Any]:
    waited: dict[str, list[float]] = {name: [] for name in arms}
    ttft: dict[str, list[float]] = {name: [] for name in arms}
    lookups: list[float] = []
    for number in range(rounds + 1):
        for name in rng.sample(sorted(arms), len(arms)):
            before = _counted(arms[WITH])
            with _no_lookups(arms[name]) if name == UNASKED else contextlib.nullcontext():
                done = turn(arms[name], words(rng, arms[name], length))
            if done.cached.total >= BLOCK_ROWS:  # of so few different tokens two prompts begin alike by chance
                raise RuntimeError(f"{done.cached.total} tokens of a cold prompt were cached")
            if not number:  # the first round is for what is loaded late
                continue
            waited[name].append(done.waited)
            ttft[name].append(done.ttft)
            after = _counted(arms[WITH])
            if after.directory_lookups != before.directory_lookups + (name == WITH):
                raise RuntimeError(f"the directory did not answer; it failed {after.directory_failures} times")
            if name == WITH:
                lookups.append(after.lookup_seconds - before.lookup_seconds)
    return {
        "what": "lookup",
        "unit": "s",
        "prompt": length,
        "rounds": rounds,
        "lookup": {"median": statistics.median(lookups), "most": max(lookups)},
        "first step": _compared(waited, "without"),
        "first token": _compared(ttft, UNASKED),
        "publishing": statistics.median(_later(ttft["without"], ttft[UNASKED])),
    }


def _compared(found: dict[str, list[float]], base: str) -> dict[str, Any]:
    """Medians of the arms; and `later`: the median of the seconds by which the arm with lookups is later than `base` in the same round, and of
    those by which one arm without a store is later than the other. `spread`: half the interquartile range of the latter.
    """
    again, late = _later(found["without"], found["without again"]), _later(found[base], found[WITH])
    low, _, high = statistics.quantiles(again, n=4)
    return {
        **{name: {"median": statistics.median(values), "spread": spread(values)} for name, values in found.items()},
        "later": {"with": statistics.median(late), "again": statistics.median(again), "spread": (high - low) / 2},
    }


@contextlib.contextmanager
def _no_lookups(engine: Engine) -> Iterator[None]:
    """Let an engine publish as ever, and look nothing up."""
    sharing = engine.parts.sharing
    assert sharing is not None
    with patch.object(sharing, "looks_up", lambda *_: False):
        yield


def _later(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [b - a for a, b in zip(one, other, strict=True)]


def _counted(engine: Engine) -> SharedStats:
    found = engine.stats().shared
    assert found is not None
    return found


def _until_whole(engine: Engine, rng: random.Random) -> None:
    """Wait until the directory answers."""
    end = time.monotonic() + FIRST_S
    while not _counted(engine).directory_lookups:
        if time.monotonic() > end:
            raise TimeoutError(f"the directory does not answer after {FIRST_S:.0f} s")
        turn(engine, words(rng, engine, 128))
