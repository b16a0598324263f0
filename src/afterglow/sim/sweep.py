"""Sweeps: `disk=1T,2T,10T`; several make a grid; options that change together: `engines,rate=1:0.1,10:1`."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from afterglow.errors import ConfigError
from afterglow.sim.capacity.bill import comparable
from afterglow.sim.nearest import unknown
from afterglow.sim.scenario_options import Scenario, option_kinds, parse_option

MAX_POINTS = 10_000


class Point(NamedTuple):
    """One simulation of a sweep: option -> value, how they were written, and which options the first sweep changes."""

    values: dict[str, Any]
    written: dict[str, str]
    first: tuple[str, ...] = ()


def points(sweeps: list[str]) -> list[Point]:
    """List all combinations, the last sweep's values next to each other; one point without options if there are no sweeps.
    Raises: ConfigError."""
    found = [Point({}, {})]
    for axis in map(_axis, sweeps):
        if len(found) * len(axis) > MAX_POINTS:
            raise ConfigError(f"the sweeps make more than {MAX_POINTS} simulations")
        if twice := [name for name in axis[0].values if name in found[0].values]:
            raise ConfigError(f"--sweep {twice[0]} is given twice")
        found = [Point(a.values | b.values, a.written | b.written, a.first or b.first) for a, b in product(found, axis)]
    return found


def checked(scenario: Scenario, all_points: list[Point]) -> list[Scenario]:
    """Check all scenarios before the first one is simulated: where prices are known, their costs must be comparable, and
    measured times are those of one machine. Raises: ConfigError."""
    found = [scenario.with_values(**point.values) for point in all_points]
    machines: dict[Path, Scenario] = {}
    for each in found:
        if (file := each.engine.calibration) is None:
            continue
        machine = machines.setdefault(file, each)
        for name in ("hardware", "devices"):
            if each.value(name) != machine.value(name):
                raise ConfigError(
                    f"--sweep {name}: all times come from --calibration {file}, whatever the {name}; leave --calibration "
                    f"out, or sweep files together with it: calibration,{name}=FILE:{machine.value(name)},..."
                )
    return comparable(found)


def _axis(text: str) -> list[Point]:
    names_text, equals, values_text = text.partition("=")
    names = [name.strip().removeprefix("--").replace("-", "_") for name in names_text.split(",")]
    if not equals or not values_text:
        raise ConfigError(f"--sweep {text!r}: write an option and its values, such as disk=1T,2T,10T")
    known = option_kinds()
    for name in names:
        if name not in known:
            raise unknown("option to sweep", name.replace("_", "-"), [n.replace("_", "-") for n in known])
    found = []
    for value in values_text.split(","):
        parts = value.strip().split(":") if len(names) > 1 else [value.strip()]
        if len(parts) != len(names):
            raise ConfigError(f"--sweep {text!r}: {value!r} should be {len(names)} values, with a colon between them")
        written = dict(zip(names, parts, strict=True))
        found.append(Point({name: parse_option(name, part) for name, part in written.items()}, written, tuple(names)))
    return found
