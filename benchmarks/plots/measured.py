"""Draws docs/images/*.svg from benchmarks/results/*.json, and from nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.common.paths import IMAGES, RESULTS
from benchmarks.plots.style import plt, sized

COLOURS = {"recompute": "#9aa0a6", "device": "#1b7f5c", "host": "#2f6fb3", "disk": "#c7732b"}


def multiturn(found: dict[str, Any]) -> None:
    """Time to first token of the next turn, by where the history's KV lies."""
    rows = found["rows"]
    figure, axes = plt.subplots(figsize=(7.6, 3.4))
    width = 0.2
    for i, tier in enumerate(COLOURS):
        heights = [row["ttft_ms"][tier] for row in rows]
        errors = [height * row["spread"][tier] for height, row in zip(heights, rows, strict=True)]
        places = [n + (i - 1.5) * width for n in range(len(rows))]
        label = "no reuse" if tier == "recompute" else f"history on {tier}"
        bars = axes.bar(places, heights, width, yerr=errors, color=COLOURS[tier], label=label, error_kw={"lw": 0.8})
        axes.bar_label(bars, [f"{height:.0f}" for height in heights], fontsize=7, padding=2)
    axes.set_xticks(range(len(rows)), [f"{row['history']:,} + {row['new']}" for row in rows])
    axes.set_xlabel("tokens of history + tokens of the new turn")
    axes.set_ylabel("time to first token, ms")
    axes.legend(frameon=False)
    _finish(figure, axes, f"bench-100m, float32, {found['hardware']['cpu']}, {found['hardware']['threads']} threads")
    figure.savefig(IMAGES / "multiturn.svg")


def engine(found: dict[str, Any]) -> None:
    """Tokens per second of the engine and of transformers."""
    rows = found["rows"]
    figure, axes = plt.subplots(figsize=(7.6, 3.2))
    colours = [
        COLOURS["recompute"] if "," in row["name"].replace("decode, ", "") else COLOURS["device"] for row in rows
    ]
    speeds = [row["tokens_per_s"] for row in rows]
    errors = [row["tokens_per_s"] * row["spread"] for row in rows]
    bars = axes.barh([row["name"] for row in rows], speeds, xerr=errors, color=colours, error_kw={"lw": 0.8})
    axes.bar_label(bars, [f"{speed:.0f}" for speed in speeds], fontsize=7, padding=3)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(right=2 * max(speeds))
    axes.set_xlabel("tokens/s (logarithmic)")
    _finish(figure, axes, f"{found['model']}, float32: Afterglow (green) and transformers (grey)")
    figure.savefig(IMAGES / "engine.svg")


def load_or_recompute(found: dict[str, Any]) -> None:
    """Time to first token over the disk's speed: loaded, recomputed, and as the engine decides."""
    rows = found["rows"]
    figure, axes = plt.subplots(figsize=(7.6, 3.2))
    colours = {"load": COLOURS["disk"], "recompute": COLOURS["recompute"], "auto": COLOURS["device"]}
    for source, colour in colours.items():
        label = {"load": "loaded", "recompute": "recomputed", "auto": "as the engine decides"}[source]
        style = {"marker": "o", "lw": 2.4} if source == "auto" else {"marker": "o", "lw": 1.2, "ls": "--"}
        axes.plot(
            [r["mb_per_s"] for r in rows], [r["ttft_ms"][source] for r in rows], color=colour, label=label, **style
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("disk, MB/s")
    axes.set_ylabel("time to first token, ms")
    axes.legend(frameon=False)
    _finish(figure, axes, "2,048 tokens of history on disk, 64 new ones, bench-100m")
    figure.savefig(IMAGES / "load_or_recompute.svg")


def preload(found: dict[str, Any]) -> None:
    """Figures 18 and 19 of CachedAttention: layer-wise pre-loading with read buffers of several sizes."""
    rows = [row for row in found["rows"] if "variant" in row]
    figure, axes = plt.subplots(figsize=(7.6, 3.0))
    axes.bar([r["variant"] for r in rows], [r["ttft_ms"] for r in rows], 0.55, color=COLOURS["disk"], label="measured")
    axes.plot([r["variant"] for r in rows], [r["predicted_ms"] for r in rows], "k_", ms=22, label="closed form")
    axes.set_ylabel("time to first token, ms")
    axes.tick_params(axis="x", labelrotation=20)
    axes.legend(frameon=False)
    _finish(figure, axes, "disk slowed down to the paper's ratio of loading and computing, bench-100m")
    figure.savefig(IMAGES / "preload.svg")


def placement(found: dict[str, Any]) -> None:
    """Figure 21 of CachedAttention, small: the share of history that was cached, by policy and tier."""
    rows = found["rows"]
    figure, axes = plt.subplots(figsize=(7.6, 3.0))
    names = [f"{r['policy']}, {'backlog' if r['backlog'] else 'one at a time'}" for r in rows]
    host = [100 * r["hit_rate"] * r["host_share"] for r in rows]
    disk = [100 * r["hit_rate"] * (1 - r["host_share"]) for r in rows]
    axes.barh(names, host, color=COLOURS["host"], label="from host memory")
    axes.barh(names, disk, left=host, color=COLOURS["disk"], label="from disk")
    axes.invert_yaxis()
    axes.set_xlabel("history that was cached, %")
    axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(1.0, 0.92))
    _finish(figure, axes, f"{36 if found['quick'] else 60} conversations, room for 6 in host memory and 18 on disk")
    figure.savefig(IMAGES / "placement.svg")


