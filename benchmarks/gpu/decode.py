"""Decoding and prefill with Llama-3-8B's shape, as shares of what the device's memory and its matrix units reach."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from itertools import pairwise

from afterglow.bench.report import goal, spread
from afterglow.bench.timed_requests import asked, words
from afterglow.engine.engine import Engine
from afterglow.request import Request, SamplingParams
from afterglow.sim.machine.shape import ModelShape
from benchmarks.gpu.models import engine_on_device, shape_of
from benchmarks.gpu.setting import Ceilings, Found, Setting, table

MODEL = "Llama-3-8B"
WANTED = {1: 0.8, 32: 0.6}  # of the bandwidth's bound, by requests


def decode(setting: Setting, ceilings: Ceilings) -> Found:
    """Time steps of 1, 8, 32 and 128 requests with 1,024 tokens of context each."""
    shape, rng = shape_of(MODEL, setting), random.Random(setting.seed)
    batches, context, reply = setting.of(((1, 8, 32, 128), 1024, 96), ((1, 2), 40, 6))
    most = batches[-1]
    room = most * (context + reply + 64)
    rows, goals = [], []
    with engine_on_device(
        shape, setting, device_rows=room, host_rows=room, max_batch=most, prefill_chunk=8192
    ) as engine:
        prompts = [words(rng, engine, context) for _ in range(most)]
        passes = engine.parts.runner.passes
        counts = Counter[str]() if passes is None else passes.counts
        for batch in batches:
            before = counts["taken"], counts["launched"]
            steps = step_seconds(engine, prompts[:batch], reply)
            rows.append(decode_row(shape, batch, context + reply // 2, statistics.median(steps), ceilings))
            taken, launched = counts["taken"] - before[0], counts["launched"] - before[1]
            rows[-1]["launched_ahead"] = taken / max(1, launched)  # and of use
            if batch in WANTED and not setting.tiny:
                name = f"decode, {batch} requests: of the bandwidth's bound"
                goals.append(goal(name, rows[-1]["share"], WANTED[batch], least=True, spread=spread(steps)))
    table(f"decoding, {shape.name}, contexts of {context} tokens and more", rows)
    return Found(rows, goals)


def decode_row(shape: ModelShape, batch: int, context: int, step: float, ceilings: Ceilings) -> dict[str, float]:
    """A row for steps of `step` seconds, beside the time to read the matrices once and all contexts."""
    weights = 2 * (shape.layer_parameters + shape.hidden * shape.vocab)
    bound = (weights + batch * context * shape.kv_bytes_per_token("bfloat16")) / ceilings.memory
    return {
        "requests": batch,
        "context": context,
        "step_ms": step * 1e3,
        "tokens_per_s": batch / step,
        "bound_ms": bound * 1e3,
        "share": bound / step,
    }


def step_seconds(engine: Engine, prompts: list[list[int]], reply: int) -> list[float]:
    """Return the seconds between tokens while all requests decode. Their prompts are on the device before."""
    for prompt in prompts:
        asked(engine, prompt)
    engine.settle()
    sampling = SamplingParams(max_tokens=reply, temperature=0, ignore_eos=True)
    times: dict[str, list[float]] = {f"step-{len(prompts)}-{i}": [] for i in range(len(prompts))}
    requests = [Request(name, prompt, sampling) for name, prompt in zip(times, prompts, strict=True)]
    for at, output in engine.outputs(requests):
        if output.tokens:
            times[output.request_id].append(at)
    began, ended = max(found[0] for found in times.values()), min(found[-1] for found in times.values())
    first = next(iter(times.values()))
    steps = [b - a for a, b in pairwise(first) if a >= began and b <= ended]
    if not steps:
        raise RuntimeError(
            f"{len(prompts)} requests never decoded together: their replies of {reply} tokens are too short"
        )
    return steps


def prefill(setting: Setting, ceilings: Ceilings) -> Found:
    """Time prompts that have not been seen before."""
    shape, rng = shape_of(MODEL, setting), random.Random(setting.seed)
    lengths, repeats = setting.of(((512, 2048, 7680), 7), ((64,), 1))
    rows = []
    with engine_on_device(shape, setting, device_rows=2 * lengths[-1], host_rows=2 * lengths[-1]) as engine:
        for length in lengths:
            found = [asked(engine, words(rng, engine, length)).ttft for _ in range(repeats + 1)][1:]
            time = statistics.median(found)
            rows.append(
                {
                    "tokens": length,
                    "ms": time * 1e3,
                    "tokens_per_s": length / time,
                    "share": prefill_flops(shape, length) / time / ceilings.flops,
                    "spread": spread(found),
                }
            )
    table(f"prefill, {shape.name}: time to the first token, share of the matrix peak", rows)
    return Found(rows, [])


def prefill_flops(shape: ModelShape, tokens: int) -> float:
    """Count the operations of a prompt: matrices, attention over half of all pairs, the last token's logits."""
    attention = 4 * shape.layers * shape.heads * shape.head_dim * tokens * (tokens + 1) / 2
    return tokens * shape.linear_flops_per_token + attention + shape.head_flops
