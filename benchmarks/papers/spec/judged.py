"""Rows and goals from what the variants gave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from afterglow.bench.report import COUNTED, goal
from benchmarks.common.paired import Paired
from benchmarks.papers.spec.runs import DEFAULT, EXACT, Chosen, Found, Protocol, Session, Variant


def quality(
    protocol: Protocol, wanted: Sequence[Variant], found: Found, sessions: Sequence[Session]
) -> list[dict[str, Any]]:
    """A row for each variant: shares in percent, points to the full cache, what it loads."""
    measured = {
        "recall": found.right,
        "agreement": found.agree,
        "text_agreement": found.text_agree,
        "text_next_token": found.text_correct,
    }
    tables = {label: pairs.accuracy(EXACT.name) for label, pairs in measured.items()}
    losses = found.text_loss.perplexity(EXACT.name)
    rows = []
    for variant in wanted:
        name = variant.name
        row: dict[str, Any] = {"protocol": protocol, **variant._asdict(), "sessions": len(sessions)}
        row["prefix_rows"] = round(sum(session.rows for session in sessions) / len(sessions))
        for label, values in tables.items():
            if name in values["accuracy"]:
                row[label] = values["accuracy"][name]
                row[f"{label}_points"] = values["points"].get(name)
                row[f"{label}_samples"] = values["questions"]
        if name in losses["perplexity"]:
            row["text_perplexity"] = losses["perplexity"][name]
            row["text_perplexity_ratio"] = losses["ratio"].get(name)
        if name in found.loaded:
            loaded = found.loaded[name]
            row["fallback"] = round(loaded.mean(loaded.fallbacks), 4)
            row["keys_loaded"] = round(loaded.mean(loaded.keys), 4)
            row["vectors_loaded"] = round(loaded.mean(loaded.vectors), 4)
            row["fallback_by_layer"] = loaded.by_layer(loaded.fallbacks)
            row["vectors_by_layer"] = loaded.by_layer(loaded.vectors)
            row["similarity_by_layer"] = loaded.by_layer(loaded.similarity)
        rows.append(row)
    return rows


LOST = 1.0  # points of accuracy: the paper loses less (section VI-B)


def choices(wanted: Sequence[Variant], found: Chosen) -> list[dict[str, Any]]:
    """Make a row for each variant of multiple choice. `above_chance`: whether the full cache's 95 % interval lies above chance."""
    right, same = found.right.accuracy(EXACT.name), found.same.accuracy(EXACT.name)
    chance = 100 * sum(found.chances) / len(found.chances)
    exact = right["accuracy"][EXACT.name]
    above = exact["error"] is not None and exact["value"] - 1.96 * exact["error"] > chance
    rows = []
    for variant in wanted:
        name = variant.name
        row = {**variant._asdict(), "questions": right["questions"], "prefixes": right["sessions"]}
        row |= {"chance": round(chance, 2), "above_chance": above}
        row |= {"prefix_rows": round(sum(found.rows) / len(found.rows))}
        row |= {"accuracy": right["accuracy"][name], "points": right["points"].get(name)}
        row |= {"same_choice": same["accuracy"][name]}
        if name in found.loaded:
            loaded = found.loaded[name]
            row |= {"fallback": round(loaded.mean(loaded.fallbacks), 4)}
            row |= {"keys_loaded": round(loaded.mean(loaded.keys), 4)}
            row |= {"vectors_loaded": round(loaded.mean(loaded.vectors), 4)}
            row |= {"vectors_by_layer": loaded.by_layer(loaded.vectors)}
        rows.append(row)
    return rows


def choice_goals(where: str, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Judge the points that SPEC loses at 50 and 25 % of the rows; none where the full cache is no better than chance."""
    found = []
    for row in rows:
        if row["above_chance"] and row["mode"] == "spec" and row["retention"] >= DEFAULT:
            points, error = row["points"]["value"], row["points"]["error"]
            name = f"{where}: points of accuracy lost at {row['retention']:.0%}"
            about = {"error": error, "samples": row["questions"]}
            found.append(goal(name, 0.0 - points, LOST, least=False, spread=1.96 * error / LOST) | about)
    return found


def goals(where: str, wanted: Sequence[Variant], found: Found) -> list[dict[str, Any]]:
    """At 50 % at most 2 points of recall are lost, at 25 % at most 2 points of agreement; SPEC is never worse than SPI and
    random rows beyond the errors, and better with 25 % and less."""
    rows = []
    for label, pairs, retention in (
        ("recall", found.right, 0.5),
        ("agreement in replies", found.agree, DEFAULT),
        ("agreement in texts", found.text_agree, DEFAULT),
        ("right next tokens in texts", found.text_correct, DEFAULT),
    ):
        values = pairs.accuracy(EXACT.name)
        points = values["points"].get(Variant("spec", retention).name)
        if points is not None:
            about = {"error": points["error"], "samples": values["questions"]}
            name = f"{where}: points of {label} lost at {retention:.0%}"
            rows.append(goal(name, 0.0 - points["value"], 2, least=False, spread=COUNTED) | about)
    for label, pairs in (
        ("recall", found.right),
        ("agreement in replies", found.agree),
        ("agreement in texts", found.text_agree),
    ):
        for mode in ("spi", "random"):
            ahead = _ahead(pairs, wanted, mode)
            if ahead:
                name = f"{where}: {label}, SPEC - {mode}"
                worst = min(value + 1.96 * error for _, value, error in ahead)
                least = min(value for retention, value, _ in ahead if retention <= DEFAULT)
                rows.append(goal(f"{name}: upper end of 95 %, worst retention", worst, 0, least=True, spread=COUNTED))
                rows.append(goal(f"{name}: least with 25 % or less", least, 0.01, least=True, spread=COUNTED))
    return rows


def _ahead(pairs: Paired, wanted: Sequence[Variant], mode: Any) -> list[tuple[float, float, float]]:
    """Retention, points that SPEC is ahead of another mode, and their error."""
    found = []
    for variant in wanted:
        other = Variant(mode, variant.retention)
        if variant.mode == "spec" and variant.alpha == 0.6 and other in wanted:
            points = pairs.accuracy(other.name)["points"].get(variant.name)
            if points is not None:
                found.append((variant.retention, points["value"], points["error"] or 0.0))
    return found
