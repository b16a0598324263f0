"""llama.cpp's own best flags for a file: each set is tried, and the quickest is the one that is compared."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from benchmarks.peers import agree
from benchmarks.peers.plan import Plan
from benchmarks.peers.quantized.lives import EIGHT, Arm, running

DEFAULT: dict[str, Any] = {}
QUICK: tuple[dict[str, Any], ...] = (
    DEFAULT,  # flash attention as it chooses, repacked weights, a mapped file, 512 tokens in a call, threads that spin
    {"flash": False},
    {"repack": False},
)
SETS = (*QUICK, {"flash": True}, {"mmap": False}, {"ubatch": 128}, {"wait": "passive"})
PROMPT, NEW = 256, 8


def tried(plan: Plan, arm: Arm) -> tuple[Arm, list[dict[str, Any]]]:
    """The arm with the flags that take the least time for a prompt, its reply and eight replies; and the times of all sets."""
    found: list[dict[str, Any]] = []
    for flags in QUICK if plan.quick else SETS:
        rng = random.Random(f"{plan.seed} {arm.path.name} flags")
        with running(plan, replace(arm, flags=tuple(flags.items()))) as engine:
            engine.ask([agree.fresh(rng, arm.vocab, NEW)], NEW)  # warms up
            one = engine.ask([agree.fresh(rng, arm.vocab, PROMPT)], NEW + 1)
            many = engine.ask([agree.fresh(rng, arm.vocab, NEW) for _ in range(EIGHT)], NEW + 1)
        seconds = {"prefill": one.first, "decode 1": one.last - one.first, "decode 8": many.last - many.first}
        found.append(
            {"engine": arm.name, "flags": flags, "seconds": {name: round(s, 4) for name, s in seconds.items()}}
        )
    best = min(found, key=lambda row: sum(row["seconds"].values()))
    plan.say(f"{arm.path.name}: llama.cpp is quickest with {best['flags'] or 'its defaults'}")
    return replace(arm, flags=tuple(best["flags"].items())), found
