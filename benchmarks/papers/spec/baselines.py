"""What SPEC is compared with, as rows of a table: all keep as many rows, and choose them in other ways."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from afterglow.errors import ConfigError
from afterglow.importance.select import SelectionRules, top
from afterglow.importance.speculation import sinks
from afterglow.model.decoder import Decoder
from benchmarks.papers.spec.attend import Prefix, SelectingAttend

Mode = Literal["exact", "spec", "h2o", "spi", "random", "sinks"]
MODES: tuple[Mode, ...] = get_args(Mode)


def attend_as(
    mode: Mode,
    decoder: Decoder,
    prefix: Prefix,
    retention: float,
    *,
    alpha: float = 0.6,
    static: Sequence[Tensor] | None = None,
    generator: torch.Generator | None = None,
    renew: bool = False,
    observe: bool = False,
) -> SelectingAttend:
    """A request over `prefix` that attends to the share `retention` of its rows, chosen by a mode.

    - `exact`: all rows.
    - `spec`: probe heads, and a set for each head where they disagree.
    - `h2o`: that in every layer (all keys are loaded, and important values only).
    - `spi`: static pre-identification: the rows that were important to other requests. `static`: float32 [rows] of each layer.
    - `random`: drawn anew for each layer, from `generator`.
    - `sinks`: the first four rows and the last ones.

    `renew` and `observe`: see `SelectingAttend`. Raises: ConfigError for another mode, or `spi` without `static`.
    """
    rules = SelectionRules(retention=1.0 if mode == "exact" else retention, alpha=alpha)
    layers, rows = decoder.spec.layers, len(prefix)
    k = rules.keep(rows)
    fixed: list[Tensor] | None = None
    if mode == "h2o":
        rules = SelectionRules(retention=retention, force="fallback")
    elif mode == "spi":
        if static is None:
            raise ConfigError("mode spi needs `static`: how important rows have been to other requests")
        fixed = None if k is None else [top(mean, k).nonzero().squeeze(1) for mean in static]
    elif mode == "random":
        drawn = (torch.randperm(rows, generator=generator) for _ in range(layers))
        fixed = None if k is None else [order[:k].sort().values.to(decoder.device) for order in drawn]
    elif mode == "sinks":
        fixed = None if k is None else [sinks(rows, k).sort().values.to(decoder.device)] * layers
    elif mode not in MODES:
        raise ConfigError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    return SelectingAttend(decoder, prefix, rules, fixed=fixed, renew=renew, observe=observe)
