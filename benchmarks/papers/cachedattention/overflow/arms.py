"""The arms of CachedAttention's tables 1 and 2, each a way to ask an engine for the next turn of a conversation that outgrows
its window. All arms see the same tokens and drop the same ones: those that the server's policy `oldest_tokens` drops.

- CA: the server with truncation: surviving keys and values are kept, and embedded at new positions.
- NKVT: the same, but surviving keys are embedded at the positions they had. No server does that: it is for comparison.
- TT: nothing is cached; the surviving tokens are computed anew. The exact reference.
- OF: the cache without truncation: an overflow invalidates it, so that turn computes the survivors anew, and later turns reuse them.
  What it computes is what TT computes; by how much they differ is what rounding does.
- none: nothing of the history survives but the head. The floor.
"""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from afterglow.engine.engine import Engine
from afterglow.plan.prefix.ranges import Rows, complement, count
from afterglow.plan.prefix.truncation import Rules
from afterglow.request import Completion, Request, SamplingParams
from benchmarks.papers.cachedattention.overflow.recording import OldPositions, RecordedOutputs

_IDS = itertools.count()

Question = tuple[Sequence[int], Sequence[Sequence[int]]]
"""The tokens of a question, and of each of its choices."""


class Rig:
    """An engine under watch, and how it is asked."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.rules: Rules = engine.parts.limits.rules
        self.window = engine.max_model_len
        self.outputs = RecordedOutputs(engine)
        self.positions = OldPositions(engine)

    def ask(
        self, prompt: Sequence[int], wanted: range, *, salt: str, turns: tuple[int, ...] | None = None
    ) -> tuple[Completion, list[float]]:
        """Compute a prompt, without a reply, and return the losses of its tokens `wanted`, by their place in what is left of it.
        `turns`: it may be truncated.

        Raises: KeyError, where the engine found rows before these tokens in its cache.
        """
        self.outputs.forget_rows()
        return self._together([prompt], [wanted], salt, turns)[0]

    def ask_aside(
        self,
        text: Sequence[int],
        rows: int,
        questions: Sequence[Question],
        *,
        salt: str,
        turns: tuple[int, ...] | None = None,
    ) -> list[list[float]]:
        """Ask questions behind a text, with `rows` rows left of it, and return the loss of each choice, all its tokens together.
        `turns`: as in `ask`.

        First one choice of each question, then the others together: these find the question in the cache.
        """
        found: list[list[float]] = [[] for _ in questions]
        for first in (True, False):
            of = [
                (at, asked, choice)
                for at, (asked, choices) in enumerate(questions)
                for choice in (choices[:1] if first else choices[1:])
            ]
            prompts = [[*text, *asked, *choice] for _, asked, choice in of]
            wanted = [range(rows + 1, rows + len(asked) + len(choice)) for _, asked, choice in of]
            answers = self._together(prompts, wanted, salt, turns)
            for (at, _, choice), (_, losses) in zip(of, answers, strict=True):
                found[at].append(sum(losses[-len(choice) :]))
        return found

    def _together(
        self, prompts: Sequence[Sequence[int]], wanted: Sequence[range], salt: str, turns: tuple[int, ...] | None
    ) -> list[tuple[Completion, list[float]]]:
        params = SamplingParams(max_tokens=0)
        cut: dict[str, Any] = {"truncation": turns is not None, "turns": turns or ()}
        requests = [Request(f"turn-{next(_IDS)}", list(prompt), params, salt=salt, **cut) for prompt in prompts]
        self.outputs.want({request.id: places for request, places in zip(requests, wanted, strict=True)})
        done = self.engine.generate(requests)
        return [(each, self.outputs.losses(request.id)) for request, each in zip(requests, done, strict=True)]

    def recompute(self, prompt: Sequence[int]) -> list[float]:
        """Return the losses of all tokens but the first, by the engine's own log-probabilities, without any cache."""
        self.outputs.want({})
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        (done,) = self.engine.generate([Request(f"all-{next(_IDS)}", list(prompt), params, reuse=False)])
        return [-each.logprob for each in done.prompt_logprobs[1:] if each is not None]


@dataclass
class Arm(ABC):
    """A conversation in one arm. `losses`: of the tokens of each turn but its first, by the overflows before; `prefilled`: rows that
    are computed from the first overflow on, the turn's own included. Where turns are not `scored`, only answers have losses."""

    rig: Rig
    head: Sequence[int]
    salt: str
    scored: bool = True
    text: list[int] = field(default_factory=list)
    gone: tuple[Rows, ...] = ()
    overflows: int = 0
    losses: dict[int, list[float]] = field(default_factory=dict)
    prefilled: int = 0

    def __post_init__(self) -> None:
        self.text = list(self.head)
        self.rig.outputs.forget_rows()  # of other arms

    @property
    def turns(self) -> tuple[int, ...]:
        """Where turns end, as the engine is told: the head is never dropped."""
        return (len(self.head),) if self.head else ()

    def compact(self) -> list[int]:
        """Return what is left of the text."""
        return [token for a, b in complement(self.gone, len(self.text)) for token in self.text[a:b]]

    def begin(self, ids: Sequence[int]) -> None:
        """Take tokens that do not overflow the window. None of them is scored."""
        assert len(self.text) + len(ids) <= self.rig.window
        self.text += ids

    def forked(self) -> Arm:
        """Return a conversation that has come as far as this one, and goes on by itself."""
        return copy.deepcopy(self, {id(self.rig): self.rig})

    def fits(self, turn: Sequence[int]) -> bool:
        """Tell whether a turn overflows nothing."""
        return len(self.text) + len(turn) - count(self.gone) <= self.rig.window

    def add(self, turn: Sequence[int]) -> None:
        """Take a turn, after truncation where it does not fit."""
        if not self.fits(turn):
            gone = self.rig.rules.drop(len(self.text) + len(turn), self.turns, self.gone)
            self._overflow(gone)
            self.gone, self.overflows = gone, self.overflows + 1
        self.text += turn
        self._turn(len(turn))

    def end(self) -> None:  # noqa: B027 - most arms have nothing left
        """Compute what is still to be computed."""

    @abstractmethod
    def answers(self, questions: Sequence[Question]) -> list[list[float]]:
        """Return the loss of each choice of questions, all its tokens together. The conversation does not keep them."""

    def _overflow(self, gone: tuple[Rows, ...]) -> None:  # noqa: B027 - some arms need not
        """Prepare for a turn before which the rows `gone` are dropped."""

    @abstractmethod
    def _turn(self, rows: int) -> None:
        """Compute the last turn of the text."""

    def _note(self, losses: Sequence[float], prefilled: int) -> None:
        self.losses.setdefault(self.overflows, []).extend(losses)
        if self.overflows:
            self.prefilled += prefilled


