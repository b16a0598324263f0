"""Tables of docs/papers.md about many rates: loading or recomputing (`tier_rates.json`), and SPEC (`importance_sweep.json`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.papers.page_simulated import Found, markdown


def rates(found: Found) -> str:
    """Show each rate of each tier: both pure ways, and the engine's choice."""
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
    head = (
        first,
        "MB/s",
        "all loaded, ms",
        "all recomputed",
        "chosen",
        "chosen / better way",
        "rows loaded",
        "chosen twice: differs by",
    )
    return markdown(head, lines)


def changes(found: Found) -> str:
    """Show the run whose rate changes: what was chosen, phase by phase."""
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


SWEEP = (
    "model", "tokens", "MB/s", "chunk", "caches, % of the data", "TTFT, ms: recompute", "load all", "H2O, LFU", "SPEC", "auto", "auto took", "auto / fastest",
    "waiting, ms: H2O", "SPEC", "read, MB: all", "H2O", "SPEC", "identification, %", "tokens as with all rows, %", "repeats differ by",
)  # fmt: skip


def sweep_lines(rows: Sequence[Found]) -> Iterator[list[str]]:
    """Make a line for each point of SPEC's sweep."""
    for row in rows:
        whole, base, spec, auto = (row["arms"][name] for name in ("load", "h2o", "spec", "auto"))
        yield [
            row["shape"],
            f"{row['tokens']:,}",
            f"{row['mb_per_s']:,}",
            str(row["chunk"]),
            str(row.get("caches", 15)),
            "" if row["recompute_ms"] is None else f"{row['recompute_ms']:,.0f}",
            *(f"{arm['ttft_ms']:,.0f}" for arm in (whole, base, spec, auto)),
            ", ".join(f"{way} {count}" for way, count in row["auto_ways"].items()),
            f"{row['auto_ratio']:.2f}",
            *(f"{arm['wait_ms']:,.0f}" for arm in (base, spec)),
            *(f"{arm['read_mb']:,.0f}" for arm in (whole, base, spec)),
            f"{100 * spec['identifying']:.1f}",
            f"{row['agreement']['spec']:.1f}" if "agreement" in row else "",
            f"{row['spread']:.1%}",
        ]


def sweep(found: Found) -> str:
    """Show SPEC's sweep."""
    return markdown(SWEEP, list(sweep_lines(found["rows"])))


def renewal(found: Found) -> str:
    """Show what a decoded token takes where it selects anew."""
    lines = [
        (
            row["model"],
            row["variant"],
            f"{row['ttft_ms']:,.0f}",
            f"{row['token_ms']:,.1f}",
            f"{row['token_ratio']:.2f}",
            f"{row['token_mb']:.2f}",
        )
        for row in found["rows"]
    ]
    first = f"behind {found['tokens']:,} tokens, {found['retention']:.0%} selected, {found['mb_per_s']:,} MB/s: model"
    head = (first, "way", "TTFT, ms", "a decoded token, ms", "of SPEC's way", "read, MB a token")
    return markdown(head, lines) + f"\n{_repeats(found)}\n"


def _repeats(found: Found) -> str:
    """Say how large the run was, and what the same way asked again differs by."""
    rows = {(row["model"], row["variant"]): row for row in found["rows"]}
    apart = []
    for (model, way), row in rows.items():
        again = rows.get((model, f"{way}, again"))
        if again is not None:
            low, high = sorted((row["token_ms"], again["token_ms"]))
            apart.append(f"{high / low:.2f} times with {model} ({low:.1f} and {high:.1f} ms)")
    requests = max(row["requests"] for row in found["rows"])
    run = "A quick run" if found["quick"] else "A full run"
    return (
        f"{run} of commit {found['commit']}: {requests} requests for each way. A decoded token of the same way, asked again, differs by {', and by '.join(apart)}, so ratios closer than "
        "that say nothing. Bytes are counted."
    )
