"""Goals of docs/papers.md: which files of results belong to which paper, which goals count, and which are not met."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from afterglow.bench.report import COUNTED, goal
from benchmarks.common.paths import RESULTS
from benchmarks.papers import page_printed, page_simulated
from benchmarks.papers.page_simulated import ARITHMETIC, COUNTS, FITTED, Found

REAL, BUNDLED, RANDOM = "SmolLM2-135M", "the bundled model (2.6 M)", "random weights"
NONE = "none needed"
ALPHA = "the paper's (alpha 0.6)"
SOFTER = "no: softer than what was promised"
SIMULATED = "papers_cachedattention"
OPERATORS = "sim_operators"
MODELLED = ("RelayAttention", "SPEC", "AttnCache")  # papers whose operators are modelled

# Goals that do not count, by their beginning.
APART = {
    "Fig. 19, event simulation": FITTED,
    "stall with": ARITHMETIC,
    "read / fastest that keeps the bytes": SOFTER,
    "bytes of memory per extent, tokens aside": SOFTER,
}


@dataclass(frozen=True, slots=True)
class Source:
    """A file of results, what of a paper it is about, and the model it was measured on."""

    file: str
    figure: str
    model: str
    thresholds: str = NONE


MEASURED: dict[str, tuple[Source, ...]] = {
    "CachedAttention": (
        Source("overflow", "Table 1", REAL),
        Source("choices", "Table 2", REAL, "every fourth question"),
        Source("truncation", "Tables 1 and 2", f"{BUNDLED} and stories260k"),
        Source("preload", "Fig. 18 and 19", f"100 M and 1.1 B parameters, {RANDOM}"),
        Source("saving", "Fig. 20", f"100 M, {RANDOM}"),
        Source("placement", "Fig. 21", f"56 M, {RANDOM}"),
        Source("load_or_recompute", "Load or recompute, beyond the paper", f"100 M, {RANDOM}"),
        Source("tier_rates", "Load or recompute at many rates, beyond the paper", f"100 M, {RANDOM}"),
        Source("disk", "Files of extents, beyond the paper", "extents of a model of 100 M"),
        Source("scale", "A million extents, beyond the paper", "catalog and plan, no model"),
    ),
    "RelayAttention": (
        Source("relay_operator", "Fig. 1 and 5", "attention of one layer, 12 heads of 64"),
        Source("relay_engine", "Fig. 6", f"100 M, {RANDOM}"),
        Source("relay_mmlu", "Table 3", f"100 M, {RANDOM}"),
        Source("relay_models", "Table 4", REAL),
        Source("relay_fixed", "Fig. 8", f"100 M, {RANDOM}"),
        Source("relay_rate", "Fig. 7", f"100 M, {RANDOM}"),
    ),
    "SPEC": (
        Source("importance_io", "Fig. 16 to 18, 20 and 21", f"32 heads of 16, {RANDOM}", ALPHA),
        Source("importance_wide", "Fig. 16 to 18, 20 and 21", f"32 heads of 64, {RANDOM}", ALPHA),
        Source(
            "importance_sweep",
            "Fig. 3, 16 to 18 and 20 to 24",
            f"heads of 64 and 128, {RANDOM}; {REAL}",
            ALPHA,
        ),
        Source("importance_quality", "Fig. 4, 8, 15 and 22", f"{BUNDLED} and stories260k", ALPHA),
        Source("importance_real", "Fig. 4, 8, 15 and 19 to 22", REAL, ALPHA),
        Source("importance_means", "Means of what is left out, beyond the paper", f"{BUNDLED}; {REAL}", ALPHA),
        Source(
            "importance_renew", "Decoded tokens select anew, beyond the paper", f"heads of 64, {RANDOM}; {REAL}", ALPHA
        ),
    ),
    "AttnCache": (
        Source("attncache_sts", "Tables 1 and 2", "MiniLM, 22 M", "250 other pairs of each task"),
        Source("attncache_decoder", "Tables 1 and 2", REAL, "250 other pairs of each task"),
        Source(
            "attncache_carry_over",
            "Thresholds on unseen sources, beyond the paper",
            "MiniLM, 22 M",
            "200 sentences of a third task",
        ),
        Source("attncache_distances", "Fig. 1", "MiniLM, 22 M"),
        Source("attncache_shapes", "Table 1", f"layers of large models, {RANDOM}"),
        Source("attncache_small", "Whole passes, beyond the paper", f"small models, {RANDOM}"),
    ),
    "The simulator": (
        Source("sim_speed", "Speed and memory", "plan and modelled machine"),
        Source("validate", "Beside the engine", f"100 M, {RANDOM}"),
    ),
}

BESIDE = (
    Source("soak", "20,000 turns in one engine", f"a tiny Llama, {RANDOM}"),
    Source("engine", "Prefill and decode beside transformers", f"100 M, {RANDOM}"),
    Source("engine_process", "An engine in a process of its own", "the bundled model (2.6 M)"),
    Source("profile", "What prefill and decode reach of the machine", f"100 M, {RANDOM}"),
)
"""Files about no paper: they are listed, and their goals count for none."""

ONE_CALL = "f60aa88"
BEFORE_ONE_CALL = frozenset({"d7d1d04", "daa9652", "161cc4e"})
"""The change since which all chunks of a layer are read by one call, and wanted ones overtake guesses; and commits before it of which
there are results. `tests/benchmarks/test_papers_page.py` compares them with git's history.
"""


def read(file: str) -> Found:
    """Read a file of results."""
    found: Found = json.loads((RESULTS / f"{file}.json").read_text())
    return found


def there(file: str) -> bool:
    """Say whether a file of results exists: that of a new benchmark does not before its first run."""
    return (RESULTS / f"{file}.json").is_file()


def link(file: str) -> str:
    """Link a file of results from the page."""
    return f"[{file}.json](../benchmarks/results/{file}.json)"


def percent(share: float, digits: int = 0) -> str:
    """Show a share in per cent."""
    return f"{100 * share:.{digits}f} %"


def sources(paper: str) -> list[Source]:
    """List the files of a paper that are there."""
    return [source for source in MEASURED[paper] if there(source.file)]


# ----------------------------------------------------------------- goals that the page makes of rows


def _scale(found: Found) -> list[Found]:
    """Judge the memory of an extent with its tokens; the benchmark leaves tokens aside."""
    last = found["rows"][-1]
    value = last["bytes_per_extent"] + last["token_bytes_per_extent"]
    return [goal("bytes of memory per extent, with its tokens", value, 1024, least=False, spread=COUNTED)]


def _relay(found: Found) -> list[Found]:
    """Judge relay's gain over shared prefixes by the paper's, where it prints one."""
    judged = []
    for row in found["rows"]:
        wanted = page_printed.relay_gain(row["workload"], row["batch"], row["prefix"])
        if wanted is not None:
            name = f"relay : sharing, {row['workload']}, batch {row['batch']}, prefix {row['prefix']}"
            judged.append(goal(name, row["gain"], wanted, least=True, spread=gain_spread(row)))
    return judged


def gain_spread(row: Found) -> float:
    """Take what repeats of relay's gain differ by; older files have it of `auto : better` alone."""
    return float(row["gain_spread" if "gain_spread" in row else "spread"])


