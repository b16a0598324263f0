"""What a step may ask of a CUDA device: copies, waits, locked memory and launches, counted on the pretend one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.device.counts import BATCHES, counted

LAYERS = 2
LAUNCHES = 5  # of each request in each layer: two rows stored, one attention, its result put in its place
ONE_PLACE = "engine/transfers.py:fetched"  # where tokens leave the device
ENDS = {"engine/gather.py:end", "engine/tee.py:hand_over"}  # rows that came, and rows that leave, at the end of a step


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
