"""Matrices in blocks of 4 to 8 bits: unpacked as the gguf library does it, multiplied as exactly as 8-bit activations allow."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from afterglow.kernels import packed
from afterglow.kernels.built import native
from afterglow.kernels.packed import BLOCK_FORMATS, PackedPanels, asymmetric_blocks, dequantize, rounded_groups

WAYS = ["torch", *([16, 8] if native() is not None else [])]  # with vectors of so many floats


@pytest.fixture(params=WAYS, ids=str)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply in one of the ways that there are."""
    if request.param == "torch":
        monkeypatch.setattr(packed, "native", lambda: None)
        return
    library = native()
    assert library is not None
    if library.width < request.param:
        pytest.skip(f"this processor has no vectors of {request.param} floats")
    monkeypatch.setattr(library, "width", request.param)


HALVES = {  # format: where a block's float16 numbers are
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def random_blocks(block_format: str, outputs: int, inputs: int, seed: int = 0) -> Tensor:
    """Blocks of any bytes, but with scales as a trained matrix has them."""
    kind, generator = BLOCK_FORMATS[block_format], torch.Generator().manual_seed(seed)
    blocks = torch.randint(
        256, (outputs, inputs // kind.weights, kind.num_bytes), dtype=torch.uint8, generator=generator
    )
    scales = torch.randn(*blocks.shape[:2], 2, generator=generator) / 100
    for which, place in enumerate(HALVES.get(block_format, ())):
        blocks[..., place : place + 2] = scales[..., which : which + 1].half().view(torch.uint8)
    if block_format in ("A4", "A8"):
        blocks[..., :4] = scales[..., :1].contiguous().view(torch.uint8)
    if block_format == "A4":
        blocks[..., 4] &= 15
    if block_format == "MXFP4":
        blocks[..., 0] = blocks[..., 0] % 8 + 118
    return blocks.flatten(1)


@pytest.mark.parametrize("block_format", sorted(BLOCK_FORMATS.keys() - {"A4", "A8"}))
def test_weights_are_those_of_the_gguf_library(block_format: str) -> None:
    gguf = pytest.importorskip("gguf")
    kind = BLOCK_FORMATS[block_format]
    any_bytes = np.random.default_rng(0).integers(0, 256, (67, kind.row_bytes(1536)), dtype=np.uint8)
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(any_bytes, gguf.GGMLQuantizationType[block_format])
    found = dequantize(torch.from_numpy(any_bytes), block_format).numpy()
    assert np.isfinite(wanted).mean() > 0.8
    assert np.array_equal(found, wanted, equal_nan=True)
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[block_format]] == (kind.weights, kind.num_bytes)


@pytest.mark.parametrize(("outputs", "groups"), [(7, 3), (1, 1)])
@pytest.mark.parametrize("bits", [4, 8])
def test_asymmetric_blocks(bits: int, outputs: int, groups: int) -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(1 << bits, (outputs, 32 * groups), dtype=torch.uint8, generator=generator)
    zero = torch.randint(1 << bits, (outputs, groups), dtype=torch.uint8, generator=generator)
    scale = torch.randn(outputs, groups, generator=generator)
    blocks = asymmetric_blocks(numbers, scale, zero, bits)
    wanted = (numbers.float() - zero.repeat_interleave(32, 1)) * scale.repeat_interleave(32, 1)
    assert torch.equal(dequantize(blocks, f"A{bits}"), wanted)


def test_rounded_rows_are_near() -> None:
    x = torch.randn(50, 96, generator=torch.Generator().manual_seed(0))
    x[3] = 0
    x[4, :32] = 1e-38
    x[5, 32:64] *= 1e30
    numbers, scale = rounded_groups(x)
    assert numbers[numbers != 0].abs().max() == 127
    error = numbers.double() * scale.double()[..., None] - x.double().unflatten(1, (3, 32))
    assert (error.abs() <= scale[..., None] * 0.5001).all()


def test_rounding_divides_as_the_compiled_kernels_do() -> None:
    x = torch.rand(1000, 32, generator=torch.Generator().manual_seed(0)) + 0.01
    numbers, _ = rounded_groups(x)
    by = np.float32(127) / x.amax(1, keepdim=True).numpy()
    assert np.array_equal(numbers[:, 0].numpy(), np.rint(x.numpy() * by))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("block_format", BLOCK_FORMATS)
def test_what_is_no_number_stays_none(block_format: str) -> None:
    """NaN at any place of a row makes all its products NaN, infinity makes none of them finite; other rows do not notice."""
    matrix = PackedPanels(random_blocks(block_format, 20, 256), block_format, 256)
    x = torch.randn(33, 256, generator=torch.Generator().manual_seed(0))
    right = matrix(x[32:])
    for bad in (torch.nan, torch.inf, -torch.inf):
        x[:32].fill_diagonal_(bad)
        found = matrix(x)
        assert not found[:32].isfinite().any()
        assert torch.equal(found[32:], right)
    x[:32].fill_diagonal_(torch.nan)
    assert matrix(x)[:32].isnan().all()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 12, 13, 100])
