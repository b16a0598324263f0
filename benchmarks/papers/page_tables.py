"""Tables of docs/papers.md about what was measured: the paper's value, ours and on which model, the goal, where thresholds come from,
and what repeats differ by. Each is made of files of benchmarks/results and of nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from afterglow.bench.report import verdict
from benchmarks.common.paths import RESULTS
from benchmarks.papers import missed, page_rates, page_simulated
from benchmarks.papers.page_simulated import ARITHMETIC, COUNTS, FITTED, Found, markdown, number

HEAD = ("figure", "what", "paper", "ours", "on", "goal", "", "thresholds from", "repeats differ by", "counts")
REAL, BUNDLED, RANDOM = "SmolLM2-135M", "bundled, 2.6 M", "random weights"
NONE = "needs none"
PRINTED_PERPLEXITY = "within 0.02 of 4.9 to 8.5"
PRINTED = {  # what a paper prints about a goal, by the beginning of the goal's name
    "perplexity CA / TT": PRINTED_PERPLEXITY,
    "perplexity NKVT / TT": "over 240",
    "points that CA loses": "-0.3 to 0.9",
    "Fig. 19, event simulation: PL-B0": "0.35",
    "Fig. 19, event simulation: PL-B15": "0.61",
    "backlog: hit rate, look-ahead - lru": "28",
    "backlog: hit rate, look-ahead - fifo": "38",
    "backlog: look-ahead's hits from host": "0.996",
    "hit rate, as published": "0.3",
    "attention speed-up at a hit rate of 0.3": "1.19 to 1.21",
}


CALCULATED = {
    "Fig. 19, event simulation": FITTED,
    "stall with": ARITHMETIC,
}  # goals beside measured ones, by their beginning


@dataclass(frozen=True, slots=True)
class Source:
    """A file of results, what of a paper it is about, and the model it was measured on."""

    file: str
    figure: str
    model: str
    thresholds: str = NONE
    only: str = ""  # goals whose name has it


MEASURED: dict[str, tuple[Source, ...]] = {
    "CachedAttention": (
        Source("overflow", "Tables 1, 2", REAL),
        Source("truncation", "Tables 1, 2", f"{BUNDLED}; stories260k"),
        Source("preload", "Fig. 18, 19", f"100 M, {RANDOM}"),
        Source("saving", "Fig. 20", f"100 M, {RANDOM}"),
        Source("placement", "Fig. 21", f"56 M, {RANDOM}"),
        Source("load_or_recompute", "beyond", f"100 M, {RANDOM}"),
        Source("tier_rates", "beyond", f"100 M, {RANDOM}"),
    ),
    "RelayAttention": (
        Source("relay_operator", "Fig. 1, 5", "one layer"),
        Source("relay_engine", "Fig. 6", f"100 M, {RANDOM}"),
        Source("relay_mmlu", "Table 3", f"100 M, {RANDOM}"),
        Source("relay_fixed", "Fig. 8", f"100 M, {RANDOM}"),
        Source("relay_rate", "Fig. 7", f"100 M, {RANDOM}"),
    ),
    "SPEC": (
        Source("importance_io", "Fig. 16 to 18, 20, 21", f"32 heads of 16, {RANDOM}", "the paper: alpha 0.6"),
        Source("importance_wide", "Fig. 16 to 18, 20, 21", f"32 heads of 64, {RANDOM}", "the paper: alpha 0.6"),
        Source(
            "importance_sweep",
            "Fig. 3, 16 to 18, 20 to 24",
            f"heads of 64, 128, {RANDOM}; {REAL}",
            "the paper: alpha 0.6",
        ),
        Source("importance_quality", "Fig. 4, 8, 15, 22", f"{BUNDLED}; stories260k", "the paper: alpha 0.6", "points"),
        Source("importance_means", "beyond", f"{BUNDLED}; {REAL}", "the paper: alpha 0.6", "points"),
    ),
    "AttnCache": (
        Source("attncache_sts", "Tables 1, 2", "MiniLM, 22 M", "250 other pairs of each task"),
        Source("attncache_decoder", "Tables 1, 2", REAL, "250 other pairs of each task"),
        Source("attncache_carry_over", "beyond", "MiniLM, 22 M", "200 sentences of a third task"),
        Source("attncache_shapes", "Table 1", f"large layers, {RANDOM}"),
        Source("attncache_small", "beyond", f"small models, {RANDOM}"),
    ),
}


def read(file: str) -> Found:
    found: Found = json.loads((RESULTS / f"{file}.json").read_text())
    return found


def sources(paper: str) -> list[Source]:
    """List the files of a paper that are there: a new benchmark has none before its first run."""
    return [source for source in MEASURED[paper] if (RESULTS / f"{source.file}.json").is_file()]


def measured(paper: str) -> str:
    """All goals that were measured for a paper."""
    lines = [line for source in sources(paper) for line in goal_lines(source, read(source.file))]
    return markdown(HEAD, lines)


def goal_lines(source: Source, found: Found) -> Iterable[Sequence[str]]:
    """A line for each goal of a file."""
    for goal in found["goals"]:
        if source.only in goal["name"]:
            printed = next((text for start, text in PRINTED.items() if goal["name"].startswith(start)), "")
            counts = next((kind for start, kind in CALCULATED.items() if goal["name"].startswith(start)), COUNTS)
            yield (
                source.figure,
                goal["name"],
                printed,
                number(goal["value"]),
                source.model if counts == COUNTS else "modelled",
                goal["goal"],
                verdict(goal).replace("MISSED", "**missed**"),
                source.thresholds,
                spread_of(goal),
                counts,
            )


def missed_goals() -> list[tuple[str, Found]]:
    """List the goals that count and are missed by more than noise, each with its file."""
    every = [(source, goal) for paper in MEASURED for source in sources(paper) for goal in read(source.file)["goals"]]
    return [
        (source.file, goal)
        for source, goal in every
        if source.only in goal["name"]
        and not any(goal["name"].startswith(start) for start in CALCULATED)
        and not (goal["met"] or goal["within_noise"])
    ]


def spread_of(goal: Found) -> str:
    """What repeats, or other samples of the same data, differ by."""
    if goal.get("error") is not None:
        return f"± {1.96 * goal['error']:.2g} (95 %)"
    return f"{goal['spread']:.1%}" if goal["spread"] else "not repeated"


def overflow_perplexity() -> str:
    """Table 1, through the engine."""
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
                    f"{abs(row['ratio']['OF']['value'] - 1):.1e}",
                )
            )
    head = f"{title(found)}: perplexity | parts | tokens | CA | TT | NKVT | OF | nothing | CA / TT | NKVT / TT | OF apart from TT"
    printed = ("paper: LLaMA-7B, WikiText-2", "", "", "5.47", "5.48", "2198.7", "", "", "0.998", "401", "")
    return markdown(head.split(" | "), [*lines, printed])


def overflow_drift() -> str:
    """CA over TT, overflow by overflow."""
    found = read("overflow")
    rows = [row for row in found["rows"] if row["table"] == "perplexity"]
    last = found["settings"]["overflows"]
    head = ["perplexity CA / TT after overflow", *(str(n + 1) for n in range(last))]
    return markdown(head, [(row["text"], *(pair(each, 4) for each in row["by_overflow"]["CA"])) for row in rows])


def overflow_accuracy() -> str:
    """Table 2, through the engine."""
    found = read("overflow")
    arms = ("CA", "TT", "NKVT", "none")
    lines = []
    for row in found["rows"]:
        if row["table"] == "accuracy":
            shares = (pair(row["accuracy"][arm], 1) for arm in arms)
            same = (f"{row['same_choice'][arm]:.0f}" for arm in ("CA", "NKVT"))
            lines.append((row["text"], f"{row['questions']}", f"{row['chance']:g}", *shares, *same))
    head = ["right after five overflows, %", "questions", "chance", "CA", "TT", "NKVT", "nothing"]
    printed = [
        ("paper: PIQA, LLaMA-7B", "", "50", "77.1", "77.2", "48.9", "", "", ""),
        ("paper: LongEval, LLaMA-7B", "", "", "66.0", "65.9", "12.0", "", "", ""),
    ]
    return markdown([*head, "CA chooses as TT, %", "NKVT as TT, %"], [*lines, *printed])


def title(found: Found) -> str:
    of = found["settings"]
    return f"{REAL}, a window of {of['window']:,}"


def pair(of: Found, digits: int) -> str:
    return f"{of['value']:,.{digits}f}" + ("" if of["error"] is None else f" ± {of['error']:.{digits}f}")


def relay_rates() -> str:
    """Fig. 7 on the engine."""
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
    """SPEC's figures of time and bytes."""
    files = [read(name) for name in ("importance_io", "importance_wide")]
    spreads = {run["run"]: run["spread_ttft"] for found in files for run in found.get("runs", ())}
    lines = [
        (
            row["run"],
            row["variant"],
            f"{row['ttft_ms']:,.0f}",
            f"{row['p99_ms']:,.0f}",
            f"{row['wait_ms']:.0f}",
            f"{row['read_mb']:.0f}",
            f"{100 * row['device_hits']:.0f}",
            f"{spreads[row['run']]:.1%}",
        )
        for found in files
        for row in found.get("rows", ())
    ]
    head = ("run", "way", "TTFT, ms", "p99", "waiting", "read, MB", "device hits, %", "TTFT of repeats differs by")
    return markdown(head, lines)


