"""Load or recompute, swept over host and disk from 8 MB/s to 8 GB/s, and with a rate that changes during the run.

A history of several turns lies in host memory or on disk, and a new turn comes. Arms, in random order: all of it is loaded, all is
recomputed, or the engine chooses, also in part; that arm is there twice, and what the two differ by is what nothing differs by (A/A).
Beside the fixed rates stands the one at which loading takes as long as computing: there a split has most to win.

Then one tier's rate changes, fast to slow to fast, while the engine chooses. How many turns go the old way?

    python -m benchmarks.papers.cachedattention.tier_rates [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from afterglow.bench.report import COUNTED, arguments, finish, goal, show, spread
from afterglow.bench.timed_requests import Turn, asked, words
from afterglow.choices import KVSource
from afterglow.engine.engine import Engine
from afterglow.store.extents.throttle import ArtificiallySlowTier, Line, Throttle
from benchmarks.common.engines import engine_of
from benchmarks.common.slow_host import slow_host

Slowed = Literal["host", "disk"]
Row = dict[str, Any]
TIERS: tuple[Slowed, ...] = ("host", "disk")

RATES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)  # MB/s
QUICK_RATES = (8, 128, 8192)
MB = 1e6
ARMS: dict[str, KVSource] = {"load": "load", "recompute": "recompute", "choice": "auto", "choice again": "auto"}
AT_MOST = 1.1  # times the better of the pure ways
SPLIT_GAINS = 0.9  # a split is of use where it takes at most that much of the better pure way
SURPRISED, FOUND_OUT = (
    1,
    9,
)  # turns that may go the old way: a slow load is its own lesson, a fast tier is found out by probes


@dataclass(frozen=True)
class Shape:
    """What a turn looks like."""

    model: str
    turns: int = 8
    rows: int = 256  # of each turn: an extent
    new: int = 64

    @property
    def history(self) -> int:
        return self.turns * self.rows


class Bench:
    """One engine with one tier that is slow on purpose."""

    def __init__(self, engine: Engine, shape: Shape, tier: Slowed, rng: random.Random) -> None:
        self.engine, self.shape, self.tier, self.rng = engine, shape, tier, rng
        self._host = slow_host(engine)

    def set_rate(self, mb_per_s: float) -> None:
        """Change the tier's speed from now on."""
        if self.tier == "host":
            self._host.line = Line(mb_per_s * MB)
            return
        slow = self.engine.parts.store.on_disk.tier
        assert isinstance(slow, ArtificiallySlowTier)
        slow.change(Throttle(read_bytes_per_s=mb_per_s * MB))

    def learn(self) -> None:
        """Let the engine see what loading and computing take, as it has in any server that has run for a while."""
        for share in (0.15, 0.55, 0.3, 0.45):
            for source, tier in dict.fromkeys((("load", "disk"), ("load", self.tier), ("recompute", self.tier))):
                self.turn(cast(KVSource, source), [max(1, int(share * self.shape.history))], tier)

    def turn(self, source: KVSource, lengths: Sequence[int] = (), tier: Slowed | None = None) -> Turn:
        """Have a conversation of turns of these lengths, push it to the tier, and time one more turn."""
        self.engine.baseline(source="load")
        history: list[int] = []
        for length in lengths or [self.shape.rows] * self.shape.turns:
            history += words(self.rng, self.engine, length)
            asked(self.engine, history)
        self.engine.settle()
        self.engine.demote(tier or self.tier)
        self.engine.baseline(source=source)
        return asked(self.engine, [*history, *words(self.rng, self.engine, self.shape.new)])


@contextlib.contextmanager
def bench_of(shape: Shape, tier: Slowed, mb_per_s: float, options: argparse.Namespace) -> Iterator[Bench]:
    """A bench at a speed, whose engine has learned."""
    cache = {"policy": "lru"}
    with engine_of(shape.model, threads=options.threads, throttle=Throttle(), cache=cache) as engine:
        bench = Bench(engine, shape, tier, random.Random(options.seed))
        bench.set_rate(mb_per_s)
        bench.learn()
        yield bench


def main(args: list[str]) -> int:
    options = parsed(args)
    shape = Shape(options.model, options.turns, options.rows, options.new)
    rates = options.rates or (QUICK_RATES if options.quick else RATES)
    repeats = options.repeats or (2 if options.quick else 7)
    rows: list[Row] = []
    changes: list[Row] = []
    for tier in options.tiers:
        of_tier = [point(shape, tier, rate, repeats, options) for rate in rates]
        of_tier.append(point(shape, tier, break_even(of_tier), repeats, options))
        rows += sorted(of_tier, key=lambda row: row["mb_per_s"])
        changes.append(changed(shape, tier, (min(rates), max(rates)), options))
    show(
        f"TTFT of {shape.new} new tokens behind {shape.history} in a tier of so many MB/s, {shape.model}, ms",
        ("tier", "MB/s", *ARMS, "choice / better", "A/A", "loaded"),
        [
            (r["tier"], r["mb_per_s"], *(r["ttft_ms"][arm] for arm in ARMS), r["ratio"], f"{r['a_a']:.1%}", r["loaded"])
            for r in rows
        ],
    )
    show(
        "the rate changes: share of the history loaded, turn by turn",
        ("tier", "MB/s", "turns", "of the old choice"),
        [
            (c["tier"], phase["mb_per_s"], " ".join(f"{share:.2g}" for share in phase["loaded"]), phase["old"])
            for c in changes
            for phase in c["phases"]
        ],
    )
    finish(options, rows, goals(rows, changes), changes=changes, model=shape.model, history=shape.history)
    return 0


