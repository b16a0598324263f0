"""How a choice is picked by the losses of all choices, and which rule a task is judged by.

The loss of a whole choice favours short choices and likely words. Two remedies are usual. One is the mean over the choice's tokens or
characters (`acc_norm` of the lm-evaluation-harness). The other takes off the choice's own loss: that behind the last words of the
question alone (Holtzman et al., "Surface Form Competition", 2021). The rule of a task is the one that is right most often on
questions that are not reported, with nothing before them that a truncation could touch. All arms are judged by it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Per = Literal["choice", "token", "character"]

# The last of so many questions of a file is for validation.
VALIDATION_EVERY = 4


@dataclass(frozen=True, slots=True)
class Choices:
    """What is known of the choices of a question before it is asked: their own losses, and their sizes. `answer`: the right one."""

    own: Sequence[float]
    tokens: Sequence[int]
    characters: Sequence[int]
    answer: int


@dataclass(frozen=True, slots=True)
class Rule:
    """A way to pick a choice."""

    less_own: bool
    per: Per

    @property
    def name(self) -> str:
        """Say what is compared."""
        return ("loss less the own loss" if self.less_own else "loss") + f" per {self.per}"

    def pick(self, losses: Sequence[float], of: Choices) -> int:
        """Return the choice with the least loss by this rule, the first of equal ones. `losses`: of each choice behind the question."""
        sizes = {"choice": [1] * len(losses), "token": of.tokens, "character": of.characters}[self.per]
        own = of.own if self.less_own else [0.0] * len(losses)
        scores = [(loss - alone) / size for loss, alone, size in zip(losses, own, sizes, strict=True)]
        return scores.index(min(scores))


RULES = tuple(Rule(less_own, per) for less_own, per in itertools.product((False, True), get_args(Per)))


def validated(asked: Sequence[tuple[Sequence[float], Choices]]) -> dict[str, float]:
    """Return the questions that each rule gets right, in per cent, by the rule's name. `asked`: losses and choices of each question."""
    return {
        rule.name: round(100 * sum(rule.pick(losses, of) == of.answer for losses, of in asked) / len(asked), 2)
        for rule in RULES
    }


def best(right: dict[str, float]) -> Rule:
    """Return the rule that is right most often, the first of equal ones."""
    return max(RULES, key=lambda rule: right[rule.name])


def is_for_validation(number: int) -> bool:
    """Tell whether a question, by its number in its file, is for validation."""
    return number % VALIDATION_EVERY == VALIDATION_EVERY - 1
