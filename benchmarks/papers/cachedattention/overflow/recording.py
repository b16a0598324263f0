"""What an engine computes, watched: the loss of each token of a prompt, and the positions that cached rows are embedded at.

An engine tells no log-probabilities of a prompt that it has truncated, or whose beginning is cached. Here they are taken where the
engine has its last hidden rows anyway: the plan, the cache, its copies and the attention are the server's own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from afterglow.engine.engine import Engine
from afterglow.engine.gather import BatchEntry, Gatherer
from afterglow.engine.grammars.masks import Constraint
from afterglow.engine.requests import token_bytes
from afterglow.engine.token_outputs import LOGIT_ROWS, RunOutput, TokenOutputs
from afterglow.kernels.rope import LayerRopes, LayerRotations
from afterglow.plan.step import Run
from afterglow.request import Request


class RecordedOutputs(TokenOutputs):
    """Keep the last hidden rows behind which the prompt tokens `wanted` come: by request, their places in the prompt as it was cut.

    Rows are kept by all tokens up to them, until `forget_rows`: a request that goes on as an earlier one did finds rows in the cache,
    and does not compute them again.
    """

    def __init__(self, engine: Engine) -> None:
        """Take the place of the outputs of an engine that has not been asked anything."""
        super().__init__(engine.decoder)
        self._model = engine.decoder
        self._wanted: dict[str, range] = {}
        self._prompts: dict[str, list[int]] = {}
        self._rows: dict[bytes, Tensor] = {}
        engine.parts.runner._outputs = self

    def want(self, wanted: Mapping[str, range]) -> None:
        """Take what is wanted of the next requests, by their ids. Earlier ones are forgotten, but not their rows."""
        self._wanted, self._prompts = dict(wanted), {}

    def losses(self, request: str) -> list[float]:
        """Return the losses of the tokens that were wanted of a request. Raises: KeyError, for a row that no request has computed."""
        found: list[float] = []
        prompt, wanted = self._prompts[request], self._wanted[request]
        names = list(_names(prompt, wanted))
        for at in range(0, len(names), LOGIT_ROWS):
            logits = self._model.logits(torch.stack([self._rows[name] for name in names[at : at + LOGIT_ROWS]]))
            targets = torch.tensor([prompt[place] for place in wanted[at : at + LOGIT_ROWS]])
            found += F.cross_entropy(logits.float(), targets.to(logits.device), reduction="none").tolist()
        return found

    def forget_rows(self) -> None:
        self._rows = {}

    def register(self, job: int, request: Request, constraint: Constraint | None) -> None:
        super().register(job, request, constraint)
        self._prompts[request.id] = list(request.prompt)

    def shorten(self, job: int, prompt: bytes) -> None:
        super().shorten(job, prompt)
        self._prompts[self.request(job).id] = memoryview(prompt).cast("I").tolist()

    def logit_rows(self, runs: Sequence[Run], entries: Sequence[BatchEntry], rows: int) -> list[int] | None:
        if any(self._wanted.get(self.request(run.job).id) for run in runs):
            return None
        return super().logit_rows(runs, entries, rows)

    def draw(
        self,
        runs: Sequence[Run],
        entries: Sequence[BatchEntry],
        hidden: Tensor,
        logit_rows: list[int] | None,
        **more: Any,
    ) -> RunOutput:
        for entry in entries:
            request = self.request(entry.job).id
            wanted = self._wanted.get(request, range(0))
            # Also the row of the last token: a longer prompt may find it in the cache.
            places = range(max(wanted.start, entry.start + 1), min(wanted.stop, entry.stop) + 1 if wanted else 0)
            for place, name in zip(places, _names(self._prompts[request], places), strict=True):
                self._rows[name] = hidden[entry.where.start + place - 1 - entry.start].clone()
        return super().draw(runs, entries, hidden, logit_rows, **more)


def _names(prompt: Sequence[int], places: range) -> Iterator[bytes]:
    """Name the rows before these places by all tokens up to them."""
    data = token_bytes(prompt)
    state = hashlib.blake2b(data[: 4 * places.start], digest_size=16)
    for place in places:
        yield state.digest()
        state.update(data[4 * place : 4 * place + 4])


class OldPositions(LayerRopes):
    """Embed cached rows at the positions `of` (int64, by row) instead of at their places in the context."""

    def __init__(self, engine: Engine) -> None:
        """Take part in the gathering of an engine that has not been asked anything. Raises: ValueError without rotary embedding."""
        rope = engine.decoder.rope
        if rope is None:
            raise ValueError(f"{engine.model_name} has no rotary embedding: its keys have no positions to keep")
        self._rope = rope
        self.of = torch.arange(engine.max_model_len)
        runner, positions = engine.parts.runner, self
        gatherer = runner._gatherer

        class Moved(Gatherer):
            def begin(self, entries: Sequence[BatchEntry], rope: LayerRopes | None) -> None:
                super().begin(entries, positions)

        runner._gatherer = Moved(
            gatherer._host, gatherer._layers, windows=gatherer._windows, counters=gatherer._counters
        )

    def cos_sin(self, positions: Tensor) -> LayerRotations:
        return self._rope.cos_sin(self.of.to(positions.device)[positions])
