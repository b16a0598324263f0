"""Serving with a shared system prompt: Figures 6 to 8 and Table 3 of RelayAttention, small, on the real engine.

`--figure throughput`: requests behind one system prompt, all at once, in four ways: the prompt is recomputed by each
("recompute"), cached and read by each ("shared"), read once for all ("relay"), or as the engine decides ("auto"). Lengths are
ShareGPT's, divided by 8, and MMLU's with five examples. `--figure rate`: requests arrive at random (Poisson), at several rates;
seconds per token of the answers. Ways take turns, on engines of equal weights; ratios within a turn are compared.

    python -m benchmarks.papers.relay.shared_prompt [--figure rate] [--quick | --full] [--json FILE]
"""

from __future__ import annotations

import contextlib
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from afterglow.bench.report import arguments, finish, goal, show, spread
from afterglow.bench.timed_requests import Turn, ask, words
from afterglow.engine.engine import Engine
from benchmarks.common.engines import engine_of

WAYS = {"recompute": "off", "shared": "off", "relay": "on", "auto": "auto"}
CACHED = ("shared", "relay", "auto")
ROUNDS = 3
RECOMPUTED_ROWS = 24_000  # of system prompts: as many requests are asked of "recompute", in the first round only

Lengths = Callable[[random.Random], tuple[int, int]]
Asked = list[tuple[list[int], int]]


def sharegpt(divide: int) -> Lengths:
    """Questions and replies within 4 to 1,024 tokens, 240 and 235 on average (RelayAttention Table 1), divided."""

    def draw(rng: random.Random) -> tuple[int, int]:
        question, reply = (max(4, min(1024, int(rng.lognormvariate(5.0, 0.9)))) // divide + 1 for _ in range(2))
        return question, reply

    return draw


def mmlu(rng: random.Random) -> tuple[int, int]:
    """Questions within 55 to 1,219 tokens, about 150 on average, and replies of 32 (Table 1)."""
    return max(55, min(1219, int(rng.lognormvariate(4.75, 0.55)))), 32


def long_contexts(rng: random.Random) -> tuple[int, int]:
    """Draw questions many times as long as the shared prompt: where reading the system prompt once gains next to nothing."""
    return rng.randint(900, 1500), 24


@dataclass(frozen=True)
class Workload:
    """`count` requests, `batch` at a time, behind a system prompt of `system` tokens."""

    name: str
    batch: int
    system: int
    count: int
    lengths: Lengths

    def drawn(self, engine: Engine, rng: random.Random, number: int, system: list[int]) -> Asked:
        """Draw prompts that are new but for the system prompt; the same lengths in every round."""
        shape = random.Random(self.name)
        lengths = [self.lengths(shape) for _ in range(number)]
        return [([*system, *words(rng, engine, question)], reply) for question, reply in lengths]


def main(args: list[str]) -> int:
    parser = arguments("python -m benchmarks.papers.relay.shared_prompt", __doc__ or "")
    parser.add_argument("--full", action="store_true", help="1,000 requests of undivided lengths, as the paper: hours")
    parser.add_argument("--figure", choices=("throughput", "rate"), default="throughput", help="what to measure")
    parser.add_argument("--model", default="bench-100m", help="preset or model directory (default bench-100m)")
    parser.add_argument("--requests", type=int, default=None, help="requests of a round (default 100)")
    parser.add_argument("--system", type=int, nargs="*", default=None, help="tokens of the system prompt")
    options = parser.parse_args(args)
    options.requests = options.requests or (1000 if options.full else 16 if options.quick else 100)
    options.divide = 1 if options.full else 8
    options.rounds = 2 if options.quick else ROUNDS
    with contextlib.ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                engine_of(
                    options.model,
                    threads=options.threads,
                    cache={"disk_cache": 0, "device_cache": 5 * 2**30, "host_cache": 2**30},
                    relay=relay,
                    max_batch=32,
                    max_model_len=4096,
                )
            )
            for name, relay in WAYS.items()
            if name != "recompute"
        }
        engines["recompute"] = engines["shared"]
        return (_rates if options.figure == "rate" else _throughput)(engines, options)


