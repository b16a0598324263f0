#!/usr/bin/env python3
"""What dropping the oldest half of a full context costs in quality: tables 1 and 2 of CachedAttention.

Compared on the same tokens and questions: CA keeps the surviving keys and values and embeds the keys at new positions;
TT computes the surviving tokens anew (OF computes the same, only less often); NKVT keeps old positions; `none` keeps
nothing of the history; `sinks_and_recent` and `importance` keep other tokens than the latest, as these policies of the
server do. No engine takes part: the decoder runs over plain tensors (`overflow/context.py`).

Without data the bundled model is measured on dialogues of its own kind. With --data (or AFTERGLOW_DATA), a folder with
`wikitext2/wiki.test.raw`, `stories260k/`, `tinystories/tinystories_sample.txt`, `lm_eval_tasks/piqa.validation.jsonl`
and `longeval/5_topics.jsonl`, each that is there is measured too. Other texts (PTB, C4) and questions (MMLU) are
given by path.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("COLUMNS", "132")  # of tables that go into a file

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from afterglow.bench.report import COUNTED, arguments, finish, goal, show
from afterglow.model.decoder import Decoder
from afterglow.model.loader import load_model
from afterglow.text.tokenizer import Tokenizer
from benchmarks.common import stories260k, texts
from benchmarks.common.model_texts import held_out_sentences, knows_markers
from benchmarks.common.paired import Paired
from benchmarks.papers.cachedattention.overflow import choices, dialogues, perplexity
from benchmarks.papers.cachedattention.overflow.context import VARIANTS, Prefill

TASKS = ("dialogues", "wikitext2", "tinystories", "longeval", "piqa")
WINDOW = 4096  # at most, unless asked for: the paper's
FACTS = 20  # in a full window of dialogue; crowded: twice as many, more than the bundled model was trained on


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder with its tokenizer, as the tasks need them."""

    name: str
    directory: Path
    decoder: Decoder
    encode: texts.Encode
    head: tuple[int, ...]  # what no truncation drops
    window: int


