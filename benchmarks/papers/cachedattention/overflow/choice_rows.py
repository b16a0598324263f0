"""Rows and goals of table 2, made of the losses that are kept. A part of a task counts when all arms have it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from benchmarks.common.paired import Paired
from benchmarks.papers.cachedattention.overflow import picks
from benchmarks.papers.cachedattention.overflow.summary import AGAINST, CONFIDENT, Part, Row, goal_of

ALONE, OWN = "alone", "own"
COMPARED = ("CA", "TT", "NKVT", "none", ALONE)
# In place of a part's number.
VALIDATION = "validation"

ByArm = dict[str, Part]


def rows(parts: Iterable[Part]) -> list[Row]:
    """Return a row for each task that has a rule and at least one part of all arms."""
    by_task: dict[str, dict[int | str, ByArm]] = {}
    for part in parts:
        by_task.setdefault(part["text"], {}).setdefault(part["part"], {})[part["arm"]] = part
    found = []
    for task, of in by_task.items():
        tried = of.pop(VALIDATION, {})
        whole = [of[number] for number in sorted(of, key=int) if of[number].keys() >= {OWN, *COMPARED}]
        if whole and tried.keys() >= {OWN, ALONE}:
            found.append(_row(task, tried, whole))
    return found


def _row(task: str, tried: ByArm, whole: Sequence[ByArm]) -> Row:
    tried_choices = _choices(tried[OWN])
    validated = picks.validated(list(zip(tried[ALONE]["losses"], tried_choices, strict=True)))
    rule = picks.best(validated)
    right, same = Paired(), Paired()
    chances: list[float] = []
    for number, part in enumerate(whole):
        asked = _choices(part[OWN])
        picked = {
            arm: [rule.pick(losses, of) for losses, of in zip(part[arm]["losses"], asked, strict=True)]
            for arm in COMPARED
        }
        right.add({arm: _flags(picked[arm], [of.answer for of in asked]) for arm in COMPARED}, number)
        same.add({arm: _flags(picked[arm], picked[AGAINST]) for arm in COMPARED}, number)
        chances += [1 / len(of.own) for of in asked]
    chance = 100 * sum(chances) / len(chances)
    found = right.accuracy(AGAINST)
    return {
        "text": task,
        "rule": rule.name,
        "validation": {
            "questions": len(tried_choices),
            "which": f"every {picks.VALIDATION_EVERY}th of the file, without a conversation before",
            "right": validated,
        },
        "parts": len(whole),
        "chance": round(chance, 2),
        **found,
        "above_chance": {arm: is_above(of, chance) for arm, of in found["accuracy"].items()},
        "same_choice": {arm: of["value"] for arm, of in same.accuracy(AGAINST)["accuracy"].items()},
    }


def is_above(of: dict[str, Any], level: float) -> bool:
    """Tell whether a value is above a level by more than its error allows (95 %). One without an error is not known to be."""
    return of["error"] is not None and of["value"] - CONFIDENT * of["error"] > level


def _choices(own: Part) -> list[picks.Choices]:
    facts = (own[key] for key in ("losses", "tokens", "characters", "answers"))
    return [picks.Choices(*of) for of in zip(*facts, strict=True)]


def _flags(picked: Sequence[int], wanted: Sequence[int]) -> torch.Tensor:
    return torch.tensor([float(a == b) for a, b in zip(picked, wanted, strict=True)])


def goals(found: Iterable[Row]) -> list[dict[str, Any]]:
    """Return the goals. Their spread is what other questions may differ by (95 %)."""
    judged = []
    for row in found:
        lost = row["points"]["CA"] | {"value": 0.0 - row["points"]["CA"]["value"]}
        judged.append(goal_of(f"points that CA loses to TT: {row['text']}", lost, 2, least=False))
    return judged
