"""The cluster's benchmark in short: answers and hit shares, which do not depend on how fast this machine is."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmarks.cluster import calls, hits, idle, latency, lookups, replicas, turns

from afterglow.library.locate import BUNDLED, find_model
from afterglow.store import kvstore
from tests.store.redis_server import binary

pytest.importorskip("obstore")
SMALL = Path(__file__).parents[2] / "src/afterglow/assets/model"
needs_model = pytest.mark.skipif(not (SMALL / "config.json").is_file(), reason="no bundled model here")


@needs_model
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_conversation_that_changes_its_engine_every_turn(tmp_path: Path, count: int) -> None:
    row = turns.wandering(str(find_model(BUNDLED)), count, count + 1, tmp_path, 0, 1)
    assert row["equal"] == row["turns"]
    assert row["missing"] == 1, "the last token of a reply was never fed"
    assert row["from_store"] > 0


def test_hit_shares_are_those_of_the_simulator(tmp_path: Path) -> None:
    found = {row["arm"]: row for row in hits.rows(2, 5, "roomy", tmp_path, 0)}
    for row in found.values():
        assert abs(row["measured"] - row["simulated"]) <= 0.02, row
    assert found["one engine"]["measured"] - found["by session"]["measured"] <= 0.01
    assert found["one engine"]["measured"] - found["at random, shared"]["measured"] <= 0.03
    assert found["at random"]["measured"] < 0.9, "else nothing is shown"


def test_no_time_goes_by_while_moves_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]

    def sleep(_: float) -> None:
        now[0] += 1.0

    monkeypatch.setattr(replicas, "time", SimpleNamespace(time=lambda: 1e9, monotonic=lambda: now[0], sleep=sleep))
    clock = replicas.StoppedClock()
    assert clock() == 1e9
    clock.wait_for(lambda: now[0] >= 130.0)
    assert clock() == 1e9
    now[0] += 2.0
    assert clock() == 1e9 + 2.0
    with pytest.raises(TimeoutError):
        clock.wait_for(lambda: False)


def late(run: Callable[..., int]) -> Callable[..., int]:
    """Let a move of rows take longer."""

    def later(*args: object) -> int:
        time.sleep(0.002)
        return run(*args)

    return later


def test_where_memory_is_tight_hit_shares_are_those_of_the_simulator_however_fast_the_disk_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In it rows are merged, evicted and swept; and engines whose moves end before their next step find what the simulated ones do."""
    said, shared = hits.trace(16, 1), hits.arms(2)[2]
    first, capacity = hits.measured(shared, said, 2, "tight", tmp_path, 1)
    assert hits.simulated(shared, said, 2, "tight", capacity, 1) == pytest.approx(first, abs=1e-9)
    for work in ("store_extent", "drop_extent"):
        monkeypatch.setattr(kvstore, work, late(getattr(kvstore, work)))
    assert hits.measured(shared, said, 2, "tight", tmp_path, 1)[0] == first
    assert 0.5 < first < 0.95, "else there is room for all, and nothing is shown"


def test_turns_after_a_change_of_replica_come_from_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round checks where its rows came from."""
    monkeypatch.setattr(latency, "ROWS", 128)
    row = latency.moving("tiny", 2, tmp_path, 0, 1)
    assert row["moved"]["median"] > 0


def test_prompts_are_looked_up_in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn checks that the directory answered, and that nothing was found."""
    binary()
    monkeypatch.setattr(lookups, "LENGTHS", (128,))
    (row,) = lookups.measure(2, tmp_path, 0, 1)
    assert 0 < row["lookup"]["median"] < row["first step"]["with"]["median"]
    assert row["first step"]["with"]["median"] < row["first token"]["with"]["median"]


@needs_model
def test_a_store_that_nothing_is_found_in_takes_few_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The goal is 1 %; the rest is for what threads do at times of their own."""
    for name, value in {"REQUESTS": 4, "FIRST": 2, "REPLY": 48}.items():
        monkeypatch.setattr(calls, name, value)
    counts = calls.measure(str(find_model(BUNDLED)), tmp_path, 0)["calls_per_token"]
    assert counts["without"] > 100
    assert counts["with"] < 1.03 * max(counts["without"], counts["without again"])


def test_the_interval_of_a_median_has_it_as_often_as_it_says() -> None:
    rng = random.Random(0)
    for number in (6, 15, 50):
        found = [idle.interval([rng.expovariate(1.0) for _ in range(number)]) for _ in range(2000)]
        share = sum(low <= math.log(2) <= high for _, low, high in found) / len(found)  # log 2: the median of all
        assert share >= idle.SURE - 0.015, "three standard errors of 2,000 draws below it"
        assert all(low <= median <= high for median, low, high in found)
    assert idle.interval([float(each) for each in range(1, 51)]) == (25.5, 18.0, 33.0), "the table of the sign test"


def test_processor_time_is_that_of_the_process() -> None:
    before, own = idle.cpu_seconds(os.getpid()), time.process_time()
    while time.process_time() < own + 0.05:
        pass
    assert idle.cpu_seconds(os.getpid()) - before >= 0.05
