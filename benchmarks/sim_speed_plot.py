"""Draws docs/images/sim_speed.svg from benchmarks/results/sim_speed.json, and from nothing else.

pip install -c constraints.txt -e '.[plots]' && python benchmarks/sim_speed_plot.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

try:
    import matplotlib
except ModuleNotFoundError:
    sys.exit("matplotlib is not installed: nothing is drawn (pip install -e '.[plots]')")

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
RESULTS, IMAGE = HERE / "results" / "sim_speed.json", HERE.parent / "docs" / "images" / "sim_speed.svg"


def main() -> None:
    plt.rcParams.update({"font.size": 8, "svg.hashsalt": "afterglow", "svg.fonttype": "none"})
    found = json.loads(RESULTS.read_text())
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
    IMAGE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(IMAGE)
    print(f"docs/images/{IMAGE.name}")


if __name__ == "__main__":
    main()
