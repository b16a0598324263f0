"""Blocks of files as a device keeps them: the weights of the gguf library, to the bit, in the memory that is said."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from afterglow.kernels.device_blocks import DEVICE_BITS, FLOATS, device_matrix
from afterglow.kernels.device_experts import PlainMatrix, expert_tables
from afterglow.kernels.device_products import RoundedMatrix
from afterglow.kernels.packed import BLOCK_FORMATS, asymmetric_blocks
from tests.kernels.test_packed import random_blocks

CPU = torch.device("cpu")
OF_FILES = sorted(BLOCK_FORMATS.keys() - {"A4", "A8"})
FOUR = {"Q4_0", "Q4_1", "Q4_K", "MXFP4", "A4"}


def bits_of(matrix: RoundedMatrix) -> float:
    return 8 * matrix.num_bytes / (matrix.outputs * matrix.inputs)


@pytest.mark.parametrize("block_format", OF_FILES)
def test_weights_are_those_of_the_gguf_library(block_format: str) -> None:
    """Of any bytes, also of those that no quantiser writes. More outputs than are split at a time."""
    gguf = pytest.importorskip("gguf")
    kind = BLOCK_FORMATS[block_format]
    any_bytes = np.random.default_rng(0).integers(0, 256, (300, kind.row_bytes(512)), dtype=np.uint8)
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(any_bytes, gguf.GGMLQuantizationType[block_format])
    matrix = device_matrix(torch.from_numpy(any_bytes), block_format, 512, CPU)
    assert np.isfinite(wanted).mean() > 0.8
    assert np.array_equal(matrix.widened(0, 300, torch.float32).numpy(), wanted, equal_nan=True)
    assert (matrix.kind.bits == 4) is (block_format in FOUR)


@pytest.mark.parametrize("block_format", OF_FILES)
def test_memory_is_what_is_said(block_format: str) -> None:
    matrix = device_matrix(random_blocks(block_format, 40, 512), block_format, 512, CPU)
    assert bits_of(matrix) == DEVICE_BITS[block_format]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("scales", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("zeros", ["symmetric", "any", "far"])
def test_weights_of_a_checkpoint_are_its_numbers(bits: int, scales: torch.dtype, zeros: str) -> None:
    """`far`: zeros beyond the numbers."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(1 << bits, (270, 64), dtype=torch.uint8, generator=generator)
    shape, most = (270, 2), {"symmetric": 1, "any": 1 << bits, "far": 256}[zeros]
    zero = torch.randint(most, shape, dtype=torch.uint8, generator=generator)
    if zeros == "symmetric":
        zero += 1 << bits - 1
    scale = torch.randn(shape, generator=generator).to(scales).float()
    matrix = device_matrix(asymmetric_blocks(numbers, scale, zero, bits), f"A{bits}", 64, CPU)
    wide = zero.repeat_interleave(32, 1), scale.repeat_interleave(32, 1)
    assert torch.equal(matrix.widened(0, 270, torch.float32), (numbers.float() - wide[0]) * wide[1])
    assert (matrix.offset is None) is (zeros == "symmetric")
    if zeros == "any":
        assert bits_of(matrix) == DEVICE_BITS[f"A{bits}"] - (0.5 if scales == torch.float16 else 0)


@pytest.mark.parametrize("block_format", BLOCK_FORMATS)
def test_parts_and_looked_up_rows_have_the_same_weights(block_format: str) -> None:
    bias = torch.randn(40, generator=torch.Generator().manual_seed(0))
    matrix = device_matrix(random_blocks(block_format, 40, 256), block_format, 256, CPU, bias)
    whole = matrix.widened(0, 40, torch.float32)
    assert torch.equal(matrix.rows(3, 30).widened(2, 9, torch.float32), whole[5:12])
    ids: Tensor = torch.tensor([39, 0, 7, 7])
    assert torch.equal(matrix.looked_up(ids, torch.bfloat16), whole[ids].to(torch.bfloat16))
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(matrix.rows(3, 30)(x), x @ whole[3:30].T + bias[3:30], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(matrix.with_bias(None)(x), x @ whole.T, atol=1e-4, rtol=1e-4)


def test_experts_are_of_one_kind_whatever_their_scales_are() -> None:
    """Powers of two that float16 has, and others. Kernels find no experts that are kept in several ways."""
    few, many = (random_blocks("MXFP4", 40, 64) for _ in range(2))
    few.view(40, 2, 17)[..., 0], many.view(40, 2, 17)[..., 0] = 120, 60
    experts = [device_matrix(blocks, "MXFP4", 64, CPU) for blocks in (few, many)]
    assert expert_tables(experts, [PlainMatrix(torch.zeros(64, 20))] * 2, None) is not None
    other = device_matrix(random_blocks("Q8_0", 40, 64), "Q8_0", 64, CPU)
    assert expert_tables([experts[0], other], [PlainMatrix(torch.zeros(64, 20))] * 2, None) is None


@pytest.mark.parametrize("bits", [4, 8])
def test_experts_of_a_checkpoint_have_scales_and_zeros_of_one_dtype(bits: int) -> None:
    """Scales that float16 has, that bfloat16 has, and others; zeros that are all 0, and others."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(1 << bits, (40, 64), dtype=torch.uint8, generator=generator)
    middle = torch.full((40, 2), 1 << bits - 1, dtype=torch.uint8)
    experts = [
        device_matrix(asymmetric_blocks(numbers, torch.full((40, 2), scale), zero, bits), f"A{bits}", 64, CPU)
        for scale, zero in ((0.5, middle), (2.0**-30, middle), (0.1, middle), (0.5, middle - 3))
    ]
    assert len({each.kind for each in experts}) == 4
    tables = expert_tables(experts, [PlainMatrix(torch.zeros(64, 20))] * 4, None)
    assert tables is not None
    for before, after in zip(experts, tables.wide.matrices, strict=True):
        assert after.kind == tables.wide.kind
        assert torch.equal(before.widened(0, 40, torch.float32), after.widened(0, 40, torch.float32))


def test_rows_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="has not 64 inputs"):
        device_matrix(random_blocks("Q8_0", 2, 32), "Q8_0", 64, CPU)
    with pytest.raises(ValueError, match="a row of 67 bytes of float8 has not 64 inputs"):
        device_matrix(torch.zeros(2, 67, dtype=torch.uint8), FLOATS, 64, CPU)
    with pytest.raises(ValueError, match="unknown block format 'Q2_K'"):
        device_matrix(random_blocks("Q8_0", 2, 32), "Q2_K", 32, CPU)
