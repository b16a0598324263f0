"""Why goals are not met: the cause with its measurement, the ways that were tried, and what hardware or model would change it.

Each goal that counts and is not met, within noise or beyond it, has one entry, and `tests/benchmarks/test_papers_page.py` holds
that no goal lacks one and no entry is left over. Values come from the files of benchmarks/results. Entries lie in
`page_missed_cachedattention.py`, `page_missed_spec.py` and `page_missed_others.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.papers import page_goals, page_missed_cachedattention, page_missed_others, page_missed_spec
from benchmarks.papers.page_entry import Missed
from benchmarks.papers.page_simulated import Found, number

EXPLAINED: tuple[Missed, ...] = (
    *page_missed_cachedattention.ENTRIES,
    *page_missed_others.ENTRIES,
    *page_missed_spec.ENTRIES,
)


def explanation(file: str, goal: str) -> Missed | None:
    """Find the entry of a goal that is not met. Raises: ValueError if several explain it."""
    found = [each for each in EXPLAINED if each.explains(file, goal)]
    if len(found) > 1:
        raise ValueError(f"{file}: {goal}: explained by {' and by '.join(each.what for each in found)}")
    return found[0] if found else None


def section(paper: str) -> str:
    """Write a paragraph and a list for each group of goals of a paper that are not met."""
    goals = page_goals.unmet()[paper]
    just_met = page_goals.just_met(paper) if paper in page_goals.MEASURED else []
    missed = list(_paragraphs(goals)) if goals else ["All goals are met.\n"]
    return "\n".join([*missed, *([_just_met(just_met)] if just_met else [])])


def _just_met(goals: list[tuple[str, Found]]) -> str:
    """List goals that are met by no more than their noise, for each file."""
    files: dict[str, list[str]] = {}
    for file, goal in goals:
        error = page_goals.error_of(file, page_goals.read(file), goal)
        shown = f"{goal['name']} {number(goal['value'])} (wanted {goal['goal']}; {error})"
        files.setdefault(file, []).append(shown)
    lines = [f"- {page_goals.link(file)}: {'; '.join(shown)}\n" for file, shown in files.items()]
    head = f"**Met, within noise** ({len(goals)}): each could as well be missed. More repeats, or a quieter machine, would tell.\n\n"
    return head + "".join(lines)


def _paragraphs(goals: list[tuple[str, Found]]) -> Iterator[str]:
    groups: dict[Missed, list[tuple[str, Found]]] = {}
    for file, goal in goals:
        entry = explanation(file, goal["name"])
        if entry is not None:
            groups.setdefault(entry, []).append((file, goal))
    for entry, of in groups.items():
        links = ", ".join(dict.fromkeys(page_goals.link(file) for file, _ in of))
        yield f"**{entry.what}** ({links}): {_values([goal for _, goal in of])}.\n"
        yield "".join(entry.lines(page_goals.read(entry.files[0])))


def _values(goals: list[Found]) -> str:
    """Show how many goals are missed, how many of them within noise, and their values beside what was wanted."""
    near = sum(goal["within_noise"] for goal in goals)
    counted = [f"{len(goals) - near} missed"] * (near < len(goals)) + [f"{near} within noise"] * (near > 0)
    wanted: dict[str, list[str]] = {}
    for goal in goals:
        values = wanted.setdefault(goal["goal"], [])
        if number(goal["value"]) not in values:
            values.append(number(goal["value"]))
    if all("simulated" in goal for goal in goals):  # whether signs and orders are right: 0 says nothing
        shown = ["; ".join(_printed(goal) for goal in goals)]
    else:
        shown = [f"{', '.join(values)} (wanted {goal})" for goal, values in wanted.items()]
    return f"{', '.join(counted)}: {'; '.join(shown)}"


def _printed(goal: Found) -> str:
    name = goal["name"].removesuffix(", deviation").removesuffix(", hits %").removesuffix(", simulated cost, less %")
    if isinstance(goal["simulated"], str):
        return f"{name} {goal['printed']} in the paper, and {goal['simulated']} here"
    return f"{name} {number(goal['simulated'])} (printed {number(goal['printed'])})"
