#!/usr/bin/env python3
"""What grammars add to a decode step: 8 replies that must be JSON of a schema, and 8 free ones, in turn, with a vocabulary
of 49,152 tokens on the shape of `bench-100m`. Nothing is guessed: only replies with a grammar repeat themselves here.

Each reply is an array of records that does not end before the last token, so that both variants draw equally many. The masks
of a step are computed while the next one is planned and computed; the figure is what is left of them in the time between two
tokens. Compiling a schema for the first time is measured apart.

    python -m benchmarks.engine.masks [--quick] [--tokenizer tokenizer.json] [--json FILE]
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from afterglow.bench.report import arguments, finish, goal, interleaved, show, spread
from afterglow.config import CacheConfig, EngineConfig
from afterglow.engine.engine import Engine
from afterglow.engine.grammars.compiler import Grammars
from afterglow.engine.grammars.masks import Masks
from afterglow.model.presets import PRESETS, save_hf
from afterglow.request import Grammar, Request, SamplingParams

VOCAB = 49_152
BATCH = 8
TOKENS = 96  # of a reply
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "pattern": r"^[a-z0-9.]{1,20}@[a-z0-9]{1,12}\.(com|org)$"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
        "notes": {"type": "string"},
    },
    "required": ["name", "age", "email", "tags", "notes"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": RECORD, "minItems": 1000}

_ids = count()


def main(args: list[str]) -> int:
    parser = arguments("python -m benchmarks.engine.masks", __doc__ or "")
    parser.add_argument(
        "--tokenizer", type=Path, help="a tokenizer.json of at most 49,152 tokens (default: a random one)"
    )
    parser.add_argument("--parts", choices=("all", "masks"), default="all", help="masks: without a model, in seconds")
    options = parser.parse_args(args)
    state = options.tokenizer.read_text("utf-8") if options.tokenizer else random_tokenizer(options.seed)
    cpu = cpu_time(state, options.seed)
    show(
        f"CPU time of the masks of a step, {BATCH} replies",
        ("", "ms"),
        [("in the engine's thread", cpu["engine_ms"]), ("in the thread beside it", cpu["beside_ms"])],
    )
    if options.parts == "masks":
        finish(options, [cpu], [])
        return 0
    row = measured(state, options.seed, 5 if options.quick else 15, options.threads)
    show(
        f"a decode step of {BATCH} replies, {VOCAB:,} tokens",
        ("", "ms"),
        [("free", row["free_ms"]), ("with a schema", row["masked_ms"]), ("compiling the schema", row["compile_ms"])],
    )
    finish(
        options,
        [row, cpu],
        [goal("decode step with masks / without", row["ratio"], 1.05, least=False, spread=row["spread"])],
    )
    return 0


def random_tokenizer(seed: int) -> str:
    """Make a byte-level tokenizer of VOCAB tokens, each but the bytes merged from two others: mostly short ones, as in words."""
    rng = random.Random(seed)
    vocab = {"<|end|>": 0}
    for char in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[char] = len(vocab)
    parts = [*"Ġetaoinsrhldcumfpgwybvk"]
    merges: list[tuple[str, str]] = []
    while len(vocab) < VOCAB:
        left, right = rng.choice(parts), rng.choice(parts)
        if len(left + right) > 12 or left + right in vocab or "Ġ" in right:
            continue
        vocab[left + right] = len(vocab)
        parts.append(left + right)
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer.to_str()


def cpu_time(state: str, seed: int) -> dict[str, Any]:
    """Measure the CPU time of masks alone, on random logits: it hardly depends on what else the machine does."""
    grammars = Grammars(VOCAB, (0,))
    grammars.use_tokenizer(lambda: state)
    params = SamplingParams(grammar=Grammar("json_schema", json.dumps(SCHEMA)), ignore_eos=True)
    rows = [(n, each) for n in range(BATCH) if (each := grammars.constraint(params)) is not None]
    masks, own, beside = Masks(), [], []
    generator = torch.Generator().manual_seed(seed)
    for _, each in rows:
        masks.begin(each)
    masks.apply(torch.zeros(BATCH, VOCAB), rows)  # waits
    for _ in range(4 * TOKENS):
        logits = torch.randn(BATCH, VOCAB, generator=generator)
        began = time.thread_time()
        masks.apply(logits, rows)
        applied = time.thread_time()
        tokens = [int(row.argmax()) for row in logits]
        drawn = [(each, (token,), ()) for (_, each), token in zip(rows, tokens, strict=True)]
        again = time.thread_time()
        masks.drew(drawn)
        own.append((applied - began + time.thread_time() - again) * 1e3)
        beside.append(masks.thread_time() * 1e3)
    return {
        "name": "CPU time of masks",
        "engine_ms": round(statistics.mean(own), 4),
        "beside_ms": round((beside[-1] - beside[0]) / (len(beside) - 1), 4),
    }


def measured(state: str, seed: int, rounds: int, threads: int | None) -> dict[str, Any]:
    """Time decode steps of both variants in turn, and the compiler."""
    rng = random.Random(seed)
    spec = replace(PRESETS["bench-100m"], vocab=VOCAB, eos_ids=(0,))
    with tempfile.TemporaryDirectory() as folder:
        save_hf(spec, Path(folder), seed=seed)
        engine = Engine.load(folder, EngineConfig(cache=CacheConfig(disk_cache=0), threads=threads, speculate="off"))
        engine.grammars.use_tokenizer(lambda: state)
        engine.start()
        try:
            row = in_turn(engine, rounds, rng)
        finally:
            engine.close(flush=False)
    return {**row, "compile_ms": round(compiled(state, spec.eos_ids), 2)}


def in_turn(engine: Engine, rounds: int, rng: random.Random) -> dict[str, Any]:
    """Time steps of an engine, without and with masks."""
    grammar = Grammar("json_schema", json.dumps(SCHEMA))
    free = SamplingParams(max_tokens=TOKENS, temperature=1.0, ignore_eos=True, seed=rng.randrange(2**31))
    masked = replace(free, grammar=grammar)

    def step(sampling: SamplingParams) -> float:
        prompts = [[rng.randrange(1, VOCAB) for _ in range(64)] for _ in range(BATCH)]
        requests = [Request(f"bench-{next(_ids)}", prompt, sampling, reuse=False) for prompt in prompts]
        first, last = 0.0, 0.0
        left = BATCH
        for at, output in engine.outputs(requests):  # from the step that drew all replies' first tokens
            if left:
                left -= 1
                first = at
            last = at
            assert output.finish_reason in (None, "length"), output
        return (last - first) * 1e3 / (TOKENS - 1)

    step(free), step(masked)
    found = interleaved({"free": lambda: step(free), "masked": lambda: step(masked)}, rounds)
    ratios = [b / a for a, b in zip(found["free"], found["masked"], strict=True)]
    return {
        "name": "masks of a JSON schema beside a decode step",
        "vocabulary": VOCAB,
        "batch": BATCH,
        "free_ms": round(statistics.median(found["free"]), 3),
        "masked_ms": round(statistics.median(found["masked"]), 3),
        "ratio": round(statistics.median(ratios), 4),
        "spread": round(max(spread(ratios), *map(spread, found.values())), 4),
    }


def compiled(state: str, eos: tuple[int, ...]) -> float:
    """Time how long the first request with a schema waits, where the tokenizer is known: milliseconds."""
    grammars = Grammars(VOCAB, eos)
    grammars.use_tokenizer(lambda: state)
    grammars.check(Grammar("regex", "a"))
    began = time.perf_counter()
    grammars.check(Grammar("json_schema", json.dumps(SCHEMA)))
    return (time.perf_counter() - began) * 1e3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
