"""Options of databases of attention maps: how one is built, and how one is used. Light to import: the command line makes
its options from these fields."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from afterglow.config import check_choices, option
from afterglow.errors import ConfigError

MemoMode = Literal["auto", "on", "off"]
ProjectorKind = Literal["positions", "binned", "public"]
LabelMode = Literal["tv", "printed", "public"]
Accept = Literal["sentence", "layers"]
Similarity = Literal["1-d", "1-d2"]
DEFAULT_THRESHOLD = 0.97
ALPHA = 0.2  # the paper's
STEPS = 600  # of training, for the kinds `positions` and `binned`


@dataclass(frozen=True, kw_only=True)
class MemoReuse:
    """Whether embeddings take attention maps from a database, and from which."""

    memo: Path | None = option(
        None,
        "Reuse the attention maps in this folder for texts that attend alike (AttnCache): faster and not exact. "
        "The default is not to.",
        metavar="DIR",
    )
    threshold: float = option(
        DEFAULT_THRESHOLD,
        "How alike texts have to be for that, by the memo's prediction: 1 is equal, lower is faster and less exact.",
    )
    memo_mode: MemoMode = option(
        "auto",
        "auto measures first whether that is faster with this model on this machine, and leaves it alone where it is not; "
        "on uses it anyway, off never.",
    )

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise ConfigError(f"--threshold must be above 0 and at most 1, got {self.threshold}")
        check_memo_mode(self.memo_mode)


def check_memo_mode(mode: str) -> None:
    """Raises: ConfigError."""
    if mode not in get_args(MemoMode):
        raise ConfigError(f"--memo-mode must be one of {', '.join(get_args(MemoMode))}, got {mode!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoOptions:
    """How a database is built.

    `accept="sentence"` is the paper's: maps of all layers, or of none, by the projector's distance d: similarity 1 - d, or
    with "1-d2" 1 - d squared, as the published program has it. `accept="layers"` takes maps where they do least harm:
    similarity is the cosine between the sentence's embedding and the exact one that is to be reckoned with, also on texts of another
    source, and as many layers take maps as keep it at the threshold. Nearer ones of the `neighbours` sentences count more in the mean.
    """

    projector: ProjectorKind = option(
        "positions", "How texts are compared: binned is the paper's two layers, public as its program has them."
    )
    accept: Accept = option(
        "layers",
        "Accept maps for single layers, by what they do to the embedding, or for a whole sentence as in the paper.",
    )
    neighbours: int = option(4, "Average the maps of so many of the nearest sentences; the paper takes 1.")
    label: LabelMode = option(
        "tv",
        "What the projector learns of the paper's equation 2: tv is total variation, printed as printed, public as in its "
        "program.",
    )
    similarity: Similarity = option(
        "1-d",
        "With --accept sentence: 1-d is one less the distance, 1-d2 one less its square, as the public program has it.",
    )
    max_bytes: int | None = option(
        None, "Stop taking maps when they have this size on disk, such as 2G. The default is no limit.", size=True
    )
    held_out: int = option(
        100,
        "Calibrate on so many of the texts, at most a tenth, that training does not see; or on so many of --calibrate.",
    )
    steps: int = option(STEPS, "Train the projector for so many steps; public has its own number.")
    seed: int = option(0, "Make the training repeatable with this number.")
    alpha: float = ALPHA
    dtype: str = "float16"

    def __post_init__(self) -> None:
        check_choices(self)
        if not 1 <= self.neighbours <= 64:
            raise ConfigError(f"--neighbours must lie between 1 and 64, got {self.neighbours}")
        for name, value in (("held-out", self.held_out), ("steps", self.steps), ("max-bytes", self.max_bytes)):
            if value is not None and value < 1:
                raise ConfigError(f"--{name} must be at least 1, got {value}")
