"""Tables of docs/papers.md about modelled machines: a paper's printed values beside the simulator's, and whether a row counts.

Not counted are rows that follow from the papers' own numbers by arithmetic, and rows that a constant was fitted to.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from afterglow.bench.report import verdict

Found = dict[str, Any]
Row = dict[str, Any]

COUNTS, ARITHMETIC, FITTED = "yes", "no: arithmetic", "no: fitted"
MODELS = ("LLaMA-2-13B, ", "LLaMA-65B, ", "LLaMA-2-70B, ", "Falcon-40B, ")
# Of CachedAttention: the generator of conversations is fitted to Fig. 2, on which Fig. 4 hangs; one ratio is fitted to Fig. 19, on which
# Fig. 20 hangs.
FITTED_FIGURES = {"2", "4", "19", "20"}
NUMBER = re.compile(r"\d[\d.,]*[KM]?(?<!,)")


NOTHING = re.compile(r"-(0\.0+)(?!\d)")  # what is below 0 by less than its last digit


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Make a table."""
    lines = [NOTHING.sub(r"\1", f"| {' | '.join(line)} |\n") for line in (head, *rows)]
    return lines[0] + "|---" * len(head) + "|\n" + "".join(lines[1:])


def number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def counts_of(row: Row) -> str:
    """Say whether a row of CachedAttention's evaluation counts: rows of runs do."""
    if "conversations" in row:
        return COUNTS
    return FITTED if row["figure"] in FITTED_FIGURES or "fit" in row["note"] else ARITHMETIC


def evaluation(found: Found, paper: str) -> str:
    """Show CachedAttention's figures, or AttentionStore's: a line for all models, and one for the orders that a figure shows."""
    groups: dict[tuple[str, str, int | None], list[Row]] = {}
    orders: dict[tuple[str, str], list[Row]] = {}
    for row in found["rows"]:
        if row["paper"] != paper or row["figure"] in ("sensitivity", "scale"):
            continue
        if isinstance(row["printed"], str):
            if row["met"] is not None:
                orders.setdefault((row["figure"], counts_of(row)), []).append(row)
            continue
        what = row["what"]
        for model in MODELS:
            what = what.removeprefix(model)
        groups.setdefault((row["figure"], what, row.get("conversations")), []).append(row)
    lines = [
        (
            figure,
            what,
            " / ".join(number(row["printed"]) for row in rows),
            " / ".join(number(row["simulated"]) for row in rows),
            _within(rows),
            "" if conversations is None else f"{conversations:,}",
            counts_of(rows[0]),
        )
        for (figure, what, conversations), rows in groups.items()
    ]
    for (figure, counts), rows in orders.items():
        met = sum(row["met"] for row in rows)
        said = "met" if met == len(rows) else "**missed**: " + "; ".join(r["what"] for r in rows if not r["met"])
        lines.append((figure, "orders as printed", str(len(rows)), str(met), said, "", counts))
    lines.sort(key=lambda line: [int(part) for part in re.findall(r"\d+", line[0])])
    return markdown(("figure", "what", "paper", "simulated", "goal", "conversations", "counts"), lines)


def _within(rows: Sequence[Row]) -> str:
    judged = [row for row in rows if row["met"] is not None]
    if not judged:
        return ""
    missed = [row for row in judged if not row["met"]]
    return "met" if not missed else f"**missed** by {len(missed)} of {len(judged)}"


SIZES = ("lookahead, hits %", "lru, hits %", "fifo, hits %", "LLaMA-65B, hits %")
ASSUMED = ("lookahead, hits %", "lru, hits %", "device time, x", "cost, less %")


def varied(found: Found, measures: Sequence[str]) -> str:
    """Show what the papers leave open, varied: a line for each variant that has all these measures."""
    variants: dict[str, dict[str, Row]] = {}
    for row in found["rows"]:
        if row["figure"] == "sensitivity":
            for measure in measures:
                if row["what"].endswith(f", {measure}"):
                    variants.setdefault(row["what"].removesuffix(f", {measure}"), {})[measure] = row
    whole = {name: of for name, of in variants.items() if of.keys() == set(measures)}
    lines = [(name, *(number(of[measure]["simulated"]) for measure in measures)) for name, of in whole.items()]
    printed = {m: of[m]["printed"] for of in whole.values() for m in measures if of[m]["printed"] != ""}
    if printed:
        lines.insert(0, ("paper", *(number(printed.get(measure, "")) for measure in measures)))
    return markdown(("13B, unless named", *measures), lines)


def operators(found: Found, paper: str) -> str:
    """Show the operator models' rows of one paper that print a value; numbers that differ between joined rows stand side by side."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in found["rows"]:
        if row["figure"].startswith(paper) and row["note"] != "sensitivity" and row["paper"] not in ("", "not printed"):
            key = (row["figure"].removeprefix(paper).lstrip(" ,"), NUMBER.sub("#", row["what"]), row["note"])
            groups.setdefault(key, []).append(row)
    lines = []
    for (figure, _, note), rows in groups.items():
        apart = [row["deviation"] for row in rows if isinstance(row["deviation"], int | float)]
        lines.append(
            (
                figure,
                _joined([row["what"] for row in rows]),
                " / ".join(dict.fromkeys(number(row["paper"]) for row in rows))
                if isinstance(rows[0]["paper"], str)
                else " / ".join(number(row["paper"]) for row in rows),
                " / ".join(number(row["simulated"]) for row in rows),
                "" if not apart else f"{round(100 * max(apart, key=abs)):+d} %",
                operator_counts(figure, note),
                note,
            )
        )
    return markdown(("figure", "what", "paper", "simulated", "apart, at most", "counts", ""), lines)


def operator_counts(figure: str, note: str) -> str:
    """Say whether a row of an operator model counts. Of SPEC one constant is fitted to the ranges of Fig. 16 and 17."""
    if note.startswith("fitted") or figure in ("Fig. 16", "Fig. 17"):
        return FITTED
    return ARITHMETIC if note in ("exact", "from the printed values") else COUNTS


def _joined(names: Sequence[str]) -> str:
    """Join names that differ in numbers only."""
    values = list(zip(*(NUMBER.findall(name) for name in names), strict=True))
    texts = NUMBER.split(names[0])
    shown = [own[0] if len(set(own)) == 1 else " / ".join(own) for own in values]
    return "".join(text + value for text, value in zip(texts, [*shown, ""], strict=True))


def operator_goals(found: Found) -> str:
    """Show the goals of all operator models."""
    lines = [
        (
            goal["name"],
            number(goal["value"]),
            goal["goal"],
            verdict(goal).replace("MISSED", "**missed**"),
            FITTED if "fitted" in goal["name"] else COUNTS,
        )
        for goal in found["goals"]
    ]
    return markdown(("goal of", "simulated", "wanted", "", "counts"), lines)
