"""The table of docs/papers.md about how far apart attention maps are (AttnCache, Fig. 1)."""

from __future__ import annotations

from benchmarks.papers.page_simulated import Found, markdown


def distances(found: Found) -> str:
    """Show percentiles of the distance of two sentences' maps, each as the range over the tasks."""
    groups: dict[str, list[Found]] = {}
    for row in found["rows"]:
        groups.setdefault(row["of"], []).append(row)

    def over_tasks(rows: list[Found], share: str) -> str:
        values = [row[share] for row in rows]
        return f"{min(values):.2f} to {max(values):.2f}"

    lines = [(of, *(over_tasks(rows, share) for share in ("p5", "p50", "p95"))) for of, rows in groups.items()]
    pairs = sum(row["pairs"] for row in groups["all layers"])
    run = "a quick run" if found["quick"] else "a full run"
    first = f"map distance of two sentences, MiniLM, {pairs:,} pairs ({run} of commit {found['commit']})"
    return markdown((first, "5th percentile", "median", "95th percentile"), lines)
