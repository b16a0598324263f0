"""Tables of docs/papers.md about AttnCache as measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from afterglow.memo.break_even import LEAST_GAIN
from benchmarks.papers.page_goals import beyond_promise, read
from benchmarks.papers.page_simulated import Found, markdown

PRINTED_LOSS = {
    "SAN": "25 to 38",
    "LazyFormer": "25 to 34",
    "AttnCache-f": "18 to 21",
    "AttnCache": "0.9 to 2.3 at 30 %",
}


def attncache(model: str, found: Found) -> str:
    """Make AttnCache's tables 1 and 2: means over the tasks of what was chosen on the validation part. Means of all maps are shown where
    AttnCache hits. Files that were made without times show none."""
    methods: dict[str, list[Found]] = {}
    every = found["rows"]
    hits = {(row["task"], row["threshold"]) for row in every if row["chosen"] and row["method"] == "AttnCache"}
    controls = {(row["task"], row["threshold"]): row for row in every if row["method"] == "mean maps"}
    for row in every:
        if row["chosen"] and row["method"] != "mean maps":
            methods.setdefault(row["method"], []).append(row)
    if controls:
        methods["mean maps"] = [controls[one] for one in sorted(hits)]
    timed = any("speedup_attention" in row for row in every)
    columns = [*COLUMNS, *(TIMES if timed else ())]
    lines = [
        (
            method,
            PRINTED_LOSS.get(method, ""),
            f"{_mean(rows, 'loss', '{:.1f}')}{_error(rows)}",
            _range([row["loss"] for row in rows], "{:.1f}"),
            *(_mean(rows, key, form) for _, key, form in columns),
        )
        for method, rows in methods.items()
    ]
    tasks = [row["task"].upper().replace("STSB", "STS-B") for row in methods["full"]]
    head = (f"{model}, mean of {' '.join(tasks)}", "paper: points lost", "ours", "range over tasks")
    sure = any("loss_error" in row for row in every)
    notes = [
        *(["±: 95 %, over the pairs of the test parts."] * sure),
        f"Times: {found['clock']}." if timed else "Times were not measured.",
    ]
    return markdown([*head, *(name for name, _, _ in columns)], lines) + f"\n{' '.join(notes)}\n"


COLUMNS = (("unseen", "unseen_loss", "{:.1f}"), ("hits", "hit_rate", "{:.0%}"), ("unseen", "unseen_hit_rate", "{:.0%}"))
TIMES = (("attention, x", "speedup_attention", "{:.2f}"), ("whole pass, x", "speedup_whole", "{:.2f}"))


def _mean(rows: list[Found], key: str, form: str) -> str:
    values = [row[key] for row in rows if row.get(key) is not None]
    return form.format(fmean(values)) if len(values) == len(rows) else ""


def _error(rows: list[Found]) -> str:
    """Show the 95 % interval of a mean loss over tasks, each with its own error; nothing where all are 0, or not known."""
    each: list[Any] = [row.get("loss_error") for row in rows]
    return "" if None in each or not any(each) else f" ± {1.96 * math.hypot(*each) / len(each):.1f}"


def small_models() -> str:
    """Show whole passes of small models with maps: from which hit rate on they are faster, and by how much at some."""
    rows = read("attncache_small")["rows"]
    kinds = ("model", "weights", "tokens")
    gains: dict[tuple[Any, ...], dict[float, float]] = {}
    for row in rows:
        if row["what"] == "pass":
            gains.setdefault(tuple(row[c] for c in kinds), {})[row["hit_rate"]] = row["pass"]
    lines = []
    for row in rows:
        if row["what"] == "break-even":
            kind = tuple(row[c] for c in kinds)
            rates = (row["hit_rate"], rate_for(gains[kind], LEAST_GAIN))
            least = ["never" if rate is None else f"{rate:.0%}" for rate in rates]
            lines.append([*map(str, kind), *least, *(f"{gains[kind][rate]:.2f}" for rate in (0.5, 0.9, 1.0))])
    used = f"used by `auto` ({LEAST_GAIN:g} x) from"
    return markdown([*kinds, "faster from a hit rate of", used, "x at 50 %", "at 90 %", "at 100 %"], lines)


def rate_for(gains: Mapping[float, float], least: float) -> float | None:
    """Find the hit rate from which on passes are `least` times as fast, on the line between two that were measured; None: at none."""
    rates = sorted(gains)
    first = next((i for i in range(len(rates)) if min(gains[rate] for rate in rates[i:]) >= least), None)
    if not first:
        return None if first is None else rates[0]
    (low, before), (high, after) = ((rate, gains[rate]) for rate in rates[first - 1 : first + 1])
    return low + (high - low) * (least - before) / (after - before)


def carry_over(found: Found) -> str:
    """Show what thresholds promise and cost on tasks that they were not calibrated on: ranges over all tasks."""
    lines = []
    for threshold, beyond in sorted(beyond_promise(found, "another").items(), reverse=True):
        rows = [row for row in found["rows"] if row["threshold"] == threshold]
        lines.append(
            (
                f"{threshold}",
                *(_range([row[name] for row in rows], form) for name, form in RANGES),
                f"{fmean(beyond):.1f}",
                f"{max(beyond):.1f}",
            )
        )
    head = ("threshold", "layers that take maps", "1 - cosine", "points lost", "beyond the promise: mean", "worst task")
    return markdown(head, lines)


RANGES = (("layer_rate", "{:.0%}"), ("error", "{:.3f}"), ("loss", "{:.1f}"))


def _range(values: list[float], form: str) -> str:
    return f"{form.format(min(values))} to {form.format(max(values))}"
