"""Rows, tables and goals of SPEC's I/O benchmark."""

from __future__ import annotations

import itertools
import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from afterglow.bench.report import COUNTED, finish, goal, show
from afterglow.store.extents.throttle import Throttle
from benchmarks.papers.spec.accounting import Layer
from benchmarks.papers.spec.io_variants import (
    AGAIN,
    BASE,
    HEADS,
    NEW,
    RETENTION,
    SHAPES,
    SPEC,
    VARIANTS,
    WHOLE,
    Asked,
    guessing,
)


def _row(asked: Asked) -> dict[str, Any]:
    stats, times, count = asked.stats, asked.times, len(asked.times)
    rows = {place: now - asked.warm_rows[place] for place, now in asked.shelf.placement.rows.items()}
    wanted, tally = max(1, sum(rows.values())), stats.tally
    return {
        "variant": asked.variant.name,
        "requests": count,
        "ways": dict(Counter(asked.ways)),
        "ttft_ms": round(1e3 * statistics.mean(times), 1),
        "median_ms": round(1e3 * statistics.median(times), 1),
        "p99_ms": round(1e3 * max(times), 1),
        **({"token_ms": round(1e3 * statistics.median(asked.tokens), 1)} if asked.tokens else {}),
        "wait_ms": round(1e3 * statistics.mean(asked.waited), 1),
        "read_mb": round(asked.read_bytes / 1e6 / count, 1),
        "device_hits": round(rows["device"] / wanted, 3),
        "host_hits": round(rows["host"] / wanted, 3),
        "fallback_layers": round(stats.fallbacks / max(1, stats.layers), 3),
        "identifying": round(stats.identifying / sum(times), 4),
        "mapping": round(stats.mapping / sum(times), 4),
        "recall": round(tally.recall, 3),
        "precision": round(tally.precision, 3),
        "hidden": round(tally.hit / max(1, tally.used + tally.missing), 3),
        "wasted_mb": round(tally.wasted / 1e6 / count, 1),
    }


def _report(
    rows: list[dict[str, Any]],
    sizes: list[int],
    throttle: Throttle | None,
    computing: float,
    extra: float,
    options: Any,
) -> None:
    rate = "the disk as it is" if throttle is None else f"a disk of {throttle.read_bytes_per_s / 1e6:.0f} MB/s"
    show(
        f"{options.shape} shape, {len(sizes)} prefixes of {min(sizes)} to {max(sizes)} tokens, {NEW} new ones (computed in"
        f" {1e3 * computing:.0f} ms), retention {RETENTION:g}, {rate}",
        ("variant", "TTFT ms", "slowest", "waits ms", "MB read", "on device", "in host", "fall back", "identify", "recall",
         "precision", "hidden", "wasted MB"),
        [
            (r["variant"], f"{r['ttft_ms']:.0f}", f"{r['p99_ms']:.0f}", f"{r['wait_ms']:.0f}", f"{r['read_mb']:.1f}",
             *(f"{100 * r[name]:.0f} %" for name in ("device_hits", "host_hits", "fallback_layers", "identifying")),
             *(f"{100 * r[name]:.0f} %" for name in ("recall", "precision", "hidden")), f"{r['wasted_mb']:.1f}")
            for r in rows
        ],
    )  # fmt: skip
    by_name = {row["variant"]: row for row in rows}
    whole, base, spec, again = by_name[WHOLE], by_name[BASE], by_name[SPEC], by_name[AGAIN.name]
    spread, of_waiting = (abs(again[what] / max(0.1, spec[what]) - 1) for what in ("ttft_ms", "wait_ms"))
    print(f"the same variant twice: TTFT differs by {100 * spread:.0f} %, waiting by {100 * of_waiting:.0f} %")
    ladder = [by_name[variant.name] for variant in VARIANTS[3:]]
    shape = Layer(kv_heads=HEADS, probe_heads=3, vector_bytes=4 * SHAPES[options.shape].head_dim)
    goals = [
        goal("TTFT, H2O with LFU over SPEC", base["ttft_ms"] / spec["ttft_ms"], 1.2, least=True, spread=spread),
        goal("TTFT, loading everything over SPEC", whole["ttft_ms"] / spec["ttft_ms"], 1.0, least=True, spread=spread),
        goal("slowest, H2O with LFU over SPEC", base["p99_ms"] / spec["p99_ms"], 1.0, least=True, spread=spread),
        goal(
            "waiting for I/O, H2O with LFU over SPEC",
            base["wait_ms"] / max(0.1, spec["wait_ms"]),
            1.5,
            least=True,
            spread=of_waiting,
        ),
        goal("identification, share of TTFT", spec["identifying"], 0.06, least=False, spread=spread),
        goal("mapping, share of TTFT", spec["mapping"], 0.02, least=False, spread=spread),
        goal(
            "extra storage, share of keys and values",
            extra,
            round(shape.sidecar_overhead, 6),
            least=False,
            spread=COUNTED,
        ),
        goal(
            "precision of guesses over random ones",
            spec["precision"] / max(0.001, by_name[guessing("random").name]["precision"]),
            1,
            least=True,
            spread=COUNTED,
        ),
        *(
            goal(
                f"{after['variant']}: TTFT over the step before",
                after["ttft_ms"] / before["ttft_ms"],
                1.0,
                least=False,
                spread=spread,
            )
            for before, after in itertools.pairwise(ladder)
        ),
    ]
    run = f"{options.shape}, {'the disk as it is' if throttle is None else 'slow disk'}"
    about = {
        "run": run, "quick": options.quick, "sizes": sizes, "retention": RETENTION, "computing_s": round(computing, 4),
        "spread_ttft": round(spread, 4), "spread_waiting": round(of_waiting, 4),
        "disk_bytes_per_s": None if throttle is None else round(throttle.read_bytes_per_s),
    }  # fmt: skip
    runs, all_rows, all_goals = _others(options.json, run)
    all_rows += [{"run": run, **row} for row in rows]
    all_goals += [{**found, "name": f"{run}: {found['name']}"} for found in goals]
    finish(options, all_rows, all_goals, runs=[*runs, about])


def _others(path: Path | None, run: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """What the file has of other runs: about them, their rows, their goals."""
    if path is None or not path.exists():
        return [], [], []
    found = json.loads(path.read_text())
    return (
        [about for about in found.get("runs", ()) if about["run"] != run],
        [row for row in found["rows"] if row.get("run", run) != run],
        [met for met in found["goals"] if ": " in met["name"] and not met["name"].startswith(f"{run}: ")],
    )
