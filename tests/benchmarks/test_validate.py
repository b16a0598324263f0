"""The comparison of the simulator with the engine: both sides' figures mean the same, and something can be missed."""

from __future__ import annotations

import random
import time
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.sim import validate
from benchmarks.sim.validate import CONVERSATIONS, DISK, HOST, QUICK, ROOM, Said

from afterglow.bench.timed_requests import Turn
from afterglow.request import CachedTokens
from afterglow.sim.simulator import Outcome


def test_history_is_counted_as_the_simulator_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    said = [Said(10, 4, 0.0), Said(20, 3, 0.0), Said(5, 2, 0.0)]
    talks = [(0.0, said), (0.0, said[:1])]

    def answered(engine: object, prompt: list[int], reply: int) -> Turn:
        turn = Turn(first=1.0, last=time.perf_counter(), cached=CachedTokens(disk=len(prompt) - 1), tokens=[0] * reply)
        turn.ended.set()
        return turn

    monkeypatch.setattr(validate, "ask", answered)
    engine: Any = SimpleNamespace(vocab_size=10)
    found = validate.measured(engine, random.Random(0), talks)
    told = [turn for each in validate.as_trace(talks) for turn in each.turns]
    wanted = [turn.prompt_tokens - turn.new_tokens if turn.index else 0 for turn in told]
    assert sorted(found.history) == sorted(wanted) == [0, 0, 15, 38]
    assert sorted(found.disk) == [10, 10, 34, 42]
    assert validate.figures(found)["hit_rate"] == 1.0
    assert (found.turns, list(found.ttft)) == (4, [1.0] * 4)


def test_both_sides_have_the_simulators_quantiles() -> None:
    outcome = Outcome(turns=4, ttft=array("d", [4.0, 1.0, 3.0, 2.0]), history=array("q", [0, 10, 10, 20]))
    for tier, cached in {"device": [3, 5, 0, 0], "host": [0, 0, 0, 10], "disk": [0, 0, 2, 0]}.items():
        getattr(outcome, tier).extend(cached)
    found = validate.figures(outcome)
    assert (found["ttft_p50"], found["ttft_p99"], found["ttft_mean"]) == (2.0, 4.0, 2.5)
    assert found["hit_rate"] == 17 / 40
    assert (found["device"], found["host"], found["disk"]) == (0.4, 0.5, 0.1)


@pytest.mark.parametrize("count", [QUICK, CONVERSATIONS])
def test_the_tiers_are_too_small_for_all_conversations(count: int) -> None:
    talks = validate.drawn_talks(random.Random(0), count, 4.0)
    assert sum(each.question + each.reply for _, said in talks for each in said) > ROOM + HOST + DISK
