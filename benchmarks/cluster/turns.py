"""A conversation that changes its replica every turn: are its answers those of an engine that reuses nothing, and what is reused?"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from afterglow.bench.timed_requests import asked, words
from benchmarks.cluster.replicas import patient, replicas, turn

FIRST, NEW, REPLY = 200, 40, 24  # tokens of the first message, of each further one, and of each reply
CACHE = {"device_cache": 16 << 20, "host_cache": 32 << 20, "disk_cache": 256 << 20, "source": "load"}


def wandering(model: str, count: int, turns: int, folder: Path, seed: int, threads: int | None) -> dict[str, Any]:
    """One row: of so many turns, those with equal tokens, and the most rows of the turn before that were not reused.

    The last token of a reply was never fed to the model, so its row cannot be reused: 1 is the least.
    """
    rng = random.Random(seed)
    same = shared = missing = reused = history = 0
    with patient(), replicas(count, model, folder / f"store-{count}", CACHE, threads=threads) as engines:
        text = words(rng, engines[0], FIRST)
        before = 0
        for number in range(turns):
            engine = engines[number % count]
            done = turn(engine, text, REPLY)
            same += done.tokens == asked(engine, text, REPLY, reuse=False).tokens
            if number:
                missing = max(missing, before - done.cached.total)
                shared += done.cached.shared
                reused, history = reused + done.cached.total, history + before
            before = len(text) + len(done.tokens)
            text = [*text, *done.tokens, *words(rng, engine, NEW)]
    return {
        "what": "wandering",
        "engines": count,
        "turns": turns,
        "equal": same,
        "reused": reused / history,
        "missing": missing,
        "from_store": shared / max(reused, 1),
    }
