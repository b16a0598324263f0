"""How important the tokens of each conversation have been so far: what policy `importance` goes by (spec A14, S2).

A token's score is the attention that it got: the column sum of the attention weights, over all layers, heads and later
rows (H2O). Recorded while rows are computed, and only while that policy is on: it costs about another pass over the keys
for each layer. Every row is counted once, in whichever turn it is computed; rows that come from a cache have been counted
when they were computed. Scores are forgotten with the process, and the least recently used first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from afterglow.engine.attend import CachedAttend
from afterglow.engine.gather import Gatherer, Part
from afterglow.engine.tee import Tee
from afterglow.kernels.attention import attend
from afterglow.kernels.column_sums import column_sums
from afterglow.kernels.rope import Rotation
from afterglow.plan.salts import covers
from afterglow.plan.step import Run
from afterglow.plan.truncation import Cut, Origin

MOST_ROWS = 2**21  # of all contexts that are remembered: 8 MiB, and about 20 MiB for their digests
STRIDE = 16  # a context is known by its first 16, 32, 48, ... tokens, and by all of them


@dataclass(eq=False, slots=True)
class _Kept:
    """The scores of a context that a job has left: float32 [rows], on the CPU. `places`: what it is known by."""

    scores: Tensor
    whole: bytes
    places: list[tuple[str, bytes]]


@dataclass(eq=False, slots=True)
class _Live:
    """A running job: the tokens whose rows it has, and the scores of its first `counted` rows so far (None: it has not
    begun, and what came before it has not been looked up)."""

    salt: str
    tokens: bytearray
    origin: Origin | None
    sums: Tensor | None = None
    counted: int = 0


@dataclass(slots=True)
class Scores:
    """Scores of running jobs and of the contexts they left. Used by the engine's thread alone."""

    device: torch.device
    most_rows: int = MOST_ROWS
    rows: int = field(default=0, init=False)  # remembered
    _live: dict[int, _Live] = field(default_factory=dict, init=False)
    _kept: OrderedDict[_Kept, None] = field(default_factory=OrderedDict, init=False)  # least recently used first
    _places: dict[tuple[str, bytes], _Kept] = field(default_factory=dict, init=False)

    def begin(self, job: int, salt: str, prompt: bytes, found: Cut | None) -> None:
        """A job is queued; `found`: how its prompt was cut, if it was."""
        if found is None:
            self._live[job] = _Live(salt, bytearray(prompt), None)
        else:
            self._live[job] = _Live(found.salt, bytearray(found.prompt), found.origin)

    def counted(self, job: int) -> int:
        """The job's first rows that have been counted: they are not to be counted again."""
        live = self._live[job]
        if live.sums is None:
            before = self._before(live)
            live.counted = len(before)
            live.sums = before.to(self.device, copy=True)
        return live.counted

    def add(self, run: Run, sums: Tensor) -> None:
        """A run's rows have been computed, and give `sums` [run's stop row] to the rows up to there."""
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
        """A job has ended: its scores are kept for the next turn."""
        live = self._live.pop(job, None)
        if live is None or live.sums is None or live.counted < STRIDE:
            return
        tokens = bytes(live.tokens[: 4 * live.counted])
        kept = _Kept(live.sums[: live.counted].to("cpu", copy=True), _digest(tokens), [])
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
        while self.rows > self.most_rows:
            self._forget(next(iter(self._kept)))

    def of(self, salt: str, tokens: bytes) -> Tensor:
        """What is known of a context: scores float32 of its first rows, on the CPU; none at all where nothing is."""
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

    def _before(self, live: _Live) -> Tensor:
        """Scores of rows that a job does not compute itself."""
        found = self.of(live.salt, bytes(live.tokens))
        if len(found) or live.origin is None:
            return found
        scores = self.of(live.origin.salt, live.origin.tokens)
        return torch.cat([torch.empty(0), *(scores[start:stop] for start, stop in live.origin.kept)])

    def _forget(self, kept: _Kept) -> None:
        del self._kept[kept]
        self.rows -= len(kept.scores)
        for place in kept.places:
            if self._places.get(place) is kept:
                del self._places[place]


def _places(salt: str, tokens: bytes) -> Iterator[tuple[str, bytes]]:
    """What a context is known by: digests of its first 16, 32, ... tokens, each made from the one before."""
    state = hashlib.blake2b(digest_size=12)
    for at in range(0, len(tokens) - 4 * STRIDE + 1, 4 * STRIDE):
        state.update(tokens[at : at + 4 * STRIDE])
        yield salt, state.digest()


def _digest(tokens: bytes) -> bytes:
    return hashlib.blake2b(tokens, digest_size=12).digest()


class ScoringAttend(CachedAttend):
    """`CachedAttend` that also records what attention each row gets, part by part."""

    def __init__(
        self,
        parts: list[Part],
        angles: Rotation | None,
        gatherer: Gatherer,
        tee: Tee,
        scores: Scores,
        whole: list[Part] | None = None,
    ) -> None:
        super().__init__(parts, angles, gatherer, tee, whole)
        self._scores = scores
        self._new = {part.job: max(0, scores.counted(part.job) - part.start) for part in self.whole}
        self._sums = {
            part.job: torch.zeros(part.stop, dtype=torch.float32, device=part.context.shape.device)
            for part in self.whole
        }

    def _attended(self, part: Part, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        out, lse = attend(q, keys, values, scale=scale, causal=True)
        new = self._new[part.job]  # rows before it were counted when they were computed first
        if new < len(q):
            self._sums[part.job] += column_sums(q[new:], keys, lse[new:], scale=scale)
        return out

    def finish(self, runs: Sequence[Run]) -> None:
        """All layers are through: take over what was recorded, but of parts whose loads failed."""
        failed = {part.job for part in self.whole if part.failed is not None}
        for run in runs:
            if run.job in self._sums and run.job not in failed:
                self._scores.add(run, self._sums[run.job])
