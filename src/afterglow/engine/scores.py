"""Score how important the tokens of each conversation were so far, for the truncation policy `importance`.

A token's score is the attention that it received: the column sum of the attention weights, over all layers, heads and later
rows (H2O). Scores are recorded while rows are computed, and only while that policy is on: this costs about another pass
over the keys for each layer. Every row is counted once, in the turn that computes it; rows from a cache were counted when they
were computed. Scores live in memory alone; the least recently used are forgotten first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from afterglow.engine.cached_attention import CachedAttend
from afterglow.engine.gather import BatchEntry, Gatherer
from afterglow.engine.tee import Tee
from afterglow.kernels.attention import attend
from afterglow.kernels.column_sums import column_sums
from afterglow.kernels.rope import LayerRotations
from afterglow.model.decoder import Attention
from afterglow.plan.prefix.salts import covers
from afterglow.plan.prefix.truncation import Cut, Origin
from afterglow.plan.step import Run

MAX_ROWS = 2**21  # of all remembered contexts: 8 MiB, and about 20 MiB for their digests
STRIDE = 16  # a context is found by its first 16, 32, 48, ... tokens, and by all its tokens


@dataclass(eq=False, slots=True)
class _ContextScores:
    """Hold the scores of a context that a job has left: float32 [rows], on the CPU. `places`: digests to find it by."""

    scores: Tensor
    whole: bytes
    places: list[tuple[str, bytes]]


@dataclass(eq=False, slots=True)
class _JobScores:
    """Hold a running job's tokens, and the scores of the first `counted` rows. `sums` is None before the job's first run."""

    salt: str
    tokens: bytearray
    origin: Origin | None
    sums: Tensor | None = None
    counted: int = 0


@dataclass(slots=True)
class Scores:
    """Keep scores of running jobs, and of the contexts that jobs have left. For the engine's thread alone."""

    device: torch.device
    max_rows: int = MAX_ROWS
    rows: int = field(default=0, init=False)  # remembered
    _live: dict[int, _JobScores] = field(default_factory=dict, init=False)
    _kept: OrderedDict[_ContextScores, None] = field(
        default_factory=OrderedDict, init=False
    )  # least recently used first
    _places: dict[tuple[str, bytes], _ContextScores] = field(default_factory=dict, init=False)

    def begin(self, job: int, salt: str, prompt: bytes, found: Cut | None) -> None:
        """Begin a queued job. `found`: how its prompt was cut, if it was."""
        if found is None:
            self._live[job] = _JobScores(salt, bytearray(prompt), None)
        else:
            self._live[job] = _JobScores(found.salt, bytearray(found.prompt), found.origin)

    def counted(self, job: int) -> int:
        """Tell how many of the job's first rows have been counted, and must not be counted again."""
        live = self._live[job]
        if live.sums is None:
            before = self._before(live)
            live.counted = len(before)
            live.sums = before.to(self.device, copy=True)
        return live.counted

    def add(self, run: Run, sums: Tensor) -> None:
        """Add the attention that a run's rows give to all rows up to the run's end: `sums` [rows]."""
        live = self._live[run.job]
        assert live.sums is not None
        stop = len(sums)
        if stop > len(live.sums):
            more = torch.zeros(max(stop, len(live.sums) * 5 // 4), dtype=torch.float32, device=self.device)
            more[: len(live.sums)] = live.sums
            live.sums = more
        live.sums[:stop] += sums
        live.counted = max(live.counted, stop)
        for token in run.tokens[max(0, len(live.tokens) // 4 - run.start) :]:
            live.tokens += token.to_bytes(4, "little")

    def end(self, job: int) -> None:
        """End a job, and keep its scores for the next turn."""
        live = self._live.pop(job, None)
        if live is None or live.sums is None or live.counted < STRIDE:
            return
        tokens = bytes(live.tokens[: 4 * live.counted])
        kept = _ContextScores(live.sums[: live.counted].to("cpu", copy=True), _digest(tokens), [])
        for place in _places(live.salt, tokens):
            kept.places.append(place)
            before = self._places.get(place)
            self._places[place] = kept
            if (
                before is not None
                and place == before.places[-1]
                and before.whole == _digest(tokens[: 4 * len(before.scores)])
            ):
                self._forget(before)  # an earlier turn of the same conversation
        self._kept[kept] = None
        self.rows += len(kept.scores)
        while self.rows > self.max_rows:
            self._forget(next(iter(self._kept)))

    def of(self, salt: str, tokens: bytes) -> Tensor:
        """Find the scores of a context's first rows, float32 [rows], on the CPU; empty where none are known."""
        for number, place in reversed(list(enumerate(_places(salt, tokens), 1))):
            kept = self._places.get(place)
            if kept is not None:
                self._kept.move_to_end(kept)
                rows = len(kept.scores)
                same = 4 * rows <= len(tokens) and _digest(tokens[: 4 * rows]) == kept.whole
                return kept.scores if same else kept.scores[: number * STRIDE]
        return torch.empty(0)

    def forget_all(self, whose: str | None) -> None:
        """Forget contexts (see `covers`)."""
        for kept in list(self._kept):
            if covers(whose, kept.places[0][0]):
                self._forget(kept)

    def _before(self, live: _JobScores) -> Tensor:
        """Find the scores of rows that a job does not compute itself."""
        found = self.of(live.salt, bytes(live.tokens))
        if len(found) or live.origin is None:
            return found
        scores = self.of(live.origin.salt, live.origin.tokens)
        return torch.cat([torch.empty(0), *(scores[start:stop] for start, stop in live.origin.kept)])

    def _forget(self, kept: _ContextScores) -> None:
        del self._kept[kept]
        self.rows -= len(kept.scores)
        for place in kept.places:
            if self._places.get(place) is kept:
                del self._places[place]


def _places(salt: str, tokens: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield digests of a context's first 16, 32, ... tokens, each made from the one before."""
    state = hashlib.blake2b(digest_size=12)
    for at in range(0, len(tokens) - 4 * STRIDE + 1, 4 * STRIDE):
        state.update(tokens[at : at + 4 * STRIDE])
        yield salt, state.digest()


def _digest(tokens: bytes) -> bytes:
    return hashlib.blake2b(tokens, digest_size=12).digest()


class ScoringAttend(CachedAttend):
    """Attend, and record the attention that each row receives, entry by entry."""

    def __init__(
        self,
        entries: list[BatchEntry],
        angles: LayerRotations | None,
        gatherer: Gatherer,
        tee: Tee,
        scores: Scores,
        whole: list[BatchEntry] | None = None,
    ) -> None:
        super().__init__(entries, angles, gatherer, tee, whole)
        self._scores = scores
        self._new = {entry.job: max(0, scores.counted(entry.job) - entry.start) for entry in self.whole}
        self._sums = {
            entry.job: torch.zeros(entry.stop, dtype=torch.float32, device=entry.context.shape.device)
            for entry in self.whole
        }

    def _attended(self, entry: BatchEntry, attention: Attention, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        out, lse = attend(q, keys, values, scale=attention.scale, causal=True)
        new = self._new[entry.job]  # rows before were counted when they were first computed
        if new < len(q):
            self._sums[entry.job] += column_sums(q[new:], keys, lse[new:], scale=attention.scale)
        return out

    def finish(self, runs: Sequence[Run]) -> None:
        """Take over the recorded sums after the last layer, except of entries whose loads failed."""
        failed = {entry.job for entry in self.whole if entry.failed is not None}
        for run in runs:
            if run.job in self._sums and run.job not in failed:
                self._scores.add(run, self._sums[run.job])
