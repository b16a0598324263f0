"""What a database knows besides maps and vectors: how it was made, what distances mean, what held-out text showed."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from afterglow.errors import ConfigError, DamageError
from afterglow.memo.calibrate import Isotonic
from afterglow.memo.labels import ALPHA, LabelMode, check_mode
from afterglow.memo.projector import ProjectorKind
from afterglow.memo.training import STEPS

SETTINGS = "memo.json"
Accept = Literal["sentence", "layers"]
Similarity = Literal["1-d", "1-d2"]
DEFAULT_THRESHOLD = 0.99
NEIGHBOURS = 4
POWER = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoOptions:
    """What a build may be told.

    `accept="sentence"` is the paper's: maps of all layers, or of none, by the projector's distance d: similarity 1 - d, or
    with "1-d2" 1 - d squared, as the published program has it. `accept="layers"` takes maps where they do least harm:
    similarity is the predicted cosine between the sentence's embedding and the exact one, and as many layers take maps as
    keep it at the threshold. `neighbours` sentences' maps are averaged, nearer ones counting more; the paper's is 1.
    """

    projector: ProjectorKind = "positions"
    accept: Accept = "layers"
    similarity: Similarity = "1-d"
    neighbours: int = NEIGHBOURS
    label: LabelMode = "tv"
    alpha: float = ALPHA
    dtype: str = "float16"
    max_bytes: int | None = None  # of maps.bin and records.bin
    held_out: int = 100  # sentences for calibration, at most; a tenth where there are fewer than ten times as many
    steps: int = STEPS  # of the projector's training; `public` has its own number
    seed: int = 0

    def __post_init__(self) -> None:
        check_mode(self.label)
        for name, kinds in (("projector", ProjectorKind), ("accept", Accept), ("similarity", Similarity)):
            if getattr(self, name) not in get_args(kinds):
                raise ConfigError(f"--{name} must be one of {', '.join(get_args(kinds))}, got {getattr(self, name)!r}")
        if not 1 <= self.neighbours <= 64:
            raise ConfigError(f"--neighbours must lie between 1 and 64, got {self.neighbours}")
        if self.steps < 1:
            raise ConfigError(f"--steps must be at least 1, got {self.steps}")
        if self.max_bytes is not None and self.max_bytes < 1:
            raise ConfigError(f"--max-bytes must be at least 1, got {self.max_bytes}")

    @classmethod
    def of_paper(cls, **more: Any) -> MemoOptions:
        """AttnCache as published, as far as it is said there."""
        return cls(projector="binned", accept="sentence", neighbours=1, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`memo.json`. `errors` has a function for each layer: distance -> 1 - cosine of the embedding if that layer alone
    takes the map. `curve`: rows of threshold, hit rate and error on held-out text."""

    records: int
    trained_on: int  # records that the projector was trained for; later ones were added
    vectors_crc: int
    options: MemoOptions
    variation: Isotonic  # distance -> total variation of the maps
    errors: tuple[Isotonic, ...]
    curve: list[dict[str, float]] = field(default_factory=list)

    def save(self, folder: Path) -> None:
        """Replaces the file at once."""
        value = dataclasses.asdict(self)
        part = folder / f"{SETTINGS}.part"
        part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        os.replace(part, folder / SETTINGS)

    @staticmethod
    def load(folder: Path) -> Settings:
        """Errors: ConfigError (nothing there, or the build has not ended), DamageError."""
        path = folder / SETTINGS
        if not path.is_file():
            raise ConfigError(f"{folder} holds no finished database of attention maps; afterglow memo build makes one")
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            value["options"] = MemoOptions(**value["options"])
            value["variation"] = _isotonic(value["variation"])
            value["errors"] = tuple(map(_isotonic, value["errors"]))
            return Settings(**value)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise DamageError(f"{path} cannot be read ({error}); build the database anew") from None

    def accepted(self, distances: NDArray[Any], threshold: float) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
        """Nearest distances [n], inf where there is no neighbour -> which layers take maps, [n, layers], and the
        similarity of each sentence."""
        known = np.isfinite(distances)
        d = np.where(known, distances, 0.0).astype(np.float64)
        layers = len(self.errors)
        if self.options.accept == "sentence":
            similarity = np.where(known, 1 - (d if self.options.similarity == "1-d" else d * d), -np.inf)
            return np.repeat((similarity >= threshold)[:, None], layers, 1), similarity
        errors = np.stack([error(d) for error in self.errors], 1)
        order = np.argsort(errors, 1, kind="stable")
        spent = np.cumsum(np.take_along_axis(errors, order, 1), 1)
        taken = np.zeros(errors.shape, bool)
        np.put_along_axis(taken, order, (spent <= 1 - threshold + 1e-12) & known[:, None], 1)
        return taken, np.where(known, 1 - (errors * taken).sum(1), -np.inf)


def _isotonic(value: dict[str, list[float]]) -> Isotonic:
    return Isotonic(tuple(value["x"]), tuple(value["y"]))
