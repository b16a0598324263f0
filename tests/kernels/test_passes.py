"""Norm, gated activation and rotation in one pass: what torch's several operations give, at each width of vectors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from afterglow.kernels import passes, rope
from afterglow.kernels.block_rounding import round_to_blocks
from afterglow.kernels.built import native
from afterglow.kernels.matrix import has_bytes
from afterglow.kernels.passes import gated_clamped, gated_silu, rms_norm, rounded
from afterglow.kernels.rope import RopeTable, rotate
from afterglow.model.linear import BlockLinear, BytePanelLinear, PanelLinear

WAYS = ["torch", *([16, 8] if native() is not None else [])]


@pytest.fixture(params=WAYS, ids=str)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int | str:
    if request.param == "torch":
        monkeypatch.setattr(passes, "native", lambda: None)
        return "torch"
    library = native()
    assert library is not None
    if library.width < request.param:
        pytest.skip(f"this processor has no vectors of {request.param} floats")
    monkeypatch.setattr(library, "width", request.param)
    return request.param  # type: ignore[no-any-return]


@pytest.mark.usefixtures("way")
def test_results_are_float32_whatever_torch_makes_by_default() -> None:
    """Another thread that loads a model in bfloat16 changes the default of all, and kernels write float32."""
    x, weight, matrix = torch.randn(3, 64), torch.ones(64), torch.randn(32, 64)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # not a narrower one: a wrong result is enough, nothing is overwritten
    try:
        found = [rms_norm(x, weight, 1e-5), gated_silu(x), gated_clamped(x, 1.7, 7.0), rounded(x, 127)[1]]
        if native() is not None:
            found += [PanelLinear(matrix, None)(x), BytePanelLinear(matrix, None)(x)] if has_bytes() else []
            found += [BlockLinear(round_to_blocks(matrix, "Q8_0"), "Q8_0", 64)(x)]
    finally:
        torch.set_default_dtype(before)
    assert {each.dtype for each in found} == {torch.float32}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("size", [1, 7, 8, 48, 64, 200, 768])
@pytest.mark.parametrize("rows", [0, 1, 2, 500])
def test_norm(size: int, rows: int, threads: int) -> None:
    x, weight = torch.randn(rows, size + 5)[:, 2 : size + 2] * 30, torch.randn(size)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = rms_norm(x, weight, 1e-5)
    finally:
        torch.set_num_threads(before)
    exact = F.rms_norm(x.double(), (size,), weight.double(), 1e-5)
    torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=1e-5)
    if rows == 500:
        stacked = x.contiguous().view(5, 100, size)
        torch.testing.assert_close(rms_norm(stacked, weight, 1e-5).flatten(0, 1), found)


@pytest.mark.usefixtures("way")
def test_a_norm_of_zeros_is_zeros() -> None:
    assert not rms_norm(torch.zeros(2, 16), torch.ones(16), 1e-6).any()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("size", [1, 7, 8, 40, 129, 2048])
@pytest.mark.parametrize("rows", [0, 1, 3, 300])
def test_gated_silu(size: int, rows: int) -> None:
    x = torch.randn(rows, 2 * size + 3)[:, 1:-2] * 12
    if rows:
        x[0, :size] = torch.tensor([0.0, -0.0, 1e-30, -200.0, 200.0, 87.5, -87.5]).repeat(size)[:size]
    exact = F.silu(x[:, :size].double()) * x[:, size:].double()
    torch.testing.assert_close(gated_silu(x).double(), exact, atol=1e-30, rtol=1e-5)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("size", [1, 7, 8, 40, 129])
@pytest.mark.parametrize("rows", [0, 1, 3, 300])
def test_gated_clamped(size: int, rows: int) -> None:
    """Gates are cut from above only."""
    x = torch.randn(rows, 2 * size + 3)[:, 1:-2] * 12
    if rows:
        x[0, :size] = torch.tensor([0.0, 7.0, 7.001, -200.0, 200.0, torch.inf, torch.nan]).repeat(size)[:size]
        x[-1, size:] = torch.tensor([-7.0, -7.001, 200.0, -200.0, 7.0, torch.inf, torch.nan]).repeat(size)[:size]
    gate, up = x.double().chunk(2, -1)
    gate = gate.clamp(max=7)
    exact = gate * (1.702 * gate).sigmoid() * (up.clamp(-7, 7) + 1)
    torch.testing.assert_close(gated_clamped(x, 1.702, 7.0).double(), exact, atol=1e-30, rtol=1e-5, equal_nan=True)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("levels", [63, 127])
@pytest.mark.parametrize("size", [1, 7, 16, 40, 129, 768])
@pytest.mark.parametrize("rows", [0, 1, 3, 300])
def test_rounding(size: int, rows: int, levels: int) -> None:
    x = torch.randn(rows, size + 3)[:, 1:-2] * torch.logspace(-6, 6, rows)[:, None]
    if rows:
        x[0] = 0
    numbers, scale = rounded(x, levels)
    assert numbers.shape == x.shape
    found = (numbers.double() - (levels + 1)) * scale.double()
    assert ((found - x.double()).abs() <= scale.double() * 0.5001).all()
    assert (numbers >= 1).all()
    assert (numbers <= 2 * levels + 1).all()
    if rows > 1:
        extreme = (numbers[1:].int() - (levels + 1)).abs().amax(1)
        assert (extreme == levels).all(), "the largest of a row takes the last level"


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("size", [7, 16, 40])
def test_rounding_keeps_what_is_no_number(size: int) -> None:
    x = torch.ones(size, size).fill_diagonal_(torch.nan)
    assert rounded(x, 127)[1].isnan().all()
    assert rounded(x.fill_diagonal_(-torch.inf), 127)[1].isinf().all()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("dim", "size"), [(2, 2), (8, 8), (16, 64), (64, 64), (80, 80), (32, 40)])
def test_rotation_of_views(dim: int, size: int) -> None:
    """Heads of a fused projection into heads first storage."""
    table = RopeTable(1.0 / 10000.0 ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    rotation = table.cos_sin(torch.arange(50, 90))
    x = torch.randn(40, 9, size)[:, 2:5]
    segment = torch.zeros(3, 64, size)
    rope.rotate_into(x, rotation, segment[:, 10:50].transpose(0, 1))
    swapped = x[..., :dim].double().roll(dim // 2, -1)
    exact = x.double().clone()
    exact[..., :dim] = x[..., :dim].double() * rotation[0][:, None] + swapped * rotation[1][:, None]
    torch.testing.assert_close(segment[:, 10:50].transpose(0, 1).double(), exact, atol=1e-6, rtol=1e-6)
    assert not segment[:, :10].any()
    assert not segment[:, 50:].any()
    torch.testing.assert_close(rotate(x, rotation).double(), exact, atol=1e-6, rtol=1e-6)


def test_other_dtypes_and_odd_views_go_the_general_way() -> None:
    assert passes.suited(torch.zeros(2, 4, dtype=torch.bfloat16)) is None
    assert passes.suited(torch.zeros(4, 2).T) is None
    x = torch.randn(16, 6).T
    torch.testing.assert_close(rms_norm(x, torch.ones(16), 1e-5), F.rms_norm(x, (16,), torch.ones(16), 1e-5))
