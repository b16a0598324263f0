"""How matrices are kept: reordered products are the plain ones, int8 ones are near, and a row is never moved by another."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import pairwise, product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from afterglow.errors import ConfigError
from afterglow.kernels.built import native
from afterglow.kernels.matrix import has_bytes
from afterglow.model import keeping
from afterglow.model.decoder import PlainAttend
from afterglow.model.keeping import TRIAL_ROWS, Keeping
from afterglow.model.linear import (
    BytePanelLinear,
    Int8Linear,
    Linear,
    PackedLinear,
    PanelLinear,
    PlainLinear,
    can_pack,
    int8_levels,
)
from afterglow.model.loader import load_model
from tests import doors

CPU = torch.device("cpu")
Int8 = Callable[[Tensor, Tensor | None], Linear]
SHAPES = [(8, 8), (96, 40), (7, 13)]
ROWS = [0, 1, 2, 3, 4, 5, 64, 300]


@pytest.fixture(autouse=True)
def the_same_numbers_each_time() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=[Int8Linear, BytePanelLinear])
def int8(request: pytest.FixtureRequest) -> Int8:
    """A way to keep a matrix in 8 bits."""
    if not can_keep(request.param):
        pytest.skip("no such products on this machine")
    if request.param is Int8Linear:
        return functools.partial(Int8Linear, levels=int8_levels())
    return BytePanelLinear


def random_case(shape: tuple[int, int], rows: int, bias: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """`x` is not contiguous, as the gated MLP's halves are."""
    weight, offset = torch.randn(shape), torch.randn(shape[0]) if bias else None
    return weight, offset, torch.randn(rows, shape[1] + 3)[:, 1:-2]


def can_keep(kind: type[object]) -> bool:
    if kind is PanelLinear:
        return native() is not None
    if kind is BytePanelLinear:
        return has_bytes()
    return bool(int8_levels()) if kind is Int8Linear else kind is PlainLinear or can_pack(torch.float32, CPU)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, (33, 2048)])
@pytest.mark.parametrize("kind", [PackedLinear, PanelLinear])
def test_reordered_products_are_right_for_every_row_count(
    rows: int, bias: bool, shape: tuple[int, int], kind: type[PackedLinear | PanelLinear]
) -> None:
    if not can_keep(kind):
        pytest.skip("no such products on this machine")
    weight, offset, x = random_case(shape, rows, bias)
    for given in (x, x.contiguous()):
        ours = kind(weight, offset)(given)
        assert ours.shape == (rows, shape[0])
        exact = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
        torch.testing.assert_close(ours.double(), exact, atol=2e-4, rtol=0)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("width", [16, 8])
def test_a_row_of_panels_is_the_same_whatever_its_batch(width: int, threads: int) -> None:
    library = native()
    if library is None or library.width < width:
        pytest.skip("no such products on this machine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "width", width)
        matrix = PanelLinear(torch.randn(1000, 512), torch.randn(1000))
    x = torch.randn(500, 1024)[:, :512]  # rows 4 KiB apart
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = matrix(x)
        torch.testing.assert_close(whole, F.linear(x, *matrix.part(0, 1000)), atol=1e-3, rtol=1e-5)
        for start, rows in product((0, 1, 239, 240), (1, 2, 7, 13, 241)):
            assert torch.equal(matrix(x[start : start + rows]), whole[start : start + rows])
    finally:
        torch.set_num_threads(before)


def test_packing_is_only_used_where_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "native", lambda: None)
    assert not can_pack(torch.bfloat16, CPU)
    assert not can_pack(torch.float32, torch.device("cuda"))
    monkeypatch.setattr(PackedLinear, "_product", lambda self, x: torch.zeros(x.shape[0], 6))
    assert not can_pack(torch.float32, CPU), "wrong numbers must be noticed"

    def missing(self: PackedLinear, x: Tensor) -> Tensor:
        raise NotImplementedError

    monkeypatch.setattr(PackedLinear, "_product", missing)
    assert not can_pack(torch.float32, CPU)
    decoder = load_model("tiny")
    ids = torch.arange(4)
    assert decoder.forward(ids, ids, PlainAttend(decoder, ids, [4])).shape == (4, 64)


KINDS = [PanelLinear, PackedLinear, PlainLinear]


@pytest.mark.parametrize("fast", KINDS)
def test_the_fastest_way_is_kept_and_tried_once(monkeypatch: pytest.MonkeyPatch, fast: type[object]) -> None:
    if not all(can_keep(kind) for kind in KINDS):
        pytest.skip("no such products on this machine")
    tried: list[type[object]] = []

    def seconds(which: object, x: Tensor) -> float:
        tried.append(type(which))
        return 1.0 if isinstance(which, fast) else 2.0

    doors.forget_trials_of_matrices()
    monkeypatch.setattr(keeping, "_seconds", seconds)
    keep = Keeping(torch.float32, CPU)
    assert {type(keep(torch.randn(24, 8), None)) for _ in range(3)} == {fast}
    assert len(tried) == 3 * len(TRIAL_ROWS)
    doors.forget_trials_of_matrices()


