"""The time that loading takes, where two threads read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.papers.cachedattention import preload

from afterglow.plan.step import MoveDone


def test_reads_at_the_same_time_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 10.5, 11.0, 13.0, 14.0, 20.0, 21.0])
    monkeypatch.setattr(preload, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    counted: list[Any] = []
    mover = SimpleNamespace(_run=lambda task: True)
    counters = SimpleNamespace(moved=lambda *told: counted.append(told))
    store: Any = SimpleNamespace(_mover=mover, _counters=counters)
    reads = preload.Reads(store)
    one, other, drop = (SimpleNamespace(label=label) for label in ("load", "load", "drop"))
    done = MoveDone(1, True)
    run = vars(mover)["_run"]
    assert run(one)
    assert run(other)
    assert run(one)  # it had let the other go first
    assert run(drop)
    for task in (other, drop, one):
        counters.moved(task, done, None)
    assert reads.take() == 4.0
    assert counted == [(other, done, None), (drop, done, None), (one, done, None)]
    assert run(one)
    counters.moved(one, done, None)
    assert reads.take() == 1.0
