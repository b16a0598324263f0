"""Benchmarks that users rerun: `afterglow bench NAME`. Each prints a table and can write JSON.

Timings are ratios between variants that take turns in one run, medians of several; each run also prints its own
repeat spread (the same variant against itself), below which no difference means anything.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence

from afterglow.errors import ConfigError

NAMES = {
    "multiturn": "TTFT of a next turn: recomputed, and with its history on device, in host memory, on disk.",
    "disk": "Reading and writing whole extents, checksums included, against plain O_DIRECT loops.",
    "engine": "Prefill and decode speed against transformers, same weights, same threads.",
    "calibrate": "What passes and transfers take on this machine, as a file for `afterglow simulate --calibration`.",
    "profile": "Where each millisecond of a decode step, a prefill and a reused turn goes, against the bound.",
    "overhead": "What HTTP adds to TTFT, and what the engine's own bookkeeping costs.",
}


def run(name: str, args: Sequence[str]) -> int:
    """Run one benchmark with its own arguments (`--quick`, `--json FILE`, ...); returns the exit code."""
    if name.startswith("-"):
        raise ConfigError(f"give the name of a benchmark before its options: afterglow bench NAME {name}")
    if name not in NAMES:
        raise ConfigError(f"no benchmark {name!r}; there are {', '.join(NAMES)}")
    module = importlib.import_module(f"afterglow.bench.{name}")
    return int(module.main(list(args)))


def plain_environment() -> dict[str, str]:
    """Return the variables for a server that is measured: without AFTERGLOW_..., which would give it a key, a certificate or other options."""
    return {name: value for name, value in os.environ.items() if not name.startswith("AFTERGLOW_")}