def relay_operator(found: dict[str, Any]) -> None:
    """Figures 1 and 5 of RelayAttention on this machine."""
    rows = [
        row
        for row in found["rows"]
        if (row["batch"], row["context"]) == (32, 128) and row.get("kv_heads") in (None, 12)
    ]
    figure, axes = plt.subplots(figsize=(7.6, 3.2))
    colours = {"plain": COLOURS["recompute"], "shared": COLOURS["disk"], "relay": COLOURS["device"]}
    labels = {"plain": "a copy for each", "shared": "one copy, read by each", "relay": "one copy, read once (relay)"}
    for name, colour in colours.items():
        times = [1e3 * row["seconds"][name] for row in rows]
        axes.plot([row["prefix"] for row in rows], times, marker="o", color=colour, label=labels[name])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens of the shared prefix")
    axes.set_ylabel("attention of one layer, ms")
    axes.legend(frameon=False)
    _finish(figure, axes, "32 requests of 128 tokens each behind a shared prefix, 12 heads of 64, float32")
    figure.savefig(IMAGES / "relay_operator.svg")


def relay_engine(found: dict[str, Any]) -> None:
    """Figures 6 and 8 of RelayAttention, small: throughput of each way, as a multiple of reading the cached prefix for each."""
    rows = found["rows"]
    figure, axes = plt.subplots(figsize=(7.6, 3.4))
    ways = {"recompute": "recompute", "shared": "disk", "relay": "device", "auto": "host"}
    for number, (way, colour) in enumerate(ways.items()):
        at = [index + 0.2 * (number - 1.5) for index in range(len(rows))]
        bars = axes.bar(
            at, [row["rate"][way] / row["rate"]["shared"] for row in rows], 0.18, color=COLOURS[colour], label=way
        )
        axes.bar_label(bars, [f"{row['rate'][way]:.0f}" for row in rows], fontsize=6, padding=1)
    axes.set_xticks(
        range(len(rows)), [f"{r['workload']}\n{r['batch']} at once\nbehind {r['prefix']}" for r in rows], fontsize=7
    )
    axes.set_ylabel("output tokens/s, shared = 1")
    axes.legend(frameon=False, ncols=4, loc="upper left")
    axes.set_ylim(top=1.25 * axes.get_ylim()[1])
    _finish(figure, axes, f"{found['model']}, ShareGPT's lengths / {found['divide']}; numbers are tokens/s")
    figure.savefig(IMAGES / "relay_engine.svg")


def importance_io(found: dict[str, Any]) -> None:
    """Figures 16 and 17 of SPEC: time to first token and the wait for the disk within it, in each run."""
    wide = json.loads((RESULTS / "importance_wide.json").read_text())
    runs = [about["run"] for about in (*found["runs"], *wide["runs"])]
    rows = {run: [row for row in (*found["rows"], *wide["rows"]) if row["run"] == run] for run in runs}
    names = [row["variant"] for row in rows[runs[0]] if row["variant"] not in ("recompute", "the same again")]
    names = [name for name in names if all(any(row["variant"] == name for row in rows[run]) for run in runs)]
    figure, panels = plt.subplots(1, len(runs), figsize=(2.6 + 2.6 * len(runs), 3.4), sharey=True, squeeze=False)
    for axes, run in zip(panels[0], runs, strict=True):
        by_name = {row["variant"]: row for row in rows[run]}
        times, waits = ([by_name[name][key] for name in names] for key in ("ttft_ms", "wait_ms"))
        bars = axes.barh(names, times, color=COLOURS["host"], label="time to first token")
        axes.barh(names, waits, height=0.4, color=COLOURS["disk"], label="waiting for chunks")
        axes.plot([by_name[name]["p99_ms"] for name in names], names, "|", color="#444444", label="slowest")
        axes.bar_label(bars, [f"{value:.0f}" for value in times], fontsize=7, padding=2)
        axes.set_xlabel("ms")
        _finish(figure, axes, f"{run}\nrecompute {by_name['recompute']['ttft_ms']:.0f} ms")
    panels[0][0].invert_yaxis()
    panels[0][0].legend(frameon=False, fontsize=7, loc="lower right")
    figure.savefig(IMAGES / "importance_io.svg")


def _finish(figure: Figure, axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=9, loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()


PLOTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "multiturn": multiturn,
    "engine": engine,
    "load_or_recompute": load_or_recompute,
    "preload": preload,
    "placement": placement,
    "relay_operator": relay_operator,
    "relay_engine": relay_engine,
    "importance_io": importance_io,
}


def main() -> None:
    sized(8)
    for name, draw in PLOTS.items():
        path = RESULTS / f"{name}.json"
        if path.exists():
            draw(json.loads(path.read_text()))
            print(f"docs/images/{name}.svg")
