"""Several engines over one store, on one machine: token-equal answers, hit shares, times, and costs.

Conversations change their replica at every turn (the bundled model); a turn behind 1,024 rows comes from the shared store or from the own
disk, both at 100 MB/s (bench-100m); a trace is served by one engine with all memory, routed by session, and at random, measured and simulated;
and a store that nothing is found in is weighed against none, as is a directory, by the length of prompts.

    python -m benchmarks.cluster [--quick] [--json FILE]
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from afterglow.bench.report import COUNTED, arguments, finish, goal, show
from afterglow.library.locate import BUNDLED, find_model
from benchmarks.cluster import calls, hits, idle, latency, lookups, turns

PARTS = ("turns", "moving", "hits", "calls", "idle", "cold", "lookup")
COST = 0.01  # part of the throughput that a store may cost, and
LATE_S = 0.002  # seconds by which a cold prompt's first token may come later


def main(args: list[str]) -> int:
    parser = arguments("python -m benchmarks.cluster", __doc__ or "")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="measure these only (default: all)")
    options = parser.parse_args(args)
    small = str(find_model(BUNDLED))
    load = os.getloadavg()[0]
    rows: list[dict[str, Any]] = []
    goals: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="afterglow-bench-") as made:
        folder = Path(made)
        if "turns" in options.parts:
            wandered = [
                turns.wandering(small, count, 6 if options.quick else 9, folder, options.seed, options.threads)
                for count in (2, 4)
            ]
            rows += wandered
            goals += _wandered(wandered)
        if "moving" in options.parts:
            moved = latency.moving("bench-100m", 5 if options.quick else 11, folder, options.seed, options.threads)
            rows.append(moved)
            goals.append(_moved(moved))
        if "hits" in options.parts:
            for size in hits.SIZES:
                found = hits.rows(2, 48, size, folder, options.seed)
                rows += found
                goals += _hits(size, found)
        if "calls" in options.parts:
            counted = calls.measure(small, folder, options.seed)
            rows.append(counted)
            goals.append(_called(counted))
        if "idle" in options.parts:
            costs = idle.measure(small, 15 if options.quick else 50, folder, options.seed, options.threads)
            rows += costs
            goals += _costs(costs)
        if "cold" in options.parts:
            late = latency.cold(small, 64 if options.quick else 160, folder, options.seed, options.threads)
            rows.append(late)
            goals.append(_late(late))
        if "lookup" in options.parts:
            asked = lookups.measure(15 if options.quick else 40, folder, options.seed, options.threads)
            rows += asked
            goals += _looked_up(asked)
    finish(options, rows, goals, load_average={"before": load, "after": os.getloadavg()[0]})
    return 0


def _wandered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    columns = ("engines", "turns", "equal", "reused", "missing", "from_store")
    show(
        "a conversation that changes its engine every turn", columns, [[row[name] for name in columns] for row in rows]
    )
    return [
        each
        for row in rows
        for each in (
            goal(f"{row['engines']} engines: turns with other tokens", row["turns"] - row["equal"], 0, least=False, spread=COUNTED),
            goal(f"{row['engines']} engines: rows of a turn before not reused", row["missing"], 1, least=False, spread=COUNTED),
        )
    ]  # fmt: skip


def _moved(row: dict[str, Any]) -> dict[str, Any]:
    names = ("computed", "own disk", "own disk again", "moved")
    show(
        "the first token of a turn behind 1,024 rows of bench-100m, store and disk at 100 MB/s",
        ("", "median ms", "spread"),
        [(name, 1e3 * row[name]["median"], f"{row[name]['spread']:.1%}") for name in names],
    )
    own, again = row["own disk"]["median"], row["own disk again"]["median"]
    apart = max(abs(again / own - 1), row["own disk"]["spread"], row["moved"]["spread"])
    return goal(
        "TTFT after a change of replica / from the own disk",
        row["moved"]["median"] / min(own, again),
        1.15,
        least=False,
        spread=apart,
    )


def _hits(size: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    show(
        f"hit shares of {rows[0]['turns']} turns, {size} memory",
        ("", "engines", "measured", "simulated", "engines left alone"),
        [
            (
                row["arm"],
                row["engines"],
                *(f"{100 * row[name]:.1f} %" for name in ("measured", "simulated")),
                ", ".join(f"{100 * each:.1f}" for each in row["alone"]),
            )
            for row in rows
        ],
    )
    one, session, shared, _ = (100 * row["measured"] for row in rows)
    apart = max(100 * abs(row["measured"] - row["simulated"]) for row in rows)
    found = [goal(f"hit shares measured and simulated, points apart, {size}", apart, 2, least=False, spread=COUNTED)]
    (random,) = (row for row in rows if row["alone"])
    alone = [100 * each for each in random["alone"]]
    found.append(
        goal(
            f"the same, {random['arm']}, engines left alone: the mean of {len(alone)} runs, {size}",
            abs(sum(alone) / len(alone) - 100 * random["simulated"]),
            2,
            least=False,
            spread=(max(alone) - min(alone)) / 2 / 2,
        )
    )
    if size == "roomy":  # else each engine lacks room for its part, which is not the same as all for all
        found += [
            goal("hit share routed by session, points below one engine", one - session, 1, least=False, spread=COUNTED),
            goal("hit share at random with a store, points below one engine", one - shared, 3, least=False, spread=COUNTED),
            goal("the same, engines left alone: the mean of all runs", one - sum(alone) / len(alone), 3, least=False, spread=(max(alone) - min(alone)) / 2 / 3),
        ]  # fmt: skip
    return found


def _called(row: dict[str, Any]) -> dict[str, Any]:
    counts = row["calls_per_token"]
    show("calls of functions for each token", ("", *counts), [("", *(f"{each:.1f}" for each in counts.values()))])
    one, again, shared = counts.values()
    return goal(
        "idle: part of the calls per token that a store adds",
        shared / ((one + again) / 2) - 1,
        COST,
        least=False,
        spread=abs(again / one - 1) / COST,
    )


def _costs(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`spread` of these goals is half the interval's width, or what two servers without a store are apart."""
    *costs, rest = rows
    cores = rest["cores"]
    show(
        "the part of a core that a server takes at rest",
        ("", *cores),
        [("", *(f"{each:.3%}" for each in cores.values()))],
    )
    show(
        "what a token costs a server with a store, over one without: medians of paired rounds, and 95 % intervals",
        ("", "by", "tokens/s", "with", "low", "high", "the same again", "low", "high"),
        [
            (
                row["kind"],
                by,
                f"{row[by]['tokens_per_s']['without']:.0f}",
                *(
                    f"{row[by][arm][part]:.4f}"
                    for arm in ("with", "without again")
                    for part in ("ratio", "low", "high")
                ),
            )
            for row in costs
            for by in ("wall", "cpu")
        ],
    )
    idle_row = costs[0]
    found = [
        goal(
            f"idle: part of the {what} per token that a store costs",
            idle_row[by]["with"]["ratio"] - 1,
            COST,
            least=False,
            spread=(idle_row[by]["with"]["high"] - idle_row[by]["with"]["low"]) / 2 / COST,
        )
        for by, what in (("wall", "time"), ("cpu", "processor time"))
    ]
    apart = abs(cores["without again"] - cores["without"]) / COST
    taken = cores["with"] - cores["without"]
    return [*found, goal("at rest: part of a core that a store takes", taken, COST, least=False, spread=apart)]


