"""The simulator's figures: words and numbers for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from afterglow.config import format_size
from afterglow.errors import ConfigError
from afterglow.sim.scenario_options import Scenario

Figures = dict[str, Any]


def seconds(value: float) -> str:
    """Write a duration: `0.0357` -> `35.7 ms`."""
    if value < 1e-6:
        return "0 s"
    # What would be rounded to 1,000 ms is a second.
    if value < 0.9995:
        return f"{value * 1e3:.3g} ms"
    if value < 120:
        return f"{value:.3g} s"
    return f"{value / 60:.1f} min" if value < 7200 else f"{value / 3600:.2f} h"


def percent(value: float) -> str:
    """Write a share: `0.5` -> `50.0 %`."""
    return f"{value:.1%}".replace("%", " %")


def dollars(value: float) -> str:
    """Write a sum: `1234.5` -> `$1,234.50`."""
    return f"${value:,.2f}" if value >= 0.1 else f"${value:.3g}"


def number(value: float) -> str:
    """Write a number: `1234.5` -> `1,234`."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# What a sweep's table has for each point: heading, and how to write it.
COLUMNS: tuple[tuple[str, Callable[[Figures], str]], ...] = (
    ("hit rate", lambda f: percent(f["hit_rate"]) if f["history_tokens"] else "-"),
    ("of prompts", lambda f: percent(f["cached_of_prompts"])),
    ("host", lambda f: percent(f["from_host"])),
    ("disk", lambda f: percent(f["from_disk"])),
    ("TTFT mean", lambda f: seconds(f["ttft_mean"])),
    ("p50", lambda f: seconds(f["ttft_p50"])),
    ("p99", lambda f: seconds(f["ttft_p99"])),
    ("admitted", lambda f: seconds(f["service_mean"])),
    ("prefill tok/s", lambda f: number(f["prefill_throughput"])),
    ("device time", lambda f: seconds(f["device_seconds"])),
    ("queue", lambda f: number(f["mean_queue"])),
    ("cut", lambda f: percent(f["cut_of_prompts"])),
    ("cost", lambda f: dollars(f["cost"]["dollars"]) if f["cost"] else "-"),
)


def overview(figures: Figures) -> list[tuple[str, str]]:
    """List the lines of one simulation."""
    f = figures
    refused = f", {number(f['refused'])} refused" if f["refused"] else ""
    rows = [
        ("turns", f"{number(f['turns'])} in {seconds(f['simulated_seconds'])}{refused}"),
        ("hit rate", f"{_history(f)}{percent(f['cached_of_prompts'])} of all prompt tokens"),
        ("  by tier", _tiers(f)),
        ("TTFT", f"mean {seconds(f['ttft_mean'])}, p50 {seconds(f['ttft_p50'])}, p99 {seconds(f['ttft_p99'])}"),
        ("  from admission on", f"mean {seconds(f['service_mean'])}"),
        ("prefill throughput", f"{number(f['prefill_throughput'])} tokens/s, history included"),
        ("device time", _device_time(f)),
        ("queue", f"{number(f['mean_queue'])} turns wait, in the mean"),
        ("bytes moved", ", ".join(f"{format_size(size)} {link}" for link, size in f["bytes_moved"].items())),
        ("cost", _cost(f)),
    ]
    if f["cut_turns"] or f["refused"]:
        rows.insert(1, ("window", cut_by_window(f)))
    if f["shortened_turns"]:
        most = f"{number(f['window'] // 2)} tokens, half of the window"
        text = f"{number(f['shortened_turns'])} turns: their questions or replies end at {most} (--window N changes it)"
        rows.insert(1, ("shortened", text))
    if "cluster" in f:
        rows.append(("engines", _cluster(f["cluster"])))
    if "bad_lines" in f:
        bad = f["bad_lines"]
        rows.append(("left out", f"{bad['skipped']} bad line{'s' * (bad['skipped'] > 1)}; the first: {bad['first']}"))
    return rows


def cut_by_window(f: Figures) -> str:
    """Say how much of the workload did not fit the window: hit rates are of the rest."""
    return (
        f"{number(f['window'])} tokens: {number(f['cut_turns'])} of {number(f['turns'])} turns did not fit and were cut, "
        f"{number(f['cut_tokens'])} tokens ({percent(f['cut_of_prompts'])} of all prompt tokens), "
        f"and {number(f['refused'])} were refused; all figures are of the rest (--window N changes it)"
    )


def _history(f: Figures) -> str:
    """Write the hit rate of conversations' history, if any turn has history."""
    return f"{percent(f['hit_rate'])} of conversations' history, " if f["history_tokens"] else ""


def _tiers(f: Figures) -> str:
    if not f["cached_of_prompts"]:
        return "nothing was cached"
    return f"device {percent(f['from_device'])}, host {percent(f['from_host'])}, disk {percent(f['from_disk'])}"


def _device_time(f: Figures) -> str:
    return (
        f"{seconds(f['device_seconds'])}: prefill {seconds(f['prefill_seconds'])} (stalled "
        f"{seconds(f['stalled_seconds'])}), decode {seconds(f['decode_seconds'])}"
    )


def _cost(f: Figures) -> str:
    cost = f["cost"]
    if not cost:
        return "not known for this device: give --prices a TOML file with dram_gb_hour, ssd_gb_hour and [devices]"
    share = cost["storage"] / cost["dollars"] if cost["dollars"] else 0.0
    return (
        f"{dollars(cost['dollars'])} for the device time: devices {dollars(cost['devices'])}, storage "
        f"{dollars(cost['storage'])} ({percent(share)}); {dollars(cost['dollars_per_hour'])} per hour "
        f"(prices: {cost['prices']})"
    )


def _cluster(c: Figures) -> str:
    text = (
        f"{c['engines']}, router {c['router']}: {number(c['moved_turns'])} turns came to another engine than the one "
        f"before, the busiest engine computed {c['busiest_over_mean']:.2f} times the mean"
    )
    if c["network_out_bytes"]:
        text += (
            f"; shared store {format_size(c['shared_bytes'])}, {format_size(c['network_out_bytes'])} written and "
            f"{format_size(c['network_in_bytes'])} read over the network"
        )
    return text


def options_of(scenario: Scenario) -> dict[str, Any]:
    """Return all options of a scenario, for JSON."""
    parts = (scenario.source, scenario.engine, scenario.tiers, scenario.cluster)
    return {
        name: str(value) if isinstance(value, Path) else value for part in parts for name, value in asdict(part).items()
    }


def check_writable(path: str | None) -> None:
    """Check the place of a JSON file before hours are spent. Raises: ConfigError."""
    if path is None or path == "-":
        return
    if Path(path).is_dir():
        raise ConfigError(f"--json {path} is a folder; give the name of a file in it")
    if not Path(path).parent.is_dir():
        raise ConfigError(f"--json {path}: there is no folder {Path(path).parent}")


def write_json(path: str, value: object) -> None:
    """Write a value to a file, or to standard output (`-`). Raises: ConfigError."""
    text = json.dumps(value, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
