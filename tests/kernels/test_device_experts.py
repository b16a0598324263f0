"""For how many rows the experts that they choose are found on the device."""

from __future__ import annotations

import pytest
import torch

from afterglow.kernels.device_experts import MOST_ROWS, ExpertTables, PlainMatrix, most_rows


@pytest.mark.parametrize(
    ("count", "taken", "hidden", "inner", "rows"),
    [
        pytest.param(8, 2, 4096, 14336, 14, id="Mixtral-8x7B"),
        pytest.param(32, 4, 2880, 2880, 56, id="gpt-oss-20b"),
        pytest.param(128, 8, 2048, 768, MOST_ROWS, id="Qwen3-30B-A3B"),
        pytest.param(2, 2, 32768, 32768, 3, id="all of few and large ones"),
    ],
)
def test_large_experts_are_soon_products_of_their_own(
    count: int, taken: int, hidden: int, inner: int, rows: int
) -> None:
    wide, narrow = (
        PlainMatrix(torch.empty(shape, dtype=torch.bfloat16, device="meta"))
        for shape in ((2 * inner, hidden), (hidden, inner))
    )
    assert most_rows(ExpertTables([wide] * count, [narrow] * count), taken) == rows
