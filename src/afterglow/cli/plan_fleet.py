"""`afterglow plan --engines`: several engines behind a router."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from afterglow.cli import simulation_report as fig
from afterglow.cli.command_options import ReportOptions
from afterglow.cli.progress import progress
from afterglow.cli.terminal_tables import lines, table
from afterglow.config import format_size
from afterglow.errors import ConfigError
from afterglow.sim.capacity.fleet import FleetSearch, FleetTrial
from afterglow.sim.machine.catalogue import hardware, model
from afterglow.sim.scenario_options import GoalConfig, Scenario

PARTS = 1000  # of a simulation, for the progress bar
USUAL = 16  # simulations of one number of engines, about
HEADS = (
    "engines",
    "shared store",
    "devices",
    "host memory",
    "disk",
    "hit rate",
    "TTFT mean",
    "p99",
    "all per hour",
    "goal",
)


def plan_fleet(scenario: Scenario, goal: GoalConfig, report: ReportOptions) -> int:
    """Search, print the result, and return the exit code. Raises: ConfigError, ModelError."""
    if report.plot is not None:
        raise ConfigError("--plot draws plans of one engine: leave out --engines or --plot")
    fig.check_writable(report.json)
    search = FleetSearch(scenario, goal)
    try:
        with progress() as bar:

            def tell(search: FleetSearch, part: float) -> None:
                expected = USUAL * (len(search.trials) + 1)
                bar("simulating", int(PARTS * (search.made + part)), PARTS * max(expected, search.made + 1))

            search.run(tell)
    finally:
        if report.json != "-" and search.trials:
            _show(search)
        if report.json is not None:
            fig.write_json(report.json, _packed(search))
    return 0


def _show(search: FleetSearch) -> None:
    best, wanted = search.best, search.scenario
    print(
        f"{model(wanted.engine.model).name} on {hardware(wanted.engine.hardware).name}, {wanted.workload}, router: {wanted.cluster.router}"
    )
    if best is not None and best.best is not None:
        each = best.best
        store = f", and a shared store of {format_size(best.shared_tier)}" if best.shared_tier else ""
        print()
        lines(
            [
                (
                    "cheapest",
                    f"{best.engines} engine{'s' * (best.engines > 1)} with {each.devices} device{'s' * (each.devices > 1)}, "
                    f"{format_size(each.dram)} of host memory and {format_size(each.disk)} of disk each{store}",
                ),
                ("  hit rate", fig.percent(each.hit_rate)),
                ("  per hour", fig.dollars(best.hourly)),
            ]
        )
    print("\nthe cheapest of each number of engines:")
    table(HEADS, [_row(trial, trial is best) for trial in search.trials], numbers=True)
    if best is not None:  # otherwise the error says it
        for trial in search.trials:
            if trial.best is None:
                print(f"{trial.name}: {trial.why}")


def _row(trial: FleetTrial, best: bool) -> tuple[str, ...]:
    store = format_size(trial.shared_tier) if trial.shared_tier else "-"
    found = trial.best
    if found is None:
        return (str(trial.engines), store, *["-"] * 7, "missed")
    return (
        str(trial.engines), store, str(found.devices), format_size(found.dram), format_size(found.disk), fig.percent(found.hit_rate),
        fig.seconds(found.figures["ttft_mean"]), fig.seconds(found.figures["ttft_p99"]), fig.dollars(trial.hourly),
        "met, cheapest" if best else "met",
    )  # fmt: skip


def _packed(search: FleetSearch) -> dict[str, Any]:
    best = search.best
    return {
        "workload": search.scenario.workload,
        "options": fig.options_of(search.scenario),
        "goal": asdict(search.goal),
        "met": best is not None,
        "best": _trial(best) if best is not None else None,
        "trials": [_trial(trial) for trial in search.trials],
    }


def _trial(trial: FleetTrial) -> dict[str, Any]:
    return asdict(trial) | {"dollars_per_hour": trial.hourly if trial.best is not None else None}
