"""What a run costs: the papers' model (CachedAttention §4.2, spec A20), and what the same machine costs per hour."""

from __future__ import annotations

from dataclasses import dataclass

from afterglow.errors import ConfigError
from afterglow.sim.catalogue import Prices, prices
from afterglow.sim.nearest import find
from afterglow.sim.options import Scenario

DEFAULT = "cachedattention"


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
    """The prices that were asked for; the papers' where they have the device, None otherwise. Errors: ConfigError."""
    asked, hardware = scenario.engine.prices, scenario.engine.hardware
    if asked is not None:
        found = prices(asked)
        found.device_hour(hardware)
        return found
    default = prices(DEFAULT)
    return default if find(hardware, default.devices) else None


def needed_prices(scenario: Scenario) -> Prices:
    """The same where costs are compared. Errors: ConfigError, where there are none."""
    found = price_list(scenario)
    if found is None:
        raise ConfigError(
            f"what {scenario.engine.hardware} costs is not known, and the cheapest cannot be found without; give --prices"
        )
    return found


def hourly(scenario: Scenario, rates: Prices) -> Bill:
    """One engine with its share of a shared store, which counts as disk, per hour. Recomputing needs no storage."""
    tiers, cluster = scenario.tiers, scenario.cluster
    disk = tiers.disk + cluster.shared_tier / cluster.engines
    storage = rates.storage_hour(tiers.dram, disk) if scenario.engine.mode != "recompute" else 0.0
    return Bill(tiers.devices * rates.device_hour(scenario.engine.hardware), storage)


def charged(scenario: Scenario, rates: Prices, device_seconds: float) -> Bill:
    """As in the papers: devices and storage for as long as the devices compute (seconds of all engines together)."""
    return hourly(scenario, rates).times(device_seconds / 3600)