def _workloads(options: Any) -> list[Workload]:
    short = sharegpt(options.divide)
    systems = options.system or ([512] if options.quick else [64, 512, 2048])
    few = max(12, options.requests // 8)  # long ones, or one at a time: fewer would differ by a tenth from themselves
    if options.quick:
        return [Workload("ShareGPT", 8, system, options.requests, short) for system in systems]
    return [
        *(Workload("ShareGPT", 32, system, options.requests, short) for system in systems),
        *(Workload("ShareGPT", 1, system, few, short) for system in (64, 2048)),
        Workload("MMLU, 5 examples", 32, 723, options.requests, mmlu),
        Workload("long contexts", 4, 64, few, long_contexts),
    ]


def _throughput(engines: dict[str, Engine], options: Any) -> int:
    rows = [_point(engines, options, workload) for workload in _workloads(options)]
    show(
        f"output tokens per second, {options.model}, ShareGPT's lengths / {options.divide}",
        ("workload", "batch", "system prompt", *WAYS, "relay : shared", "auto : better", "spread"),
        [
            (
                r["workload"],
                r["batch"],
                r["prefix"],
                *(f"{r['rate'][name]:.1f}" for name in WAYS),
                r["gain"],
                r["auto"],
                f"{100 * r['spread']:.0f} %",
            )
            for r in rows
        ],
    )
    goals = [
        goal(
            f"auto : better of on and off, {r['workload']}, batch {r['batch']}, prefix {r['prefix']}",
            r["auto"],
            0.98,
            least=True,
            spread=r["spread"],
        )
        for r in rows
    ]
    finish(options, rows, goals, model=options.model, divide=options.divide)
    return 0


def _point(engines: dict[str, Engine], options: Any, workload: Workload) -> dict[str, Any]:
    rng = random.Random(f"{options.seed} {workload}")
    system = words(rng, engines["shared"], workload.system)
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    for name in CACHED:  # the system prompt is in the cache, and everything has run once
        tokens_per_second(engines[name], workload.drawn(engines[name], rng, workload.batch, system), workload.batch)
    for turn in range(options.rounds):
        asked = workload.drawn(engines["shared"], rng, workload.count, system)
        # No way is always the first: load from outside would count against it.
        for name in (*CACHED[turn % 3 :], *CACHED[: turn % 3]):
            found[name].append(tokens_per_second(engines[name], asked, workload.batch))
    few = max(2, min(workload.count, RECOMPUTED_ROWS // workload.system))
    asked = workload.drawn(engines["shared"], rng, few, system)
    found["recompute"].append(tokens_per_second(engines["recompute"], asked, workload.batch, reuse=False))
    rates = {name: statistics.median(values) for name, values in found.items()}
    _say(f"{workload.name}, batch {workload.batch}, prefix {workload.system}: {rates}")
    better = "relay" if rates["relay"] > rates["shared"] else "shared"
    ratios = [auto / other for auto, other in zip(found["auto"], found[better], strict=True)]
    return {
        "workload": workload.name,
        "batch": workload.batch,
        "prefix": workload.system,
        "requests": workload.count,
        "rate": rates,
        "gain": statistics.median(a / b for a, b in zip(found["relay"], found["shared"], strict=True)),
        "auto": statistics.median(ratios),
        "spread": spread(ratios),
    }


def _say(text: str) -> None:
    """How far it is: the whole takes a quarter of an hour."""
    print(text, file=sys.stderr, flush=True)


def tokens_per_second(engine: Engine, asked: Asked, batch: int, reuse: bool = True) -> float:
    """All requests, `batch` at a time; output tokens per second."""
    began = time.perf_counter()
    running: list[Turn] = []
    waiting = list(asked)
    tokens = 0
    while waiting or running:
        while waiting and len(running) < batch:
            prompt, reply = waiting.pop(0)
            running.append(ask(engine, prompt, reply, reuse=reuse))
        running[0].ended.wait()
        tokens += sum(len(turn.tokens) for turn in running if turn.ended.is_set())
        running = [turn for turn in running if not turn.ended.is_set()]
    return tokens / (time.perf_counter() - began)


def _rates(engines: dict[str, Engine], options: Any) -> int:
    """Figure 7: latency against the rate of requests, from a quarter of what relay can do to more than that."""
    rows: list[dict[str, Any]] = []
    count = min(options.requests, 10**9 if options.full else 50)
    for system in options.system or ([512] if options.quick else [512, 2048]):
        rng = random.Random(f"{options.seed} {system}")
        workload = Workload("ShareGPT", 32, system, count, sharegpt(options.divide))
        prompt = words(rng, engines["shared"], system)
        asked = workload.drawn(engines["shared"], rng, count, prompt)
        for name in CACHED:  # the system prompt is in the cache, and everything has run once
            tokens = tokens_per_second(engines[name], asked, 32)
        most = tokens * len(asked) / sum(reply for _, reply in asked)
        for part in (0.5, 1.0) if options.quick else (0.25, 0.5, 0.75, 1.0, 1.25):
            asked = workload.drawn(engines["shared"], rng, count, prompt)
            gaps = [rng.expovariate(part * most) for _ in asked]
            for name in WAYS:
                if name == "recompute" and system * count > RECOMPUTED_ROWS * 4:
                    continue  # it is far beyond what it can do at any of these rates
                turns, seconds = _arriving(engines[name], asked, gaps, reuse=name != "recompute")
                _say(f"prefix {system}, {part:.2f} of {most:.1f} requests a second, {name}: {len(turns) / seconds:.1f}")
                each = [(turn.last - turn.asked) / len(turn.tokens) for turn in turns]
                rows.append(
                    {
                        "prefix": system,
                        "offered": part * most,
                        "way": name,
                        "served": len(turns) / seconds,
                        "seconds_per_token": statistics.mean(each),
                        "median": statistics.median(each),
                        "ttft": statistics.median(turn.ttft for turn in turns),
                    }
                )
    show(
        f"requests that arrive at random, {options.model}, ShareGPT's lengths / {options.divide}",
        ("system prompt", "offered, 1/s", "way", "served, 1/s", "ms per token", "median", "first token, ms"),
        [
            (
                r["prefix"],
                r["offered"],
                r["way"],
                r["served"],
                *(f"{1e3 * r[name]:.0f}" for name in ("seconds_per_token", "median", "ttft")),
            )
            for r in rows
        ],
    )
    finish(options, rows, [], model=options.model, divide=options.divide, requests=count)
    return 0


def _arriving(engine: Engine, asked: Asked, gaps: list[float], reuse: bool) -> tuple[list[Turn], float]:
    """Requests some seconds apart, whatever the others are doing; and how long until the last answer."""
    began = due = time.perf_counter()
    turns = []
    for (prompt, reply), gap in zip(asked, gaps, strict=True):
        due += gap
        time.sleep(max(0.0, due - time.perf_counter()))
        turns.append(ask(engine, prompt, reply, reuse=reuse))
    for turn in turns:
        turn.ended.wait()
    return turns, time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