@dataclass
class Report:
    """Rows and goals as they come."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    goals: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def perplexity(self, text: str, model: Model, losses: Paired, *, judged: bool = True) -> None:
        """A row of table 1; `judged`: it counts for the goals."""
        row = losses.perplexity()
        if not row["tokens"]:
            self.skipped.append(f"{text}, {model.name}: no tokens to measure")
            return
        self.rows.append({"table": "perplexity", "text": text, "model": model.name, "window": model.window} | row)
        if judged:
            where = f"{text}, {model.name}"
            self._goal(f"perplexity CA / TT: {where}", row["ratio"]["CA"], 1.01, row["tokens"], least=False)
            self._goal(f"perplexity NKVT / TT: {where}", row["ratio"]["NKVT"], 2, row["tokens"], least=True)

    def accuracy(self, task: str, model: Model, right: Paired, *, judged: bool = False, **more: Any) -> None:
        """A row of table 2."""
        row = right.accuracy()
        if not row["questions"]:
            self.skipped.append(f"{task}, {model.name}: no questions that fit the window")
            return
        about = {"table": "accuracy", "task": task, "model": model.name, "window": model.window}
        self.rows.append(about | row | more)
        if judged:
            lost = row["points"]["CA"] | {"value": 0.0 - row["points"]["CA"]["value"]}
            self._goal(f"points that CA loses to TT: {task}, {model.name}", lost, 2, row["questions"], least=False)

    def _goal(self, name: str, found: dict[str, float], wanted: float, samples: int, *, least: bool) -> None:
        judged = goal(name, found["value"], wanted, least=least, spread=COUNTED)
        self.goals.append(judged | {"error": found["error"], "samples": samples})

    def prefill(self, text: str, model: Model, counted: Prefill) -> None:
        """A row of prefilled tokens."""
        row = {"table": "prefill", "text": text, "model": model.name, "window": model.window, "turns": counted.turns}
        self.rows.append(row | {"tokens": counted.by_variant()})


def main(args: Sequence[str] | None = None) -> int:
    """The command."""
    options = _options(args)
    if options.threads:
        torch.set_num_threads(options.threads)
    report = Report()
    data: Path | None = options.data
    if data is None:
        report.skipped.append("texts and questions of the data folder: no --data and no AFTERGLOW_DATA")
    directory = options.model or Path(str(files("afterglow") / "assets" / "model"))
    model = _load(directory, "bundled" if options.model is None else directory.name, options.window)
    with tempfile.TemporaryDirectory() as folder:
        small = _stories(data, Path(folder), options.tasks, report)
        _run(options, model, small, report)
    _print(report)
    return _finish(options, report)


def _options(args: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments("python -m benchmarks.papers.cachedattention.truncation", __doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    named: dict[str, Any] = {"action": "append", "default": [], "metavar": "NAME=FILE", "type": _named}
    parser.add_argument("--model", type=Path, metavar="DIR", help="model directory (default: the bundled model)")
    parser.add_argument(
        "--window", type=int, metavar="N", help=f"context window (default the model's, {WINDOW} at most)"
    )
    parser.add_argument("--tasks", type=_tasks, default=TASKS, help=f"of {','.join(TASKS)} (default: all)")
    parser.add_argument("--data", type=Path, default=os.environ.get("AFTERGLOW_DATA"), metavar="DIR", help="see above")
    parser.add_argument("--text", help="a plain text for table 1", **named)
    parser.add_argument("--choices", help="a JSON-lines file of questions for table 2", **named)
    return parser.parse_args(args)


def _named(text: str) -> tuple[str, Path]:
    name, _, path = text.partition("=")
    if not path or not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FILE with a file that exists")
    return name, Path(path)


def _tasks(text: str) -> tuple[str, ...]:
    found = tuple(name.strip() for name in text.split(",") if name.strip())
    if unknown := set(found) - set(TASKS):
        raise argparse.ArgumentTypeError(f"no task {', '.join(sorted(unknown))}; there are {', '.join(TASKS)}")
    return found


def _load(directory: Path, name: str, window: int | None) -> Model:
    decoder = load_model(directory)
    tokenizer = Tokenizer(directory)
    window = window or min(WINDOW, decoder.spec.context())
    decoder.spec.context(window)  # refuses what the model cannot do
    head = () if decoder.spec.bos_id is None else (decoder.spec.bos_id,)
    return Model(name, directory, decoder, lambda text: tokenizer.encode(text, add_special_tokens=False), head, window)


def _stories(data: Path | None, folder: Path, tasks: Sequence[str], report: Report) -> Model | None:
    """The `stories260k` model, converted into `folder`, where the data has it and a task needs it."""
    if data is None or not {"wikitext2", "tinystories"} & set(tasks):
        return None
    weights, pieces = data / "stories260k" / "stories260K.bin", data / "stories260k" / "tok512.bin"
    if not (weights.is_file() and pieces.is_file()):
        report.skipped.append("stories260k: not in the data folder")
        return None
    stories260k.convert(weights, folder)
    decoder = load_model(folder)
    encode = stories260k.Pieces(pieces, decoder.spec.vocab).encode
    return Model("stories260k", folder, decoder, encode, (stories260k.BOS,), decoder.spec.context())


def _run(options: argparse.Namespace, model: Model, small: Model | None, report: Report) -> None:
    quick, data, tasks = options.quick, options.data, options.tasks
    wikitext = _file(data, "wikitext2/wiki.test.raw", report, {"wikitext2", "longeval", "piqa"} & set(tasks))
    if "dialogues" in tasks:
        if knows_markers(model.directory):
            _timed(report, "dialogues", _dialogues, model, quick, options.seed, report)
        else:
            report.skipped.append(f"dialogues: {model.name} was not trained by scripts/small_model")
    named: list[tuple[str, Path]] = list(options.text)
    if "wikitext2" in tasks and wikitext is not None:
        named.insert(0, ("WikiText-2", wikitext))
    for name, path in named:
        for each in (model, small):
            if each is not None:
                _timed(report, f"{name}, {each.name}", _text, each, name, path, quick, report)
    tales = _file(data, "tinystories/tinystories_sample.txt", report, small is not None and "tinystories" in tasks)
    if tales is not None and small is not None:
        _timed(report, "TinyStories, stories260k", _tinystories, small, tales, quick, report)
    questions: list[tuple[str, Path]] = []
    for task, name, file in (
        ("longeval", "LongEval topics", "longeval/5_topics.jsonl"),
        ("piqa", "PIQA", "lm_eval_tasks/piqa.validation.jsonl"),
    ):
        found = _file(data, file, report, task in tasks)
        questions += [(name, found)] if found is not None else []
    for name, path in questions + options.choices:
        _timed(report, f"{name}, {model.name}", _choices, model, name, path, wikitext, quick, report)


def _timed(report: Report, name: str, work: Callable[..., None], *args: object) -> None:
    began = time.process_time()  # other programs' load does not count
    work(*args)
    report.seconds[name] = round(time.process_time() - began, 1)
    print(f"{name}: {report.seconds[name]} s of CPU time", flush=True)


def _file(data: Path | None, name: str, report: Report, wanted: object) -> Path | None:
    if data is None or not wanted:
        return None
    if (data / name).is_file():
        return data / name
    report.skipped.append(f"{name}: not in the data folder")
    return None


def _dialogues(model: Model, quick: bool, seed: int, report: Report) -> None:
    sentences = held_out_sentences()
    setups = [
        ("", model.window, FACTS, 2 if quick else 24, 3),
        (", half the window", model.window // 2, FACTS, 2 if quick else 14, 3 if quick else 4),
        (", crowded", model.window, 2 * FACTS, 8, 3),
    ]
    for name, window, facts, sessions, overflows in setups[: 2 if quick else 3]:
        found = dialogues.run(
            model.decoder,
            model.directory,
            sentences,
            window=window,
            facts=facts,
            sessions=sessions,
            overflows=overflows,
            seed=seed,
        )
        _dialogue_rows(dataclasses.replace(model, window=window), name, found, report)


def _dialogue_rows(model: Model, name: str, found: dialogues.Found, report: Report) -> None:
    plain = not name
    report.perplexity(f"dialogues{name}: replies", model, found.replies)
    report.perplexity(f"dialogues{name}: values in replies", model, found.values, judged=False)
    report.perplexity(f"dialogues{name}: texts to read", model, found.filler, judged=plain)
    report.prefill(f"dialogues{name}", model, found.prefill)
    kept = Paired()
    for each in found.kept:
        kept.extend(each)
    report.accuracy(f"facts kept{name}", model, kept, judged=True)
    if plain:
        for kind, pairs in found.kinds.items():
            report.accuracy(f"facts kept, {kind}", model, pairs)
        for overflow, pairs in enumerate(found.kept, 1):
            report.accuracy(f"facts kept, overflow {overflow}", model, pairs)
    report.accuracy(f"facts dropped{name}", model, found.dropped)


def _text(model: Model, name: str, path: Path, quick: bool, report: Report) -> None:
    streams, overflows = (1, 2) if quick else (6, 3)
    text = path.read_text(encoding="utf-8", errors="replace")
    parts = perplexity.spaced(text, model.encode, streams, perplexity.stream_length(model.window, overflows))
    found, counted = perplexity.perplexity(model.decoder, parts, model.head, window=model.window)
    report.perplexity(name, model, found)
    report.prefill(name, model, counted)


def _tinystories(model: Model, path: Path, quick: bool, report: Report) -> None:
    """Also with no BOS kept at position 0, as if a model had no token that is always there."""
    streams, overflows = (3, 3) if quick else (12, 5)
    length = perplexity.stream_length(model.window, overflows)
    parts = texts.stories(path, model.encode, stories260k.BOS, streams, length)
    for name, head in (("TinyStories", model.head), ("TinyStories, no head kept", ())):
        found, counted = perplexity.perplexity(model.decoder, parts, head, window=model.window)
        report.perplexity(name, model, found, judged=bool(head))
        if head:
            report.prefill(name, model, counted)


def _choices(model: Model, name: str, path: Path, wikitext: Path | None, quick: bool, report: Report) -> None:
    questions = choices.read(path)
    questions = questions[: 3 if quick else 25] if questions[0].record else questions[: 20 if quick else 200]
    if wikitext is not None:
        text = wikitext.read_text(encoding="utf-8", errors="replace")
    else:
        text = " ".join(held_out_sentences())
    ids = model.encode(text[: 400 * model.window])
    found = choices.answers(
        model.decoder, model.encode, model.head, ids, questions, window=model.window, shared=10 if quick else 20
    )
    same = {name: share["value"] for name, share in found.same.accuracy()["accuracy"].items()}
    report.accuracy(name, model, found.right, chance=round(100 * found.chance, 2), same_choice_as_tt=same)


LABELS = {"sinks_and_recent": "s. + r.", "importance": "imp."}  # of columns that would be too wide


def _print(report: Report) -> None:
    variants = [LABELS.get(name, name) for name in VARIANTS]

    def rows(table: str, key: str, *columns: str) -> list[list[object]]:
        return [[r[column] for column in columns] + _cells(r, key) for r in report.rows if r["table"] == table]

    show(
        "Table 1: perplexity after overflow (OF = TT); ratios to TT with their standard errors",
        ("text", "model", "window", "tokens", *variants, "CA / TT", "NKVT / TT"),
        rows("perplexity", "perplexity", "text", "model", "window", "tokens"),
    )
    show(
        "Table 2: accuracy before and after overflow, % (OF = TT); differences to TT in points, with standard errors",
        ("task", "model", "window", "n", "before", *variants, "CA - TT", "NKVT - TT"),
        rows("accuracy", "accuracy", "task", "model", "window", "questions"),
    )
    show(
        "Prefilled tokens from the first overflow on",
        ("text", "model", "turns", "CA", "TT", "OF", "NKVT"),
        [
            (r["text"], r["model"], r["turns"], *(f"{r['tokens'][name]:,}" for name in ("CA", "TT", "OF", "NKVT")))
            for r in report.rows
            if r["table"] == "prefill"
        ],
    )
    for line in report.skipped:
        print(f"skipped: {line}")


def _cells(row: dict[str, Any], key: str) -> list[object]:
    """The variants' own values, then how CA and NKVT compare with TT."""
    if key == "perplexity":
        compared = [row["ratio"][name] for name in ("CA", "NKVT")]
        own = [f"{row[key][name]:.4g}" for name in VARIANTS]
        return [*own, *(_compared(c, ".4f") for c in compared)]
    compared = [row["points"][name] for name in ("CA", "NKVT")]
    own = [f"{row[key][name]['value']:.1f}" if name in row[key] else "" for name in ("before", *VARIANTS)]
    return [*own, *(_compared(c, "+.2f") for c in compared)]


def _compared(found: dict[str, float | None], form: str) -> str:
    error = "?" if found["error"] is None else format(found["error"], form.strip("+"))
    return f"{found['value']:{form}} ± {error}"


def _finish(options: argparse.Namespace, report: Report) -> int:
    finish(
        options,
        report.rows,
        report.goals,
        ratio=0.5,
        cpu_seconds=report.seconds,
        skipped=report.skipped,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
