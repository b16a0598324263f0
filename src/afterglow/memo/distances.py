"""How far sentences' attention maps lie apart: what the projector learns to predict (AttnCache, equation 2).

The printed equation, its text and the published program disagree; each reading is a mode. Maps are [layers, heads,
tokens, tokens], every row a distribution; the shorter of two sentences is padded with rows and columns of zeros.

`tv` (default): mean over layers, heads and rows of the total variation (half the L1 distance, 0 to 1), plus
    `alpha` times the difference of the lengths.
`printed`: as printed: mean of half the rows' L2 distance, times `alpha`, plus the difference of the lengths.
`public`: as the published program has it: `tv` with the difference of the lengths unweighted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from afterglow.errors import ConfigError
from afterglow.memo.options import ALPHA, LabelMode


def labels(maps: Sequence[Tensor], mode: LabelMode = "tv", alpha: float = ALPHA) -> Tensor:
    """Distances between all pairs of `maps`, [layers, heads, s, s] each -> float32 [n, n]."""
    check_mode(mode)
    lengths = [m.shape[-1] for m in maps]
    longest = max(lengths)
    padded = torch.stack(
        [F.pad(m.float(), (0, longest - s, 0, longest - s)) for m, s in zip(maps, lengths, strict=True)]
    )
    rows = padded.flatten(1, 3)  # [n, rows, s]
    length = torch.tensor(lengths, dtype=torch.float32)
    apart = (length[:, None] - length[None]).abs()
    if mode == "printed":
        per_row = rows.transpose(0, 1)
        exact = "donot_use_mm_for_euclid_dist"  # differences of close rows, not of their squares
        return torch.cdist(per_row, per_row, compute_mode=exact).mean(0) * (alpha / 2) + apart
    flat = rows.flatten(1)
    return torch.cdist(flat, flat, p=1) / (2 * rows.shape[1]) + (alpha if mode == "tv" else 1.0) * apart


def label(first: Tensor, second: Tensor, mode: LabelMode = "tv", alpha: float = ALPHA) -> float:
    """The distance of two sentences' maps."""
    return float(labels([first, second], mode, alpha)[0, 1])


def total_variation(first: Tensor, second: Tensor) -> Tensor:
    """Of each sentence of a batch, mean over the rows of all maps: [n, ..., s, s] twice -> float32 [n]."""
    return (first.float() - second.float()).abs().sum(-1).flatten(1).mean(1) / 2


def check_mode(mode: str) -> None:
    """Check the name of a reading. Raises: ConfigError."""
    if mode not in get_args(LabelMode):
        raise ConfigError(f"--label must be one of {', '.join(get_args(LabelMode))}, got {mode!r}")
