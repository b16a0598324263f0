#!/usr/bin/env python3
"""What int8 weights cost and gain: the bundled model's answers with them and without, and the speed of `bench-100m`.

Quality: long dialogues that the model has not seen, with questions about facts told in them and texts to go on with, each
token after the real ones before it. Recall: how often the value of a fact is the first choice. Agreement: how often the first
choice is the same with and without. Speed: both engines take turns.

    python -m benchmarks.engine.quantization [--quick] [--json FILE]
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import functools
import random
import statistics
import sys
from collections import defaultdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from afterglow.bench.report import arguments, finish, goal, interleaved, show, spread
from afterglow.bench.timed_requests import asked, words
from afterglow.choices import QuantizationName
from afterglow.config import CacheConfig, EngineConfig
from afterglow.engine.engine import Engine
from afterglow.model.decoder import Decoder, PlainAttend
from afterglow.model.loader import load_model
from benchmarks.common.model_texts import held_out_sentences
from benchmarks.papers.spec.prefixes import dialogues

KINDS: tuple[QuantizationName, ...] = ("none", "int8")
TOKENS, FACTS = 1200, 12
FEWER = 1.5  # int8 is to be so many times as fast


def main(args: list[str]) -> int:
    parser = arguments("python -m benchmarks.engine.quantization", __doc__ or "")
    parser.add_argument("--model", default="bench-100m", help="preset or model directory to time (default bench-100m)")
    options = parser.parse_args(args)
    if options.threads:
        torch.set_num_threads(options.threads)
    row = quality(6 if options.quick else 40, options.seed)
    show(
        f"the bundled model with int8 weights, {row['facts']} facts, {row['tokens']} tokens of texts and answers",
        ("", "float32", "int8"),
        [
            ("facts recalled", f"{row['recall']['none']:.1%}", f"{row['recall']['int8']:.1%}"),
            ("perplexity", row["perplexity"]["none"], row["perplexity"]["int8"]),
            ("same first choice", "", f"{row['agreement']:.1%}"),
            ("logits: error over deviation", "", row["logit_error"]),
        ],
    )
    speeds = speed(options.model, 3 if options.quick else 7, options.seed, options.threads)
    show(
        f"{options.model}, tokens/s",
        ("", "float32", "int8", "int8 / float32", "spread"),
        [(s["name"], s["none"], s["int8"], s["ratio"], f"{100 * s['spread']:.0f} %") for s in speeds],
    )
    goals = [goal(f"int8 / float32, {s['name']}", s["ratio"], FEWER, least=True, spread=s["spread"]) for s in speeds]
    finish(options, [row, *speeds], goals, model=options.model)
    return 0


def quality(sessions: int, seed: int) -> dict[str, Any]:
    """The bundled model in both ways, over the same tokens."""
    folder = Path(str(files("afterglow") / "assets" / "model"))
    models = {kind: load_model(folder, quantization=kind) for kind in KINDS}
    right: dict[str, int] = defaultdict(int)
    loss: dict[str, float] = defaultdict(float)
    facts = tokens = same = 0
    errors = []
    texts = held_out_sentences()
    for shared in dialogues(folder, texts, count=sessions, tokens=TOKENS, facts=FACTS, seed=seed):
        for query in shared.queries:
            ids = torch.tensor([*shared.prefix, *query.prompt, *query.reply])
            start = len(shared.prefix) + len(query.prompt) - 1
            found = {kind: logits(model, ids)[start:-1] for kind, model in models.items()}
            targets = ids[start + 1 :]
            for kind, rows in found.items():
                loss[kind] += F.cross_entropy(rows, targets, reduction="sum").item()
                if query.value is not None:
                    right[kind] += int(rows[query.value].argmax() == targets[query.value])
            exact, rounded = found["none"], found["int8"]
            facts += query.value is not None
            tokens += len(targets)
            same += int((exact.argmax(-1) == rounded.argmax(-1)).sum())
            errors.append(((exact - rounded).square().mean().sqrt() / exact.std()).item())
    return {
        "facts": facts,
        "tokens": tokens,
        "recall": {kind: right[kind] / facts for kind in KINDS},
        "perplexity": {kind: float(torch.tensor(loss[kind] / tokens).exp()) for kind in KINDS},
        "agreement": same / tokens,
        "logit_error": statistics.fmean(errors),
    }


def logits(model: Decoder, ids: Tensor) -> Tensor:
    """[tokens, vocab] after each of the tokens."""
    positions = torch.arange(len(ids))
    return model.logits(model.forward(ids, positions, PlainAttend(model, positions, [len(ids)])))


def speed(model: str, repeats: int, seed: int, threads: int | None) -> list[dict[str, Any]]:
    """Tokens per second of both, taking turns."""
    rng = random.Random(seed)
    cache = CacheConfig(disk_cache=0)
    engines = {
        kind: Engine.load(
            model,
            EngineConfig(cache=cache, max_model_len=4096, threads=threads, quantization=kind, speculate="off"),
        )
        for kind in KINDS
    }
    for engine in engines.values():
        engine.start()
    try:
        rows = []
        for name, prompt, new in (("prefill of 1,024 tokens", 1024, 1), ("decoding, one request", 256, 64)):

            def measured(engine: Engine, prompt: int = prompt, new: int = new) -> float:
                turn = asked(engine, words(rng, engine, prompt), new, reuse=False)
                return prompt / turn.ttft if new == 1 else (new - 1) / (turn.last - turn.first)

            found = interleaved({k: functools.partial(measured, e) for k, e in engines.items()}, repeats + 1)
            kept = {kind: samples[1:] for kind, samples in found.items()}
            middle = {kind: statistics.median(samples) for kind, samples in kept.items()}
            rows.append(
                {
                    "name": name,
                    **middle,
                    "ratio": middle["int8"] / middle["none"],
                    "spread": max(spread(samples) for samples in kept.values()),
                }
            )
        return rows
    finally:
        for engine in engines.values():
            engine.close(flush=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
