"""The generated parts of docs/papers.md by name. Each is made of files of benchmarks/results and of nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.papers import (
    missed,
    page_attncache,
    page_choices,
    page_distances,
    page_measured,
    page_prose,
    page_rates,
    page_simulated,
    page_spec_real,
    page_summary,
)
from benchmarks.papers.page_goals import (
    MEASURED,
    MISSED,
    OPERATORS,
    SIMULATED,
    Source,
    counts,
    error_of,
    goals_of,
    judged,
    link,
    read,
    sources,
    tally,
    there,
)
from benchmarks.papers.page_printed import printed
from benchmarks.papers.page_simulated import COUNTS, Found, markdown, number

HEAD = ("goal", "paper", "ours", "wanted", "", "error")
MADE = "†"


def goal_lines(source: Source, found: Found) -> list[Sequence[str]]:
    """Make a line for each goal about a file."""
    lines: list[Sequence[str]] = []
    for goal in goals_of(source.file, found):
        kind = counts(goal["name"])
        came_out = judged(goal)
        said = f"**{came_out}**" if came_out == MISSED else came_out
        lines.append(
            (
                goal["name"] + (f" {MADE}" if "made" in goal else ""),
                printed(source.file, goal["name"]),
                number(goal["value"]),
                goal["goal"],
                said if kind == COUNTS else f"{said} ({kind.removeprefix('no: ')}: does not count)",
                error_of(source.file, found, goal),
            )
        )
    return lines


def measured(paper: str) -> str:
    """Show all goals that were measured for a paper: a folded table for each file that has goals."""
    return "\n".join(_folded(source) for source in sources(paper) if goals_of(source.file, read(source.file)))


def _folded(source: Source) -> str:
    found = read(source.file)
    counted = [goal for goal in goals_of(source.file, found) if counts(goal["name"]) == COUNTS]
    came_out = "; ".join(f"{count} {verdict}" for verdict, count in tally(counted).items() if count)
    run = "quick" if found["quick"] else "full"
    about = f"{link(source.file)}, a {run} run of commit {found['commit']}. Thresholds: {source.thresholds}.\n"
    number = f"{len(counted)} goal{'s' * (len(counted) > 1)}"
    title = f"{source.figure} ({source.model}), {number}: {came_out}"
    table = markdown(HEAD, goal_lines(source, found))
    return f"<details>\n<summary>{title}</summary>\n\n{about}\n{table}\n</details>\n"


def _when_measured(make: Callable[[Found], str], file: str) -> str:
    if not there(file):
        return f"Not measured yet: `{file}.json` (`python -m benchmarks.rerun {file}`).\n"
    return make(read(file))


def _of(make: Callable[[Found, str], str], file: str, paper: str) -> str:
    return make(read(file), paper)


TABLES: dict[str, Callable[[], str]] = {
    "summary": page_summary.counted,
    "in short": page_summary.in_short,
    "papers": page_summary.files,
    **{f"measured: {paper}": partial(measured, paper) for paper in MEASURED},
    **{f"not met: {paper}": partial(missed.section, paper) for paper in (*MEASURED, "Operators")},
    "overflow: perplexity": page_measured.overflow_perplexity,
    "overflow: drift": page_measured.overflow_drift,
    "overflow: accuracy": partial(_when_measured, page_choices.choices, "choices"),
    "times: in words": page_prose.times,
    "load or recompute: rates": partial(_when_measured, page_rates.rates, "tier_rates"),
    "load or recompute: changes": partial(_when_measured, page_rates.changes, "tier_rates"),
    "relay gains": page_measured.relay_gains,
    "relay: in words": page_prose.relay,
    "relay rates": page_measured.relay_rates,
    "spec io": page_measured.spec_io,
    "spec io: in words": page_prose.spec_io,
    "spec io: older": page_prose.before_one_call,
    "spec quality: in words": page_prose.spec_quality,
    "spec real": partial(_when_measured, page_spec_real.spec_real, "importance_real"),
    "spec means": partial(_when_measured, page_measured.spec_means, "importance_means"),
    "spec sweep: in words": partial(_when_measured, page_prose.spec_sweep, "importance_sweep"),
    "spec sweep": partial(_when_measured, page_rates.sweep, "importance_sweep"),
    "spec renewal": partial(_when_measured, page_rates.renewal, "importance_renew"),
    "attncache": partial(_when_measured, partial(page_attncache.attncache, "MiniLM"), "attncache_sts"),
    "attncache: distances": partial(_when_measured, page_distances.distances, "attncache_distances"),
    "attncache: decoder": partial(
        _when_measured, partial(page_attncache.attncache, "SmolLM2-135M"), "attncache_decoder"
    ),
    "attncache: in words": page_prose.attncache,
    "attncache: small models": page_attncache.small_models,
    "attncache: unseen sources": partial(_when_measured, page_attncache.carry_over, "attncache_carry_over"),
    **{f"simulated: {paper}": partial(_of, page_simulated.evaluation, SIMULATED, paper) for paper in ("ATC", "arXiv")},
    **{
        f"operators: {paper}": partial(_of, page_simulated.operators, OPERATORS, paper)
        for paper in ("RelayAttention", "SPEC", "AttnCache")
    },
    "varied: sizes": lambda: page_simulated.varied(read(SIMULATED), page_simulated.SIZES),
    "varied: assumptions": lambda: page_simulated.varied(read(SIMULATED), page_simulated.ASSUMED),
    "operators: goals": lambda: page_simulated.operator_goals(read(OPERATORS)),
}


def table(name: str) -> str:
    """Make a generated part in Markdown. Raises: ValueError for an unknown name."""
    if name not in TABLES:
        raise ValueError(f"no table {name!r}; there are {', '.join(TABLES)}")
    return TABLES[name]()
