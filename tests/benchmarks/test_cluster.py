"""The cluster's benchmark in short: answers and hit shares, which do not depend on how fast this machine is."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.cluster import hits, latency, turns

from afterglow.library.locate import BUNDLED, find_model

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


def test_turns_after_a_change_of_replica_come_from_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round checks where its rows came from."""
    monkeypatch.setattr(latency, "ROWS", 128)
    row = latency.moving("tiny", 2, tmp_path, 0, 1)
    assert row["moved"]["median"] > 0
