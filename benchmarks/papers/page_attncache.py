"""Tables of docs/papers.md about AttnCache as measured."""

from __future__ import annotations

from statistics import fmean

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
    AttnCache hits."""
    methods: dict[str, list[Found]] = {}
    every = found["rows"]
    hits = {(row["task"], row["threshold"]) for row in every if row["chosen"] and row["method"] == "AttnCache"}
    controls = {(row["task"], row["threshold"]): row for row in every if row["method"] == "mean maps"}
    for row in every:
        if row["chosen"] and row["method"] != "mean maps":
            methods.setdefault(row["method"], []).append(row)
    if controls:
        methods["mean maps"] = [controls[one] for one in sorted(hits)]

    def mean(rows: list[Found], key: str, form: str) -> str:
        values = [row[key] for row in rows if row.get(key) is not None]
        return form.format(fmean(values)) if len(values) == len(rows) else ""

    def losses(rows: list[Found]) -> str:
        values = [row["loss"] for row in rows]
        return f"{min(values):.1f} to {max(values):.1f}"

    lines = [
        (
            method,
            PRINTED_LOSS.get(method, ""),
            mean(rows, "loss", "{:.1f}"),
            losses(rows),
            mean(rows, "unseen_loss", "{:.1f}"),
            mean(rows, "hit_rate", "{:.0%}"),
            mean(rows, "unseen_hit_rate", "{:.0%}"),
            mean(rows, "speedup_attention", "{:.2f}"),
            mean(rows, "speedup_whole", "{:.2f}"),
        )
        for method, rows in methods.items()
    ]
    tasks = [row["task"].upper().replace("STSB", "STS-B") for row in methods["full"]]
    head = f"{model}, mean of {' '.join(tasks)} | paper: points lost | ours | range over tasks | unseen | hits | unseen | attention, x | whole pass, x"
    return markdown(head.split(" | "), lines) + f"\nTimes: {found['clock']}.\n"


def small_models() -> str:
    """Show whole passes of small models with maps: from which hit rate on they are faster, and by how much at some."""
    rows = read("attncache_small")["rows"]
    kinds = ("model", "weights", "tokens")
    gains = {(*(r[c] for c in kinds), r["hit_rate"]): f"{r['pass']:.2f}" for r in rows if r["what"] == "pass"}
    lines = []
    for row in rows:
        if row["what"] == "break-even":
            kind = tuple(row[c] for c in kinds)
            least = "never" if row["hit_rate"] is None else f"{row['hit_rate']:.0%}"
            lines.append([*map(str, kind), least, *(gains[*kind, rate] for rate in (0.5, 0.9, 1.0))])
    return markdown([*kinds, "faster from a hit rate of", "x at 50 %", "at 90 %", "at 100 %"], lines)


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
