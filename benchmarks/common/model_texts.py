"""Texts of the kind that the bundled model was trained on, which its training has not seen."""

from __future__ import annotations

from pathlib import Path

import tokenizers
from scripts.small_model.filler import filler_sentences
from scripts.small_model.tokenizer import SPECIALS

SEED = 4_210_773
"""Added to the benchmark's seed: neither the training's (1, ...) nor the evaluation's (977123)."""


def knows_markers(directory: Path) -> bool:
    """Check whether a model directory's tokenizer has the training's role markers, at the same ids."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        return False
    fast = tokenizers.Tokenizer.from_file(str(path))
    return [fast.token_to_id(marker) for marker in SPECIALS[1:]] == list(range(1, 6))


def held_out_sentences() -> list[str]:
    """Collect sentences from docstrings that the bundled model has not seen in training. Takes seconds."""
    return filler_sentences()[1]
