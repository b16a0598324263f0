"""Matplotlib as all plots use it: without a display, with text as text."""

from __future__ import annotations

import sys

try:
    import matplotlib
except ModuleNotFoundError:
    sys.exit("matplotlib is not installed: nothing is drawn (pip install -e '.[plots]')")

matplotlib.use("Agg")
import matplotlib.pyplot as plt

__all__ = ["plt", "sized"]


def sized(points: float) -> None:
    """Set the size of text in points."""
    plt.rcParams.update({"font.size": points, "svg.hashsalt": "afterglow", "svg.fonttype": "none"})
