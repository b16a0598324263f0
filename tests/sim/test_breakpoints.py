"""Breakpoints in the simulator: agents whose prompts are marked find them again, however many others ask once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from afterglow.request import Breakpoint
from afterglow.sim.engine_setup import Setup
from afterglow.sim.machine.catalogue import hardware, model
from afterglow.sim.simulator import Simulation
from afterglow.sim.workload.trace_formats import AfterglowReader, TraceSettings
from afterglow.sim.workload.trace_values import BadLine
from afterglow.sim.workload.turns import Conversation, StreamSegment, TraceTurn, Workload

AGENTS, TURNS, PAUSE = 6, 6, 200.0  # an agent asks again after 200 s
SYSTEM, STEP, REPLY = 2000, 200, 50
ONCE = 2000  # tokens of a prompt that comes once, every 2 s


class Watched(Simulation):
    """A simulation that counts the tokens of agents' prompts, and those of them that were cached."""

    asked = cached = others = 0

    def _count(self, live: object) -> None:  # type: ignore[override]
        turn, hits = live.arrival.turn, sum(live.cached)  # type: ignore[attr-defined]
        if turn.session.startswith("agent"):
            self.asked += turn.prompt_tokens if turn.index else 0
            self.cached += hits if turn.index else 0
        super()._count(live)  # type: ignore[arg-type]


def agent(name: str, marked: bool) -> Iterator[TraceTurn]:
    """Turns of an agent: instructions of its own, then steps; breakpoints behind both."""
    for index in range(TURNS):
        rows = SYSTEM + index * (STEP + REPLY) + STEP
        breakpoints = (Breakpoint(SYSTEM, 3600.0), Breakpoint(rows, 300.0)) if marked else ()
        yield TraceTurn(
            name,
            index,
            (StreamSegment(name, 0, rows),),
            (StreamSegment(name, rows, REPLY),),
            new_tokens=STEP if index else rows,
            think=PAUSE,
            breakpoints=breakpoints,
        )


def conversations(marked: bool) -> Iterator[Conversation]:
    agents = [Conversation(f"agent {i}", float(i), agent(f"agent {i}", marked)) for i in range(AGENTS)]
    once = [
        Conversation(
            name, 2.0 * i, [TraceTurn(name, 0, (StreamSegment(name, 0, ONCE),), (StreamSegment(name, ONCE, 20),), ONCE)]
        )
        for i in range(int(TURNS * PAUSE / 2))
        for name in [f"once {i}"]
    ]
    yield from sorted([*agents, *once], key=lambda each: each.start)


def rate(marked: bool, policy: str, disk: int) -> float:
    """The share of the agents' later prompts that was cached."""
    setup = Setup(
        model=model("LLaMA-2-13B"),
        hardware=hardware("A100-80G"),
        devices=2,
        dram=64 * 10**9,  # about 80,000 tokens: the agents have 21,000, the others 100,000 in the time of a pause
        disk=disk,
        retain=False,
        policy=policy,  # type: ignore[arg-type]
    )
    simulation = Watched(setup, Workload(conversations(marked)))
    simulation.run()
    return simulation.cached / simulation.asked


@pytest.mark.parametrize(("policy", "disk"), [("lookahead", 0), ("lru", 0), ("lookahead", 20 * 10**9)])
def test_marked_prefixes_have_a_higher_hit_rate(policy: str, disk: int) -> None:
    assert rate(False, policy, disk) < 0.2
    assert rate(True, policy, disk) > 0.9


def test_traces_may_have_breakpoints() -> None:
    def turn(breakpoints: object) -> TraceTurn:
        row = f'{{"time": 1.0, "prompt_tokens": 10, "output_tokens": 4, "breakpoints": {breakpoints}}}'
        (found,) = AfterglowReader(TraceSettings()).read(row)
        (made,) = found.turns
        return made

    assert turn("null").breakpoints == turn("[]").breakpoints == ()
    assert turn("[[4, 300], [10, 3600.0]]").breakpoints == (Breakpoint(4, 300.0), Breakpoint(10, 3600.0))
    for bad in (
        "[[11, 300]]",
        "[[4, 300], [4, 300]]",
        "[[0, 300]]",
        "[[4, -1]]",
        "[4]",
        "3",
        '[["4", 300]]',
        "[[4.5, 1]]",
    ):
        with pytest.raises(BadLine, match=r"^breakpoints must be"):
            turn(bad)
