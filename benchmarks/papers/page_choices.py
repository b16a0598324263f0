"""Table 2 of CachedAttention in docs/papers.md: multiple choice after overflows. Made of `choices.json` and of nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.papers.cachedattention.overflow.choice_rows import is_above
from benchmarks.papers.page_measured import pair, title
from benchmarks.papers.page_simulated import Found, markdown

ARMS = ("CA", "TT", "NKVT", "none", "alone")


def choices(found: Found) -> str:
    """Make the table, and say what it can tell."""
    lines = [
        (
            row["text"],
            f"{row['questions']}",
            f"{row['chance']:g}",
            *(pair(row["accuracy"][arm], 1) for arm in ARMS),
            pair(row["points"]["CA"], 1),
            pair(row["points"]["NKVT"], 1),
            f"{row['same_choice']['CA']:.0f}",
        )
        for row in found["rows"]
    ]
    printed = [
        ("paper: PIQA, LLaMA-7B", "", "50", "77.1", "77.2", "48.9", "", "", "-0.1", "-28.3", ""),
        ("paper: LongEval, LLaMA-7B", "", "", "66.0", "65.9", "12.0", "", "", "0.1", "-53.9", ""),
    ]
    arms = ("CA", "TT", "NKVT", "nothing", "alone")
    head = (f"{title(found)}: right after {found['settings']['overflows']} overflows, %", "questions", "chance", *arms)
    table = markdown([*head, "CA - TT", "NKVT - TT", "CA chooses as TT, %"], [*lines, *printed])
    return f"{table}\n{_rules(found['rows'])}\n{_telling(found['rows'])}"


def _rules(rows: Sequence[Found]) -> str:
    """Say which rule each task is judged by, and what it was chosen on."""
    chosen = [
        f"{row['text']}: {row['rule']} ({row['validation']['right'][row['rule']]:.0f} % of {row['validation']['questions']} right)"
        for row in rows
    ]
    return (
        f"The rule of each task, chosen on other questions ({rows[0]['validation']['which']}; there are six): {'; '.join(chosen)}.\n"
        if rows
        else ""
    )


def _telling(rows: Sequence[Found]) -> str:
    """Say in which tasks the model is above chance, and in which the history helps."""

    def beyond(text: str, ways: Sequence[str]) -> str:
        return f"{text}: {', '.join(ways) or 'none'}."

    above = {arm: [row["text"] for row in rows if row["above_chance"][arm]] for arm in ("TT", "NKVT", "alone")}
    worth = {row["text"]: row["points"]["none"] for row in rows}
    helped = [text for text, of in worth.items() if is_above(of | {"value": -of["value"]}, 0)]
    said = (
        beyond("With nothing dropped (`alone`) the model is above chance (95 %) in these tasks", above["alone"]),
        beyond("TT is in these", above["TT"]),
        beyond("NKVT is in these", above["NKVT"]),
        beyond("The history helps TT in these", helped),
    )
    return " ".join(said) + "\n"