PRINTED_LOSS = {"SAN": "25 to 38", "LazyFormer": "25 to 34", "AttnCache-f": "18 to 21", "AttnCache": "within 2 at 30 %"}


def spec_means(found: Found) -> str:
    """Rows by share and by attention, each without and with means of what is left out."""
    pairs: dict[tuple[str, str, str], dict[bool, Found]] = {}
    for row in found["rows"]:
        arm = row["arm"].removesuffix(", means")
        pairs.setdefault((row["text"], row["protocol"], arm), {})[arm != row["arm"]] = row

    def shown(row: Found, key: str) -> str:
        return f"{row[key]['value']:.1f} ± {row[key]['error']:.1f}" if key in row else ""

    lines = [
        (
            *(text, {"generated": "yes", "published": "no"}[protocol], arm, f"{of[False]['kept']:.0%}"),
            *(shown(of[means], key) for key in ("agreement", "recall") for means in (False, True)),
        )
        for (text, protocol, arm), of in pairs.items()
    ]
    head = ("text, model", "decoded tokens select", "attends to", "rows", "next tokens alike, %", "with means")
    return markdown((*head, "facts recalled, %", "with means"), lines)


def attncache(model: str, found: Found) -> str:
    """AttnCache's tables 1 and 2: means over the tasks of what was chosen on the validation part. Means of all maps are shown where
    AttnCache hits."""
    methods: dict[str, list[Found]] = {}
    every = found["rows"]
    hits = {(row["task"], row["threshold"]) for row in every if row["chosen"] and row["method"] == "AttnCache"}
    controls = {(row["task"], row["threshold"]): row for row in every if row["method"] == "mean maps"}
    for row in every:
        if row["chosen"] and row["method"] != "mean maps":
            methods.setdefault(row["method"], []).append(row)
    if controls:
        methods["mean maps"] = [controls[one] for one in sorted(hits)]

    def mean(rows: list[Found], key: str, form: str) -> str:
        values = [row[key] for row in rows if row.get(key) is not None]
        return form.format(sum(values) / len(values)) if len(values) == len(rows) else ""

    lines = [
        (
            method,
            PRINTED_LOSS.get(method, ""),
            mean(rows, "loss", "{:.1f}"),
            mean(rows, "unseen_loss", "{:.1f}"),
            mean(rows, "hit_rate", "{:.0%}"),
            mean(rows, "unseen_hit_rate", "{:.0%}"),
            mean(rows, "speedup_attention", "{:.2f}"),
            mean(rows, "speedup_whole", "{:.2f}"),
        )
        for method, rows in methods.items()
    ]
    head = f"{model}, mean of {len(methods['full'])} tasks | paper: Spearman lost | ours | unseen | hits | unseen | attention, x | whole pass, x"
    return markdown(head.split(" | "), lines)


