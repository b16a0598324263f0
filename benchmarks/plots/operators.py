"""Draws docs/images/sim_*.svg of the operator models from benchmarks/results/sim_operators.json, and from nothing else."""

from __future__ import annotations

import json
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.common.paths import IMAGES, RESULTS
from benchmarks.plots.style import plt, sized

FILE = RESULTS / "sim_operators.json"
COLOURS = {"plain": "#9aa0a6", "shared": "#2f6fb3", "relay": "#1b7f5c"}
SYSTEMS = {
    "recompute": "#9aa0a6",
    "as": "#c7732b",
    "as+h2o+lru": "#d9a441",
    "as+h2o+lfu": "#2f6fb3",
    "+sc": "#1b7f5c",
    "+sp": "#6fbf9b",
}


def relay_operator(rows: list[dict[str, Any]]) -> None:
    """RelayAttention's Figure 1: lines the model, dots the paper."""
    figure, axes = plt.subplots(figsize=(5.2, 3.2))
    for mode in ("plain", "relay"):
        points = [(_system(r), r) for r in rows if r["figure"].endswith("Fig. 1") and r["what"].startswith(mode)]
        lengths = [length for length, _ in points]
        axes.plot(lengths, [r["simulated"] for _, r in points], color=COLOURS[mode], label=f"{mode}, model")
        axes.plot(lengths, [r["paper"] for _, r in points], "o", color=COLOURS[mode], label=f"{mode}, paper", ms=4)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens of the system prompt")
    axes.set_ylabel("attention of one layer, us")
    axes.legend(frameon=False)
    _finish(figure, axes, "LLaMA-30B, A40, 32 requests, 128 tokens each (RelayAttention, Fig. 1)", "sim_relay_operator")


def relay_server(rows: list[dict[str, Any]]) -> None:
    """RelayAttention's Figure 6: bars the model, dots the paper."""
    cases = [("A40", 64), ("A40", 512), ("A40", 2048), ("A100-80G", 64), ("A100-80G", 512), ("A100-80G", 2048)]
    figure, axes = plt.subplots(figsize=(7.6, 3.2))
    for i, mode in enumerate(COLOURS):
        names = [f"{device} {mode} req/s, s={system}" for device, system in cases]
        found = [next(r for r in rows if r["figure"].endswith("Fig. 6") and r["what"] == name) for name in names]
        places = [n + (i - 1) * 0.27 for n in range(len(cases))]
        axes.bar(places, [r["simulated"] for r in found], 0.27, color=COLOURS[mode], label=mode)
        axes.plot(places, [r["paper"] for r in found], "ko", ms=3, label="paper" if i == 0 else "_")
    axes.set_xticks(range(len(cases)), [f"{device}\n{system}" for device, system in cases])
    axes.set_ylabel("requests/s")
    axes.legend(frameon=False)
    _finish(figure, axes, "LLaMA-2-7B, ShareGPT lengths, offline (RelayAttention, Fig. 6)", "sim_relay_server")


def importance(times: list[dict[str, Any]]) -> None:
    """SPEC's Figure 16, of the model alone: the paper prints no bar's value."""
    figure, axes = plt.subplots(figsize=(7.6, 3.2))
    for i, (system, colour) in enumerate(SYSTEMS.items()):
        places = [n + (i - 2.5) * 0.14 for n in range(len(times))]
        axes.bar(places, [1e3 * row[system] for row in times], 0.14, color=colour, label=system)
    labels = [f"{row['model'].removeprefix('OPT-')}\n{row['data']}" for row in times]
    axes.set_xticks(range(len(times)), labels, fontsize=6)
    axes.set_yscale("log")
    axes.set_ylabel("mean time to first token, ms")
    axes.legend(frameon=False, ncols=3)
    _finish(figure, axes, "OPT, A100-80G, 10 GB and 32 GB of cache (SPEC, Fig. 16)", "sim_importance")


def _system(row: dict[str, Any]) -> int:
    return int(row["what"].rpartition("s=")[2])


def _finish(figure: Figure, axes: Axes, title: str, name: str) -> None:
    axes.set_title(title, fontsize=9, loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(IMAGES / f"{name}.svg", metadata={"Date": None})
    print(f"docs/images/{name}.svg")


def main() -> None:
    sized(8)
    found = json.loads(FILE.read_text())
    relay_operator(found["rows"])
    relay_server(found["rows"])
    importance(found["times"])
