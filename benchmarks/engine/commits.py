"""This checkout's speed beside another one's: prefill, decode, relay and second turns, in processes of their own, in turn.

A process is fast or slow from its start to its end, as the system had huge pages free when its memory was first touched
(docs/log.md). So each tells how much of its memory lies in them, and those of the most are compared; the ratio of all is printed beside
it. Fewer than three of an arm are not judged. The other checkout needs its kernels compiled in place (`AFTERGLOW_KERNELS=required python setup.py build_ext --inplace`).

    python -m benchmarks.engine.commits CHECKOUT [--quick] [--json FILE]
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from afterglow.bench.report import arguments, finish, goal, show, spread
from benchmarks.common.paths import ROOT
from benchmarks.peers.processes import THREADS

WORKER = Path(__file__).with_name("commit_worker.py")
ALIKE = 0.95  # of the most memory in huge pages of an arm: a step is a slab, 75 MB of 460
FEWEST = 3  # processes of an arm
PROCESSES, QUICK_PROCESSES = 7, 2

Process = dict[str, Any]


def main(args: Sequence[str]) -> int:
    parser = arguments("python -m benchmarks.engine.commits", __doc__ or "")
    parser.add_argument("checkout", type=Path, help="the other checkout")
    options = parser.parse_args(args)
    arms = {"this": ROOT, "other": options.checkout.resolve()}
    for folder in arms.values():
        if not (folder / "src" / "afterglow").is_dir():
            parser.error(f"{folder} is no checkout: it has no src/afterglow")
    order = random.Random(options.seed)
    found: dict[str, list[Process]] = {name: [] for name in arms}
    for _ in range(QUICK_PROCESSES if options.quick else PROCESSES):
        for name in order.sample(list(arms), len(arms)):
            found[name].append(process(arms[name], 2 if options.quick else 4))
            print(f"{name}: {found[name][-1]['huge_bytes'] / 1e6:.0f} MB in huge pages", file=sys.stderr, flush=True)
    rows = compared(found)
    show(
        f"{revision(arms['this'])} beside {revision(arms['other'])}: bench-100m, higher is better",
        ("", "this", "other", "this : other", "processes differ by", "compared", "all of them"),
        [
            (
                r["name"],
                r["this"],
                r["other"],
                f"{r['ratio']:.3f}",
                f"{100 * r['spread']:.1f} %",
                " and ".join(map(str, r["compared"].values())),
                f"{r['ratio_of_all']:.3f}",
            )
            for r in rows
        ],
    )
    goals = [
        goal(f"this : other, {r['name']}", r["ratio"], 1.0, least=True, spread=r["spread"])
        for r in rows
        if min(r["compared"].values()) >= FEWEST
    ]
    about = {"head": revision(arms["this"]), "other_head": revision(arms["other"]), "processes": found}
    finish(options, rows, goals, **about)
    return 0


def process(checkout: Path, repeats: int) -> Process:
    """Measure a checkout in a new process. Raises: RuntimeError, with what it printed, where it fails."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(THREADS)}
    environment["PYTHONPATH"] = str(checkout / "src")
    done = subprocess.run(
        [sys.executable, str(WORKER), str(repeats)], env=environment, cwd=checkout, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{checkout}: {done.stderr[-2000:]}")
    found: Process = json.loads(done.stdout.splitlines()[-1])
    if Path(package := found.pop("package")).parent != checkout / "src":
        raise RuntimeError(f"{checkout}: the package of {package} was measured")
    return found


def compared(found: dict[str, list[Process]]) -> list[dict[str, Any]]:
    """Make a row for each rate: medians over the processes of each arm whose memory lies in huge pages about as much as that of any."""
    most = {name: max(each["huge_bytes"] for each in processes) for name, processes in found.items()}
    kept = {arm: [each for each in of if each["huge_bytes"] >= ALIKE * most[arm]] for arm, of in found.items()}
    rows = []
    for name in kept["this"][0]["rates"]:
        each = {arm: [process["rates"][name] for process in processes] for arm, processes in kept.items()}
        every = [statistics.median(process["rates"][name] for process in found[arm]) for arm in ("this", "other")]
        this, other = (statistics.median(each[arm]) for arm in ("this", "other"))
        rows.append(
            {
                "name": name,
                "this": this,
                "other": other,
                "ratio": this / other,
                "ratio_of_all": every[0] / every[1],
                "spread": max(map(spread, each.values())),
                "compared": {arm: len(values) for arm, values in each.items()},
            }
        )
    return rows


def revision(checkout: Path) -> str:
    told = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=checkout, capture_output=True, text=True)
    return told.stdout.strip() or checkout.name


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
