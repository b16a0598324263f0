"""Rows in 8 bits: how far from what was rounded, and the same bits with the compiled kernels and with torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as of_numpy
from torch import Tensor

from afterglow.kernels import passes, stored_rows
from afterglow.kernels.built import native
from afterglow.kernels.stored_rows import narrowed, stored_width, widen_into, widened

WAYS = [16, 8] if native() is not None else []
EPSILON = 2.0**-23  # of float32
LARGEST = torch.finfo(torch.float32).max
TINY = torch.finfo(torch.float32).tiny


@pytest.fixture(params=WAYS, ids=str)
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    library = native()
    assert library is not None
    if library.width < request.param:
        pytest.skip(f"this processor has no vectors of {request.param} floats")
    monkeypatch.setattr(library, "width", request.param)
    return request.param  # type: ignore[no-any-return]


def by_torch(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Round and widen with torch alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "native", lambda: None)
        patch.setattr(stored_rows, "native", lambda: None)
        stored = narrowed(rows, torch.int8)
        return stored, widened(stored, torch.float32)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


shapes = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 70))
numbers = st.floats(width=32, allow_nan=True, allow_infinity=True)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(rows=shapes.flatmap(lambda shape: of_numpy.arrays(np.float32, shape, elements=numbers)))
def test_any_rows_come_back_within_half_a_step(rows: np.ndarray) -> None:
    """Half of the scale, and what one rounding of a float32 quotient and of a product may add."""
    x = torch.from_numpy(rows)
    stored, found = by_torch(x)
    scale = stored[..., -4:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    finite = x.isfinite().all(-1)
    assert torch.equal(found.isfinite().all(-1), finite)
    assert found[~finite].isnan().all()
    assert (scale[finite] >= TINY).all()
    distance = (found.double() - x.double()).abs()
    allowed = scale.double() * (0.5 + 127 * 4 * EPSILON)
    assert (distance <= allowed)[finite].all()
    if native() is not None:  # with the vectors of this processor
        again = narrowed(x, torch.int8)
        assert same_bits(again, stored)
        assert same_bits(widened(again, torch.float32), found)


@pytest.mark.parametrize("size", [1, 7, 8, 16, 24, 64, 100, 128, 259])
@pytest.mark.parametrize("rows", [0, 1, 3, 700])
def test_the_compiled_kernels_give_torchs_bits(compiled: int, rows: int, size: int) -> None:
    draw = torch.Generator().manual_seed(size)
    batch = torch.randn(rows, 5, size + 3, generator=draw)[:, 1:4, :size] * torch.logspace(-45, 38, rows)[:, None, None]
    if rows:
        batch[0, 0] = 0
        batch[-1, 1, size // 2] = torch.nan
        batch[-1, 2, 0] = -torch.inf
    stored, found = by_torch(batch)
    assert stored.shape == (rows, 3, stored_width(size, torch.int8))
    assert same_bits(narrowed(batch, torch.int8), stored)
    assert same_bits(widened(stored, torch.float32), found)
    out = torch.full((3, rows + 2, size), 5.0)  # a context: heads first
    widen_into(stored, out.transpose(0, 1)[1:-1])
    assert same_bits(out[:, 1:-1].transpose(0, 1), found)
    assert (out[:, [0, -1]] == 5).all()


def test_what_the_largest_and_smallest_numbers_become() -> None:
    rows = torch.tensor([[[LARGEST, -LARGEST, 0.0]], [[TINY / 4, 0.0, -0.0]], [[127.0, 0.5, 1.5]]])
    found = widened(narrowed(rows, torch.int8), torch.float32)
    assert found.isfinite().all()
    torch.testing.assert_close(found[0], rows[0], rtol=1e-6, atol=0)
    assert not found[1].any()
    assert found[2].tolist() == [[127.0, 0.0, 2.0]]  # ties to even


def test_other_dtypes_are_rounded_as_floats_are() -> None:
    rows = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(narrowed(rows, torch.bfloat16), rows.bfloat16())
    assert torch.equal(widened(rows.bfloat16(), torch.float32), rows.bfloat16().float())
    half = rows.half()
    assert torch.equal(narrowed(half, torch.int8), narrowed(half.float(), torch.int8))
    assert widened(narrowed(half, torch.int8), torch.float16).dtype == torch.float16
