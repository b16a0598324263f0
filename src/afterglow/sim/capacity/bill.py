"""What a run costs: the papers' model (CachedAttention §4.2), and what the same machine costs per hour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from afterglow.errors import ConfigError
from afterglow.sim.machine.catalogue import Prices, all_prices, hardware, prices
from afterglow.sim.nearest import find
from afterglow.sim.scenario_options import Scenario


@dataclass(frozen=True, slots=True)
class Bill:
    """Dollars: of devices, and of host memory and disk."""

    devices: float
    storage: float

    @property
    def total(self) -> float:
        return self.devices + self.storage

    def times(self, factor: float) -> Bill:
        return Bill(self.devices * factor, self.storage * factor)


def price_list(scenario: Scenario) -> Prices | None:
    """Choose the prices that were asked for; otherwise the first of the catalogue that have the device, which are the papers'
    where they do, and None if there are none. Raises: ConfigError."""
    asked, device = scenario.engine.prices, scenario.engine.hardware
    if asked is not None:
        found = prices(asked)
        found.device_hour(device)
        return found
    return next((each for each in all_prices().values() if find(device, each.devices)), None)


def comparable(scenarios: Sequence[Scenario]) -> list[Scenario]:
    """The same, with the first prices that have the devices of all, unless prices were asked for or one list serves all
    anyway: costs of several lists say nothing about the devices."""
    found = {each.name for scenario in scenarios if (each := price_list(scenario)) is not None}
    devices = {scenario.engine.hardware for scenario in scenarios}
    if len(found) < 2 or any(scenario.engine.prices is not None for scenario in scenarios):
        return list(scenarios)
    for each in all_prices().values():
        if all(find(device, each.devices) for device in devices):
            return [scenario.with_values(prices=each.name) for scenario in scenarios]
    return list(scenarios)


def needed_prices(scenario: Scenario) -> Prices:
    """Choose the prices where costs are compared. Raises: ConfigError, where there are none."""
    found = price_list(scenario)
    if found is None:
        raise ConfigError(f"the cheapest cannot be found: {unpriced(scenario.engine.hardware)}")
    return found


def unpriced(device: str) -> str:
    """Make the message that says which price is missing, and how to give it."""
    name = hardware(device).name
    return (
        f"what an hour of {name} costs is not known; give --prices a TOML file with dram_gb_hour, ssd_gb_hour and "
        f"[devices] {name} = dollars per hour"
    )


def hourly(scenario: Scenario, rates: Prices) -> Bill:
    """One engine with its share of a shared store, which counts as disk, per hour. Recomputing needs no storage."""
    tiers, cluster = scenario.tiers, scenario.cluster
    disk = tiers.disk + cluster.shared_tier / cluster.engines
    storage = rates.storage_hour(tiers.dram, disk) if scenario.engine.mode != "recompute" else 0.0
    return Bill(tiers.devices * rates.device_hour(scenario.engine.hardware), storage)


def charged(scenario: Scenario, rates: Prices, device_seconds: float) -> Bill:
    """As in the papers: devices and storage for as long as the devices compute (seconds of all engines together)."""
    return hourly(scenario, rates).times(device_seconds / 3600)
