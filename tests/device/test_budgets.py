"""What a step may ask of a CUDA device: copies, waits, locked memory and launches, counted on the pretend one."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from tests.device.counts import BATCHES, counted
from tests.device.watching import Watch

LAYERS = 2
LAUNCHES = 5  # of each request in each layer: two rows stored, one attention, its result put in its place
# What steps with two prefills launch beside a graph: where their rows of two layers go, and which ones tokens are drawn from.
GRAPHS = 12
ONE_PLACE = ["engine/transfers.py:wait"]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed (the extra gpu)")
def test_triton_steps_wait_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are sent without waiting as well, and prefills of few rows ask for little more than decoding does."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = counted("fewest_counts")
    rows: dict[str, dict[str, Any]] = found["rows"]
    assert found["waits"] == ONE_PLACE
    assert {row["synchronisations"] for row in rows.values()} == {found["most"]} == {1}
    assert {row["pinned allocations"] for row in rows.values()} == {0}
    launches = {name: row["launches"] for name, row in rows.items()}
    assert launches["prefill 2"] <= launches["decode 2"] + GRAPHS


def test_steps_with_shared_rows_and_draws_wait_once() -> None:
    """Those with log-probabilities once more: they are of the tokens that were drawn."""
    assert counted("waits") == {"waits": ONE_PLACE, "most": [1, 2]}


@pytest.mark.parametrize(
    ("scene", "batches"), [("few_counts", (2, 8)), pytest.param("counts", BATCHES, marks=pytest.mark.long)]
)
def test_a_step_asks_no_more_than_this(scene: str, batches: tuple[int, ...]) -> None:
    found = counted(scene)
    rows: dict[str, dict[str, Any]] = found["rows"]
    assert len(rows) == 4 * len(batches)
    for name, row in rows.items():
        assert row["pinned allocations"] == 0, name
        assert row["synchronisations"] == 1, name
    for batch in batches:
        decode = rows[f"decode {batch}"]
        assert (decode["copies to device"], decode["copies to host"]) == (1, 1)
    assert (found["waits"], found["most"]) == (ONE_PLACE, 1)
    fewest, most = batches[0], batches[-1]
    more = rows[f"decode {most}"]["launches"] - rows[f"decode {fewest}"]["launches"]
    assert more <= LAUNCHES * LAYERS * (most - fewest)


def test_pinned_memory_is_used_again_when_its_copies_are_known_to_be_done() -> None:
    watch = Watch()

    def allocate(copied: bool = True) -> int:
        memory = torch.empty(256)
        watch.locked(memory)
        if copied:
            watch.copies_pinned(memory)
        return watch.counts["pinned allocations"]

    assert [allocate(), allocate()] == [1, 2]
    watch.wait_for_stream(watch.stream)
    assert [allocate(), allocate(copied=False), allocate()] == [2, 2, 2]
    assert allocate() == 3
