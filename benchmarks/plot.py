"""Draws docs/images/*.svg from benchmarks/results/*.json, and from nothing else.

pip install -c constraints.txt -e '.[plots]' && python benchmarks/plot.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

HERE = Path(__file__).parent
RESULTS, IMAGES = HERE / "results", HERE.parent / "docs" / "images"
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


def _finish(figure: plt.Figure, axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=9, loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()


PLOTS: dict[str, Callable[[dict[str, Any]], None]] = {"multiturn": multiturn, "engine": engine}


def main() -> None:
    plt.rcParams.update({"font.size": 8, "svg.hashsalt": "afterglow", "svg.fonttype": "none"})
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name, draw in PLOTS.items():
        path = RESULTS / f"{name}.json"
        if path.exists():
            draw(json.loads(path.read_text()))
            print(f"docs/images/{name}.svg")


if __name__ == "__main__":
    main()
