#!/usr/bin/env python3
"""CachedAttention's evaluation (USENIX ATC'24; arXiv v1: AttentionStore) beside the simulator's figures.

Figures 1, 2, 4, 13 to 25 of the ATC paper, and 1, 2, 4, 13 to 26 of the arXiv version: a row per printed value, and rows
for the orders that the figures show. The policy is the server's own; workload and machine are modelled. What the papers
leave open is set once, for all models and figures, at the head of `runs.py`, and varied by
`--figure sensitivity`.

Runs of fewer conversations than the papers' 9,000 have as much less disk, warm-up and think time, so that as large a part
of the workload waits and fits. Every run is kept in the JSON file as it ends; `--resume` goes on from there, and `--kept`
makes the figures that can be made of what there is, of 9,000 conversations or else of 1,500: each row says of how many.

    python -m benchmarks.papers.cachedattention.figures --json benchmarks/results/papers_cachedattention.json
    python -m benchmarks.papers.cachedattention.figures --quick --figure 13 --figure 21 --paper ATC
"""

from __future__ import annotations

import os

os.environ.setdefault("COLUMNS", "150")  # of tables that go into a file

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from afterglow.bench.report import COUNTED, about, arguments, commit, goal, show
from benchmarks.papers.cachedattention import closed, serving, varied
from benchmarks.papers.cachedattention.runs import PAPER_CONVERSATIONS, Case, Figures, Runs
from benchmarks.papers.cachedattention.table import Paper, Row, missed, shown

QUICK = 1500
PAPERS: tuple[Paper, ...] = ("ATC", "arXiv")
SENSITIVITY, SCALE = "sensitivity", "scale"


@dataclass
class Evaluation:
    """The options, and the rows so far."""

    options: argparse.Namespace
    rows: list[Row] = field(default_factory=list)
    kept: dict[str, Figures] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    def save(self) -> None:
        """Write what there is, so that nothing is lost."""
        path: Path | None = self.options.json
        if path is not None:
            facts = {"commit": commit(), "seed": self.options.seed, "partial": True, "rows": self.rows}
            path.parent.mkdir(parents=True, exist_ok=True)
            beside = path.with_name(path.name + ".part")
            beside.write_text(json.dumps(facts | {"runs": self.kept}, indent=1) + "\n")
            beside.replace(path)  # hours of runs are in the file: it is whole at any time

    def add(self, paper: Paper, number: str, rows: Sequence[Row]) -> None:
        """A figure is complete."""
        self.rows += rows
        of = {f", {each['conversations']:,} conversations" for each in rows if "conversations" in each}
        title = (
            f"{paper}, {number if number == SENSITIVITY else f'Figure {number}'}{''.join(of)} ({self.seconds:.0f} s)"
        )
        show(title, ("", "paper", "simulated", "deviation", "goal", ""), [shown(found) for found in rows])
        self.save()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


def options_of(args: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments("python -m benchmarks.papers.cachedattention.figures", __doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--figure", action="append", metavar="N", help="only this figure; may be repeated")
    parser.add_argument("--paper", choices=PAPERS, help="of this paper only (default: both)")
    parser.add_argument(
        "--conversations", type=int, metavar="N", help=f"per run (default {PAPER_CONVERSATIONS:,}; --quick: {QUICK:,})"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (default 1)")
    parser.add_argument("--resume", action="store_true", help="take over the runs that the JSON file already has")
    parser.add_argument(
        "--kept",
        action="store_true",
        help=f"the same, and simulate nothing: figures that lack a run are made of runs of {QUICK:,} conversations, or left out",
    )
    return parser.parse_args(args)


def main(args: Sequence[str] | None = None) -> int:
    """The command."""
    options = options_of(args)
    conversations = options.conversations or (QUICK if options.quick else PAPER_CONVERSATIONS)
    found = Evaluation(options, kept=_known(options))
    runs = Runs(options.jobs, found.kept, found.save, lambda line: print(line, flush=True))
    bases = [
        Case(conversations=n, seed=options.seed) for n in ((conversations, QUICK) if options.kept else (conversations,))
    ]
    wanted = set(options.figure or ())
    papers: tuple[Paper, ...] = (options.paper,) if options.paper else PAPERS
    for paper in papers:
        for number, rows in closed.without_runs(paper, PAPER_CONVERSATIONS, options.seed, wanted).items():
            found.add(paper, number, rows)
    for paper in papers:
        for number, make in serving.numbered(paper).items():
            for case in (serving.paper_case(paper, base) for base in bases):
                cases = serving.cases_of(paper, number, case)
                if _is_wanted(options, number, cases, runs):
                    runs.all(cases)
                    found.add(paper, number, _counted(make(paper, case, runs), case))
                    break
    for base in bases:
        cases = varied.sensitivity_cases(base)
        if "ATC" in papers and _is_wanted(options, SENSITIVITY, cases, runs):
            runs.all(cases)
            found.add("ATC", SENSITIVITY, _counted(varied.sensitivity_rows(base, runs), base))
            break
    if options.kept:
        for paper in papers:
            if rows := list(varied.scale_rows(paper, runs.kept, QUICK)):
                found.add(paper, SCALE, rows)
    _finish(found, bases[0])
    return 0


def _counted(rows: Iterable[Row], case: Case) -> list[Row]:
    """Rows of runs say of how many conversations these were."""
    return [{"conversations": case.conversations} | each for each in rows]


def _is_wanted(options: argparse.Namespace, number: str, cases: Sequence[Case], runs: Runs) -> bool:
    """Was this figure asked for, and may all be simulated that it needs?"""
    if options.figure and number not in options.figure:
        return False
    return not options.kept or all(case.key in runs.kept for case in cases)


def _known(options: argparse.Namespace) -> dict[str, Figures]:
    """Runs of the JSON file. Their keys say what they are of, so that others are simply not found."""
    path: Path | None = options.json
    if not (options.resume or options.kept) or path is None or not path.is_file():
        return {}
    known: dict[str, Figures] = json.loads(path.read_text()).get("runs", {})
    return known


def _finish(found: Evaluation, base: Case) -> None:
    wrong = missed(found.rows)
    columns = ("goals that are missed", "paper", "simulated", "deviation", "", "")
    show("", columns, [(f"{r['paper']} {r['figure']}: {r['what']}", *shown(r)[1:]) for r in wrong])
    judged = sum(r["met"] is not None for r in found.rows)
    print(f"{judged - len(wrong)} of {judged} goals met, {found.seconds:.0f} s")
    path: Path | None = found.options.json
    if path is not None:
        facts = about(found.options)
        goals = [goal_of(r) for r in found.rows if r["met"] is not None]
        everything = {"assumptions": asdict(base), "rows": found.rows, "goals": goals, "runs": found.kept}
        path.write_text(json.dumps(facts | everything, indent=1) + "\n")
        print(f"written to {path}")


def goal_of(found: Row) -> dict[str, Any]:
    """As all benchmarks write their goals: how far the simulated value may lie from the printed one, or, of orders, 1 for one
    that is as printed."""
    name = f"{found['paper']} {found['figure']}: {found['what']}"
    if found["within"] is None:
        judged = goal(name, float(found["met"]), 1, least=True, spread=COUNTED)
    else:
        judged = goal(f"{name}, deviation", abs(found["deviation"]), found["within"], least=False, spread=COUNTED)
    counted = {"conversations": found["conversations"]} if "conversations" in found else {}
    return judged | {"printed": found["printed"], "simulated": found["simulated"]} | counted


if __name__ == "__main__":
    sys.exit(main())