def _recall(found: Found) -> list[Found]:
    """Judge the facts that a quarter of the rows with means loses, without renewal and with it."""
    judged = []
    for row in found["rows"]:
        if row["arm"] == "25% of the rows, means" and "recall_points" in row:
            points, name = row["recall_points"], f"{row['text']}, {row['protocol']}"
            lost, error = 0.0 - points["value"], points["error"] or 0.0
            name = f"{name}: points of recall lost at a quarter of the rows, with means"
            judged.append(goal(name, lost, 1, least=False, spread=1.96 * error) | {"error": error})
    return judged


def _worst(found: Found) -> list[Found]:
    """Judge what the worst unseen task loses beyond the promise; the benchmark judges the mean."""
    judged = []
    for threshold, beyond in beyond_promise(found, "another").items():
        name = f"points lost beyond the promise at threshold {threshold:g}, worst task, calibrated on another"
        judged.append(goal(name, round(max(beyond), 4), 0.5, least=False, spread=COUNTED))
    return judged


def beyond_promise(found: Found, way: str) -> dict[float, list[float]]:
    """List the points that each unseen task loses beyond the promise, by threshold."""
    points: dict[float, list[float]] = {}
    for row in found["rows"]:
        if row["way"] == way:
            points.setdefault(row["threshold"], []).append(row["loss"] - row["promised"])
    return points


MADE: dict[str, Callable[[Found], list[Found]]] = {
    "scale": _scale,
    "relay_engine": _relay,
    "relay_mmlu": _relay,
    "relay_fixed": _relay,
    "importance_means": _recall,
    "attncache_carry_over": _worst,
}


def goals_of(file: str, found: Found) -> list[Found]:
    """List all goals about a file: its own, and those that the page makes of its rows (`made`)."""
    made = [one | {"made": True} for one in MADE[file](found)] if file in MADE else []
    return [*found["goals"], *made]


def counts(name: str) -> str:
    """Say whether a measured goal counts, and if not, why."""
    return next((kind for start, kind in APART.items() if name.startswith(start)), COUNTS)


MET, JUST_MET, JUST_MISSED, MISSED = VERDICTS = ("met", "met, within noise", "missed, within noise", "missed")


