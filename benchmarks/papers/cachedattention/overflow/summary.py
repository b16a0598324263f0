"""Rows and goals of table 1, made of the parts that are kept. A part of a text counts when all arms have it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from afterglow.bench.report import COUNTED, goal

Part = dict[str, Any]
Row = dict[str, Any]

AGAINST = "TT"
PERPLEXITY = "perplexity"
CONFIDENT = 1.96  # standard errors


def whole(parts: Iterable[Part], arms: Sequence[str]) -> dict[str, list[dict[str, Part]]]:
    """Return the parts that all arms have, by text; of each the arms' results."""
    found: dict[str, dict[int, dict[str, Part]]] = {}
    for part in parts:
        found.setdefault(part["text"], {}).setdefault(part["part"], {})[part["arm"]] = part
    paired = {key: [of[number] for number in sorted(of) if of[number].keys() >= set(arms)] for key, of in found.items()}
    return {key: of for key, of in paired.items() if of}


def clustered(sums: Sequence[float], counts: Sequence[int]) -> tuple[float, float]:
    """Return the mean of all values and its standard error, where the values of one cluster hang together: of each cluster the sum
    and the number of its values. NaN where there is one cluster only."""
    total, groups = sum(counts), len(counts)
    mean = sum(sums) / total
    if groups < 2:
        return mean, math.nan
    squares = sum((own - mean * count) ** 2 for own, count in zip(sums, counts, strict=True))
    return mean, math.sqrt(squares * groups / (groups - 1)) / total


def ratio(parts: Sequence[dict[str, Part]], arm: str, overflow: int | None = None) -> dict[str, float | None]:
    """Return an arm's perplexity over the reference's: of all overflows, or of one (from 1)."""
    sums, counts = [], []
    for part in parts:
        at = slice(None) if overflow is None else slice(overflow - 1, overflow)
        sums.append(sum(part[arm]["losses"][at]) - sum(part[AGAINST]["losses"][at]))
        counts.append(sum(part[AGAINST]["tokens"][at]))
    mean, error = clustered(sums, counts)
    value = math.exp(mean)
    return {"value": round(value, 5), "error": None if math.isnan(error) else round(value * error, 5)}


def perplexity_row(text: str, parts: Sequence[dict[str, Part]], arms: Sequence[str]) -> Row:
    """A row of table 1."""
    tokens = sum(sum(part[AGAINST]["tokens"]) for part in parts)
    overflows = len(parts[0][AGAINST]["tokens"])
    others = [arm for arm in arms if arm != AGAINST]
    return {
        "table": PERPLEXITY,
        "text": text,
        "parts": len(parts),
        "tokens": tokens,
        "perplexity": {
            arm: round(math.exp(sum(sum(part[arm]["losses"]) for part in parts) / tokens), 4) for arm in arms
        },
        "ratio": {arm: ratio(parts, arm) for arm in others},
        "by_overflow": {arm: [ratio(parts, arm, overflow) for overflow in range(1, overflows + 1)] for arm in others},
        "prefilled": {arm: sum(part[arm]["prefilled"] for part in parts) for arm in arms},
    }


def rows(parts: Iterable[Part], arms: Sequence[str]) -> list[Row]:
    """Return the rows of table 1."""
    return [perplexity_row(text, of, arms) for text, of in whole(parts, arms).items()]


def goals(found: Iterable[Row]) -> list[dict[str, Any]]:
    """Return the goals. Their spread is what another sample of texts may differ by (95 %)."""
    judged = []
    for row in found:
        where, last = row["text"], len(row["by_overflow"]["CA"])
        judged += [
            goal_of(f"perplexity CA / TT: {where}", row["ratio"]["CA"], 1.01, least=False),
            goal_of(f"perplexity CA / TT, overflow {last}: {where}", row["by_overflow"]["CA"][-1], 1.01, least=False),
            goal_of(f"perplexity NKVT / TT: {where}", row["ratio"]["NKVT"], 2, least=True),
        ]
        apart = abs(row["ratio"]["OF"]["value"] - 1)
        judged.append(goal(f"perplexity OF apart from TT: {where}", apart, 0.001, least=False, spread=COUNTED))
    return judged


def goal_of(name: str, of: dict[str, Any], wanted: float, *, least: bool) -> dict[str, Any]:
    """Judge a value with its standard error. The spread is what another sample may differ by (95 %), as a part of `wanted`."""
    spread = CONFIDENT * (of["error"] or 0) / wanted
    return goal(name, of["value"], wanted, least=least, spread=spread) | {"error": of["error"]}


def pair(of: dict[str, Any], digits: int) -> str:
    """Show a value with its 95 % interval, if it has an error."""
    return f"{of['value']:.{digits}f}" + ("" if of["error"] is None else f" ± {CONFIDENT * of['error']:.{digits}f}")
