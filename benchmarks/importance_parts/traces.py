"""What is important to whom, for models that find nothing important: recorded with the bundled model, and stretched.

A model of random weights attends to everything alike, so that its probe heads never agree. Here its layers select by what
the bundled model's heads found in dialogues of 1,000 to 2,000 tokens: column sums of each layer, head and request. For a
prefix of n tokens, row i has the sums of the recorded row i * recorded / n, times a factor drawn once for each row of a
prefix (log-normal, sigma 0.5: neighbours are not alike, requests are); layers are mapped by their relative depth, heads in
turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

from afterglow.importance.attend import SelectingAttend, prefill
from afterglow.importance.identify import Rules
from afterglow.model.loader import load_model
from importance_parts import prefixes
from truncation_parts import dialogues

SIGMA = 0.5


@dataclass(frozen=True)
class Recorded:
    """One prefix: of each request over it, column sums float32 [layers, kv_heads, rows]."""

    requests: list[Tensor]


def record(count: int, tokens: int, seed: int) -> list[Recorded]:
    """Dialogues with the bundled model; each has a dozen requests."""
    directory = Path(str(files("afterglow") / "assets" / "model"))
    decoder = load_model(directory)
    found = []
    with torch.inference_mode():
        shared = prefixes.dialogues(
            directory, dialogues.held_out_sentences(), count=count, tokens=tokens, facts=8, seed=seed
        )
        for each in shared:
            prefix = prefill(decoder, each.prefix).turn(decoder)
            requests = []
            for query in each.queries:
                attend = SelectingAttend(decoder, prefix, Rules(retention=1.0), observe=True)
                attend.extend(query.prompt)
                requests.append(torch.stack(attend.sums))
            found.append(Recorded(requests))
    return found


def stretched(recorded: Recorded, request: int, layers: int, kv_heads: int, rows: int, seed: int) -> list[Tensor]:
    """Of one request, as if its prefix had `rows` rows: float32 [kv_heads, rows] for each layer. `seed` names the prefix."""
    sums = recorded.requests[request % len(recorded.requests)]
    source = torch.arange(rows) * sums.shape[2] // rows
    found = []
    for layer in range(layers):
        draw = torch.Generator().manual_seed(seed * 1009 + layer)
        factor = torch.randn(rows, generator=draw).mul_(SIGMA).exp_()
        heads = torch.arange(kv_heads) % sums.shape[1]
        found.append(sums[layer * sums.shape[0] // layers][heads][:, source] * factor)
    return found
