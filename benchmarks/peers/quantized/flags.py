"""llama.cpp's own best flags for a file: each set is tried for one life, and the quickest is the one that is compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.peers.plan import Plan
from benchmarks.peers.quantized.lives import EIGHT, EIGHT_NEW, NEW, PREFILL, Arm, Lived, live

DEFAULT: dict[str, Any] = {}
SETS: tuple[dict[str, Any], ...] = (
    DEFAULT,  # flash attention as it chooses, repacked weights, a mapped file, 512 tokens in a call
    {"flash": True},
    {"flash": False},
    {"repack": False},
    {"mmap": False},
    {"ubatch": 128},
    {"wait": "passive"},  # OpenMP's threads sleep while they wait, instead of spinning
)
QUICK = SETS[:4]
MEASURES = ("prefill", "decode 1", "decode 8")
UNTIMED = 1  # the number of a life that forgets no file


def tried(plan: Plan, arm: Arm) -> tuple[Arm, list[dict[str, Any]]]:
    """The arm with the flags that took the least time for one prefill, one decode and one of eight; and what all sets reached."""
    found: list[dict[str, Any]] = []
    for flags in QUICK if plan.quick else SETS:
        lived = Lived()
        live(plan, replace(arm, flags=tuple(flags.items())), UNTIMED, lived)
        values = {measure: lived.samples[measure][0] for measure in MEASURES}
        found.append({"engine": arm.name, "flags": flags, **{name: round(value, 2) for name, value in values.items()}})
    best = min(found, key=_seconds)
    plan.say(f"{arm.path.name}: llama.cpp is quickest with {best['flags'] or 'its defaults'}")
    return replace(arm, flags=tuple(best["flags"].items())), found


def _seconds(row: dict[str, Any]) -> float:
    """The time of what a life asks once."""
    return float(PREFILL / row["prefill"] + NEW / row["decode 1"] + EIGHT * EIGHT_NEW / row["decode 8"])
