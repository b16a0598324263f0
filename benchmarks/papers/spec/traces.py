"""Importance of rows to requests, for models that find nothing important: recorded with the bundled model, and stretched.

A model of random weights attends to everything alike, so that its probe heads never agree. Here its layers select by what
the bundled model's heads found in dialogues of 1,000 to 2,000 tokens: column sums of each layer, head and request. For a
prefix of n tokens, row i has the sums of the recorded row i * recorded / n, times factors that keep neighbours from being
alike: one for the row, one for the row in a layer, in a layer's head, and in a layer of this request (log-normal, `SIGMAS`).
Layers are mapped by their relative depth, heads in turn.

`SIGMAS` are set so that stretched importance is as similar as the recorded one: sets of a quarter of the rows of adjacent layers
(Jaccard index 0.34, recorded 0.29; 8 layers out of 6, so that two pairs are of one), of two requests over a prefix (0.61, as
recorded). Of heads they are not: those of the bundled model disagree in two layers out of three, the paper's in less than one
of five; here in one of seven.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

from afterglow.importance.select import SelectionRules
from afterglow.model.loader import load_model
from benchmarks.common.model_texts import held_out_sentences
from benchmarks.papers.spec import prefixes
from benchmarks.papers.spec.attend import SelectingAttend, prefill

SIGMAS = (
    0.33,
    0.2,
    0.38,
    0.16,
)  # of a row, of a row in a layer, of a row in a head, of a row in a layer of one request


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
        shared = prefixes.dialogues(directory, held_out_sentences(), count=count, tokens=tokens, facts=8, seed=seed)
        for each in shared:
            prefix = prefill(decoder, each.prefix).turn(decoder)
            requests = []
            for query in each.queries:
                attend = SelectingAttend(decoder, prefix, SelectionRules(retention=1.0), observe=True)
                attend.extend(query.prompt)
                requests.append(torch.stack(attend.sums))
            found.append(Recorded(requests))
    return found


def stretched(recorded: Recorded, request: int, layers: int, kv_heads: int, rows: int, seed: int) -> list[Tensor]:
    """Of one request, as if its prefix had `rows` rows: float32 [kv_heads, rows] for each layer. `seed` names the prefix.

    Requests of even numbers take the even recordings, in turn, and those of odd numbers the odd ones.
    """
    half = recorded.requests[request % 2 :: 2]
    sums = half[request // 2 % len(half)]
    source = torch.arange(rows) * sums.shape[2] // rows
    heads = torch.arange(kv_heads) % sums.shape[1]

    def noise(sigma: float, *shape: int, of: int) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed * 10_000_019 + of)).mul_(sigma)

    row, in_layer, in_head, in_request = SIGMAS
    found = []
    for layer in range(layers):
        factor = noise(row, rows, of=0) + noise(in_layer, rows, of=1 + layer)
        factor = factor + noise(in_request, rows, of=1000 * (1 + request) + layer)
        factor = factor + noise(in_head, sums.shape[1], rows, of=500 + layer)
        found.append((sums[layer * sums.shape[0] // layers][:, source] * factor.exp_())[heads])
    return found
