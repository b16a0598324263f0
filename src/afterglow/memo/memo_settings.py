"""What a database knows besides maps and vectors: how it was made, what held-out text showed, and what a projector's distances mean, by
isotonic regression on held-out sentences.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afterglow.errors import ConfigError, DamageError
from afterglow.memo.options import MemoOptions

SETTINGS = "memo.json"
FORMAT = 2  # of the file; in 1 each layer had its own error
POWER = 2.0
OWN = 1e-3  # distance up to which a sentence's maps are its own
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
    """Fit the never-falling function of `x` nearest to `y` in squares (pool adjacent violators); equal `x` count by their mean.
    Raises: ValueError, if there are no points."""
    if not len(x):
        raise ValueError("a calibration needs at least one point")
    places, first = np.unique(np.asarray(x, np.float64), return_inverse=True)
    points, sums = np.bincount(first), np.bincount(first, np.asarray(y, np.float64))
    blocks: list[list[float]] = []  # sum of y, points, first x, last x
    for place, count, value in zip(places.tolist(), points.tolist(), sums.tolist(), strict=True):
        blocks.append([value, count, place, place])
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] >= blocks[-1][0] / blocks[-1][1]:
            total, more, _, last = blocks.pop()
            blocks[-1] = [blocks[-1][0] + total, blocks[-1][1] + more, blocks[-1][2], last]
    knots: list[tuple[float, float]] = []
    for total, count, start, last in blocks:
        knots += [(start, total / count)] if start == last else [(start, total / count), (last, total / count)]
    return Isotonic(tuple(p[0] for p in knots), tuple(p[1] for p in knots))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoSettings:
    """`memo.json`. `order`: layers, those first whose maps change the embedding least. `errors` has a function for each number of
    layers: distance -> 1 - cosine of the embedding that is to be reckoned with when so many of `order` take maps. `curve`: rows of
    threshold, hit rate and error on the texts that it was calibrated on."""

    records: int
    trained_on: int  # records that the projector was trained for; later ones were added
    vectors_crc: int
    options: MemoOptions
    variation: Isotonic  # distance -> total variation of the maps
    order: tuple[int, ...]
    errors: tuple[Isotonic, ...]
    curve: list[dict[str, float]] = field(default_factory=list)
    calibrated_on: int = 0  # texts of another source; 0: some of the database's own, which training did not see
    pooling: str = ""  # how the embeddings were made whose errors are known; empty: built before this was noted

    def save(self, folder: Path) -> None:
        """Replaces the file at once."""
        value = {"format": FORMAT, **dataclasses.asdict(self)}
        part = folder / f"{SETTINGS}.part"
        part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        os.replace(part, folder / SETTINGS)

    @staticmethod
    def load(folder: Path) -> MemoSettings:
        """Read the file. Raises: ConfigError (no file, the build has not ended, or another version's file), DamageError."""
        path = folder / SETTINGS
        if not path.is_file():
            raise ConfigError(f"{folder} holds no finished database of attention maps; afterglow memo build makes one")
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            if "errors" in value and value.get("format") != FORMAT:
                raise ConfigError(f"{path} was calibrated by another version's rule; build the database anew")
            del value["format"]
            value["options"] = MemoOptions(**value["options"])
            value["variation"] = _isotonic(value["variation"])
            value["order"] = tuple(value["order"])
            value["errors"] = tuple(map(_isotonic, value["errors"]))
            if sorted(value["order"]) != list(range(len(value["errors"]))):
                raise ValueError(f"layers {value['order']} are not each of {len(value['errors'])} once")
            return MemoSettings(**value)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise DamageError(f"{path} cannot be read ({error}); build the database anew") from None

    def accepted(self, distances: NDArray[Any], threshold: float) -> tuple[NDArray[np.bool_], Floats]:
        """Nearest distances [n], inf where there is no neighbour -> which layers take maps, [n, layers], and the
        similarity of each sentence. Of distances beyond those of held-out sentences no error is known: no layer takes maps there."""
        furthest = max(OWN, *(error.x[-1] for error in self.errors)) if self.options.accept == "layers" else np.inf
        known = np.isfinite(distances) & (distances <= furthest * (1 + 1e-6))
        d = np.where(known, distances, 0.0).astype(np.float64)
        taken = np.zeros((len(d), len(self.order)), bool)
        if self.options.accept == "layers":
            errors = np.maximum.accumulate(np.stack([error(d) for error in self.errors], 1), 1)
            fits = (errors <= 1 - threshold + 1e-12) & known[:, None]
            taken[:, list(self.order)] = fits
            return taken, np.where(known, 1 - (errors * fits).max(1), -np.inf)
        similarity = np.where(known, 1 - (d if self.options.similarity == "1-d" else d * d), -np.inf)
        taken[:] = (similarity >= threshold)[:, None]
        return taken, similarity


def _isotonic(value: dict[str, list[float]]) -> Isotonic:
    return Isotonic(tuple(value["x"]), tuple(value["y"]))
