"""Column sums of attention weights against the formula."""

from __future__ import annotations

import pytest
import torch

from afterglow.kernels import column_sums as module
from afterglow.kernels.attention import attend
from afterglow.kernels.column_sums import column_sums


@pytest.mark.parametrize("most", [1, 500, 2**22])
@pytest.mark.parametrize(("n", "rows"), [(1, 1), (1, 40), (7, 7), (13, 50), (50, 50)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_the_formula(n: int, rows: int, heads: int, kv_heads: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WEIGHTS", most)
    generator = torch.Generator().manual_seed(rows)
    q = torch.randn(n, heads, 8, generator=generator)
    keys, values = (torch.randn(rows, kv_heads, 8, generator=generator) for _ in range(2))
    lse = attend(q, keys, values, scale=0.3, causal=True)[1]
    scores = torch.einsum("qhd,khd->hqk", q, keys.repeat_interleave(heads // kv_heads, 1)) * 0.3
    weights = scores.masked_fill(torch.ones(n, rows, dtype=torch.bool).triu(1 + rows - n), -torch.inf).softmax(-1)
    found = column_sums(q, keys, lse, scale=0.3)
    torch.testing.assert_close(found, weights.sum((0, 1)))
    assert float(found.sum()) == pytest.approx(n * heads, rel=1e-5)
