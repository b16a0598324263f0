"""What the figures over HTTP share: do the servers agree, and do they rest without requests?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from benchmarks.peers import agree
from benchmarks.peers.client import all_of
from benchmarks.peers.plan import Plan
from benchmarks.peers.processes import PeerError
from benchmarks.peers.server import Server
from benchmarks.peers.weights import Weights
from benchmarks.peers.worker import Worker

T = TypeVar("T")
REST, BUSY, PATIENCE = 0.25, 0.15, 5.0  # seconds without so many busy cores; seconds to wait for that


def agreement(
    plan: Plan, servers: Mapping[str, Server], weights: Weights, worker: Worker | None = None
) -> dict[str, int]:
    """First tokens have to be the same (PeerError otherwise); tokens in common by name. Warms the servers up, too."""
    asked = agree.prompts(plan.seed, weights.spec.vocab)
    answers = {
        name: [turn.tokens for turn in asyncio.run(all_of(server.client, asked, agree.NEW, 1))]
        for name, server in servers.items()
    }
    if worker is not None:
        answers[worker.name] = [worker.ask([prompt], agree.NEW).tokens[0] for prompt in asked]
    return agree.check(answers)


def idle(servers: Mapping[str, Server]) -> dict[str, float]:
    """Measure the cores that each server takes without requests, and so from the others' turns."""
    return {name: round(server.idle_cpu(), 3) for name, server in servers.items()}


def tried(plan: Plan, notes: dict[str, Any], running: dict[str, Any], name: str, what: Callable[[], T]) -> T | None:
    """What this engine's turn brings. A peer that fails is left out from then on, and named; Afterglow may not fail."""
    if name not in running:
        return None
    _rested(running.values())
    try:
        return what()
    except PeerError as error:
        if name.startswith("afterglow"):
            raise
        plan.say(f"{name} is left out: {error}")
        notes["left out"][name] = str(error).splitlines()[0]
        del running[name]
        return None


def _rested(running: Collection[Worker | Server]) -> None:
    """Wait for servers still busy with their last turn: vLLM's worker, for one, polls for a second after its last token."""
    until = time.monotonic() + PATIENCE
    before = sum(one.cpu_seconds() for one in running)
    while time.monotonic() < until:
        time.sleep(REST)
        now = sum(one.cpu_seconds() for one in running)
        if now - before < BUSY * REST:
            return
        before = now
