#!/usr/bin/env python3
"""What KV in 16 and in 8 bits costs and gains, against float32, through the engine.

Answers: a context is computed, stored, dropped from device and host memory, read back from disk, and attended to by the tokens
that follow it, each after the real ones before it. Perplexity: texts of a file. Recall (of the bundled model): facts that were
told in dialogues which it has not seen. All dtypes judge the same tokens. Bytes: of the files, and of host memory.

Speed: the first token of a short turn whose history is on a disk that reads so many MB/s, on the disk as it is, and in host
memory; and of a long prompt that is stored while it is computed. The engines take turns.

    python -m benchmarks.engine.kv_dtypes --text FILE [--model MODEL] [--quick] [--json FILE]
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import contextlib
import functools
import random
import statistics
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from afterglow.bench.report import COUNTED, arguments, finish, goal, interleaved, show, spread
from afterglow.bench.timed_requests import asked, words
from afterglow.engine.engine import Engine
from afterglow.errors import ConfigError
from afterglow.store.extents.throttle import Throttle
from afterglow.text import Tokenizer
from benchmarks.common.engines import engine_of
from benchmarks.common.model_texts import held_out_sentences
from benchmarks.common.paired import Paired
from benchmarks.papers.spec.prefixes import dialogues

KINDS = ("float32", "bfloat16", "int8")
BUNDLED = str(files("afterglow") / "assets" / "model")
CONTEXT, AFTER = 1024, 256  # tokens of a text that are stored, and that are judged after them
TOKENS, FACTS = 1200, 12  # of a dialogue
HISTORY, NEW, PROMPT = 2048, 16, 1024  # tokens of timed requests
MB = 1e6

Part = tuple[list[dict[str, Any]], list[dict[str, Any]]]
"""Rows and goals."""


class Judge:
    """An engine of each dtype, and the final rows of all tokens that it computes."""

    def __init__(self, model: str, threads: int | None, stack: contextlib.ExitStack) -> None:
        cache = {"source": "load", "device_cache": 256 << 20, "host_cache": 256 << 20}
        self.engines = {
            kind: stack.enter_context(engine_of(model, threads=threads, kv_dtype=kind, cache=cache)) for kind in KINDS
        }
        self._rows = {kind: _tap(engine) for kind, engine in self.engines.items()}

    def store(self, context: Sequence[int]) -> None:
        for engine in self.engines.values():
            asked(engine, list(context))
            engine.demote("disk")

    def logits(self, context: Sequence[int], after: Sequence[int]) -> dict[str, Tensor]:
        """[computed, vocab] of each dtype, after each of the last tokens, which were computed: those that follow a stored context,
        but for what an earlier request began with as well.
        """
        found = {}
        for kind, engine in self.engines.items():
            self._rows[kind].clear()
            turn = asked(engine, [*context, *after])
            engine.demote("disk")
            if turn.cached.disk < len(context):
                raise RuntimeError(f"{turn.cached} of {len(context)} stored tokens were read back")
            (rows,) = self._rows[kind]
            found[kind] = engine.decoder.logits(rows)
        return found

    def bytes(self) -> dict[str, dict[str, int]]:
        """Bytes of a row in host memory, and of all files, by dtype."""
        found = {}
        for kind, engine in self.engines.items():
            layout = engine.parts.store.layout
            found[kind] = {"row": layout.layers * 2 * layout.row_bytes, "files": engine.stats().tiers.disk.used}
        return found


def _tap(engine: Engine) -> list[Tensor]:
    """Have an engine compute the final rows of all tokens; they come to the returned list, pass by pass."""
    passes: list[Tensor] = []
    decoder = engine.decoder
    go_on = decoder.go_on

    def tapped(hidden: Any, attend: Any, wanted: Tensor | None = None, stop: int | None = None) -> None:
        go_on(hidden, attend, None, stop)
        passes.append(hidden.normed.clone())
        if wanted is not None:
            hidden.x, hidden.normed = hidden.x[wanted], hidden.normed[wanted]

    decoder.go_on = tapped  # type: ignore[method-assign]
    return passes


def main(args: list[str]) -> int:
    parser = arguments("python -m benchmarks.engine.kv_dtypes", __doc__ or "")
    parser.add_argument(
        "--model", default=BUNDLED, help="model whose perplexity is measured (default: the bundled one)"
    )
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="plain text to judge, such as WikiText-2's wiki.test.raw"
    )
    parser.add_argument("--timed", default="bench-100m", help="preset or model to time (default bench-100m)")
    parser.add_argument("--only", choices=("perplexity", "recall", "speed"), help="one part (default: all)")
    parser.add_argument("--rate", type=float, default=200.0, help="MB/s of the disk that is made slow (default 200)")
    options = parser.parse_args(args)
    rows, goals = [], []
    for name, part in (("perplexity", judged_text), ("recall", judged_facts), ("speed", speeds)):
        if options.only in (None, name):
            found, wanted = part(options)
            rows += found
            goals += wanted
    finish(options, rows, goals, model=Path(options.model).name, timed=options.timed)
    return 0


# --------------------------------------------------------------------------------------------------- answers


def judged_text(options: argparse.Namespace) -> Part:
    """Perplexity, and bytes; nothing without a text."""
    if options.text is None:
        return [], []
    with contextlib.ExitStack() as stack:
        judge = Judge(options.model, options.threads, stack)
        row = perplexity(judge, options.model, options.text, 4 if options.quick else 30)
        row["bytes"] = judge.bytes()
    table(f"perplexity, {Path(options.model).name}, {row['tokens']} tokens", row, "perplexity", "ratio")
    change = row["ratio"]["int8"]
    noise = (change["error"] or 0) / 0.005
    goals = [
        goal("perplexity, int8 / float32, apart from 1", abs(change["value"] - 1), 0.005, least=False, spread=noise)
    ]
    for what in ("row", "files"):
        fewer = row["bytes"]["float32"][what] / row["bytes"]["int8"][what]
        goals.append(goal(f"bytes of {what}, float32 / int8", fewer, 3.5, least=True, spread=COUNTED))
    return [row], goals


def judged_facts(options: argparse.Namespace) -> Part:
    """Recall of the bundled model."""
    with contextlib.ExitStack() as stack:
        row = recall(Judge(BUNDLED, options.threads, stack), 3 if options.quick else 40, options.seed)
    table(f"recall, the bundled model, {row['questions']} facts, %", row, "accuracy", "points")
    lost = row["points"]["int8"]
    name = "points of recall, int8 less float32"
    return [row], [goal(name, lost["value"], -1.0, least=True, spread=lost["error"] or 0)]


def table(title: str, row: dict[str, Any], value: str, against: str) -> None:
    def said(found: Any) -> str:
        return f"{found['value']:.4f} ± {found['error'] or 0:.4f}" if isinstance(found, dict) else f"{found:.4f}"

    show(
        title,
        ("", *KINDS),
        [(name, *(said(row[name][k]) if k in row[name] else "" for k in KINDS)) for name in (value, against)],
    )


def perplexity(judge: Judge, model: str, text: Path, windows: int) -> dict[str, Any]:
    """Stretches of a text, spread evenly over it: the first tokens are stored, the losses of the others are compared."""
    ids = Tokenizer(model).encode(text.read_text(encoding="utf-8"), add_special_tokens=False)
    size = CONTEXT + AFTER
    if len(ids) <= size:
        raise ConfigError(f"--text {text} has {len(ids)} tokens; give a text of more than {size}")
    step = max(size, (len(ids) - size) // windows)
    losses = Paired()
    for number, start in enumerate(range(0, len(ids) - size, step)[:windows]):
        context, after = ids[start : start + CONTEXT], ids[start + CONTEXT : start + size]
        judge.store(context)
        targets = torch.tensor(after[1:])
        found = judge.logits(context, after)
        losses.add({k: F.cross_entropy(rows[:-1], targets, reduction="none") for k, rows in found.items()}, number)
    return {"name": "perplexity", "context": CONTEXT, **losses.perplexity(against="float32")}


def recall(judge: Judge, sessions: int, seed: int) -> dict[str, Any]:
    """How often the value of a fact is the first choice, where the dialogue that told it comes from disk."""
    right = Paired()
    drawn = dialogues(Path(BUNDLED), held_out_sentences(), count=sessions, tokens=TOKENS, facts=FACTS, seed=seed)
    for number, shared in enumerate(drawn):
        judge.store(shared.prefix)
        for query in shared.queries:
            if query.value is None:
                continue
            after = [*query.prompt, *query.reply]
            place = len(query.prompt) + query.value
            found = judge.logits(shared.prefix, after[:place])
            right.add({k: (rows[-1:].argmax(-1) == after[place]).float() for k, rows in found.items()}, number)
    return {"name": "recall", **right.accuracy(against="float32")}


# ----------------------------------------------------------------------------------------------------- speed


def speeds(options: argparse.Namespace) -> Part:
    """Times to first tokens."""
    repeats = 3 if options.quick else 9
    slow = Throttle(read_bytes_per_s=options.rate * MB)
    name = f"TTFT, {HISTORY} tokens on a disk of {options.rate:g} MB/s"
    rows = [
        timed(options, name, "disk", slow, repeats),
        timed(options, f"TTFT, {HISTORY} tokens on the disk as it is", "disk", None, repeats),
        timed(options, f"TTFT, {HISTORY} tokens in host memory", "host", None, repeats),
        timed(options, f"TTFT of a new prompt of {PROMPT} tokens", None, None, repeats),
    ]
    show(
        f"{options.timed}, {NEW} new tokens after the history, ms",
        ("", *KINDS, "float32 / int8", "spread"),
        [(r["name"], *(r["ttft_ms"][k] for k in KINDS), r["ratio"], f"{100 * r['spread']:.0f} %") for r in rows],
    )
    goals = [goal(f"{name}, float32 / int8", rows[0]["ratio"], 2.0, least=True, spread=rows[0]["spread"])]
    return rows, goals


def timed(
    options: argparse.Namespace,
    name: str,
    tier: Literal["host", "disk"] | None,
    throttle: Throttle | None,
    repeats: int,
) -> dict[str, Any]:
    """One kind of request to an engine of each dtype. `tier`: where the history is; None: there is none."""
    rng = random.Random(options.seed)
    with contextlib.ExitStack() as stack:
        cache = {"source": "load", "device_cache": 256 << 20, "host_cache": 256 << 20}
        engines = {
            kind: stack.enter_context(
                engine_of(options.timed, threads=options.threads, throttle=throttle, kv_dtype=kind, cache=cache)
            )
            for kind in KINDS
        }

        history = words(rng, next(iter(engines.values())), HISTORY)
        for engine in engines.values() if tier is not None else ():
            asked(engine, history)

        def measured(engine: Engine) -> float:
            if tier is None:
                return asked(engine, words(rng, engine, PROMPT)).ttft
            engine.demote(tier)
            turn = asked(engine, [*history, *words(rng, engine, NEW)])
            if getattr(turn.cached, tier) != HISTORY:
                raise RuntimeError(f"{turn.cached} instead of {HISTORY} tokens of {tier}")
            engine.settle()
            return turn.ttft

        found = interleaved(
            {kind: functools.partial(measured, engine) for kind, engine in engines.items()}, repeats + 1
        )
    kept = {kind: samples[1:] for kind, samples in found.items()}
    middle = {kind: statistics.median(samples) for kind, samples in kept.items()}
    return {
        "name": name,
        "ttft_ms": {kind: round(1e3 * seconds, 3) for kind, seconds in middle.items()},
        "ratio": middle["float32"] / middle["int8"],
        "spread": max(spread(samples) for samples in kept.values()),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