def judged(one: Found) -> str:
    """Say in words how a goal came out: one of `VERDICTS`.

    A goal that is met by no more than its noise is as little shown as one that is missed by no more. Noise is what repeats differ by
    (`spread`) or, for goals that are met, the 95 % interval if that is wider. A miss is excused by `spread` alone, as its file has it.
    """
    if not one["met"]:
        return JUST_MISSED if one["within_noise"] else MISSED
    wanted = float(one["goal"].split()[1])
    noise = max(one["spread"] * abs(wanted), 1.96 * (one.get("error") or 0.0))
    return JUST_MET if noise > 0 and abs(one["value"] - wanted) <= noise else MET


def tally(goals: Sequence[Found]) -> dict[str, int]:
    """Count goals by how they came out, in the order of `VERDICTS`."""
    found = Counter(map(judged, goals))
    return {verdict: found[verdict] for verdict in VERDICTS}


# ----------------------------------------------------------------------------------- goals that are not met


def simulated_goals(edition: str) -> list[tuple[Found, bool]]:
    """List the goals of one edition of CachedAttention's evaluation, each with whether it counts."""
    found = read(SIMULATED)
    judged = [row for row in found["rows"] if row["met"] is not None]
    return [
        (one, page_simulated.counts_of(row) == COUNTS)
        for one, row in zip(found["goals"], judged, strict=True)
        if row["paper"] == edition
    ]


def operator_goals(paper: str) -> list[tuple[Found, bool]]:
    """List the goals of the operator models of one paper, each with whether it counts."""
    return [
        (one, "fitted" not in one["name"]) for one in read(OPERATORS)["goals"] if one["name"].startswith(f"{paper} ")
    ]


def just_met(paper: str) -> list[tuple[str, Found]]:
    """List the measured goals of a paper that count and are met within noise, each with its file."""
    goals = [(source.file, one) for source in sources(paper) for one in goals_of(source.file, read(source.file))]
    return [(file, one) for file, one in goals if counts(one["name"]) == COUNTS and judged(one) == JUST_MET]


def unmet() -> dict[str, list[tuple[str, Found]]]:
    """List, by paper, the goals that count and are not met, each with its file. Those within noise are among them."""
    found: dict[str, list[tuple[str, Found]]] = {}
    for paper in MEASURED:
        measured = [(source.file, one) for source in sources(paper) for one in goals_of(source.file, read(source.file))]
        found[paper] = [(file, one) for file, one in measured if counts(one["name"]) == COUNTS and not one["met"]]
    for edition in ("ATC", "arXiv"):
        found["The simulator"] += [
            (SIMULATED, one) for one, counted in simulated_goals(edition) if counted and not one["met"]
        ]
    modelled = [each for paper in MODELLED for each in operator_goals(paper)]
    return found | {"Operators": [(OPERATORS, one) for one, counted in modelled if counted and not one["met"]]}


# --------------------------------------------------------------------------------------------------- errors

METHODS = {"as published": "AttnCache", "ours": "+ layers (ours)"}
PERCENT = "{:.0%}"
KEYS = {
    "hit rate on sentences that are not in the database": ("unseen_hit_rate", PERCENT),
    "hit rate": ("hit_rate", PERCENT),
    "points lost at it": ("loss", "{:.1f}"),
}
SAME_EACH_TIME = (
    "bytes ",
    "stall with",
    "event simulation",
    "perplexity OF",
    "largest difference",
    "extra storage",
)


def error_of(file: str, found: Found, one: Found) -> str:
    """Say how sure a value is: its 95 % interval, what repeats of the same run differ by, or the range over tasks."""
    if file == "importance_means" and "error" not in one:  # its spread is one standard error, as a part of the goal
        return f"± {1.96 * one['spread'] * float(one['goal'].split()[1]):.2g} (95 %)"
    if one.get("error") is not None:
        return f"± {1.96 * one['error']:.2g} (95 %)"
    if one["spread"]:
        return percent(one["spread"], 1)
    if any(mark in one["name"] for mark in SAME_EACH_TIME):
        return "counted"
    return _over_tasks(found, one["name"]) or "one run"


def _over_tasks(found: Found, name: str) -> str:
    """Show the range over the tasks of a mean of AttnCache's: for files that are older than its errors over pairs."""
    what, _, last = name.rpartition(", ")
    if last in METHODS and what in KEYS:
        key, form = KEYS[what]
        rows = [row for row in found["rows"] if row.get("chosen") and row["method"] == METHODS[last]]
        return _range([row[key] for row in rows], form)
    if last.startswith("calibrated on ") and what.endswith("mean"):
        threshold = float(what.split("threshold ")[1].split(",")[0])
        return _range(beyond_promise(found, last.removeprefix("calibrated on "))[threshold], "{:.1f}")
    return ""


def _range(values: list[float], form: str) -> str:
    return f"{len(values)} tasks: {form.format(min(values))} to {form.format(max(values))}"