def test_a_little_faster_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    if not can_keep(PackedLinear):
        pytest.skip("no such products on this machine")
    doors.forget_trials_of_matrices()
    monkeypatch.setattr(keeping, "_seconds", lambda which, x: 1.0 if isinstance(which, PlainLinear) else 1.05)
    assert type(Keeping(torch.float32, CPU)(torch.randn(24, 8), None)) is not PlainLinear
    doors.forget_trials_of_matrices()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, (512, 768), (33, 1030)])
def test_int8_products_are_those_of_rounded_numbers(int8: Int8, rows: int, bias: bool, shape: tuple[int, int]) -> None:
    weight, offset, x = random_case(shape, rows, bias)
    levels = int8_levels() or 127
    ours = int8(weight, offset)(x)
    scale = weight.abs().amax(1, keepdim=True) / 127
    steps = x.abs().amax(1, keepdim=True) / levels
    # Half a step for each number: sums of products differ by no more than this, wherever a tie was rounded to.
    bound = (x.abs() @ (scale / 2).expand_as(weight).T) + (steps / 2).expand_as(x) @ weight.abs().T
    bound += shape[1] * (steps / 2) @ (scale / 2).T
    assert ours.shape == (rows, shape[0])
    assert ((ours - F.linear(x, weight, offset)).abs() <= bound * 1.001 + 1e-5).all()
    if rows >= 64:
        error = (ours - F.linear(x, weight, offset)).norm() / F.linear(x, weight, offset).norm()
        assert error < (0.02 if levels == 127 else 0.04)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(7, 13), (64, 64), (100, 1030)])
def test_int8_parts_are_rounded_as_the_whole_matrix_in_float32(
    int8: Int8, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight, offset, x = random_case(shape, 9, True)
    weight[2] = 0
    weight[1] = torch.arange(shape[1]) - 2.5  # ties
    weight[1, 0] = 127
    weight = weight.to(dtype)
    filled = (Int8Linear if int8 is not BytePanelLinear else BytePanelLinear).empty(*shape)
    cuts = (0, 1, 5, shape[0] // 2, shape[0])
    for start, stop in pairwise(cuts):
        filled.fill(start, weight[start:stop])
    ours = filled.done(offset)
    scale = weight.float().abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / 127
    numbers = (weight.float() / scale[:, None]).round()
    if isinstance(ours, BytePanelLinear):
        found, bias = ours.part(0, shape[0])
        assert torch.equal(found, numbers * scale[:, None])
        assert bias is not None
        assert torch.equal(bias, offset)
    assert torch.equal(ours(x), int8(weight.float(), offset)(x))


def test_an_int8_row_does_not_depend_on_its_batch(int8: Int8) -> None:
    matrix = int8(torch.randn(96, 64), torch.randn(96))
    x = torch.randn(70, 64) * torch.logspace(-3, 3, 70)[:, None]
    whole = matrix(x)
    for start, rows in product((0, 1, 33), (1, 2, 7, 36)):
        torch.testing.assert_close(matrix(x[start : start + rows]), whole[start : start + rows], rtol=1e-6, atol=0)


def test_rows_of_zeros_and_weights_of_zeros_are_zeros(int8: Int8) -> None:
    matrix = int8(torch.cat((torch.zeros(3, 16), torch.randn(5, 16))), None)
    assert not matrix(torch.zeros(2, 16)).any()
    assert not matrix(torch.randn(2, 16))[:, :3].any()


@pytest.mark.parametrize("kind", [*KINDS, Int8Linear, BytePanelLinear])
def test_a_part_of_the_outputs(kind: Callable[[Tensor, Tensor | None], Linear]) -> None:
    if not can_keep(kind):
        pytest.skip("no such products on this machine")
    weight, offset, x = random_case((48, 24), 9, True)
    whole = Int8Linear(weight, offset, levels=int8_levels()) if kind is Int8Linear else kind(weight, offset)
    torch.testing.assert_close(whole.rows(16, 40)(x), whole(x)[:, 16:40], rtol=1e-4, atol=1e-4)


def test_int8_is_refused_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="not on cpu in bfloat16"):
        Keeping(torch.bfloat16, CPU, "int8")
    with pytest.raises(ConfigError, match="--device cpu"):
        Keeping(torch.float32, torch.device("mps"), "int8")
    monkeypatch.setattr(keeping, "int8_levels", lambda: 0)
    monkeypatch.setattr(keeping, "has_bytes", lambda: False)
    with pytest.raises(ConfigError, match="--quantization none"):
        Keeping(torch.float32, CPU, "int8")


def test_overflowing_processors_take_fewer_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of two products that are cut at 16 bits, as `vpmaddubsw` does it, injected where the product is asked for."""

    def saturating(self: Int8Linear, x: Tensor) -> Tensor:
        zero = self._levels + 1
        scale = x.abs().amax(-1, keepdim=True) / self._levels
        rounded = (x / scale).add(zero + 0.5).floor()
        pairs = (rounded[:, None, :] * ones * 127).unflatten(2, (-1, 2)).sum(3)
        sums = pairs.clamp(-(2**15), 2**15 - 1).sum(2) - zero * 127 * ones.sum(1)
        return sums * scale / 127

    ones = torch.ones(16, 64)
    ones[::2] = -1
    int8_levels.cache_clear()
    monkeypatch.setattr(Int8Linear, "__call__", saturating)
    assert int8_levels() == 63
    int8_levels.cache_clear()
