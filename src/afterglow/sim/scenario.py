"""From options to a simulation, and from its outcome to the figures that people ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import ceil
from pathlib import Path
from typing import Any, Protocol

from afterglow.config import format_size
from afterglow.errors import ConfigError
from afterglow.sim.capacity.bill import charged, hourly, price_list
from afterglow.sim.cluster.engines import Cluster, Network
from afterglow.sim.engine_setup import Setup
from afterglow.sim.machine.catalogue import RESERVE, Hardware, hardware, model
from afterglow.sim.machine.shape import ModelShape
from afterglow.sim.machine.timing import Calibration
from afterglow.sim.nearest import unknown
from afterglow.sim.scenario_options import Scenario, flag
from afterglow.sim.simulator import Outcome, Simulation, summary
from afterglow.sim.workload.sharegpt import PRESETS, ShareGPT, ThinkTime, preset
from afterglow.sim.workload.traces import TraceSource
from afterglow.sim.workload.turns import Conversation, Workload

GB = 10**9
# Formats of traces whose sessions begin when --rate says.
WITHOUT_TIMES = {"agentic"}
PRESET_RATE, TRACE_RATE = 1.0, 0.1  # conversations per second, where nothing says it


class TurnSource(Protocol):
    """Where conversations come from."""

    @property
    def fraction(self) -> float: ...

    def __iter__(self) -> Iterator[Conversation]: ...


class _First:
    """The first conversations of a trace, each with all its parts; where they may go on, the trace is read to its end."""

    def __init__(self, source: TraceSource, count: int) -> None:
        self._source, self._count, self._given = source, count, 0
        self._go_on: set[str] = set()

    @property
    def fraction(self) -> float:
        return self._source.fraction if self._go_on else self._given / self._count

    def __iter__(self) -> Iterator[Conversation]:
        self._given = 0
        self._go_on.clear()
        for conversation in self._source:
            if conversation.name not in self._go_on:
                if self._given == self._count:
                    continue
                self._given += 1
                if conversation.goes_on:
                    self._go_on.add(conversation.name)
            yield conversation
            if self._given == self._count and not self._go_on:
                return


class Running:
    """One scenario on its way: `figures` can be asked for at any time."""

    def __init__(self, scenario: Scenario) -> None:
        """Prepare the simulation. Raises: ConfigError, ModelError."""
        self.scenario = scenario
        self.setup = setup_of(scenario)
        self.rates = price_list(scenario)
        self.trace, self.source = source_of(scenario, self.setup.longest)
        self.workload = Workload(self.source, scenario.source.pace)
        self.complete = False
        self.outcome: Outcome | None = None
        cluster, warm_up = scenario.cluster, scenario.source.warm_up
        self._engines: Simulation | Cluster
        if cluster.engines == 1 and not cluster.shared_tier:
            self._engines = Simulation(self.setup, self.workload, warm_up=warm_up)
        else:
            network = Network(cluster.network * GB, cluster.shared_tier)
            self._engines = Cluster(
                self.setup, self.workload, cluster.engines, cluster.router, network, scenario.source.seed, warm_up
            )

    def run(self, progress: Callable[[float], object] | None = None) -> dict[str, Any]:
        """To the end. `progress` is told how much of the workload has begun, 0 to 1."""
        self._engines.run((lambda _: progress(self.source.fraction)) if progress is not None else None)
        self.complete = True
        return self.figures()

    def figures(self) -> dict[str, Any]:
        """Collect the figures so far. Raises: ConfigError, where the run has ended and nothing was counted."""
        self.outcome = outcome = self._engines.finish()
        if self.complete and not outcome.turns:
            raise ConfigError(
                f"nothing to count: the warm-up took {outcome.skipped} turns, {self.workload.taken - outcome.skipped} "
                "were refused (too long for the window), and there were no others"
            )
        found = summary(outcome)
        found["history_tokens"] = sum(outcome.history)
        found["window"] = self.setup.longest
        found["shortened_turns"] = self.source.shortened if isinstance(self.source, ShareGPT) else 0
        found["cost"] = self._cost(outcome)
        if isinstance(self._engines, Cluster):
            found["cluster"] = self._engines.figures()
        if self.trace is not None and self.trace.skipped:
            found["bad_lines"] = {"skipped": self.trace.skipped, "first": self.trace.first_bad}
        found["complete"] = self.complete
        found["fraction"] = 1.0 if self.complete else self.source.fraction
        return found

    def _cost(self, outcome: Outcome) -> dict[str, Any] | None:
        if self.rates is None:
            return None
        bill = charged(self.scenario, self.rates, outcome.prefilling + outcome.decoding)
        hour = hourly(self.scenario, self.rates)
        return {
            "prices": self.rates.name,
            "dollars": bill.total,
            "devices": bill.devices,
            "storage": bill.storage,
            "dollars_per_hour": hour.total * self.scenario.cluster.engines,
        }


def setup_of(scenario: Scenario) -> Setup:
    """Make the engine of a scenario. Raises: ConfigError, also for a model that does not fit, ModelError."""
    wanted, tiers = scenario.engine, scenario.tiers
    shape, device = model(wanted.model), hardware(wanted.hardware)
    least = fewest_devices(shape, device, wanted.window or shape.window, wanted.dtype)
    if tiers.devices < least:
        raise ConfigError(
            f"{shape.name} does not fit: its weights ({format_size(shape.weight_bytes(wanted.dtype))} as {wanted.dtype}) and "
            f"the keys and values of one context of {wanted.window or shape.window} tokens take {least} {device.name}, "
            f"not {tiers.devices}"
        )
    measured: dict[str, Any] = {"disk_read": wanted.disk_bandwidth * GB, "disk_write": wanted.disk_bandwidth * GB}
    if wanted.calibration is not None:
        measured = _measured(wanted.calibration, shape, wanted.kv_dtype or wanted.dtype)
    if scenario.cluster.shared_tier and not tiers.disk:
        raise ConfigError("--shared-tier needs a --disk on each engine, through which it is read and written")
    more = {"write_policy": "write_through"} if scenario.cluster.shared_tier else {}
    return Setup(
        model=shape,
        hardware=device,
        devices=tiers.devices,
        dtype=wanted.dtype,
        kv_dtype=wanted.kv_dtype,
        dram=tiers.dram,
        disk=tiers.disk,
        host_link=wanted.host_link * GB if wanted.host_link is not None else None,
        policy=wanted.policy,
        mode=wanted.mode,
        max_batch=wanted.max_batch,
        prefill_chunk=wanted.prefill_chunk,
        window=wanted.window,
        retain=wanted.retain,
        ttl=wanted.ttl,
        more=more,
        **measured,
    )


def _measured(path: Path, shape: ModelShape, dtype: str) -> dict[str, Any]:
    found = Calibration.load(path)
    if found.kv_bytes_per_token != shape.kv_bytes_per_token(dtype):
        raise ConfigError(
            f"{path} was measured with {found.model}, {found.kv_bytes_per_token} bytes of KV per token; {shape.name} as "
            f"{dtype} has {shape.kv_bytes_per_token(dtype)}: give the --model, --dtype and --kv-dtype that were "
            "measured"
        )
    return {
        "calibration": found,
        "disk_read": found.disk_read,
        "disk_write": found.disk_write,
        "disk_latency": found.disk_latency,
    }


def fewest_devices(shape: ModelShape, device: Hardware, window: int, dtype: str) -> int:
    """How many devices have room for the weights, and for the keys and values of one context."""
    needed = shape.weight_bytes(dtype) + window * shape.kv_bytes_per_token(dtype)
    return ceil((needed + 1) / (device.memory_bytes * (1 - RESERVE)))


def check_useful(scenarios: Sequence[Scenario], names: Iterable[str]) -> None:
    """Check that each of these options changes one of the scenarios at least. Raises: ConfigError."""
    names = sorted(names)
    reasons = [_useless(scenario, reads="rate" in names) for scenario in scenarios]
    for name in names:
        if all(name in each for each in reasons):
            raise ConfigError(f"{flag(name)} does nothing {reasons[0][name]}")


def _useless(scenario: Scenario, reads: bool) -> dict[str, str]:
    """Map options that do nothing in a scenario to the reason. `reads`: may the trace be looked at? Raises: ConfigError."""
    found: dict[str, str] = {}
    if scenario.engine.calibration is not None:
        speeds = "beside --calibration, which brings the speeds that were measured; leave one of the two out"
        found |= {"disk_bandwidth": speeds, "host_link": speeds}
        found["max_devices"] = "beside --calibration, whose times are those of one machine; leave one of the two out"
    if not scenario.cluster.shared_tier:
        found["network"] = "without --shared-tier, which is what engines reach over it"
    if scenario.cluster.engines == 1:
        found["router"] = "with one engine; --engines N simulates several"
    if scenario.workload in PRESETS:
        return found | dict.fromkeys(("format", "skip_bad", "pace"), "with a preset; it is for trace files")
    found["think"] = "with a trace, which has its users' own times"
    trace = source_of(scenario, 1)[0] if reads else None
    if trace is not None and trace.format not in WITHOUT_TIMES:
        found["rate"] = "with a trace that has the times of its requests"
    return found


def source_of(scenario: Scenario, window: int) -> tuple[TraceSource | None, TurnSource]:
    """Open the conversations of a trace file or a preset, and the trace if it is one. Raises: ConfigError."""
    wanted, name = scenario.source, scenario.workload
    if name not in PRESETS:
        if not name or not Path(name).exists():
            raise unknown("workload", name, PRESETS, "(a trace file will do as well)")
        trace = TraceSource(
            name, wanted.format, skip_bad=wanted.skip_bad, rate=wanted.rate or TRACE_RATE, seed=wanted.seed
        )
        return trace, trace if wanted.conversations is None else _First(trace, wanted.conversations)
    law = preset(name)
    if window < 2:
        raise ConfigError(f"--window must be 2 or more for a preset, got {window}")
    return None, ShareGPT(
        law,
        conversations=wanted.conversations,
        rate=wanted.rate or PRESET_RATE,
        think=ThinkTime(wanted.think),
        seed=wanted.seed,
        max_prompt=min(law.max_prompt, window // 2),
        max_reply=min(law.max_reply, window // 2),
    )
