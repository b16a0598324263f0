"""The cheapest cluster that meets a goal: how many engines behind the router, of what size each, and with a shared store or without.

For each number of engines, and with the store and without it, the cheapest engine is searched for (`search`), all of them simulated together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from afterglow.errors import ConfigError
from afterglow.sim.capacity.search import Search, SizeTrial, device_counts
from afterglow.sim.scenario_options import GoalConfig, Scenario

Progress = Callable[["FleetSearch", float], object]


@dataclass(frozen=True, slots=True)
class FleetTrial:
    """So many engines, with a shared store of so many bytes (0: none). `best`: the cheapest engine; None: `why` there is none."""

    engines: int
    shared_tier: int
    best: SizeTrial | None
    why: str = ""
    simulated: int = 0  # engines of other sizes that were tried

    @property
    def name(self) -> str:
        """Return what it is in words."""
        return f"{self.engines} engine{'s' * (self.engines > 1)}{', shared store' * bool(self.shared_tier)}"

    @property
    def hourly(self) -> float:
        """Return the dollars per hour of all engines and the store."""
        return self.engines * self.best.hourly.total if self.best is not None else float("inf")


@dataclass
class FleetSearch:
    """A plan for up to as many engines as the scenario has, over a store of its size if it has one."""

    scenario: Scenario
    goal: GoalConfig
    trials: list[FleetTrial] = field(default_factory=list)
    made: int = 0  # simulations

    @property
    def best(self) -> FleetTrial | None:
        """Return the cheapest that meets the goal; of equal ones the one with the fewest engines."""
        met = [trial for trial in self.trials if trial.best is not None]
        return min(met, key=lambda trial: (trial.hourly, trial.engines, trial.shared_tier), default=None)

    def run(self, progress: Progress | None = None) -> FleetTrial:
        """Find the cheapest. Raises: ConfigError, where the goal cannot be met; the message says how close it comes."""
        cluster = self.scenario.cluster
        for engines in device_counts(1, cluster.engines):
            for shared in dict.fromkeys((0, cluster.shared_tier if engines > 1 else 0)):
                self._try(engines, shared, progress)
        best = self.best
        if best is None:
            raise ConfigError("; ".join(f"{trial.name}: {trial.why}" for trial in self.trials))
        return best

    def _try(self, engines: int, shared: int, progress: Progress | None) -> None:
        search = Search(self.scenario.with_values(engines=engines, shared_tier=shared), self.goal)
        found, why = None, ""
        try:
            found = search.run((lambda _, part: progress(self, part)) if progress is not None else None)
        except ConfigError as error:
            if not search.trials:
                raise  # the workload cannot be read, say: other numbers of engines do not help
            why = str(error)
        self.made += len(search.trials)
        self.trials.append(FleetTrial(engines, shared, found, why, len(search.trials)))