def parsed(args: list[str]) -> argparse.Namespace:
    parser = arguments("python -m benchmarks.papers.cachedattention.tier_rates", __doc__ or "")
    parser.add_argument("--model", default="bench-100m", help="preset or model directory (default bench-100m)")
    parser.add_argument("--tiers", nargs="+", choices=TIERS, default=TIERS, help="default: both")
    parser.add_argument("--rates", type=float, nargs="+", metavar="MB/s", help="rates (default: of the run's size)")
    parser.add_argument("--repeats", type=int, metavar="N", help="of each arm (default 7; quick: 2)")
    parser.add_argument("--turns", type=int, default=Shape.turns, help="turns of a history (default %(default)s)")
    parser.add_argument("--rows", type=int, default=Shape.rows, help="tokens of each of them (default %(default)s)")
    parser.add_argument("--new", type=int, default=Shape.new, help="tokens of the new turn (default %(default)s)")
    parser.add_argument("--each", type=int, metavar="N", help="turns at each rate of the changing run")
    return parser.parse_args(args)


def point(shape: Shape, tier: Slowed, rate: float, repeats: int, options: argparse.Namespace) -> Row:
    """All arms at one rate of one tier."""
    found: dict[str, list[float]] = {arm: [] for arm in ARMS}
    loaded: list[int] = []
    with bench_of(shape, tier, rate, options) as bench:
        order = random.Random(options.seed + 1)
        for _ in range(repeats):
            for arm in order.sample(list(ARMS), len(ARMS)):
                turn = bench.turn(ARMS[arm])
                found[arm].append(turn.ttft)
                if ARMS[arm] == "auto":
                    loaded.append(turn.cached.total)
        size = shape.turns * bench.engine.capacity.file_size(shape.rows)
    return summary(tier, rate, found, loaded, size, shape.history)


def summary(tier: str, rate: float, found: dict[str, list[float]], loaded: list[int], size: int, history: int) -> Row:
    """One row: medians, how the choice came out, and what repeats differ by. `loaded`: rows, of each turn that was chosen."""
    ms = {arm: round(statistics.median(samples) * 1e3, 2) for arm, samples in found.items()}
    chosen = statistics.median([*found["choice"], *found["choice again"]]) * 1e3
    return {
        "tier": tier,
        "mb_per_s": round(rate, 1),
        "ttft_ms": ms,
        "ratio": round(chosen / min(ms["load"], ms["recompute"]), 4),
        "a_a": round(abs(ms["choice again"] / ms["choice"] - 1), 4),
        "loaded": round(statistics.median(loaded)),
        "split": 0 < statistics.median(loaded) < history,
        "history_bytes": size,
        "spread": {arm: round(spread(samples), 4) for arm, samples in found.items()},
    }


def break_even(rows: Sequence[Row]) -> float:
    """The rate, in MB/s, at which loading a history takes as long as computing it."""
    seconds = statistics.median(row["ttft_ms"]["recompute"] for row in rows) / 1e3
    return float(rows[0]["history_bytes"] / seconds / MB)


def changed(shape: Shape, tier: Slowed, rates: tuple[float, float], options: argparse.Namespace) -> Row:
    """The engine chooses, while the tier goes from the higher rate to the lower and back."""
    slow, fast = rates
    each = options.each or (12 if options.quick else 20)
    phases: list[Row] = []
    with bench_of(shape, tier, fast, options) as bench:
        for rate in (fast, slow, fast):
            bench.set_rate(rate)
            turns = [bench.turn("auto") for _ in range(each)]
            loaded = [round(turn.cached.total / shape.history, 3) for turn in turns]
            ttft_ms = [round(turn.ttft * 1e3, 1) for turn in turns]
            old = old_choices(loaded, loads=rate == fast)
            phases.append({"mb_per_s": rate, "loaded": loaded, "ttft_ms": ttft_ms, "old": old})
    return {"tier": tier, "phases": phases}


def old_choices(loaded: Sequence[float], *, loads: bool) -> int:
    """How many turns pass until the choice is the right one, and stays so. `loaded`: the share of the history, turn by turn;
    `loads`: to load most of it is right."""
    wrong = [at for at, share in enumerate(loaded, 1) if (share > 0.5) != loads]
    return wrong[-1] if wrong else 0


def goals(rows: Sequence[Row], changes: Sequence[Row]) -> list[Row]:
    """At most 1.1 times the better way anywhere; a split that gains; a choice that follows."""

    def noise(row: Row) -> float:
        return float(max(row["a_a"], *row["spread"].values()))

    found = [
        goal(
            f"{r['tier']}, {r['mb_per_s']:g} MB/s: choice / better way",
            r["ratio"],
            AT_MOST,
            least=False,
            spread=noise(r),
        )
        for r in rows
    ]
    splits = sorted((row for row in rows if row["split"]), key=lambda row: float(row["ratio"]))
    ratio, spread_of = (splits[0]["ratio"], noise(splits[0])) if splits else (1.0, COUNTED)
    found.append(goal("the best split / better way", ratio, SPLIT_GAINS, least=False, spread=spread_of))
    said: tuple[tuple[int, str, int], ...] = ((1, "becomes slow", SURPRISED), (2, "becomes fast again", FOUND_OUT))
    for change in changes:
        for at, what, most in said:
            if len(change["phases"][at]["loaded"]) <= most:
                continue  # so short a phase cannot miss the goal
            name = f"{change['tier']} {what}: turns that go the old way"
            found.append(goal(name, change["phases"][at]["old"], most, least=False, spread=COUNTED))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
