"""Rows out of many tensors are what an index into each gives."""

from __future__ import annotations

import pytest
import torch

from afterglow.kernels import pick
from afterglow.kernels.built import native
from afterglow.kernels.pick import picked

WAYS = ["torch", *(["built"] if native() is not None else [])]


@pytest.fixture(params=WAYS)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(pick, "native", lambda: None)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shape", [(), (3,), (4, 16), (32, 64)])
def test_as_an_index_into_each(shape: tuple[int, ...], dtype: torch.dtype, threads: int) -> None:
    draw = torch.Generator().manual_seed(len(shape))
    pieces = [torch.randint(0, 200, (rows, *shape), generator=draw).to(dtype) for rows in (64, 1, 64, 7, 200)]
    which = torch.randint(0, 5, (1000,), generator=draw)
    rows = (torch.rand(1000, generator=draw) * torch.tensor([len(piece) for piece in pieces])[which]).long()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = picked(pieces, which, rows)
    finally:
        torch.set_num_threads(before)
    assert found.dtype == dtype
    assert torch.equal(found, torch.stack([pieces[i][j] for i, j in zip(which, rows, strict=True)]))


@pytest.mark.usefixtures("_way")
def test_of_pieces_whose_rows_lie_apart_or_in_parts() -> None:
    whole = torch.randn(2, 50, 4, 16)
    which, rows = torch.tensor([1, 0, 1, 1]), torch.tensor([49, 3, 0, 49])
    apart = [whole[0, :, :3], torch.randn(50, 3, 16)]
    assert torch.equal(picked(apart, which, rows), torch.stack([apart[i][j] for i, j in zip(which, rows, strict=True)]))
    turned = [part.transpose(0, 1) for part in torch.randn(2, 4, 50, 16)]
    expected = torch.stack([turned[i][j] for i, j in zip(which, rows, strict=True)])
    assert torch.equal(picked(turned, which, rows), expected), "heads first in memory"
    scattered = [torch.randn(50, 16, 4).transpose(1, 2) for _ in range(2)]
    expected = torch.stack([scattered[i][j] for i, j in zip(which, rows, strict=True)])
    assert torch.equal(picked(scattered, which, rows), expected)


@pytest.mark.usefixtures("_way")
def test_of_nothing() -> None:
    none = torch.empty(0, dtype=torch.int64)
    assert picked([torch.randn(5, 2, 8)], none, none).shape == (0, 2, 8)
    assert picked([torch.empty(5, 0)], torch.zeros(3, dtype=torch.int64), torch.arange(3)).shape == (3, 0)
