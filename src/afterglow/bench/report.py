"""What all benchmarks share: arguments, repeats, tables, the JSON file."""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from afterglow.errors import ConfigError


def arguments(prog: str, description: str, threads: bool = True) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark takes. `threads`: whether it computes, with as many threads as one likes."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--quick", action="store_true", help="fewer repeats: about a minute")
    parser.add_argument("--json", type=writable_file, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and prompts (default 0)")
    if threads:
        parser.add_argument("--threads", type=int, default=None, help="compute threads (default: all cores)")
    return parser


def writable_file(text: str) -> Path:
    """Check the place of a file before minutes are spent; missing folders are made when it is written. Raises: ArgumentTypeError."""
    path = Path(text)
    near = path.absolute()
    try:
        while not near.exists():
            near = near.parent
        folder = near.is_dir()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {error.strerror}") from None
    there = near == path.absolute()
    if there and folder:
        raise argparse.ArgumentTypeError(f"{text} is a folder; give the name of a file in it")
    if not (there or folder):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {near} is no folder")
    if not os.access(near, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: you have no right to write {near}")
    return path


def writable_folder(text: str) -> Path:
    """Check a folder that temporary files go into. Raises: ArgumentTypeError."""
    path = Path(text)
    try:
        folder = path.is_dir()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be used: {error.strerror}") from None
    if not folder:
        raise argparse.ArgumentTypeError(f"there is no folder {text}; make it first")
    if not os.access(path, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"you have no right to write into the folder {text}")
    return path


def write_json(path: Path, found: object) -> None:
    """Write results to a file, and say so. Raises: ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"--json {path} cannot be written: {error.strerror}") from error
    print(f"written to {path}")


def hardware() -> dict[str, Any]:
    """The machine, as far as results depend on it."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as f:
            name = next(line.split(":", 1)[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    facts = {
        "cpu": name,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


_SHOWN_BY = ("results", "readme_tables.py", "papers/missed.py", "papers/page*.py", "plots")
"""Paths in benchmarks that show figures, and measure none."""
MEASURED_BY = (
    *("src", "benchmarks", "pyproject.toml", "setup.py", "constraints.txt"),
    *(f":!benchmarks/{path}" for path in _SHOWN_BY),
)
"""Paths from the top of the checkout that figures depend on, as git takes them."""


def commit() -> str | None:
    """Name the last commit that changed anything that figures depend on: figures and documents that are committed later are of
    the same one. None outside a checkout."""
    try:
        here = ["git", "-C", str(Path(__file__).parent)]
        top = subprocess.run([*here, "rev-parse", "--show-toplevel"], capture_output=True, text=True, check=True)
        last = ["git", "-C", top.stdout.strip(), "log", "-1", "--format=%h", "--", *MEASURED_BY]
        out = subprocess.run(last, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return out.stdout.strip() or None


def interleaved(
    variants: Mapping[str, Callable[[], float]], repeats: int, order: random.Random | None = None
) -> dict[str, list[float]]:
    """Call the variants in turn, `repeats` rounds; each returns its own measurement. `order` draws their order in each round."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for _ in range(repeats):
        if order is not None:
            order.shuffle(names)
        for name in names:
            found[name].append(variants[name]())
    return found


def spread(samples: Sequence[float]) -> float:
    """Half the interquartile range (of two samples, half their distance) over the median: what a repeat differs by."""
    if len(samples) < 2:
        return 0.0
    low, _, high = statistics.quantiles(samples, n=4) if len(samples) > 2 else (min(samples), 0, max(samples))
    return (high - low) / 2 / abs(statistics.median(samples))


COUNTED = 0.0  # the spread of counted and calculated numbers: they are the same in each run


def goal(name: str, value: float, wanted: float, *, least: bool, spread: float) -> dict[str, Any]:
    """Make one row of `goals`: at least (or at most) `wanted`, without any tolerance.

    `spread`: what the run's own repeats of the same thing differ by, as a fraction of the goal. A miss by no more than that
    is `within_noise`: neither met nor shown to be missed.
    """
    value, wanted = float(f"{value:.12g}"), float(f"{wanted:.12g}")  # as they are written: `met` follows from them
    met = value >= wanted if least else value <= wanted
    noise = spread * abs(wanted)  # a goal may be negative
    near = value >= wanted - noise if least else value <= wanted + noise
    return {
        "name": name,
        "value": value,
        "goal": f"{'>=' if least else '<='} {wanted:.12g}",
        "spread": round(spread, 4),
        "met": bool(met),
        "within_noise": bool(near and not met),
    }


def verdict(found: dict[str, Any]) -> str:
    """Say in words how a goal came out."""
    return "met" if found["met"] else "within noise" if found["within_noise"] else "MISSED"


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table."""
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*[f"{c:.3g}" if isinstance(c, float) else str(c) for c in row])
    Console().print(table)


def about(options: argparse.Namespace) -> dict[str, Any]:
    """What each result file begins with. `options` are those of `arguments`."""
    return {"hardware": hardware(), "commit": commit(), "quick": options.quick, "seed": options.seed}


def finish(options: argparse.Namespace, rows: list[dict[str, Any]], goals: list[dict[str, Any]], **more: Any) -> None:
    """Print the goals and write the JSON file, if one was asked for."""
    path: Path | None = options.json
    if goals:
        show(
            "goals",
            ("goal", "measured", "wanted", "repeats differ by", ""),
            [(g["name"], g["value"], g["goal"], f"{g['spread']:.1%}", verdict(g)) for g in goals],
        )
        counts = Counter(map(verdict, goals))
        print(", ".join(f"{counts[word]} {word}" for word in ("met", "within noise", "MISSED")))
    if path is not None:
        write_json(path, {**about(options), "rows": rows, "goals": goals, **more})