def small_models() -> str:
    """Whole passes of small models with maps: from which hit rate on they are faster, and by how much at some."""
    rows = read("attncache_small")["rows"]
    kinds = ("model", "weights", "tokens")
    gains = {(*(r[c] for c in kinds), r["hit_rate"]): f"{r['pass']:.2f}" for r in rows if r["what"] == "pass"}
    lines = []
    for row in rows:
        if row["what"] == "break-even":
            kind = tuple(row[c] for c in kinds)
            least = "never" if row["hit_rate"] is None else f"{row['hit_rate']:.0%}"
            lines.append([*map(str, kind), least, *(gains[*kind, rate] for rate in (0.5, 0.9, 1.0))])
    return markdown([*kinds, "faster from a hit rate of", "x at 50 %", "at 90 %", "at 100 %"], lines)


def carry_over(found: Found) -> str:
    """What thresholds promise and cost on tasks that they were not calibrated on: ranges over all tasks."""
    lines = []
    for threshold in sorted({row["threshold"] for row in found["rows"]}, reverse=True):
        rows = [row for row in found["rows"] if row["threshold"] == threshold]
        beyond = [row["loss"] - row["promised"] for row in rows if row["way"] == "another"]
        lines.append(
            (
                f"{threshold}",
                *(_range([row[name] for row in rows], form) for name, form in RANGES),
                f"{fmean(beyond):.1f}, {max(beyond):.1f}",
            )
        )
    head = ("threshold", "layers that take maps", "1 - cosine", "points lost", "beyond the promise: mean, worst")
    return markdown(head, lines)