def _late(row: dict[str, Any]) -> dict[str, Any]:
    names = ("without", "without again", "with")
    show(
        "a prompt that is found nowhere",
        ("", *names),
        [
            ("TTFT ms", *(1e3 * row[name]["median"] for name in names)),
            ("spread", *(f"{row[name]['spread']:.1%}" for name in names)),
        ],
    )
    later = row["later"]
    return goal(
        "seconds later of a cold prompt's first token",
        later["with"],
        LATE_S,
        least=False,
        spread=later["spread"] / LATE_S,
    )


def _looked_up(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    show(
        "milliseconds by which a directory's lookup delays prompts that are found nowhere (and without a store again); and by which publishing does",
        ("tokens", "the lookup", "the first step", "again", "the first token", "again", "publishing", "token without"),
        [
            (
                row["prompt"],
                1e3 * row["lookup"]["median"],
                *(1e3 * row[what]["later"][arm] for what in ("first step", "first token") for arm in ("with", "again")),
                1e3 * row["publishing"],
                1e3 * row["first token"]["without"]["median"],
            )
            for row in rows
        ],
    )
    return [
        goal(
            f"directory, {row['prompt']} tokens: seconds later of a cold prompt's {what}",
            row[what]["later"]["with"],
            LATE_S,
            least=False,
            spread=row[what]["later"]["spread"] / LATE_S,
        )
        for row in rows
        for what in ("first step", "first token")
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
