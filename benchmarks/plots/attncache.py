"""Figures 1 and 5 of AttnCache from rows of the benchmark."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any


def draw(folder: Path, rows: list[dict[str, Any]]) -> list[Path]:
    """What the rows hold: losses against hit rates for each model and task, and map distances. Returns the files."""
    figures = import_module("matplotlib.figure")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for model, task in sorted({(row["model"], row["task"]) for row in rows}):
        own = [row for row in rows if (row["model"], row["task"]) == (model, task)]
        figure = figures.Figure(figsize=(6.0, 3.6), layout="constrained")
        axes = figure.subplots()
        stem = f"attncache_{Path(model).name}_{task}"
        curves = [row for row in own if row.get("threshold") is not None]
        if curves:
            for method in dict.fromkeys(row["method"] for row in curves):
                points = sorted((row["hit_rate"], row["loss"]) for row in curves if row["method"] == method)
                axes.plot(*zip(*points, strict=True), marker=".", label=method)
            axes.set_xlabel("share of attention that took maps")
            axes.set_ylabel("loss, points of Spearman x 100")
            axes.legend()
        else:
            stem += "_distances"
            names = [row["of"] for row in own]
            axes.bxp(
                [
                    {
                        "whislo": r["p5"],
                        "q1": r["p25"],
                        "med": r["p50"],
                        "q3": r["p75"],
                        "whishi": r["p95"],
                        "label": r["of"],
                    }
                    for r in own
                ],
                showfliers=False,
            )
            axes.set_ylabel("total variation of maps")
            axes.set_xticks(range(1, len(names) + 1), names, rotation=45)
        paths.append(folder / f"{stem}.svg")
        figure.savefig(paths[-1])
    return paths
