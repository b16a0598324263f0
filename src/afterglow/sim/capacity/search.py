"""The cheapest engine that meets a goal: how many devices, how much host memory, how much disk.

More of anything costs more and, as good as always, serves no worse. So for each number of devices the least host memory
with which the goal can be met is found by bisection, then the least disk for it; then, as long as that may be cheaper,
more host memory with less disk. Each step is a whole simulation, so there are few: sizes are 1, 1.5, 2, 3, 4, 6,
8, ... GiB.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from afterglow.config import format_size
from afterglow.errors import ConfigError
from afterglow.sim.capacity.bill import Bill, hourly, needed_prices
from afterglow.sim.capacity.census import Census, WorkingSet
from afterglow.sim.machine.catalogue import hardware, model
from afterglow.sim.scenario import Running, fewest_devices
from afterglow.sim.scenario_options import GoalConfig, Scenario

GIB = 2**30
UNIT_S = 3600.0  # the unit time where there is no TTL (CachedAttention 4.3.6)
PADDING = 4  # short extents fill whole blocks, and contexts that were cut leave others behind
CONTEXTS = 2  # that host memory has to hold at least

Progress = Callable[["Search", float], object]


@dataclass(frozen=True, slots=True)
class SizeTrial:
    """One engine that was simulated. `hourly`: what it costs per hour."""

    devices: int
    dram: int
    disk: int
    hit_rate: float
    ttft: float
    met: bool
    hourly: Bill
    figures: dict[str, Any]


@dataclass
class Search:
    """A plan in the making: `trials` in the order in which they were simulated."""

    scenario: Scenario
    goal: GoalConfig
    trials: list[SizeTrial] = field(default_factory=list)
    working_set: WorkingSet | None = None
    best: SizeTrial | None = None

    def __post_init__(self) -> None:
        self._rates = needed_prices(self.scenario)
        self._known: dict[tuple[int, int, int], SizeTrial] = {}
        self._progress: Progress | None = None
        engine = self.scenario.engine
        self._shape, self._device = model(engine.model), hardware(engine.hardware)
        self._window = engine.window or self._shape.window
        self._row_bytes = self._shape.kv_bytes_per_token(engine.kv_dtype or engine.dtype)
        self._least = fewest_devices(self._shape, self._device, self._window, engine.dtype)
        if engine.calibration is None and self._least > self.goal.max_devices:
            raise ConfigError(
                f"{self._shape.name} does not fit: it takes {self._least} {self._device.name}, and --max-devices is "
                f"{self.goal.max_devices}"
            )
        self._smallest = CONTEXTS * self._window * self._row_bytes
        if self._smallest > self.goal.max_dram:
            raise ConfigError(
                f"--max-dram must be {format_size(self._smallest)} or more, which is {CONTEXTS} contexts of "
                f"{self._shape.name}"
            )

    def run(self, progress: Progress | None = None) -> SizeTrial:
        """Find the cheapest engine. `progress` is told how far the simulation under way is, 0 to 1. Raises: ConfigError, where the
        goal cannot be met; the message says how close it comes."""
        self._progress = progress
        # Measured times are those of one machine, whatever the number of devices.
        most = self.goal.max_devices if self.scenario.engine.calibration is None else self._least
        for count in device_counts(self._least, most):
            if self.best is not None and count * self._rates.device_hour(self._device.name) >= self.best.hourly.total:
                break
            self._with_devices(count)
        if self.best is None:
            raise ConfigError(self._how_far())
        return self.best

    def wanted(self) -> str:
        """The goal in words."""
        parts = []
        if self.goal.hit_rate is not None:
            parts.append(f"a hit rate of {100 * self.goal.hit_rate:.1f} %")
        if self.goal.ttft is not None:
            parts.append(f"a TTFT ({self.goal.ttft_of}) of {self.goal.ttft:g} s")
        return " and ".join(parts)

    def _with_devices(self, devices: int) -> None:
        """The cheapest with so many, if that is the cheapest of all so far."""
        most = self.goal.max_dram, self.goal.max_disk
        if not self._trial(devices, *most).met:
            return
        assert self.working_set is not None
        everything = self.working_set.all_rows * self._row_bytes * PADDING
        drams = sizes(self._smallest, everything, self.goal.max_dram)
        disks = [0, *sizes(GIB, everything, self.goal.max_disk)] if self.goal.max_disk else [0]
        if self.scenario.cluster.shared_tier:
            del disks[0]  # the shared store is read and written through it

        def met(dram: int, disk: int) -> bool:
            return self._trial(devices, drams[dram], disks[disk]).met

        dram = _first(0, len(drams) - 1, lambda i: met(i, len(disks) - 1))
        if dram is None:  # the working set said too little: what was tried first is enough
            drams = sizes(self._smallest, self.goal.max_dram, self.goal.max_dram)
            disks += [size for size in sizes(GIB, self.goal.max_disk, self.goal.max_disk) if size > disks[-1]]
            dram = _first(0, len(drams) - 1, lambda i: met(i, len(disks) - 1))
        assert dram is not None
        disk = _first(0, len(disks) - 1, lambda i: met(dram, i))
        assert disk is not None
        self._keep(self._trial(devices, drams[dram], disks[disk]))
        for more in range(dram + 1, len(drams)):
            cheaper = [i for i in range(disk) if self._cheaper(devices, drams[more], disks[i])]
            if not cheaper:
                break
            if (less := _first(0, cheaper[-1], lambda i, more=more: met(more, i))) is not None:  # type: ignore[misc]
                disk = less
                self._keep(self._trial(devices, drams[more], disks[disk]))

    def _cheaper(self, devices: int, dram: int, disk: int) -> bool:
        return self.best is None or self._hourly(devices, dram, disk).total < self.best.hourly.total

    def _keep(self, trial: SizeTrial) -> None:
        if self.best is None or trial.hourly.total < self.best.hourly.total:
            self.best = trial

    def _hourly(self, devices: int, dram: int, disk: int) -> Bill:
        return hourly(self.scenario.with_values(devices=devices, dram=dram, disk=disk), self._rates)

    def _trial(self, devices: int, dram: int, disk: int) -> SizeTrial:
        known = self._known.get((devices, dram, disk))
        if known is not None:
            return known
        scenario = self.scenario.with_values(devices=devices, dram=dram, disk=disk)
        running = Running(scenario)
        census = Census(scenario.engine.ttl or UNIT_S, self._window, self._row_bytes)
        if self.working_set is None:
            running.workload.watch = census.add
        tell = self._progress
        figures = running.run((lambda part: tell(self, part)) if tell is not None else None)
        if self.working_set is None:
            self.working_set = census.result()
        hits, ttft = hit_rate(figures), float(figures[f"ttft_{self.goal.ttft_of}"])
        met = (self.goal.hit_rate is None or hits >= self.goal.hit_rate) and (
            self.goal.ttft is None or ttft <= self.goal.ttft
        )
        trial = SizeTrial(devices, dram, disk, hits, ttft, met, self._hourly(devices, dram, disk), figures)
        self._known[devices, dram, disk] = trial
        self.trials.append(trial)
        return trial

    def _how_far(self) -> str:
        hits = max(self.trials, key=lambda trial: trial.hit_rate)
        quickest = min(self.trials, key=lambda trial: trial.ttft)
        reached = []
        if self.goal.hit_rate is not None:
            reached.append(f"the hit rate gets up to {100 * hits.hit_rate:.1f} % ({_sizes(hits)})")
        if self.goal.ttft is not None:
            reached.append(f"the TTFT ({self.goal.ttft_of}) down to {quickest.ttft:.3g} s ({_sizes(quickest)})")
        return f"{self.wanted()} cannot be met: {', '.join(reached)}"


def hit_rate(figures: dict[str, Any]) -> float:
    """Of the history of conversations; of all prompt tokens where no turn has a history."""
    return float(figures["hit_rate"] if figures["history_tokens"] else figures["cached_of_prompts"])


def device_counts(least: int, most: int) -> list[int]:
    """The fewest, the powers of two above, and the most."""
    powers = [2**i for i in range(most.bit_length()) if least < 2**i < most]
    return [least, *powers, most] if most > least else [least]


def sizes(least: int, enough: int, most: int) -> list[int]:
    """1, 1.5, 2, 3, 4, 6, ... GiB: from the first that is `least` or more to the first that is `enough`, or `most`."""
    found: list[int] = []
    size = GIB
    while True:
        for each in (size, size * 3 // 2):
            if each >= least or each >= most:
                found.append(min(each, most))
                if each >= min(enough, most):
                    return found
        size *= 2


def _first(low: int, high: int, met: Callable[[int], bool]) -> int | None:
    """The first of low..high for which it is met, if it is met for all after it; None if not for the last."""
    if not met(high):
        return None
    while low < high:
        middle = (low + high) // 2
        if met(middle):
            high = middle
        else:
            low = middle + 1
    return high


def _sizes(trial: SizeTrial) -> str:
    plural = "s" * (trial.devices > 1)
    return (
        f"{trial.devices} device{plural}, {format_size(trial.dram)} of host memory, {format_size(trial.disk)} of disk"
    )
