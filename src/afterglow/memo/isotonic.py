"""From a projector's distances to what they mean, by isotonic regression on held-out sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Isotonic:
    """A function that never falls: linear between its points, constant beyond them."""

    x: tuple[float, ...]
    y: tuple[float, ...]

    def __call__(self, x: Any) -> Floats:
        """Of numbers in any shape."""
        return np.interp(np.asarray(x, np.float64), self.x, self.y)


def isotonic(x: Sequence[float] | Floats, y: Sequence[float] | Floats) -> Isotonic:
    """Fit the never-falling function of `x` nearest to `y` in squares (pool adjacent violators). Raises: ValueError, if
    there are no points."""
    if not len(x):
        raise ValueError("a calibration needs at least one point")
    order = np.argsort(np.asarray(x, np.float64), kind="stable")
    blocks: list[list[float]] = []  # sum of y, points, first x, last x
    for place, value in zip(np.asarray(x, np.float64)[order], np.asarray(y, np.float64)[order], strict=True):
        blocks.append([float(value), 1.0, float(place), float(place)])
        while len(blocks) > 1 and _tied_or_falling(blocks[-2], blocks[-1]):
            total, points, _, last = blocks.pop()
            blocks[-1] = [blocks[-1][0] + total, blocks[-1][1] + points, blocks[-1][2], last]
    knots: list[tuple[float, float]] = []
    for total, points, first, last in blocks:
        knots += [(first, total / points)] if first == last else [(first, total / points), (last, total / points)]
    return Isotonic(tuple(p[0] for p in knots), tuple(p[1] for p in knots))


def _tied_or_falling(before: list[float], after: list[float]) -> bool:
    return before[3] == after[2] or before[0] / before[1] >= after[0] / after[1]
