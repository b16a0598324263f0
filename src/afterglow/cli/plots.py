"""Pictures of simulations. matplotlib is imported only to draw."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from math import ceil
from pathlib import Path
from typing import Any

from afterglow.errors import ConfigError
from afterglow.sim.capacity.search import SizeTrial
from afterglow.sim.scenario_options import parse_option
from afterglow.sim.simulator import Outcome
from afterglow.sim.sweep import Point

SIZE = (6.0, 3.6)  # inches
LEGEND_LINE = 0.2
COLUMNS = ((22, 3), (36, 2))  # letters of the longest name in a legend of so many columns
STYLES = ("-", "--", ":")
MOST_POINTS = 1000  # of a distribution
MOST_TICKS = 10  # that are labelled as they were written
WIDE = 20  # times the smallest value: then the axis is logarithmic
GIB = 2**30

# File, axis, what to divide by, and the figures in it: label -> where it is found.
PICTURES: tuple[tuple[str, str, float, dict[str, tuple[str, ...]]], ...] = (
    ("hit_rate", "share of tokens", 1, {"history cached": ("hit_rate",), "all prompts cached": ("cached_of_prompts",)}),
    ("ttft", "time to first token (s)", 1, {"mean": ("ttft_mean",), "p50": ("ttft_p50",), "p99": ("ttft_p99",)}),
    ("throughput", "prompt tokens/s of prefill time", 1, {"prefill": ("prefill_throughput",)}),
    ("cost", "dollars", 1, {"total": ("cost", "dollars"), "storage": ("cost", "storage")}),
    ("network", "GiB", GIB, {"read": ("cluster", "network_in_bytes"), "written": ("cluster", "network_out_bytes")}),
)


def check_plots(folder: Path) -> None:
    """Check that pictures can be drawn, before anything is simulated. Raises: ConfigError."""
    try:
        import_module("matplotlib.figure")
    except ImportError:
        raise ConfigError("--plot needs matplotlib; pip install matplotlib brings it") from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--plot {folder}: {error.strerror}") from None


def draw_run(folder: Path, outcome: Outcome | None) -> list[Path]:
    """Draw one simulation: the distribution of times to the first token, and the sources of tokens."""
    if outcome is None or not outcome.turns:
        return []
    figure, axes = _blank("time to first token (s)", "share of turns")
    for values, label in ((outcome.ttft, "from arrival"), (_service(outcome), "from admission")):
        axes.plot(*distribution(values), label=label)
    _logarithmic(axes)
    axes.legend()
    paths = [_save(figure, folder / "ttft.svg")]
    figure, axes = _blank("", "prompt tokens")
    cached = {tier: sum(getattr(outcome, tier)) for tier in ("device", "host", "disk")}
    axes.bar([*cached, "computed"], [*cached.values(), outcome.computed_tokens])
    return [*paths, _save(figure, folder / "tiers.svg")]


def draw_sweep(folder: Path, done: Sequence[tuple[Point, dict[str, Any]]]) -> list[Path]:
    """Draw a picture for each kind of figure, over the first sweep; further sweeps become lines."""
    first = done[0][0].first
    swept = first[0]
    groups: dict[str, list[tuple[Point, dict[str, Any]]]] = {}
    for point, found in done:
        rest = [f"{name} {value}" for name, value in point.written.items() if name not in first]
        groups.setdefault(", ".join(rest).replace("_", " "), []).append((point, found))
    ticks = {_place(swept, point.written[swept]): point.written[swept] for point, _ in done}
    paths = []
    for name, axis, unit, series in PICTURES:
        figure, axes = _blank(swept.replace("_", " "), axis)
        drawn = False
        for colour, (group, members) in enumerate(groups.items()):
            for style, (label, path) in zip(STYLES, series.items(), strict=False):
                values = [(_place(swept, point.written[swept]), _at(found, path)) for point, found in members]
                known = [(place, value / unit) for place, value in values if value is not None]
                if known:
                    name_of_line = f"{label}, {group}" if group else label
                    look = {"marker": "o", "color": f"C{colour % 10}", "linestyle": style}
                    axes.plot(*zip(*known, strict=True), label=name_of_line, **look)
                    drawn = True
        if drawn:
            _place_ticks(axes, ticks)
            labels = [line.get_label() for line in axes.get_lines()]
            longest = max(map(len, labels))
            fits = next((most for letters, most in COLUMNS if longest < letters), 1)
            columns = min(fits, len(groups) if len(groups) > 1 else len(labels))  # a column for each group
            figure.set_figheight(SIZE[1] + LEGEND_LINE * ceil(len(labels) / columns))
            figure.legend(loc="outside lower center", ncols=columns, fontsize="small")
            paths.append(_save(figure, folder / f"{name}.svg"))
    return paths


def _place_ticks(axes: Any, ticks: dict[float | str, str]) -> None:
    """Label values as they were written. Values far apart get a logarithmic axis, with a place for 0."""
    numbers = sorted(place for place in ticks if isinstance(place, float))
    if len(numbers) < len(ticks):
        return  # names
    positive = [number for number in numbers if number > 0]
    if len(positive) > 1 and numbers[0] >= 0 and positive[-1] > WIDE * positive[0]:
        if numbers[0] > 0:
            axes.set_xscale("log")
        else:
            axes.set_xscale("symlog", linthresh=positive[0], linscale=0.5)
        axes.minorticks_off()
    if len(numbers) <= MOST_TICKS:
        axes.set_xticks(numbers, [ticks[number] for number in numbers])


def draw_plan(folder: Path, trials: Sequence[SizeTrial], best: SizeTrial | None) -> list[Path]:
    """Draw the simulations of a search: dollars per hour against the hit rate and the time to the first token."""
    paths = []
    for name, axis in (("hit_rate", "hit rate"), ("ttft", "time to first token (s)")):
        figure, axes = _blank("dollars per hour", axis)
        for met, colour in ((True, "tab:green"), (False, "tab:red")):
            some = [trial for trial in trials if trial.met is met]
            label = "meets the goal" if met else "does not"
            axes.scatter([t.hourly.total for t in some], [getattr(t, name) for t in some], color=colour, label=label)
        if best is not None:
            # The ring tells it from others as dear, which lie next to it or on top.
            at = (best.hourly.total, getattr(best, name))
            axes.scatter(*at, s=120, facecolors="none", edgecolors="black", label="cheapest")
        _logarithmic(axes)
        axes.margins(0.08)
        axes.legend(loc="best", fontsize="small")
        paths.append(_save(figure, folder / f"plan_{name}.svg"))
    return paths


def _logarithmic(axes: Any) -> None:
    """Make an axis logarithmic, with labels that are plain numbers and do not touch."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_xscale("log")
    low, high = axes.get_xlim()
    steps = (1.0, 2.0, 5.0) if high < 100 * low else (1.0,)
    axes.xaxis.set_major_locator(LogLocator(subs=steps, numticks=20))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def distribution(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return some of the values in order, the largest among them, and which part of all is no larger than each."""
    last = len(values) - 1
    places = [*range(0, last, max(1, len(values) // MOST_POINTS)), last]
    ordered = sorted(values)
    return [ordered[place] for place in places], [(place + 1) / len(ordered) for place in places]


def _service(outcome: Outcome) -> list[float]:
    return [first - waited for first, waited in zip(outcome.ttft, outcome.waited, strict=True)]


def _at(figures: dict[str, Any], path: tuple[str, ...]) -> float | None:
    value: Any = figures
    for name in path:
        value = value.get(name) if value is not None else None
    return None if value is None else float(value)


def _place(option: str, text: str) -> float | str:
    """Return the place of a value on its axis."""
    value = parse_option(option, text)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else text


def _blank(x: str, y: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    return figure, axes


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path)
    return path
