"""Documents of 4K to 28K tokens with Mistral-7B's shape: reuse from host memory, against computing them and against copying."""

from __future__ import annotations

import random
import statistics

from afterglow.bench.report import goal, spread
from afterglow.bench.timed_requests import asked, words
from benchmarks.gpu.models import engine_on_device, shape_of
from benchmarks.gpu.setting import Ceilings, Found, Setting, table

MODEL = "Mistral-7B"
WANTED = 0.85  # of the rate of a copy from locked memory, for the longest documents
QUESTION = 32


def documents(setting: Setting, ceilings: Ceilings) -> Found:
    """Time a question about a document that is new, and another about one whose rows are in host memory."""
    shape, rng = shape_of(MODEL, setting), random.Random(setting.seed)
    lengths, repeats = setting.of((range(4096, 28673, 4096), 5), (range(128, 257, 128), 1))
    longest = lengths[-1] + 2 * QUESTION
    rows = []
    with engine_on_device(
        shape, setting, device_rows=2 * longest, host_rows=3 * longest, prefill_chunk=2048, max_batch=2
    ) as engine:
        for length in lengths:
            computed, reused = [], []
            for _ in range(repeats + 1):
                document = words(rng, engine, length)
                computed.append(asked(engine, [*document, *words(rng, engine, QUESTION)]).ttft)
                engine.settle()
                engine.demote("host")
                turn = asked(engine, [*document, *words(rng, engine, QUESTION)])
                if turn.cached.host < length:
                    raise RuntimeError(f"a document of {length} tokens was not reused from host memory: {turn.cached}")
                reused.append(turn.ttft)
            copy = length * shape.kv_bytes_per_token("bfloat16") / ceilings.copy
            compute, reuse = (statistics.median(found[1:]) for found in (computed, reused))
            rows.append(
                {
                    "tokens": length,
                    "computed_ms": compute * 1e3,
                    "reused_ms": reuse * 1e3,
                    "gain": compute / reuse,
                    "copy_ms": copy * 1e3,
                    "share_of_copy": copy / reuse,
                    "spread": spread(reused[1:]),
                }
            )
    table(f"documents, {shape.name}: time to the first token, and to copy the rows alone", rows)
    last = rows[-1]
    name = f"reuse of {last['tokens']} tokens from host: of the rate of a copy from locked memory"
    goals = [] if setting.tiny else [goal(name, last["share_of_copy"], WANTED, least=True, spread=last["spread"])]
    return Found(rows, goals)
