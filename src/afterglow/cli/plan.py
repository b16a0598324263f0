"""`afterglow plan`: one engine, or several behind a router (`--engines`)."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from afterglow.cli import simulation_report as fig
from afterglow.cli.command_options import ReportOptions
from afterglow.cli.plots import check_plots, draw_plan
from afterglow.cli.terminal import progress
from afterglow.cli.terminal_tables import lines, table
from afterglow.config import format_size
from afterglow.errors import ConfigError
from afterglow.sim.capacity.census import WorkingSet
from afterglow.sim.capacity.fleet import FleetSearch, FleetTrial
from afterglow.sim.capacity.search import Search, SizeTrial
from afterglow.sim.machine.catalogue import hardware, model
from afterglow.sim.scenario_options import GoalConfig, Scenario

INTERRUPTED = 130
PARTS = 1000  # of a simulation, for the progress bar
USUAL = 16  # simulations of a search for one number of engines, about


def plan(scenario: Scenario, goal: GoalConfig, report: ReportOptions) -> int:
    """Search, print the result and the reasons for it, and return the exit code. Raises: ConfigError, ModelError."""
    json, plot = report.json, report.plot
    fig.check_writable(json)
    if plot is not None:
        check_plots(plot)
    search = Search(scenario, goal)
    failed: ConfigError | None = None
    stopped = False
    try:
        with progress() as bar:

            def tell(search: Search, part: float) -> None:
                made = len(search.trials)
                bar("simulating", int(PARTS * (made + part)), PARTS * max(USUAL, made + 1))

            search.run(tell)
    except KeyboardInterrupt:
        stopped = True
    except ConfigError as error:
        if not search.trials:
            raise
        failed = error
    if json != "-":
        _show(search)
    if json is not None:
        fig.write_json(json, _packed(search, complete=not stopped))
    if plot is not None and search.trials:
        paths = draw_plan(plot, search.trials, search.best)
        print("drawn: " + ", ".join(map(str, paths)), file=sys.stderr)
    if failed is not None:
        raise failed
    if stopped:
        print(f"interrupted after {len(search.trials)} simulations: the search is not over", file=sys.stderr)
    return INTERRUPTED if stopped else 0


def _show(search: Search) -> None:
    best, found = search.best, search.working_set
    engine = search.scenario.engine
    print(
        f"{model(engine.model).name} on {hardware(engine.hardware).name}, {search.scenario.workload}: {search.wanted()}"
    )
    rows: list[tuple[str, str]] = []
    if found is not None:
        rows += _needs(found)
    if best is not None:
        rows += _answer(best, found)
    if rows:
        print()
        lines(rows)
    if search.trials:
        print("\nsimulated:")
        table(HEADS, [_row(trial, trial is best) for trial in sorted(search.trials, key=_order)], numbers=True)


def _needs(found: WorkingSet) -> list[tuple[str, str]]:
    unit = fig.seconds(found.unit)
    return [
        (
            "working set",
            f"{format_size(found.bytes)} of distinct KV in the busiest {unit}, of {found.sessions} conversations",
        ),
        (
            "CCpUT",
            f"{format_size(found.most_bytes)}, the most that so many can need: {found.sessions} times "
            f"{found.window} tokens of {format_size(found.row_bytes)}",
        ),
    ]


def _answer(best: SizeTrial, found: WorkingSet | None) -> list[tuple[str, str]]:
    capacity = best.dram + best.disk
    ratio = f", {capacity / found.most_bytes:.2f} of CCpUT" if found is not None and found.most_bytes else ""
    cost = best.figures["cost"]
    share = best.hourly.storage / best.hourly.total if best.hourly.total else 0.0
    return [
        ("RCC", f"{format_size(capacity)} of host memory and disk{ratio}"),
        (
            "cheapest",
            f"{best.devices} device{'s' * (best.devices > 1)}, {format_size(best.dram)} of host memory, "
            f"{format_size(best.disk)} of disk",
        ),
        ("  hit rate", f"{fig.percent(best.hit_rate)} (device {fig.percent(best.figures['from_device'])} of the cached tokens, "
         f"host {fig.percent(best.figures['from_host'])}, disk {fig.percent(best.figures['from_disk'])})"),
        ("  TTFT", f"mean {fig.seconds(best.figures['ttft_mean'])}, p50 {fig.seconds(best.figures['ttft_p50'])}, "
         f"p99 {fig.seconds(best.figures['ttft_p99'])}"),
        (
            "  per hour",
            f"{fig.dollars(best.hourly.total)}: devices {fig.dollars(best.hourly.devices)}, storage "
            f"{fig.dollars(best.hourly.storage)} ({fig.percent(share)}; prices: {cost['prices']})",
        ),
        ("  this workload", f"{fig.dollars(cost['dollars'])} for {fig.seconds(best.figures['device_seconds'])} of device time"),
    ]  # fmt: skip


HEADS = ("devices", "host memory", "disk", "hit rate", "TTFT mean", "p50", "p99", "per hour", "goal")


def _row(trial: SizeTrial, best: bool) -> tuple[str, ...]:
    f = trial.figures
    said = "met, cheapest" if best else "met" if trial.met else "missed"
    times = (fig.seconds(f["ttft_mean"]), fig.seconds(f["ttft_p50"]), fig.seconds(f["ttft_p99"]))
    tiers = (str(trial.devices), format_size(trial.dram), format_size(trial.disk))
    return (*tiers, fig.percent(trial.hit_rate), *times, fig.dollars(trial.hourly.total), said)


def _order(trial: SizeTrial) -> tuple[int, int, int]:
    return trial.devices, trial.dram, trial.disk


def _packed(search: Search, complete: bool) -> dict[str, Any]:
    found, best = search.working_set, search.best
    needs = None
    if found is not None:
        needs = asdict(found) | {
            "bytes": found.bytes,
            "ccpus_bytes": found.session_bytes,
            "ccput_bytes": found.most_bytes,
        }
    return {
        "workload": search.scenario.workload,
        "options": fig.options_of(search.scenario),
        "goal": asdict(search.goal),
        "complete": complete,
        "met": best is not None,
        "working_set": needs,
        "best": _trial(best) if best is not None else None,
        "rcc_over_ccput": (best.dram + best.disk) / found.most_bytes if best and found and found.most_bytes else None,
        "trials": [_trial(trial) for trial in search.trials],
    }


def _trial(trial: SizeTrial) -> dict[str, Any]:
    packed = asdict(trial)
    packed["hourly"]["total"] = trial.hourly.total
    return packed


FLEET_HEADS = ("engines", "shared store", *HEADS[:5], "p99", "all per hour", "goal")


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
            _show_fleet(search)
        if report.json is not None:
            fig.write_json(report.json, _packed_fleet(search))
    return 0


def _show_fleet(search: FleetSearch) -> None:
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
    table(FLEET_HEADS, [_fleet_row(trial, trial is best) for trial in search.trials], numbers=True)
    if best is not None:  # otherwise the error says it
        for trial in search.trials:
            if trial.best is None:
                print(f"{trial.name}: {trial.why}")


def _fleet_row(trial: FleetTrial, best: bool) -> tuple[str, ...]:
    store = format_size(trial.shared_tier) if trial.shared_tier else "-"
    found = trial.best
    if found is None:
        return (str(trial.engines), store, *["-"] * 7, "missed")
    return (
        str(trial.engines), store, str(found.devices), format_size(found.dram), format_size(found.disk), fig.percent(found.hit_rate),
        fig.seconds(found.figures["ttft_mean"]), fig.seconds(found.figures["ttft_p99"]), fig.dollars(trial.hourly),
        "met, cheapest" if best else "met",
    )  # fmt: skip


def _packed_fleet(search: FleetSearch) -> dict[str, Any]:
    best = search.best
    return {
        "workload": search.scenario.workload,
        "options": fig.options_of(search.scenario),
        "goal": asdict(search.goal),
        "met": best is not None,
        "best": _fleet_trial(best) if best is not None else None,
        "trials": [_fleet_trial(trial) for trial in search.trials],
    }


def _fleet_trial(trial: FleetTrial) -> dict[str, Any]:
    return asdict(trial) | {"dollars_per_hour": trial.hourly if trial.best is not None else None}
