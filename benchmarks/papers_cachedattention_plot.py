"""Draws docs/images/cachedattention_*.svg from benchmarks/results/papers_cachedattention.json, and from nothing else.

A panel per figure and unit: bars what is simulated, dots what the paper prints.

pip install -c constraints.txt -e '.[plots]' && python benchmarks/papers_cachedattention_plot.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

try:
    import matplotlib
except ModuleNotFoundError:
    sys.exit("matplotlib is not installed: nothing is drawn (pip install -e '.[plots]')")

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

HERE = Path(__file__).parent
RESULTS, IMAGES = HERE / "results" / "papers_cachedattention.json", HERE.parent / "docs" / "images"
COLOURS = {"ATC": "#2f6fb3", "arXiv": "#1b7f5c"}
SHEETS: dict[str, dict[str, tuple[str, ...]]] = {  # name: paper, figures
    "cachedattention_serving": {"ATC": ("13", "14", "15", "16")},
    "cachedattention_tiers": {"ATC": ("21", "22", "23", "24")},
    "cachedattention_rates": {"ATC": ("17", "25")},
    "cachedattention_computing": {"ATC": ("1", "2", "4", "18", "19", "20")},
    "cachedattention_sensitivity": {"ATC": ("sensitivity",)},
    "attentionstore_serving": {"arXiv": ("13", "14", "15", "16", "17")},
    "attentionstore_tiers": {"arXiv": ("21", "22", "25", "26")},
    "attentionstore_computing": {"arXiv": ("2", "4", "23", "24")},
}
COLUMNS = 2
LABEL = 44  # characters

Row = dict[str, Any]


def panels(rows: list[Row], paper: str, figures: tuple[str, ...]) -> dict[tuple[str, str], list[Row]]:
    """The rows with numbers, by figure and unit."""
    found: dict[tuple[str, str], list[Row]] = {}
    for number in figures:
        for each in rows:
            if (each["paper"], each["figure"]) == (paper, number) and not isinstance(each["simulated"], str):
                found.setdefault((number, each["what"].rpartition(", ")[2]), []).append(each)
    return {key: chosen for key, chosen in found.items() if len(chosen) > 1}


def panel(axes: Axes, rows: list[Row], title: str, colour: str) -> None:
    names = [each["what"].rpartition(", ")[0][-LABEL:] or each["what"][-LABEL:] for each in rows]
    places = list(range(len(rows)))
    bars = axes.barh(places, [each["simulated"] for each in rows], color=colour, height=0.7, label="simulated")
    axes.bar_label(bars, [f"{each['simulated']:.3g}" for each in rows], fontsize=6, padding=4)
    dots = [(each["printed"], place) for place, each in enumerate(rows) if not isinstance(each["printed"], str)]
    if dots:
        axes.plot(*zip(*dots, strict=True), "ko", ms=3, label="paper")
    axes.set_yticks(places, names, fontsize=6)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_title(title, fontsize=8, loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def sheet(name: str, rows: list[Row], wanted: dict[str, tuple[str, ...]]) -> bool:
    """One image. False: there is nothing to draw yet."""
    chosen = {
        (paper, *key): of for paper, numbers in wanted.items() for key, of in panels(rows, paper, numbers).items()
    }
    if not chosen:
        return False
    lines = [list(chosen.items())[i : i + COLUMNS] for i in range(0, len(chosen), COLUMNS)]
    heights = [max(len(of) for _, of in line) * 0.19 + 0.6 for line in lines]
    figure, grid = plt.subplots(
        len(lines), COLUMNS, figsize=(9.5, sum(heights)), squeeze=False, height_ratios=heights, layout="constrained"
    )
    for axes, line in zip(grid, lines, strict=True):
        for i, place in enumerate(axes):
            if i >= len(line):
                place.set_visible(False)
                continue
            (paper, number, unit), of = line[i]
            title = f"{paper}, {number if number == 'sensitivity' else f'Figure {number}'}: {unit}"
            panel(place, of, title, COLOURS[paper])
    grid[0][0].legend(frameon=False, fontsize=6)
    figure.savefig(IMAGES / f"{name}.svg")
    plt.close(figure)
    return True


def main() -> None:
    plt.rcParams.update({"font.size": 7, "svg.hashsalt": "afterglow", "svg.fonttype": "none"})
    IMAGES.mkdir(parents=True, exist_ok=True)
    rows = json.loads(RESULTS.read_text())["rows"]
    for name, wanted in SHEETS.items():
        if sheet(name, rows, wanted):
            print(f"docs/images/{name}.svg")


if __name__ == "__main__":
    main()
