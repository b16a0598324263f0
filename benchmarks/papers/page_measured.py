"""Tables of docs/papers.md about CachedAttention's truncation, RelayAttention and SPEC as measured. Each is made of files of
benchmarks/results and of nothing else.
"""

from __future__ import annotations

from benchmarks.papers.page_goals import REAL, gain_spread, read, there
from benchmarks.papers.page_printed import relay_gain
from benchmarks.papers.page_simulated import Found, markdown


def overflow_perplexity() -> str:
    """Make table 1, through the engine."""
    found = read("overflow")
    lines = []
    for row in found["rows"]:
        if row["table"] == "perplexity":
            of = row["perplexity"]
            lines.append(
                (
                    row["text"],
                    f"{row['parts']}",
                    f"{row['tokens']:,}",
                    *(f"{of[arm]:.2f}" for arm in ("CA", "TT", "NKVT", "OF", "none")),
                    pair(row["ratio"]["CA"], 4),
                    pair(row["ratio"]["NKVT"], 1),
                    f"{abs(row['ratio']['OF']['value'] - 1):.1g}",
                )
            )
    head = f"{title(found)}: perplexity | parts | tokens | CA | TT | NKVT | OF | nothing | CA / TT | NKVT / TT | OF apart from TT"
    printed = ("paper: LLaMA-7B, WikiText-2", "", "", "5.47", "5.48", "2198.7", "", "", "0.998", "401", "")
    return markdown(head.split(" | "), [*lines, printed])


def overflow_drift() -> str:
    """Show CA over TT, overflow by overflow."""
    found = read("overflow")
    rows = [row for row in found["rows"] if row["table"] == "perplexity"]
    last = found["settings"]["overflows"]
    head = ["perplexity CA / TT after overflow", *(str(n + 1) for n in range(last))]
    return markdown(head, [(row["text"], *(pair(each, 4) for each in row["by_overflow"]["CA"])) for row in rows])


def title(found: Found) -> str:
    """Name the model and its window."""
    return f"{REAL}, a window of {found['settings']['window']:,}"


def pair(of: Found, digits: int) -> str:
    """Show a value with its 95 % interval."""
    return f"{of['value']:,.{digits}f}" + ("" if of["error"] is None else f" ± {1.96 * of['error']:.{digits}f}")


def relay_gains() -> str:
    """Show what relay serves beside its alternatives, and what the paper has."""
    lines = []
    files = {"relay_engine": "6", "relay_mmlu": "Table 3", "relay_fixed": "8", "relay_models": "Table 4"}
    for name, figure in ((name, figure) for name, figure in files.items() if there(name)):
        for row in read(name)["rows"]:
            printed = relay_gain(row["workload"], row["batch"], row["prefix"])
            lines.append(
                (
                    figure,
                    row["workload"],
                    f"{row['batch']}",
                    f"{row['prefix']:,}",
                    *(f"{row['rate'][way]:,.0f}" for way in ("recompute", "shared", "relay", "auto")),
                    f"{row['gain']:.2f}",
                    "" if printed is None else f"{printed:.2f}",
                    f"{gain_spread(row):.1%}",
                )
            )
    head = ("figure", "lengths", "batch", "prefix", "tokens/s: recomputed", "shared", "relay", "auto")
    return markdown((*head, "relay : shared", "paper (A40)", "repeats differ by"), lines)


def relay_rates() -> str:
    """Show Fig. 7 on the engine."""
    groups: dict[tuple[int, float], dict[str, Found]] = {}
    for row in read("relay_rate")["rows"]:
        groups.setdefault((row["prefix"], row["offered"]), {})[row["way"]] = row
    ways = [
        way
        for way in ("recompute", "shared", "relay", "relay again", "auto")
        if all(way in of for of in groups.values())
    ]
    head = ["system prompt", "offered, requests/s", *(f"{way}: served, ms per token" for way in ways)]
    lines = [
        [f"{prefix:,}", f"{offered:.1f}"]
        + [f"{ways_of[way]['served']:.2f}, {1e3 * ways_of[way]['seconds_per_token']:.0f}" for way in ways]
        for (prefix, offered), ways_of in groups.items()
    ]
    return markdown(head, lines)


def spec_io() -> str:
    """Show SPEC's figures of time and bytes."""
    files = [read(name) for name in ("importance_io", "importance_wide")]
    spreads = {run["run"]: run["spread_ttft"] for found in files for run in found.get("runs", ())}
    lines = [
        (
            row["run"],
            row["variant"],
            f"{row['ttft_ms']:,.0f}",
            f"{row['p99_ms']:,.0f}",
            f"{row['wait_ms']:,.0f}",
            f"{row['read_mb']:.0f}",
            f"{100 * row['device_hits']:.0f}",
            f"{spreads[row['run']]:.1%}",
        )
        for found in files
        for row in found.get("rows", ())
    ]
    head = ("run", "way", "TTFT, ms", "p99", "waiting", "read, MB", "device hits, %", "TTFT of repeats differs by")
    return markdown(head, lines)


def spec_means(found: Found) -> str:
    """Show rows by share and by attention, each without and with means of what is left out."""
    pairs: dict[tuple[str, str, str], dict[bool, Found]] = {}
    for row in found["rows"]:
        arm = row["arm"].removesuffix(", means")
        pairs.setdefault((row["text"], row["protocol"], arm), {})[arm != row["arm"]] = row

    def shown(row: Found, key: str) -> str:
        return pair(row[key], 1) if key in row else ""

    lines = [
        (
            *(text, {"generated": "yes", "published": "no"}[protocol], arm, f"{of[False]['kept']:.0%}"),
            *(shown(of[means], key) for key in ("agreement", "recall") for means in (False, True)),
        )
        for (text, protocol, arm), of in pairs.items()
    ]
    head = ("text, model", "decoded tokens select", "attends to", "rows", "next tokens alike, %", "with means")
    return markdown((*head, "facts recalled, %", "with means"), lines)
