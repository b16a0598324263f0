"""SPEC's quality on a real model, for docs/papers.md: few-shot questions, texts behind a long prefix, and alpha."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.papers.page_goals import percent
from benchmarks.papers.page_measured import pair
from benchmarks.papers.page_simulated import Found, markdown

NAMES = {"exact": "all rows", "spec": "SPEC", "h2o": "H2O", "spi": "SPI", "random": "random rows"}


def spec_real(found: Found) -> str:
    """Make the tables one below the other."""
    choices = [row for row in found["rows"] if row["table"] == "choices"]
    texts = [row for row in found["rows"] if row["table"] == "quality"]
    return "\n".join(
        (
            _choices(choices),
            *(f"{line}.\n" for line in found["not_judged"]),
            _texts([row for row in texts if row["alpha"] == 0.6]),
            _alphas(
                [row for row in texts if (row["protocol"], row["mode"], row["retention"]) == ("scored", "spec", 0.25)]
            ),
        )
    )


def _choices(rows: Sequence[Found]) -> str:
    """Show accuracy, and points to the full cache on the same questions."""
    tasks = {row["text"]: row for row in rows}
    prefixes = ", ".join(f"{task} {row['prefixes']} of {row['prefix_rows']:,} tokens" for task, row in tasks.items())
    arms: dict[str, dict[str, Found]] = {}
    for row in rows:
        arms.setdefault(_arm(row), {})[row["text"]] = row
    lines = []
    for arm, of in arms.items():
        cells = []
        for task in tasks:
            points = of[task]["points"]
            cells += [pair(of[task]["accuracy"], 1), "" if points is None else pair(points, 1)]
        lines.append((arm, *cells))
    head = ["right answers, % ± 95 %"]
    for task, row in tasks.items():
        head += [f"{task} ({row['questions']} questions, chance {row['chance']:.0f})", "points to all rows"]
    scored = "A choice is scored by the mean log-likelihood of its tokens, and no example of a prefix is asked."
    return f"{scored} Prefixes: {prefixes}.\n\n{markdown(head, lines)}"


def _texts(rows: Sequence[Found]) -> str:
    """Show next tokens like the full cache's, and perplexity over its, as scored and as the paper decodes."""
    arms: dict[str, dict[str, Found]] = {}
    for row in rows:
        arms.setdefault(_arm(row), {})[row["protocol"]] = row
    protocols = ("scored", "published")
    lines = [(arm, *(cell for protocol in protocols for cell in _text_cells(of[protocol]))) for arm, of in arms.items()]
    first = rows[0]
    name = f"{first['text']} ({first['text_agreement_samples']:,} tokens, {first['sessions']} prefixes of {first['prefix_rows']:,})"
    shown = ("next tokens alike, %", "perplexity", "over all rows'")
    return markdown((name, *(f"`{protocol}`: {what}" for protocol in protocols for what in shown)), lines)


def _alphas(rows: Sequence[Found]) -> str:
    """Show what alpha does (Fig. 22)."""
    lines = [
        (f"{row['alpha']:g}", *_text_cells(row), percent(row["fallback"]), percent(row["vectors_loaded"], 1))
        for row in sorted(rows, key=lambda row: float(row["alpha"]))
    ]
    head = ("alpha, SPEC at 25 % (`scored`)", "next tokens alike, %", "perplexity", "over all rows'")
    return markdown((*head, "layers that select head by head", "keys and values read"), lines)


def _arm(row: Found) -> str:
    name = NAMES[row["mode"]]
    return name if row["mode"] == "exact" else f"{name}, {percent(row['retention'])}"


def _text_cells(row: Found) -> tuple[str, str, str]:
    ratio = row["text_perplexity_ratio"]
    alike = pair(row["text_agreement"], 1) if ratio else ""
    return alike, f"{row['text_perplexity']:.2f}", pair(ratio, 3) if ratio else ""
