"""Tables of docs/papers.md about loading or recomputing at many rates, made of `tier_rates.json`."""

from __future__ import annotations

from benchmarks.papers.page_simulated import Found, markdown


def rates(found: Found) -> str:
    """Each rate of each tier: both pure ways, and the engine's choice."""
    lines = [
        (
            row["tier"],
            f"{row['mb_per_s']:,.4g}",
            *(f"{row['ttft_ms'][arm]:,.0f}" for arm in ("load", "recompute", "choice")),
            f"{row['ratio']:.2f}",
            f"{row['loaded']:,}" + (" (a split)" if row["split"] else ""),
            f"{row['a_a']:.1%}",
        )
        for row in found["rows"]
    ]
    first = f"{found['history']:,} tokens of history, {found['model']}: in"
    head = (first, "MB/s", "all loaded, ms", "all recomputed", "chosen", "chosen / better way", "rows loaded", "A/A")
    return markdown(head, lines)


def changes(found: Found) -> str:
    """The run whose rate changes: what was chosen, phase by phase."""
    lines = [
        (
            change["tier"],
            f"{phase['mb_per_s']:,.4g}",
            str(len(phase["loaded"])),
            str(phase["old"]),
            f"{sum(phase['loaded']) / len(phase['loaded']):.0%}",
        )
        for change in found["changes"]
        for phase in change["phases"]
    ]
    return markdown(
        ("the rate changes: tier", "MB/s", "turns", "until the choice follows", "of the history loaded"), lines
    )
