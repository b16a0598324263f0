"""Pictures of simulations. matplotlib is wanted only when something is to be drawn."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from math import ceil
from pathlib import Path
from typing import Any

from afterglow.errors import ConfigError
from afterglow.sim.capacity import Trial
from afterglow.sim.options import parse_option
from afterglow.sim.simulator import Outcome
from afterglow.sim.sweep import Point

SIZE = (6.0, 3.6)  # inches
LEGEND_LINE = 0.2
WIDEST = 36  # letters of a name in a legend of two columns
STYLES = ("-", "--", ":")
MOST_POINTS = 1000  # of a distribution
WIDE = 20  # times the smallest value: then the axis is logarithmic

# File, axis, and the figures in it: label -> where it is found.
PICTURES: tuple[tuple[str, str, dict[str, tuple[str, ...]]], ...] = (
    ("hit_rate", "share of tokens", {"history cached": ("hit_rate",), "all prompts cached": ("cached_of_prompts",)}),
    ("ttft", "time to first token (s)", {"mean": ("ttft_mean",), "p50": ("ttft_p50",), "p99": ("ttft_p99",)}),
    ("throughput", "prompt tokens/s of prefill time", {"prefill": ("prefill_throughput",)}),
    ("cost", "dollars", {"total": ("cost", "dollars"), "storage": ("cost", "storage")}),
    ("network", "bytes", {"read": ("cluster", "network_in_bytes"), "written": ("cluster", "network_out_bytes")}),
)


def check_plots(folder: Path) -> None:
    """Before anything is simulated. Errors: ConfigError."""
    try:
        import_module("matplotlib.figure")
    except ImportError:
        raise ConfigError("--plot needs matplotlib; pip install 'afterglow[plots]' brings it") from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--plot {folder}: {error.strerror}") from None


def draw_run(folder: Path, outcome: Outcome | None) -> list[Path]:
    """One simulation: the distribution of times to the first token, and where tokens came from."""
    if outcome is None or not outcome.turns:
        return []
    figure, axes = _blank("time to first token (s)", "share of turns")
    every = max(1, len(outcome.ttft) // MOST_POINTS)
    for values, label in ((outcome.ttft, "from arrival"), (_service(outcome), "from admission")):
        ordered = sorted(values)[::every]
        axes.plot(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], label=label)
    axes.set_xscale("log")
    axes.legend()
    paths = [_save(figure, folder / "ttft.svg")]
    figure, axes = _blank("", "prompt tokens")
    cached = {tier: sum(getattr(outcome, tier)) for tier in ("device", "host", "disk")}
    axes.bar([*cached, "computed"], [*cached.values(), outcome.computed_tokens])
    return [*paths, _save(figure, folder / "tiers.svg")]


def draw_sweep(folder: Path, done: Sequence[tuple[Point, dict[str, Any]]]) -> list[Path]:
    """A picture for each kind of figure, over the first sweep; the other ones make lines of their own."""
    first = done[0][0].first
    swept = first[0]
    groups: dict[str, list[tuple[Point, dict[str, Any]]]] = {}
    for point, found in done:
        rest = [f"{name} {value}" for name, value in point.written.items() if name not in first]
        groups.setdefault(", ".join(rest).replace("_", " "), []).append((point, found))
    places = [_place(swept, point.written[swept]) for point, _ in done]
    numbers = [place for place in places if isinstance(place, float) and place > 0]
    wide = len(numbers) == len(places) and max(numbers) > WIDE * min(numbers)
    paths = []
    for name, axis, series in PICTURES:
        figure, axes = _blank(swept.replace("_", " "), axis)
        drawn = False
        for colour, (group, members) in enumerate(groups.items()):
            for style, (label, path) in zip(STYLES, series.items(), strict=False):
                values = [(_place(swept, point.written[swept]), _at(found, path)) for point, found in members]
                known = [(place, value) for place, value in values if value is not None]
                if known:
                    name_of_line = f"{label}, {group}" if group else label
                    look = {"marker": "o", "color": f"C{colour % 10}", "linestyle": style}
                    axes.plot(*zip(*known, strict=True), label=name_of_line, **look)
                    drawn = True
        if drawn:
            axes.set_xscale("log" if wide else axes.get_xscale())
            labels = [line.get_label() for line in axes.get_lines()]
            columns = 2 if max(map(len, labels)) < WIDEST else 1
            figure.set_figheight(SIZE[1] + LEGEND_LINE * ceil(len(labels) / columns))
            figure.legend(loc="outside lower center", ncols=columns, fontsize="small")
            paths.append(_save(figure, folder / f"{name}.svg"))
    return paths


def draw_plan(folder: Path, trials: Sequence[Trial], best: Trial | None) -> list[Path]:
    """What was searched: dollars per hour against the hit rate and the time to the first token."""
    paths = []
    for name, axis in (("hit_rate", "hit rate"), ("ttft", "time to first token (s)")):
        figure, axes = _blank("dollars per hour", axis)
        for met, colour in ((True, "tab:green"), (False, "tab:red")):
            some = [trial for trial in trials if trial.met is met]
            label = "meets the goal" if met else "does not"
            axes.scatter([t.hourly.total for t in some], [getattr(t, name) for t in some], color=colour, label=label)
        if best is not None:
            axes.annotate("cheapest", (best.hourly.total, getattr(best, name)))
        axes.legend()
        paths.append(_save(figure, folder / f"plan_{name}.svg"))
    return paths


def _service(outcome: Outcome) -> list[float]:
    return [first - waited for first, waited in zip(outcome.ttft, outcome.waited, strict=True)]


def _at(figures: dict[str, Any], path: tuple[str, ...]) -> float | None:
    value: Any = figures
    for name in path:
        value = value.get(name) if value is not None else None
    return None if value is None else float(value)


def _place(option: str, text: str) -> float | str:
    """Where a value lies on its axis."""
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
