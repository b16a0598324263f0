"""What a step may ask of a CUDA device: copies, waits, locked memory and launches, counted on the pretend one."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.device.counts import BATCHES, counted

LAYERS = 2
LAUNCHES = 5  # of each request in each layer: two rows stored, one attention, its result put in its place
ONE_PLACE = "engine/transfers.py:fetched"  # where tokens leave the device
ENDS = {"engine/gather.py:end", "engine/tee.py:hand_over"}  # rows that came, and rows that leave, at the end of a step


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed (the extra gpu)")
def test_triton_steps_wait_at_their_end_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of attention and of new rows, which no graph has, are sent without waiting as well: also in prefills."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = counted("fewest_counts")
    rows: dict[str, dict[str, Any]] = found["rows"]
    assert set(found["waits"]) == {ONE_PLACE, *ENDS}
    assert [rows[f"{kind} 2"]["synchronisations"] for kind in ("decode", "prefill", "reuse")] == [1, 3, 3]
    assert {row["pinned allocations"] for row in rows.values()} == {0}


@pytest.mark.parametrize(
    ("scene", "batches"), [("few_counts", (2, 8)), pytest.param("counts", BATCHES, marks=pytest.mark.long)]
)
def test_a_step_asks_no_more_than_this(scene: str, batches: tuple[int, ...]) -> None:
    found = counted(scene)
    rows: dict[str, dict[str, Any]] = found["rows"]
    assert len(rows) == 4 * len(batches)
    for name, row in rows.items():
        assert row["pinned allocations"] == 0, name
    for batch in batches:
        decode, leave = rows[f"decode {batch}"], rows[f"decode, blocks leave {batch}"]
        asked = decode["copies to device"], decode["copies to host"], decode["synchronisations"]
        assert asked == (1, 1, 1)
        assert leave["synchronisations"] <= 2  # not all requests flush in one step
        assert rows[f"prefill {batch}"]["synchronisations"] <= 3  # prompts may begin with a row that another left
        assert rows[f"reuse {batch}"]["synchronisations"] == 3
    assert set(found["waits"]) == {ONE_PLACE, *ENDS}
    fewest, most = batches[0], batches[-1]
    more = rows[f"decode {most}"]["launches"] - rows[f"decode {fewest}"]["launches"]
    assert more <= LAUNCHES * LAYERS * (most - fewest)
