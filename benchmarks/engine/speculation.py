#!/usr/bin/env python3
"""Decoding with guesses against decoding without, on a 1.1 B shape in int8 with random weights.

Random weights say nothing, so what is drawn is a double: the logits of each row are replaced by those of a recorded reply, code
that was edited or prose. Everything else is real: the forward passes, the guesses from the request's own text, their
verification, the rows that are saved. Texts are cut into words roughly as byte-pair encoders cut them. One engine runs both
variants in turn, and the one without guesses twice (A/A), so that the spread of the machine is seen.

    python -m benchmarks.engine.speculation [--quick] [--model DIRECTORY] [--json FILE]
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch

from afterglow.bench.report import arguments, finish, goal, show, spread
from afterglow.config import CacheConfig, EngineConfig
from afterglow.engine import token_outputs
from afterglow.engine.engine import Engine
from afterglow.engine.runner import TorchRunner
from afterglow.engine.sampling import Sampler, Shaping
from afterglow.engine.speculation.guesser import Guesser, Lookup
from afterglow.engine.speculation.row_costs import PROBE_ROWS, RowCosts
from afterglow.request import Request, SamplingParams
from benchmarks.peers.quantized.models import RandomShape

RECORDED = Path(__file__).with_name("recorded_replies.json")
WORD = re.compile(r" ?[A-Za-z][a-z]*|\n *|\s|\d|[^\sA-Za-z\d]")
FIRST_ID = 3
LEAD = 30  # tokens of a reply before the first change of an edit

_ids = count()


@dataclass(frozen=True, slots=True)
class Recorded:
    """A prompt, and the reply that is drawn."""

    prompt: list[int]
    reply: list[int]


class Forced(Shaping):
    """Make a recorded reply's next token the only one that can be drawn."""

    def __init__(self, reply: Sequence[int]) -> None:
        self._reply = reply
        self._at = 0

    def apply(self, row: torch.Tensor) -> None:
        row.fill_(-torch.inf)
        row[self._reply[self._at]] = 0.0

    def drew(self, token: int) -> None:
        self._at += 1


class ForcedSampler(Sampler):
    """The double: makes samplers that draw the reply recorded for a prompt."""

    replies: dict[tuple[int, ...], list[int]]

    @classmethod
    def of(
        cls, params: SamplingParams, device: torch.device, prompt: Sequence[int] = (), stop_tokens: Collection[int] = ()
    ) -> Sampler:
        return Sampler(params, None, Forced(cls.replies[tuple(prompt)]))


class Bench:
    """An engine whose guesser can be switched off and on between replies."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        runner = engine.parts.runner
        assert isinstance(runner, TorchRunner)
        self._outputs = runner._outputs
        self.guesser = self._outputs._guesser
        assert self.guesser is not None, "guesses were not asked for"

    def reply(self, text: Recorded, guesser: Guesser | None) -> dict[str, float]:
        """Draw a reply. Returns milliseconds and CPU milliseconds of a token, and the steps and guesses of the reply."""
        self._outputs._guesser = guesser
        before = self.engine.stats().engine
        sampling = SamplingParams(max_tokens=len(text.reply), temperature=0.0, ignore_eos=True)
        first: tuple[float, float] | None = None
        for _, output in self.engine.outputs([Request(f"bench-{next(_ids)}", text.prompt, sampling)]):
            first = first or (time.perf_counter(), time.process_time())
            assert output.finish_reason in (None, "length"), output
        assert first is not None
        wall, cpu = time.perf_counter() - first[0], time.process_time() - first[1]
        self.engine.settle()
        after = self.engine.stats().engine
        tokens = len(text.reply) - 1
        return {
            "ms": wall * 1e3 / tokens,
            "cpu_ms": cpu * 1e3 / tokens,
            "steps": after.steps - before.steps,
            "guessed": after.draft_tokens - before.draft_tokens,
            "accepted": after.accepted_tokens - before.accepted_tokens,
        }


def main(args: list[str]) -> int:
    parser = arguments("python -m benchmarks.engine.speculation", __doc__ or "")
    parser.add_argument(
        "--model", type=Path, help="the checkpoint of the 1.1 B shape (default: made in a temporary folder)"
    )
    parser.add_argument("--rounds", type=int, default=None, help="rounds over all texts (default 3; quick: 1)")
    parser.add_argument("--tokens", type=int, default=None, help="tokens of a reply (default 200; quick: 100)")
    options = parser.parse_args(args)
    tokens = options.tokens or (100 if options.quick else 200)
    texts = recorded(tokens, 2 if options.quick else None)
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or RandomShape(Path(folder), Path(folder), options.seed).checkpoint()
        config = EngineConfig(
            cache=CacheConfig(disk_cache=0, host_cache=2**31),
            quantization="int8",
            threads=options.threads,
            speculate="auto",
        )
        ForcedSampler.replies = {tuple(text.prompt): text.reply for kind in texts.values() for text in kind}
        token_outputs.Sampler = ForcedSampler  # type: ignore[attr-defined]
        engine = Engine.load(model, config)
        engine.start()
        try:
            rows = [costs(engine, [text for kind in texts.values() for text in kind])]
            bench = Bench(engine)
            for kind, of_kind in texts.items():
                rows.append(compared(bench, kind, of_kind, options.rounds or (1 if options.quick else 3)))
        finally:
            engine.close(flush=False)
    _, edits, prose = rows
    goals = [
        goal(
            "code edits: tokens per second with guesses / without",
            edits["faster"],
            1.5,
            least=True,
            spread=edits["spread"],
        ),
        goal("prose: time with guesses / without", prose["slower"], 1.02, least=False, spread=prose["spread"]),
        goal(
            "prose: CPU time with guesses / without", prose["cpu_slower"], 1.02, least=False, spread=prose["cpu_spread"]
        ),
    ]
    finish(options, rows, goals, load=os.getloadavg())
    return 0


def recorded(tokens: int, most: int | None) -> dict[str, list[Recorded]]:
    """Read the texts. Of an edit's reply, the part around its first change is drawn; what comes before was said already."""
    known: dict[str, int] = {}

    def ids(text: str) -> list[int]:
        return [known.setdefault(word, len(known) + FIRST_ID) for word in WORD.findall(text)]

    found: dict[str, list[Recorded]] = {"edits": [], "prose": []}
    for kind, texts in found.items():
        for each in json.loads(RECORDED.read_text("utf-8"))[kind][:most]:
            prompt, reply = ids(each["prompt"]), ids(each["reply"])
            said = 0
            if kind == "edits":
                copied = Lookup(prompt)
                changes = [at for at, token in enumerate(reply) if at > 2 * LEAD and _news(copied, token)]
                said = max(0, min(changes[0] - LEAD, len(reply) - tokens)) if changes else 0
            texts.append(Recorded(prompt + reply[:said], reply[said : said + tokens]))
    return found


