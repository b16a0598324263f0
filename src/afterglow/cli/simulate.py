"""`afterglow simulate`."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from afterglow.cli import simulation_report as fig
from afterglow.cli.command_options import ReportOptions
from afterglow.cli.option_sources import Given
from afterglow.cli.plots import check_plots, draw_run, draw_sweep
from afterglow.cli.terminal import Report, progress
from afterglow.cli.terminal_tables import lines, table
from afterglow.config import format_size
from afterglow.errors import ConfigError
from afterglow.sim.machine.catalogue import hardware, model
from afterglow.sim.operators.operator_tables import OperatorOptions, run
from afterglow.sim.scenario import GB, Running, check_useful, setup_of
from afterglow.sim.scenario_options import EngineModel, Scenario, TierConfig, flag
from afterglow.sim.sweep import Point, checked, points

INTERRUPTED = 130
PARTS = 1000  # of a simulation, for the progress bar


def simulate(scenario: Scenario, sweeps: list[str], report: ReportOptions, typed: Collection[str] = ()) -> int:
    """Simulate a scenario, or each point of the sweeps, and return the exit code. `typed`: options of the command line,
    which have to be of use. Raises: ConfigError, ModelError."""
    json, plot = report.json, report.plot
    fig.check_writable(json)
    if plot is not None:
        check_plots(plot)
    all_points = points(sweeps)
    scenarios = checked(scenario, all_points)
    check_useful(scenarios, {*typed, *all_points[0].values})
    for each in scenarios:  # an option that cannot be is said before the first one is simulated
        setup_of(each)
    done: list[tuple[Point, dict[str, Any]]] = []
    running: Running | None = None
    stopped = False
    failed: ConfigError | None = None
    try:
        with progress() as bar:
            for i, (point, each) in enumerate(zip(all_points, scenarios, strict=True)):
                running = Running(each)
                done.append((point, running.run(partial(_tell, bar, i, len(scenarios)))))
    except KeyboardInterrupt:
        stopped = True
        if running is not None and not running.complete:
            done.append((all_points[len(done)], running.figures()))
    except ConfigError as error:
        if not sweeps:
            raise
        written = all_points[len(done)].written.items()
        failed = ConfigError(f"at {', '.join(f'{flag(name)} {value}' for name, value in written)}: {error}")
        if not done:
            raise failed from None
    _show(scenario, done, bool(sweeps), quiet=json == "-")
    if stopped:
        part = done[-1][1]["fraction"] if done else 0.0
        print(
            f"interrupted: {len([f for _, f in done if f['complete']])} of {len(scenarios)} simulations are complete; "
            f"of the last one {fig.percent(part)} of the conversations had begun",
            file=sys.stderr,
        )
    if json is not None:
        fig.write_json(json, _packed(scenario, done))
    if plot is not None and done:
        paths = draw_sweep(plot, done) if sweeps else draw_run(plot, running.outcome if running is not None else None)
        print("drawn: " + ", ".join(map(str, paths)), file=sys.stderr)
    if failed is not None:
        raise failed
    return INTERRUPTED if stopped else 0


# What the models of single operators can be told, and what it is called there.
_OPERATORS_TAKE = {"model": "model", "hardware": "hardware", "devices": "devices", "seed": "seed"}
_OPERATORS_TAKE |= {"disk_bandwidth": "disk_read", "host_link": "host_link"}


def simulate_operator(
    name: str, prefix: Sequence[int], given: Given, engine: EngineModel, tiers: TierConfig, seed: int, json: str | None
) -> int:
    """Model one operator and return the exit code; options that were not given are its paper's. Raises: ConfigError."""
    strange = sorted(given.typed - {"operator", "prefix", "json"} - set(_OPERATORS_TAKE))
    if strange:
        what = "a workload" if strange[0] == "workload" else flag(strange[0])
        raise ConfigError(
            f"{what} means nothing to --operator; it takes {', '.join(map(flag, _OPERATORS_TAKE))}, --prefix"
        )
    values: dict[str, Any] = {
        "model": engine.model,
        "hardware": engine.hardware,
        "devices": tiers.devices,
        "seed": seed,
    }
    values["disk_bandwidth"] = engine.disk_bandwidth * GB
    values["host_link"] = engine.host_link * GB if engine.host_link is not None else None
    fig.check_writable(json)
    found = {_OPERATORS_TAKE[key]: value for key, value in values.items() if key in given.names}
    tables = run(name, OperatorOptions(prefix=tuple(prefix), **found))
    for each in tables if json != "-" else ():
        print(each.title)
        table(each.columns, [[str(cell) for cell in row] for row in each.rows], numbers=True)
        print(f"{each.note}\n")
    if json is not None:
        fig.write_json(json, {"operator": name, "tables": [each.as_json() for each in tables]})
    return 0


def _tell(report: Report, number: int, count: int, part: float) -> None:
    report("simulating", int(PARTS * (number + part)), PARTS * count)


def _show(scenario: Scenario, done: list[tuple[Point, dict[str, Any]]], swept: bool, quiet: bool) -> None:
    if quiet or not done:
        return
    tiers, engine = scenario.tiers, scenario.engine
    if not swept:
        print(
            f"{model(engine.model).name} on {tiers.devices} {hardware(engine.hardware).name}, {format_size(tiers.dram)} of host memory, "
            f"{format_size(tiers.disk)} of disk, {engine.policy}, {scenario.workload}"
        )
        lines(fig.overview(done[0][1]))
        return
    names = list(done[0][0].written)
    heads = [flag(name)[2:] for name in names] + [head for head, _ in fig.COLUMNS]
    lists = {found["cost"]["prices"] for _, found in done if found["cost"]}
    if len(lists) == 1:
        heads[-1] += f" ({lists.pop()})"
    clusters = any("cluster" in found for _, found in done)
    rows = []
    for point, found in done:
        row = [point.written[name] for name in names] + [write(found) for _, write in fig.COLUMNS]
        if len(lists) > 1 and found["cost"]:
            row[-1] += f" ({found['cost']['prices']})"
        if clusters:
            row.append(format_size(found["cluster"]["network_in_bytes"]) if "cluster" in found else "-")
        if not found["complete"]:
            row[0] += " (in part)"
        rows.append(row)
    table(heads + ["read over network"] * clusters, rows, numbers=True)


def _packed(scenario: Scenario, done: list[tuple[Point, dict[str, Any]]]) -> dict[str, Any]:
    return {
        "workload": scenario.workload,
        "options": fig.options_of(scenario),
        "points": [{"options": point.written, "figures": found} for point, found in done],
    }