@pytest.mark.parametrize("block_format", BLOCK_FORMATS)
def test_products(block_format: str, rows: int, bias: bool) -> None:
    """Near float64's of the rounded rows (float32 sums), and of the rows themselves (half a step for each of 8 bits)."""
    outputs, inputs = 50, 768 if BLOCK_FORMATS[block_format].weights == 256 else 736
    blocks = random_blocks(block_format, outputs, inputs)
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inputs + 3, generator=generator)[:, 1:-2]
    offset = torch.randn(outputs, generator=generator) if bias else None
    matrix = PackedPanels(blocks, block_format, inputs, offset)
    assert (matrix.inputs, matrix.outputs) == (inputs, outputs)
    found = matrix(x).double()
    weight = dequantize(blocks, block_format).double()
    added = None if offset is None else offset.double()
    numbers, scale = rounded_groups(x)
    near = F.linear((numbers.double() * scale.double()[..., None]).flatten(1), weight, added)
    size = F.linear(x.double().abs(), weight.abs())
    assert ((found - near).abs() <= 2e-6 * size + 1e-6).all()
    steps = scale.double().repeat_interleave(32, 1) / 2
    assert ((found - F.linear(x.double(), weight, added)).abs() <= F.linear(steps, weight.abs()) * 1.001 + 1e-6).all()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("block_format", BLOCK_FORMATS)
def test_a_row_is_the_same_whatever_its_batch(block_format: str) -> None:
    matrix = PackedPanels(random_blocks(block_format, 70, 512), block_format, 512, torch.arange(70.0))
    x = torch.randn(300, 512, generator=torch.Generator().manual_seed(1))
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        whole = matrix(x)
    finally:
        torch.set_num_threads(threads)
    for start, rows in ((0, 1), (7, 1), (0, 12), (5, 13), (239, 2), (240, 7), (1, 299)):
        assert torch.equal(matrix(x[start : start + rows]), whole[start : start + rows])


@pytest.mark.skipif(len(WAYS) < 3, reason="nothing has been built here")
@pytest.mark.parametrize("rows", [1, 4, 30, 250])
@pytest.mark.parametrize("block_format", BLOCK_FORMATS)
def test_products_are_the_same_in_vectors_of_each_width(
    block_format: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = native()
    assert library is not None
    matrix = PackedPanels(random_blocks(block_format, 40, 2560), block_format, 2560, torch.arange(40.0))
    x = torch.randn(rows, 2560, generator=torch.Generator().manual_seed(1))
    x[0, 64:96] = 0
    found = matrix(x)
    monkeypatch.setattr(library, "width", 8)
    assert torch.equal(matrix(x), found)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("start", "stop"), [(0, 70), (16, 48), (32, 70), (5, 6), (3, 69)])
