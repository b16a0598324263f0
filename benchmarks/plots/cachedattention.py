"""Draws docs/images/cachedattention_*.svg from benchmarks/results/papers_cachedattention.json, and from nothing else.

A panel per figure and unit: bars are simulated, dots are the paper's, at the right both as numbers.
"""

from __future__ import annotations

import json
from typing import Any

from matplotlib.axes import Axes

from benchmarks.common.paths import IMAGES, RESULTS
from benchmarks.plots.style import plt, sized

FILE = RESULTS / "papers_cachedattention.json"
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
LABEL = 56  # characters

Row = dict[str, Any]


def panels(rows: list[Row], paper: str, figures: tuple[str, ...]) -> dict[tuple[str, str], list[Row]]:
    """The rows with numbers, by figure and unit."""
    found: dict[tuple[str, str], list[Row]] = {}
    for number in figures:
        for each in rows:
            if (each["paper"], each["figure"]) == (paper, number) and not isinstance(each["simulated"], str):
                found.setdefault((number, each["what"].rpartition(", ")[2]), []).append(each)
    return {key: chosen for key, chosen in found.items() if len(chosen) > 1}


def panel(axes: Axes, rows: list[Row], title: str, colour: str, places_of_line: int) -> None:
    """`places_of_line`: bars of the panel beside it, if that has more: bars are equally thick. Values stand at the right,
    where neither bars nor dots are."""
    names = [each["what"].rpartition(", ")[0][-LABEL:] or each["what"][-LABEL:] for each in rows]
    places = list(range(len(rows)))
    axes.barh(places, [each["simulated"] for each in rows], color=colour, height=0.7, label="simulated")
    dots = [(each["printed"], place) for place, each in enumerate(rows) if not isinstance(each["printed"], str)]
    if dots:
        axes.plot(*zip(*dots, strict=True), "o", color="black", mec="white", mew=0.5, ms=4, label="paper")
    for place, each in zip(places, rows, strict=True):
        printed = "" if isinstance(each["printed"], str) else f" ({each['printed']:g})"
        text = f"{each['simulated']:.3g}{printed}"
        axes.text(1.01, place, text, transform=axes.get_yaxis_transform(), va="center", fontsize=6)
    axes.set_yticks(places, names, fontsize=6)
    axes.set_ylim(places_of_line - 0.5, -0.5)
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
    most = [max(len(of) for _, of in line) for line in lines]
    heights = [bars * 0.19 + 0.6 for bars in most]
    figure, grid = plt.subplots(
        len(lines),
        COLUMNS,
        figsize=(10.5, sum(heights) + 0.3),
        squeeze=False,
        height_ratios=heights,
        layout="constrained",
    )
    for axes, line, bars in zip(grid, lines, most, strict=True):
        for i, place in enumerate(axes):
            if i >= len(line):
                place.set_visible(False)
                continue
            (paper, number, unit), of = line[i]
            title = f"{paper}, {number if number == 'sensitivity' else f'Figure {number}'}: {unit}"
            panel(place, of, title, COLOURS[paper], bars)
    handles = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside upper right", ncols=2, frameon=False, fontsize=7)
    figure.savefig(IMAGES / f"{name}.svg")
    plt.close(figure)
    return True


def main() -> None:
    sized(7)
    rows = json.loads(FILE.read_text())["rows"]
    for name, wanted in SHEETS.items():
        if sheet(name, rows, wanted):
            print(f"docs/images/{name}.svg")
