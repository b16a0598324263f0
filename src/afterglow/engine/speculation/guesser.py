"""Guess the next tokens of the replies of a batch, and learn from what is drawn."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from afterglow.engine.speculation.acceptance import Acceptance, allot
from afterglow.engine.speculation.lookup import Lookup

MAX_GUESSES = 15  # of a reply in a step: with its row these fit into what gathers new rows (`engine.tee`)

Guesses = dict[int, tuple[int, ...]]  # by job


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Predict the seconds of a decode step. `rows(n)`: of its n rows, without attention. `reads`: of attention to one row of
    context, in all layers; `again`: for each further row of the same reply."""

    rows: Callable[[int], float]
    reads: float
    again: float


@dataclass(slots=True)
class _Reply:
    """Follow one reply. Its text is entered when its first token is drawn: a request that waits needs no tables."""

    prompt: Sequence[int]
    stops: Collection[int]
    lookup: Lookup | None = None
    acceptance: Acceptance = field(default_factory=Acceptance)


class Guesser:
    """Guess tokens by looking up where a reply's last tokens stood before, in its prompt or in itself."""

    def __init__(self, costs: StepCosts | None) -> None:
        """`costs`: of steps on this machine, for guesses only where they pay; None: wherever there are any."""
        self._costs = costs
        self._replies: dict[int, _Reply] = {}

    def begin(self, job: int, prompt: Sequence[int], stops: Collection[int]) -> None:
        """Begin a reply, which ends with one of `stops`."""
        self._replies[job] = _Reply(prompt, stops)

    def forget(self, job: int) -> None:
        """Forget a reply."""
        self._replies.pop(job, None)

    def drew(self, job: int, tokens: Sequence[int]) -> None:
        """Take in tokens that were drawn for a reply."""
        reply = self._replies.get(job)
        if reply is None:
            return
        lookup = reply.lookup
        if lookup is None:
            lookup = reply.lookup = Lookup(reply.prompt)
        for token in tokens:
            if lookup.at:
                reply.acceptance.note(lookup.length, lookup.tokens[lookup.at] == token)
            lookup.add(token)

    def guesses(self, jobs: Sequence[tuple[int, int]]) -> Guesses:
        """Guess what comes next in replies that are decoded together. `jobs`: with the rows of their contexts."""
        offers: list[tuple[int, list[int]]] = []
        chances: list[list[float]] = []
        for job, _ in jobs:
            reply = self._replies.get(job)
            tokens: list[int] = []
            falling: list[float] = []
            if reply is not None and reply.lookup is not None and reply.lookup.at:
                most = MAX_GUESSES
                if self._costs is not None:
                    falling = reply.acceptance.chances(reply.lookup.length, most)
                    most = len(falling)
                tokens = _until(reply.lookup.guess(most), reply.stops)
            offers.append((job, tokens))
            chances.append(falling[: len(tokens)])
        if self._costs is None:
            return {job: tuple(tokens) for job, tokens in offers if tokens}
        if not any(chances):
            return {}
        costs = self._costs
        attention = costs.reads * sum(rows for _, rows in jobs)
        counts = allot(chances, lambda rows: costs.rows(rows) + attention, [costs.again * rows for _, rows in jobs])
        return {job: tuple(tokens[:count]) for (job, tokens), count in zip(offers, counts, strict=True) if count}


def _until(tokens: list[int], stops: Collection[int]) -> list[int]:
    """Cut tokens at the first one that would end the reply: nothing comes after it."""
    for at, token in enumerate(tokens):
        if token in stops:
            return tokens[:at]
    return tokens