RANGES = (("layer_rate", "{:.0%}"), ("error", "{:.3f}"), ("loss", "{:.1f}"))


def _range(values: list[float], form: str) -> str:
    return f"{form.format(min(values))} to {form.format(max(values))}"


def overview() -> str:
    """Goals met, by paper and kind of evidence, of those that count."""
    lines: list[tuple[str, ...]] = []
    for paper in MEASURED:
        for source in sources(paper):
            found = read(source.file)
            goals = list(goal_lines(source, found))
            counted = [line for line in goals if line[-1] == COUNTS]
            met, near = (sum(line[6] == word for line in counted) for word in ("met", "within noise"))
            apart = len(goals) - len(counted)
            run = "quick" if found["quick"] else "full"
            lines.append(
                (
                    paper,
                    source.figure,
                    f"measured, {source.model}",
                    f"`{source.file}.json`, {run}, {found['commit']}",
                    f"{met} of {len(counted)}",
                    f"{near}" if near else "",
                    f"{apart}" if apart else "",
                )
            )
    lines += [_simulated("papers_cachedattention", "ATC"), _simulated("papers_cachedattention", "arXiv")]
    models = read("sim_operators")
    judged = [goal for goal in models["goals"] if "fitted" not in goal["name"]]
    met_all = f"{sum(goal['met'] for goal in judged)} of {len(judged)}"
    where = ("all but CachedAttention", "operators", "modelled", f"`sim_operators.json`, {models['commit']}")
    lines.append((*where, met_all, "", str(len(models["goals"]) - len(judged))))
    head = ("paper", "figures", "evidence", "file, run, commit", "goals met", "within noise", "not counted")
    return markdown(head, lines)


def _simulated(file: str, paper: str) -> tuple[str, ...]:
    found = read(file)
    rows = [row for row in found["rows"] if row["paper"] == paper and row["met"] is not None]
    counted = [row for row in rows if page_simulated.counts_of(row) == COUNTS]
    met = f"{sum(row['met'] for row in counted)} of {len(counted)}"
    evidence = f"`{file}.json`, {found['commit']}"
    return ("CachedAttention", paper, "modelled", evidence, met, "", str(len(rows) - len(counted)))


def _when_measured(make: Callable[[Found], str], file: str) -> str:
    if not (RESULTS / f"{file}.json").is_file():
        return f"Not measured yet: `{file}.json` (`python -m benchmarks.rerun {file}`).\n"
    return make(read(file))


def _of(make: Callable[[Found, str], str], file: str, paper: str) -> str:
    return make(read(file), paper)


TABLES: dict[str, Callable[[], str]] = {
    "papers": overview,
    **{f"measured: {paper}": partial(measured, paper) for paper in MEASURED},
    "missed": lambda: missed.table(missed_goals()),
    "overflow: perplexity": overflow_perplexity,
    "overflow: drift": overflow_drift,
    "overflow: accuracy": overflow_accuracy,
    "load or recompute: rates": partial(_when_measured, page_rates.rates, "tier_rates"),
    "load or recompute: changes": partial(_when_measured, page_rates.changes, "tier_rates"),
    "relay rates": relay_rates,
    "spec io": spec_io,
    "spec means": partial(_when_measured, spec_means, "importance_means"),
    "spec sweep": partial(_when_measured, page_rates.sweep, "importance_sweep"),
    "attncache": partial(_when_measured, partial(attncache, "MiniLM"), "attncache_sts"),
    "attncache: decoder": partial(_when_measured, partial(attncache, "SmolLM2-135M"), "attncache_decoder"),
    "attncache: small models": small_models,
    "attncache: unseen sources": partial(_when_measured, carry_over, "attncache_carry_over"),
    **{
        f"simulated: {paper}": partial(_of, page_simulated.evaluation, "papers_cachedattention", paper)
        for paper in ("ATC", "arXiv")
    },
    **{
        f"operators: {paper}": partial(_of, page_simulated.operators, "sim_operators", paper)
        for paper in ("RelayAttention", "SPEC", "AttnCache")
    },
    "varied: sizes": lambda: page_simulated.varied(read("papers_cachedattention"), page_simulated.SIZES),
    "varied: assumptions": lambda: page_simulated.varied(read("papers_cachedattention"), page_simulated.ASSUMED),
    "operators: goals": lambda: page_simulated.operator_goals(read("sim_operators")),
}


def table(name: str) -> str:
    """Make a table in Markdown. Raises: ValueError for an unknown name."""
    if name not in TABLES:
        raise ValueError(f"no table {name!r}; there are {', '.join(TABLES)}")
    return TABLES[name]()
