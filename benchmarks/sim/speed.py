#!/usr/bin/env python3
"""How fast the simulator is: turns and events per second of processor time, and memory, from 10K to 500K turns.

CachedAttention's workload (ATC) and machine: LLaMA-2-13B on two A100, 128 GB of host memory, 10 TB of disk. The curve is
of conversations that come as fast as they can be served, so that longer runs are no different ones; the papers' own run
of 52K turns, in which thousands wait, is measured apart. Every run has a process of its own.

    python -m benchmarks.sim.speed [--turns 10000,500000] [--json benchmarks/results/sim_speed.json]
    python -m benchmarks.plots sim_speed
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

from afterglow.bench.report import arguments, finish, goal, show, spread
from afterglow.sim.simulator import Simulation
from benchmarks.papers.cachedattention.runs import PAPER_CONVERSATIONS, Case

TURNS = (10_000, 20_000, 50_000, 100_000, 200_000, 500_000)
QUICK = (5_000, 10_000, 20_000)
MEAN_TURNS = 5.75
STEADY = 0.3  # conversations per second that are served about as fast as they come
SECONDS, BYTES, FLAT = 60, 10**9, 1.5


def measured(case: Case) -> dict[str, Any]:
    """One run, in a process that does nothing else."""
    simulation = Simulation(case.setup(), case.workload())
    before, began = time.process_time(), time.monotonic()
    outcome = simulation.run()
    seconds, passed = time.process_time() - before, time.monotonic() - began
    found = outcome.turns + outcome.refused
    return {
        "turns": found,
        "rate": case.rate,
        "seconds": round(seconds, 2),
        "passed": round(passed, 2),
        "ms_per_turn": round(1e3 * seconds / found, 4),
        "turns_per_s": round(found / seconds, 1),
        "events": outcome.events,
        "events_per_s": round(outcome.events / seconds, 1),
        "steps": outcome.steps,
        "mean_queue": round(outcome.queue_seconds / outcome.ended, 1),
        "max_rss": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


REPEATS = 2  # of each run


def apart(case: Case) -> dict[str, Any]:
    """The same in a fresh process, whose memory is that of this run."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measured, case).result()


def main(args: list[str]) -> int:
    parser = arguments("python -m benchmarks.sim.speed", __doc__ or "")
    parser.add_argument("--turns", type=_sizes, help=f"sizes (default {','.join(map(str, TURNS))})")
    parser.add_argument("--without-paper", action="store_true", help="leave out the papers' run of 52K turns")
    options = parser.parse_args(args)
    sizes = options.turns or (QUICK if options.quick else TURNS)
    base = Case(shrinks=False, seed=options.seed)
    cases = [replace(base, rate=STEADY, conversations=max(1, round(turns / MEAN_TURNS))) for turns in sizes]
    if not (options.without_paper or options.quick):
        cases.append(replace(base, conversations=PAPER_CONVERSATIONS))
    rows = []
    for case in cases:
        rows.append(_repeated([apart(case) for _ in range(REPEATS)]))
        show(
            f"{case.conversations:,} conversations, {case.rate:g} per second",
            ("turns", "s", "ms per turn", "turns/s", "events/s", "mean queue", "MB"),
            [_shown(rows[-1])],
        )
    finish(options, rows, goals(rows))
    return 0


def goals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Flat cost, the papers' run in a minute, and memory."""
    steady = [row for row in rows if row["rate"] == STEADY]
    found = []
    if len(steady) > 1:
        costs = [row["ms_per_turn"] for row in steady]
        noise = max(row["spread"] for row in (steady[0], steady[-1]))
        found.append(goal("ms per turn, longest run / shortest", costs[-1] / costs[0], FLAT, least=False, spread=noise))
    longest = [row for row in rows if row["rate"] != STEADY]
    found += [goal("52K turns, s", row["seconds"], SECONDS, least=False, spread=row["spread"]) for row in longest]
    largest = max(rows, key=lambda row: row["max_rss"])
    name = f"memory at {max(row['turns'] for row in rows):,} turns, bytes"
    return [*found, goal(name, largest["max_rss"], BYTES, least=False, spread=largest["spread_rss"])]


def _repeated(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Take the run in the middle, by time, and what the others differ by."""
    middle = sorted(runs, key=lambda run: run["seconds"])[len(runs) // 2]
    apart = {
        name: spread([run[key] for run in runs]) for name, key in (("spread", "seconds"), ("spread_rss", "max_rss"))
    }
    return middle | {name: round(value, 4) for name, value in apart.items()}


def _shown(row: dict[str, Any]) -> tuple[object, ...]:
    names = ("turns", "seconds", "ms_per_turn", "turns_per_s", "events_per_s", "mean_queue")
    return *(row[name] for name in names), round(row["max_rss"] / 10**6)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