class Kept(Arm):
    """CA: the engine truncates, and keeps the rest."""

    def _turn(self, rows: int) -> None:
        left = len(self.text) - count(self.gone)
        wanted = range(left - rows + 1, left) if self.scored else range(0)
        done, losses = self.rig.ask(self.text, wanted, salt=self.salt, turns=self.turns)
        dropped = done.truncation.dropped if done.truncation is not None else 0
        if dropped != count(self.gone):
            raise RuntimeError(f"the engine dropped {dropped} rows, expected {count(self.gone)}")
        # Turns that are not scored may begin as another branch's do, and reuse more.
        least, most = left - rows, left - rows if self.scored else left
        if self.overflows and not least <= done.cached.total <= most:
            raise RuntimeError(f"the engine reused {done.cached.total} rows, expected {least}")
        self._note(losses, left - done.cached.total)

    def answers(self, questions: Sequence[Question]) -> list[list[float]]:
        left = len(self.text) - count(self.gone)
        return self.rig.ask_aside(self.text, left, questions, salt=self.salt, turns=self.turns)


class KeptPositions(Kept):
    """NKVT: the same with the keys' old positions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._embedded = torch.arange(self.rig.window)  # by row of the compact text

    def _overflow(self, gone: tuple[Rows, ...]) -> None:
        places = [row for a, b in complement(self.gone, len(self.text)) for row in range(a, b)]
        left = {row for a, b in complement(gone, len(self.text)) for row in range(a, b)}
        kept = self._embedded[[at for at, row in enumerate(places) if row in left]]
        self._embedded = torch.cat((kept, torch.arange(len(kept), self.rig.window)))

    def _turn(self, rows: int) -> None:
        with_old = self.rig.positions
        before, with_old.of = with_old.of, self._embedded
        try:
            super()._turn(rows)
        finally:
            with_old.of = before

    def answers(self, questions: Sequence[Question]) -> list[list[float]]:
        with_old = self.rig.positions
        before, with_old.of = with_old.of, self._embedded
        try:
            return super().answers(questions)
        finally:
            with_old.of = before


class Invalidated(Arm):
    """OF: the engine knows nothing of the truncation; its prompts are what is left."""

    def _turn(self, rows: int) -> None:
        prompt = self._prompt()
        wanted = range(len(prompt) - rows + 1, len(prompt)) if self.scored else range(0)
        done, losses = self.rig.ask(prompt, wanted, salt=self.salt)
        self._note(losses, len(prompt) - done.cached.total)

    def _prompt(self) -> list[int]:
        return self.compact()

    def answers(self, questions: Sequence[Question]) -> list[list[float]]:
        before = self._prompt()
        return self.rig.ask_aside(before, len(before), questions, salt=self.salt)


class Recomputed(Invalidated):
    """TT: no cache. All turns between two overflows are computed at once, which gives each what it would get by itself.

    Questions reuse what the first of them has computed anew: exact reuse.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._waiting: list[int] = []  # rows of the turns since the last overflow

    def _overflow(self, gone: tuple[Rows, ...]) -> None:
        self.end()

    def _turn(self, rows: int) -> None:
        self._waiting.append(rows)
        if self.overflows:
            self.prefilled += len(self._prompt())

    def end(self) -> None:
        if self.scored and self.overflows and self._waiting:  # before the first overflow all arms are the same
            prompt = self._prompt()
            losses = self.rig.recompute(prompt)
            at = len(prompt) - sum(self._waiting)
            for rows in self._waiting:
                self._note(losses[at : at + rows - 1], 0)
                at += rows
        self._waiting = []


class Forgotten(Recomputed):
    """none: the history before the last overflow is gone."""

    _since = 0

    def _overflow(self, gone: tuple[Rows, ...]) -> None:
        super()._overflow(gone)
        self._since = len(self.text)

    def _prompt(self) -> list[int]:
        return [*self.head, *self.text[max(self._since, len(self.head)) :]]


ARMS: dict[str, type[Arm]] = {
    "CA": Kept,
    "TT": Recomputed,
    "NKVT": KeptPositions,
    "OF": Invalidated,
    "none": Forgotten,
}
