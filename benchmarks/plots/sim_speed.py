"""Draws docs/images/sim_speed.svg from benchmarks/results/sim_speed.json, and from nothing else."""

from __future__ import annotations

import json

from benchmarks.common.paths import IMAGES, RESULTS
from benchmarks.plots.style import plt, sized

FILE, IMAGE = RESULTS / "sim_speed.json", IMAGES / "sim_speed.svg"


def main() -> None:
    sized(8)
    found = json.loads(FILE.read_text())
    figure, (cost, memory) = plt.subplots(1, 2, figsize=(7.6, 3.0))
    for rate, colour, mark in ((0.3, "#1b7f5c", "o-"), (1.0, "#c7732b", "s")):
        rows = [row for row in found["rows"] if row["rate"] == rate]
        turns = [row["turns"] for row in rows]
        label = f"{rate:g} conversations/s"
        cost.plot(turns, [row["ms_per_turn"] for row in rows], mark, color=colour, label=label, ms=4)
        memory.plot(turns, [row["max_rss"] / 1e6 for row in rows], mark, color=colour, label=label, ms=4)
    for axes, name in ((cost, "ms of processor time per turn"), (memory, "most memory, MB")):
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("turns")
        axes.set_ylabel(name)
        axes.legend(frameon=False)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.suptitle(f"The simulator, {found['hardware']['cpu']}, one core", fontsize=9)
    figure.tight_layout()
    figure.savefig(IMAGE)
    print(f"docs/images/{IMAGE.name}")