def _news(text: Lookup, token: int) -> bool:
    """Let a text grow by a token; returns whether it was another one than was guessed."""
    guessed = text.guess(1)
    text.add(token)
    return guessed != [token]


def costs(engine: Engine, texts: Sequence[Recorded]) -> dict[str, Any]:
    """Measure what guesses cost: further rows of a step, and the lookup."""
    rows = RowCosts.measured(engine.parts.decoder)
    seconds = {n: rows.step(n) for n in PROBE_ROWS}
    began, added = time.thread_time(), 0
    for text in texts:
        lookup = Lookup(text.prompt)
        for token in text.reply:
            lookup.guess(8)
            lookup.add(token)
        added += len(text.prompt) + len(text.reply)
    lookup_us = (time.thread_time() - began) * 1e6 / added
    show(
        "a step without its attention, by its rows",
        ("rows", "CPU ms a thread", "of one row's"),
        [(n, each * 1e3, each / seconds[1]) for n, each in seconds.items()],
    )
    print(f"looking up takes {lookup_us:.1f} us of CPU a token, of prompts and replies")
    row_ms = {str(n): round(each * 1e3, 2) for n, each in seconds.items()}
    return {"name": "costs", "row_ms": row_ms, "lookup_us": round(lookup_us, 2)}


def compared(bench: Bench, kind: str, texts: Sequence[Recorded], rounds: int) -> dict[str, Any]:
    """Draw each reply without guesses, with, and without again, `rounds` times."""
    for text in texts:
        bench.reply(text, None)  # computes the prompt
    runs: list[dict[str, dict[str, float]]] = []
    for turn in range(rounds):
        for text in texts:
            order = ("off", "auto", "again") if (turn + len(runs)) % 2 else ("again", "auto", "off")
            runs.append({name: bench.reply(text, bench.guesser if name == "auto" else None) for name in order})
    found: dict[str, Any] = {"name": kind, "load": os.getloadavg()}
    for unit, prefix in (("ms", ""), ("cpu_ms", "cpu_")):
        off = [(run["off"][unit] + run["again"][unit]) / 2 for run in runs]
        ratios = [run["auto"][unit] / each for run, each in zip(runs, off, strict=True)]
        same = [run["again"][unit] / run["off"][unit] for run in runs]
        found |= {
            f"{prefix}off_ms": round(statistics.median(off), 2),
            f"{prefix}auto_ms": round(statistics.median([run["auto"][unit] for run in runs]), 2),
            f"{prefix}slower": round(statistics.median(ratios), 4),
            f"{prefix}faster": round(1 / statistics.median(ratios), 3),
            f"{prefix}a_a": round(statistics.median(same), 4),
            f"{prefix}spread": round(max(spread(same), spread(ratios) / len(ratios) ** 0.5), 4),
        }
    total = {key: sum(run["auto"][key] for run in runs) for key in ("steps", "guessed", "accepted")}
    tokens = sum(len(text.reply) for text in texts) * rounds
    found |= {"tokens": tokens, **total, "tokens_per_step": round(tokens / total["steps"], 3)}
    show(
        f"{kind}: {len(texts)} replies of {len(texts[0].reply)} tokens, {rounds} rounds",
        ("", "without, ms a token", "with", "without / with", "A/A", "spread"),
        [
            (label, found[f"{prefix}off_ms"], found[f"{prefix}auto_ms"], found[f"{prefix}faster"], found[f"{prefix}a_a"],
             found[f"{prefix}spread"])
            for label, prefix in (("time", ""), ("CPU time", "cpu_"))
        ],
    )  # fmt: skip
    print(f"{total['guessed']:.0f} guessed, {total['accepted']:.0f} right; {found['tokens_per_step']} tokens a step")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
