"""Models whose matrices are in blocks: as a source has them, or rounded at the start."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from afterglow.choices import QuantizationName
from afterglow.errors import ConfigError
from afterglow.kernels.block_rounding import round_to_blocks
from afterglow.kernels.packed import dequantize
from afterglow.model.decoder import Decoder, PlainAttend
from afterglow.model.linear import BlockLinear, StackedLinear
from afterglow.model.names import Names
from afterglow.model.presets import PRESETS, RandomSource
from afterglow.model.spec import ExpertsSpec, ModelSpec
from afterglow.model.tables import PackedTensor
from afterglow.model.weights import WeightAssembler

CPU = torch.device("cpu")
TIED = dataclasses.replace(PRESETS["tiny"], tied_embeddings=True, qkv_bias=True)
# Each token takes all experts: a choice that rounding flips is no small error.
EXPERTS = ExpertsSpec(count=4, chosen=4, ffn=64, layers=(1,), shared_ffn=32)
MIXED = dataclasses.replace(PRESETS["tiny"], experts=EXPERTS)


class BlockSource(RandomSource):
    """Random matrices in blocks; values in 8 bits, all else in 4, and the embedding as it is if `plain_table`."""

    def __init__(self, *, plain_table: bool = False) -> None:
        super().__init__(3)
        self._plain_table = plain_table

    def _format(self, name: str) -> str | None:
        if name.endswith(".bias") or "norm" in name or (self._plain_table and "embed" in name):
            return None
        return "Q8_0" if "v_proj" in name or "embed" in name or "head" in name else "Q4_0"

    def packed(self, name: str, shape: tuple[int, int]) -> PackedTensor | None:
        kind = self._format(name)
        return None if kind is None else PackedTensor(round_to_blocks(super().get(name, shape), kind), kind)

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        kind = self._format(name)
        exact = super().get(name, shape)
        return exact if kind is None else dequantize(round_to_blocks(exact, kind), kind)


def decoder(source: RandomSource, spec: ModelSpec, quantization: QuantizationName) -> Decoder:
    return WeightAssembler(spec, Names(), source, torch.float32, CPU, quantization).decoder()


def logits(model: Decoder) -> Tensor:
    ids = torch.arange(40) * 11 % 512
    positions = torch.arange(40)
    return model.logits(model.forward(ids, positions, PlainAttend(model, positions, [40])))


@pytest.mark.parametrize("spec", [PRESETS["tiny"], TIED, MIXED], ids=["own head", "tied", "experts"])
@pytest.mark.parametrize("plain_table", [False, True])
def test_blocks_of_a_source_stay_as_they_are(spec: ModelSpec, plain_table: bool) -> None:
    blocks, exact = (decoder(BlockSource(plain_table=plain_table), spec, kind) for kind in ("auto", "none"))
    assert (blocks.quantization, exact.quantization) == ("blocks", "none")
    assert isinstance(blocks.layers[0].out, BlockLinear)
    found, wanted = logits(blocks), logits(exact)
    # Weights are the same: what differs is that rows are rounded to 8 bits, 0.3 to 0.4 % of their deviation per product.
    assert (found - wanted).square().mean().sqrt() < 0.02 * wanted.std()


def test_a_fused_matrix_of_several_formats_is_stacked() -> None:
    model = decoder(BlockSource(), TIED, "auto")
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    q, k, v = model.layers[1].attention.project(x)
    source = BlockSource()
    for name, found in (("q", q), ("k", k), ("v", v)):
        own = f"model.layers.1.self_attn.{name}_proj"
        outputs = found.flatten(1).shape[1]
        exact = x @ source.get(own + ".weight", (outputs, 64)).T + source.get(own + ".bias", (outputs,))
        assert (found.flatten(1) - exact).abs().max() < 0.01
    torch.testing.assert_close(model.layers[1].attention.value(x), v)


def test_rows_of_stacked_matrices() -> None:
    weights = [torch.randn(size, 32, generator=torch.Generator().manual_seed(size)) for size in (8, 24, 16)]
    parts = [BlockLinear(round_to_blocks(weight, "Q8_0"), "Q8_0", 32) for weight in weights]
    whole, x = StackedLinear(parts), torch.ones(3, 32)
    assert (whole.inputs, whole.outputs) == (32, 48)
    for start, stop in ((0, 48), (0, 8), (8, 32), (4, 40), (33, 34)):
        assert torch.equal(whole.rows(start, stop)(x), whole(x)[:, start:stop])


@pytest.mark.parametrize("spec", [PRESETS["tiny"], TIED], ids=["own head", "tied"])
def test_int4_rounds_matrices_to_4_bits_embedding_and_head_to_8(spec: ModelSpec) -> None:
    class Rounded(RandomSource):
        def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
            exact = super().get(name, shape)
            if len(shape) == 1 or name.endswith("gate.weight"):  # routers are never rounded
                return exact
            kind = "Q8_0" if "embed" in name or "head" in name else "Q4_0"
            return dequantize(round_to_blocks(exact, kind), kind)

    ours, exact = decoder(RandomSource(3), spec, "int4"), decoder(Rounded(3), spec, "none")
    assert ours.quantization == "int4"
    found, wanted = logits(ours), logits(exact)
    assert (found - wanted).square().mean().sqrt() < 0.02 * wanted.std()


def test_widths_that_are_no_whole_blocks_get_8_bits() -> None:
    spec = dataclasses.replace(PRESETS["tiny"], ffn=72)
    model, exact = (decoder(RandomSource(3), spec, kind) for kind in ("int4", "none"))
    assert not isinstance(model.layers[0].dense.narrow, BlockLinear)
    assert isinstance(model.layers[0].dense.wide, BlockLinear)
    assert (logits(model) - logits(exact)).square().mean().sqrt() < 0.2 * logits(exact).std()


def test_int4_is_refused_where_it_cannot_be() -> None:
    with pytest.raises(ConfigError, match="--quantization int4 computes on CPU in float32, not on cpu in bfloat16"):
        WeightAssembler(PRESETS["tiny"], Names(), RandomSource(3), torch.bfloat16, CPU, "int4")


def test_where_blocks_cannot_be_multiplied_they_are_dequantised() -> None:
    model = WeightAssembler(PRESETS["tiny"], Names(), BlockSource(), torch.bfloat16, CPU, "auto").decoder()
    assert model.quantization == "none"
