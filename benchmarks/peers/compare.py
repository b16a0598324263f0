"""Afterglow beside its peers: same weights, same prompts, same cores, taking turns.

Each peer that is installed runs from a virtual environment of its own (`--install NAME` makes it); the others are named as absent.
`--figure engine`: prefill and decode, as libraries. `shared-prefix`: many requests behind one prefix, over HTTP. `multi-turn`:
conversations that overlap, with room for all conversations and without. `repeat`: a prompt that was seen before, from memory and from
disk. First tokens have to agree before anything is timed. docs/compare.md explains settings and differences.

    python -m benchmarks.peers.compare [--figure NAME] [--peer NAME,NAME] [--environments DIR] [--quick] [--json FILE]
    python -m benchmarks.peers.compare --install llama|vllm|ort [--environments DIR]
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from afterglow.bench.report import arguments, commit, finish, hardware
from afterglow.errors import AfterglowError, ConfigError
from afterglow.model.presets import PRESETS
from benchmarks.peers import environments, plan
from benchmarks.peers.figures import engine, multi_turn, repeat, shared_prefix
from benchmarks.peers.processes import ended_by_signals

FIGURES: dict[str, ModuleType] = {figure.NAME: figure for figure in (engine, shared_prefix, multi_turn, repeat)}
MODELS = ("bench-56m", "bench-100m")


def main(args: list[str]) -> int:
    parser = arguments("python -m benchmarks.peers.compare", __doc__ or "")
    parser.add_argument("--figure", choices=tuple(FIGURES), action="append", help="what to measure; default: all")
    parser.add_argument("--peer", default=",".join(plan.PEERS), metavar="NAME,NAME", help="default: %(default)s")
    parser.add_argument(
        "--environments",
        type=Path,
        metavar="DIR",
        help=f"folder of the peers' environments; default: the variable {environments.VARIABLE}, or .peers",
    )
    parser.add_argument("--install", action="append", metavar="NAME", help="make this environment: llama, vllm or ort")
    parser.add_argument(
        "--model",
        nargs="+",
        default=list(MODELS),
        choices=sorted(PRESETS),
        help=f"presets; the figures over HTTP take the first (default {' '.join(MODELS)})",
    )
    parser.add_argument(
        "--vllm-compiled",
        action="store_true",
        help="over HTTP, let vLLM compile its model too (minutes at each start); as a library it is measured both ways",
    )
    parser.add_argument(
        "--wait-policy",
        choices=("passive", "default"),
        default="passive",
        help="what idle OpenMP threads do: sleep, or what each engine's library does by itself (default passive)",
    )
    parser.add_argument(
        "--work", type=Path, metavar="DIR", help="keep weights and logs here; default: a temporary folder"
    )
    options = parser.parse_args(args)
    try:
        return _install(options) if options.install else _measure(options)
    except AfterglowError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _install(options: Any) -> int:
    for name in options.install:
        environments.install(name, environments.folder(options.environments))
    return 0


def _measure(options: Any) -> int:
    asked = tuple(name for name in options.peer.split(",") if name)
    unknown = [name for name in asked if name not in plan.PEERS]
    if unknown:
        raise ConfigError(f"--peer {','.join(unknown)} is not known; peers: {', '.join(plan.PEERS)}")
    cores = sorted(os.sched_getaffinity(0))[: options.threads]
    where = environments.folder(options.environments)
    present, absent = plan.found(asked, where)
    for name, reason in absent.items():
        print(f"absent: {name} ({reason})")
    with ended_by_signals(), tempfile.TemporaryDirectory(prefix="afterglow-peers-") as temporary:
        doing = plan.Plan(
            peers=tuple(present),
            environments=where,
            folder=(options.work or Path(temporary)).resolve(),
            seed=options.seed,
            quick=options.quick,
            cores=tuple(cores),
            vllm_compiled=options.vllm_compiled,
            wait_policy=options.wait_policy,
            say=Said(),
        )
        rows, goals, figures = _kept(options.json, options.figure)
        for name in options.figure or FIGURES:
            figure = FIGURES[name]
            began = time.monotonic()
            more, notes = figure.run(doing, options.model)
            seconds = round(time.monotonic() - began)
            figure.table(more)
            rows, goals = rows + more, goals + figure.goals(more)
            figures[name] = {"commit": commit(), "seconds": seconds, "quick": options.quick, **notes}
        facts = {"versions": present, "absent": absent, "settings": plan.settings(doing), "figures": figures}
    finish(options, rows, goals, models=options.model, **facts)
    return 0


def _kept(path: Path | None, measured: list[str] | None) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """What an earlier run has written of figures that are not measured now, on this machine."""
    if path is None or measured is None or not path.exists():
        return [], [], {}
    found = json.loads(path.read_text())
    if found["hardware"]["cpu"] != hardware()["cpu"]:
        return [], [], {}
    rows = [row for row in found["rows"] if row["figure"] not in measured]
    names = {row["figure"] for row in rows}
    goals = [goal for goal in found["goals"] if goal["name"].split(",")[0] in names]
    return rows, goals, {name: notes for name, notes in found["figures"].items() if name in names}


class Said:
    """Progress, with the minutes since the start."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def __call__(self, what: str) -> None:
        print(f"{(time.monotonic() - self._began) / 60:5.1f} min  {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
