"""Run the parts that have no result yet, one process each, at most five minutes each.

A part that fails, or takes longer, is reported, and the next one runs; the next call tries it again. A part that is finished is
not run again: its result is a file of the folder. Results of another commit are measured again. Needs no network.

    benchmarks/gpu.sh [--parts NAME...] [--out FOLDER] [--shape tiny]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from afterglow.bench.report import commit
from benchmarks.gpu.parts import PARTS

LIMIT = 300.0  # seconds for a part
ROOT = Path(__file__).parents[2]

Start = Callable[[str, Path, str], str | None]
"""`start(part, file, shape)` runs a part. Returns what went wrong, None if nothing did."""


def main(args: Sequence[str], start: Start | None = None) -> int:
    """Run the parts. Returns 1 if one of them has no result now."""
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.sh", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="NAME", help="all")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "gpu", help="folder of results (default build/gpu)"
    )
    parser.add_argument("--shape", choices=("full", "tiny"), default="full", help="tiny: to see that all parts run")
    parser.add_argument("--limit", type=float, default=LIMIT, metavar="S", help="seconds for a part (default 300)")
    options = parser.parse_args(args)
    start = start or partial(in_a_process, options.limit)
    options.out.mkdir(parents=True, exist_ok=True)
    failed, now = {}, commit()
    for name in options.parts:
        file = options.out / f"{name}.json"
        found = result(file, options.shape)
        if is_of(found, now):
            print(f"{name}: finished before", flush=True)
            continue
        why = "" if found is None else f" again: its result is of commit {found['commit']}, the code of {now}"
        print(f"{name}: begins{why}", flush=True)
        wrong = start(name, file, options.shape)
        if wrong is None and result(file, options.shape) in (None, found):
            wrong = "ended without a result"
        if wrong is not None:
            failed[name] = wrong
            print(f"{name}: FAILED: {wrong}", flush=True)
    summary(options.out, options.shape, now)
    for name, wrong in failed.items():
        print(f"{name}: FAILED: {wrong}")
    return 1 if failed else 0


def result(file: Path, shape: str) -> dict[str, Any] | None:
    """Read what a part found; None if it has not finished with this shape."""
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return found if found.get("tiny") is (shape == "tiny") else None


def is_of(found: dict[str, Any] | None, now: str | None) -> bool:
    """Tell whether there is a result, and of the commit `now`; where that is not known (no checkout), any result will do."""
    return found is not None and now in (None, found["commit"])


def in_a_process(limit: float, name: str, file: Path, shape: str, module: str = "benchmarks.gpu.part") -> str | None:
    """Run a part in a process of its own: what goes wrong on a device stays with the process. What it prints goes to a log too."""
    log = file.with_suffix(".log")
    command = [sys.executable, "-m", module, name, str(file), "--shape", shape]
    with log.open("w") as output:
        started = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
        )  # fmt: skip
        try:
            status: int | None = started.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:  # an interrupt too ends what the part has started
            if started.poll() is None:
                os.killpg(started.pid, signal.SIGKILL)
                started.wait()
    print(log.read_text(errors="replace"), end="", flush=True)
    if status is None:
        return f"took more than {limit:g} s; see {log}"
    return None if status == 0 else f"exit status {status}; see {log}"


def summary(folder: Path, shape: str, now: str | None) -> None:
    """Print the goals of all parts that have finished, and of which commit they are if it is not `now`."""
    for name in PARTS:
        found = result(folder / f"{name}.json", shape)
        if found is None:
            continue
        old = "" if is_of(found, now) else f" (old: commit {found['commit']})"
        for goal in found["goals"]:
            came = "met" if goal["met"] else "within noise" if goal["within_noise"] else "MISSED"
            print(f"{name}: {goal['name']}: {goal['value']:.3g}, wanted {goal['goal']}: {came}{old}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
