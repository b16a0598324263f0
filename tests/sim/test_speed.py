"""What makes the simulator fast changes little or nothing of what it finds."""

from __future__ import annotations

from math import inf

import pytest

from afterglow.plan.step import Gather, Run, Step
from afterglow.sim.engine_setup import Setup
from afterglow.sim.executor import Executor, Machine
from afterglow.sim.machine.catalogue import hardware, model
from afterglow.sim.machine.timing import Calibrated
from afterglow.sim.simulator import Outcome, Simulation, summary
from afterglow.sim.workload.sharegpt import ShareGPT, ThinkTime, preset
from afterglow.sim.workload.turns import Workload


def simulated(late: float, patch: pytest.MonkeyPatch) -> Outcome:
    """Conversations that fill the batch."""
    patch.setattr(Simulation, "late", late)
    setup = Setup(
        model=model("LLaMA-2-13B"),
        hardware=hardware("A100-80G"),
        devices=2,
        dram=24 * 10**9,
        disk=400 * 10**9,
        retain=False,
        prefill_chunk=0,
        max_batch=8,
        source="load",
    )
    source = ShareGPT(preset("sharegpt-atc"), conversations=80, rate=2.0, think=ThinkTime(5.0), max_prompt=1024)
    return Simulation(setup, Workload(source)).run()


def test_what_nobody_waits_for_may_be_told_late(monkeypatch: pytest.MonkeyPatch) -> None:
    late = simulated(Simulation.late, monkeypatch)
    at_once = simulated(0.0, monkeypatch)
    first, second = summary(at_once), summary(late)
    assert second["turns"] == first["turns"] > 300
    assert late.events < 0.95 * at_once.events
    for name in ("hit_rate", "from_host"):
        assert second[name] == pytest.approx(first[name], abs=0.01)
    assert second["simulated_seconds"] == pytest.approx(first["simulated_seconds"], rel=0.01)
    assert second["ttft_mean"] == pytest.approx(first["ttft_mean"], rel=0.05)


class OneSecond:
    """Every pass takes a second."""

    def seconds(self, rows: int, attended: float, context: int, jobs: int, gathered: int = 0) -> float:
        return 1.0


def test_gathering_takes_time_where_every_job_computes_one_row() -> None:
    timing = Calibrated((0.01, 1e-4, 0.0, 1e-6), (0.02, 1e-3, 0.0))
    passes = [timing.seconds(2, 2000.0, 2000, 2, gathered) for gathered in (1000, 2000)]
    assert passes == pytest.approx([0.0112, 0.0122])
    machine = Machine(row_bytes=10, layers=10, host_link=inf, disk_read=1, disk_write=1)
    ends = []
    for rows in (1024, 8192):
        executor = Executor(machine, timing)
        executor.expect(1, bytes(4), 0.0)
        run = Run(1, rows, (7,), True, rows + 64, gathers=(Gather("a", 0, rows, (0, 1), None),))
        ends.append(executor.run(Step(1, runs=(run,)), 0.0, 0.0)[0])
    assert ends[1] - ends[0] == pytest.approx(1e-6 * (8192 - 1024))


@pytest.mark.parametrize(
    ("came", "before", "seconds"),
    [(10.0, 8.0, 2.1), (9.0, 8.0, 1.1), (4.0, 9.0, 1.1), (4.0, 8.0, 1.0)],
)
def test_a_read_buffer_is_filled_from_when_the_job_came(came: float, before: float, seconds: float) -> None:
    # Ten layers of 0.1 s each, whose rows take 0.2 s each to come: five layers when there was a second to do so.
    machine = Machine(row_bytes=10, layers=10, host_link=500, disk_read=1, disk_write=1, read_buffer=10)
    executor = Executor(machine, OneSecond())
    executor.expect(1, bytes(40), 0.0)
    executor.run(Step(1, runs=(Run(1, 5, (7,), True, 64),)), before, before)
    executor.expect(2, bytes(4), came)
    run = Run(2, 100, (1, 2, 3), True, 128, gathers=(Gather("a", 0, 100, (0, 1), None),))
    end, _ = executor.run(Step(2, runs=(run,)), 10.0, 10.0)
    assert end - 10.0 == pytest.approx(seconds)
