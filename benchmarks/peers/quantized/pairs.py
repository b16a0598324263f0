"""Decoding in turns of a second: both engines are open, and one waits while the other decodes.

The rate at which a virtual machine reads memory may change from one minute to the next, so that the lives of two engines, one after the other,
differ by more than the engines do. Bursts that follow each other at once share it.
"""

from __future__ import annotations

import random
import statistics
from typing import Any

from afterglow.bench.report import spread
from benchmarks.peers import agree
from benchmarks.peers.plan import Plan
from benchmarks.peers.quantized.lives import NEW, PREFILL, Arm, running
from benchmarks.peers.rounds import turns

PAIRS = {True: 12, False: 24}  # by --quick


def decoded_in_turns(plan: Plan, ours: Arm, theirs: Arm) -> dict[str, Any]:
    """Let two arms decode the same prompts. Returns tokens/s of each burst, and the median and spread of the quotients of pairs. Raises:
    PeerError."""
    rng = random.Random(f"{plan.seed} {ours.path.name} turns")
    rates: dict[str, list[float]] = {ours.name: [], theirs.name: []}
    with running(plan, ours) as first, running(plan, theirs) as second:
        engines = {ours.name: first, theirs.name: second}
        for engine in engines.values():
            engine.ask([agree.fresh(rng, ours.vocab, PREFILL)], NEW)  # warms up
        prompts = [agree.fresh(rng, ours.vocab, PREFILL) for _ in range(PAIRS[plan.quick])]
        for number, name in turns(list(engines), len(prompts)):
            rates[name].append(engines[name].ask([prompts[number]], NEW + 1).decode_rate())
    quotients = [a / b for a, b in zip(*rates.values(), strict=True)]
    return {
        "rates": {name: [round(rate, 2) for rate in found] for name, found in rates.items()},
        "quotient": round(statistics.median(quotients), 4),
        "spread": round(spread(quotients), 4),
    }