@pytest.mark.parametrize("block_format", BLOCK_FORMATS)
def test_a_part(block_format: str, start: int, stop: int) -> None:
    matrix = PackedPanels(random_blocks(block_format, 70, 256), block_format, 256, torch.arange(70.0))
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1))
    part = matrix.part(start, stop)
    assert (part.inputs, part.outputs) == (256, stop - start)
    assert torch.equal(part(x), matrix(x)[:, start:stop])
    middle = part.part(1, part.outputs)
    assert torch.equal(middle(x), matrix(x)[:, start + 1 : stop])


@pytest.mark.usefixtures("way")
def test_the_most_that_sums_hold() -> None:
    """All numbers at their ends: no sum of products in 16 or 32 bits may overflow."""
    for block_format, kind in BLOCK_FORMATS.items():
        for fill in (0, 255):
            blocks = random_blocks(block_format, 16, 512)
            scales = blocks.view(16, -1, kind.num_bytes).clone()
            blocks.fill_(fill)
            for place in HALVES.get(block_format, ()):
                blocks.view(16, -1, kind.num_bytes)[..., place : place + 2] = scales[..., place : place + 2]
            if block_format in ("A4", "A8"):
                blocks.view(16, -1, kind.num_bytes)[..., :5] = scales[..., :5]
            if block_format == "MXFP4":
                blocks.view(16, -1, kind.num_bytes)[..., 0] = 120
            for x in (torch.ones(13, 512), -torch.ones(13, 512)):
                found = PackedPanels(blocks, block_format, 512)(x)
                wanted = F.linear(x.double(), dequantize(blocks, block_format).double())
                torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-4)


def test_blocks_of_a_mapped_file() -> None:
    """Rows may begin anywhere, lie apart, and be read-only."""
    blocks = random_blocks("Q4_K", 20, 512)
    apart = torch.zeros(20, blocks.shape[1] + 7, dtype=torch.uint8)
    apart[:, 3:-4] = blocks
    x = torch.randn(2, 512, generator=torch.Generator().manual_seed(1))
    assert torch.equal(PackedPanels(apart[:, 3:-4], "Q4_K", 512)(x), PackedPanels(blocks, "Q4_K", 512)(x))
    across = blocks.T.contiguous().T
    assert torch.equal(PackedPanels(across, "Q4_K", 512)(x), PackedPanels(blocks, "Q4_K", 512)(x))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("block_format", ["Q4_0", "Q6_K"])
def test_rows_of_several_tensors_in_another_order(block_format: str) -> None:
    parts = [random_blocks(block_format, rows, 512) for rows in (21, 3, 40)]
    order = torch.randperm(64, generator=torch.Generator().manual_seed(2))
    whole = torch.cat(parts)
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(1))
    stacked = PackedPanels([parts[0], parts[1], parts[2].T.contiguous().T], block_format, 512)
    assert torch.equal(stacked(x), PackedPanels(whole, block_format, 512)(x))
    reordered = PackedPanels(parts, block_format, 512, torch.arange(64.0), order)
    assert torch.equal(reordered(x), PackedPanels(whole[order], block_format, 512, torch.arange(64.0))(x))


@pytest.mark.usefixtures("way")
def test_rows_that_are_no_blocks() -> None:
    blocks = random_blocks("Q4_0", 3, 64)
    with pytest.raises(ValueError, match="unknown block format 'Q2_K': known are Q8_0"):
        PackedPanels(blocks, "Q2_K", 64)
    with pytest.raises(ValueError, match="blocks of 18"):
        PackedPanels(blocks[:, 1:], "Q4_0", 64)
    with pytest.raises(ValueError, match="has not 96 inputs"):
        PackedPanels(blocks, "Q4_0", 96)
    with pytest.raises(ValueError, match="100 inputs are no whole number"):
        BLOCK_FORMATS["Q4_0"].row_bytes(100)
