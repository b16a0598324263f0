"""The seam: what an Attend gets to see, and the small parts below it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from afterglow.kernels.attention import attend, merge
from afterglow.kernels.rope import rotate_into
from afterglow.model.decoder import Attention, Decoder, PlainAttend
from afterglow.model.loader import load_model
from tests.model.families_hf import save_case


class Recorder(PlainAttend):
    """Keeps the keys and values that would be stored."""

    def __init__(self, decoder: Decoder, positions: Tensor) -> None:
        super().__init__(decoder, positions, [positions.shape[0]])
        self.kept: list[tuple[Tensor, Tensor]] = []

    def __call__(self, layer: int, attention: Attention, x: Tensor) -> Tensor:
        assert layer == attention.layer == len(self.kept)
        _, k, v = attention.project(x)
        assert k.shape == v.shape == (x.shape[0], attention.kv_heads, attention.head_dim)
        self.kept.append((k.clone(), v.clone()))
        return super().__call__(layer, attention, x)


class Resumed:
    """Attends new tokens over kept, un-rotated rows, stored heads first and turned on the way in."""

    def __init__(self, decoder: Decoder, kept: list[tuple[Tensor, Tensor]], old: Tensor, new: Tensor) -> None:
        self._kept, self._old, self._new = kept, decoder.rotation(old), decoder.rotation(new)

    def __call__(self, layer: int, attention: Attention, x: Tensor) -> Tensor:
        keys, values = self._kept[layer]
        segment = torch.empty_like(keys.transpose(0, 1), memory_format=torch.contiguous_format).transpose(0, 1)
        rotation = None if self._old is None else self._old.at(layer)
        if rotation is None:
            segment.copy_(keys)
        else:
            rotate_into(keys, rotation, segment)
        q, k, v = attention.project(x)
        torch.testing.assert_close(attention.value(x), v)
        q, k = attention.rotate(q, self._new), attention.rotate(k, self._new)
        past = attend(q, segment, values, scale=attention.scale, causal=False)
        own = attend(q, k, v, scale=attention.scale, causal=True)
        return merge([past, own])[0].flatten(1)


@pytest.mark.parametrize("case", ["llama", "llama-yarn", "qwen3", "phi", "falcon-new", "opt"])
def test_kept_rows_have_no_position_and_resume_exactly(case: str, tmp_path: Path) -> None:
    save_case(case, tmp_path)
    decoder = load_model(tmp_path)
    ids, positions = torch.randint(3, 97, (50,)), torch.arange(50)
    whole = Recorder(decoder, positions)
    expected = decoder.forward(ids, positions, whole)[37:]
    head = Recorder(decoder, positions[:37])
    decoder.forward(ids[:37], positions[:37], head)
    resumed = Resumed(decoder, head.kept, positions[:37], positions[37:])
    torch.testing.assert_close(decoder.forward(ids[37:], positions[37:], resumed), expected, atol=1e-5, rtol=0)
    if decoder.spec.decoupled:
        shifted = Recorder(decoder, positions + 100)
        decoder.forward(ids, positions + 100, shifted)
        for (k, v), (k2, v2) in zip(whole.kept, shifted.kept, strict=True):
            torch.testing.assert_close(k2, k, atol=1e-4, rtol=0)
            torch.testing.assert_close(v2, v, atol=1e-4, rtol=0)


def test_learned_positions_have_no_rotation(tmp_path: Path) -> None:
    save_case("opt", tmp_path)
    decoder = load_model(tmp_path)
    assert decoder.rope is None
    assert decoder.rotation(torch.arange(3)) is None
    x = torch.randn(3, 2, 8)
    assert decoder.layers[0].attention.rotate(x, None) is x


def test_forward_leaves_no_autograd_and_an_empty_batch_is_empty() -> None:
    decoder = load_model("tiny")
    nothing = torch.zeros(0, dtype=torch.int64)
    hidden = decoder.forward(nothing, nothing, PlainAttend(decoder, nothing, [0]))
    assert decoder.logits(hidden).shape == (0, 512)
    ids = torch.arange(4)
    assert not decoder.forward(ids, ids, PlainAttend(decoder, ids, [4])).requires_grad


@pytest.mark.parametrize("case", ["llama", "qwen3", "phi", "falcon-new", "opt"])
@pytest.mark.parametrize("wanted", [[], [49], [3, 17, 49]])
def test_only_some_rows_are_wanted(case: str, wanted: list[int], tmp_path: Path) -> None:
    save_case(case, tmp_path)
    decoder = load_model(tmp_path)
    ids, positions = torch.randint(3, 97, (50,)), torch.arange(50)
    whole = decoder.forward(ids, positions, PlainAttend(decoder, positions, [50]))
    rows = torch.tensor(wanted, dtype=torch.int64)
    some = decoder.forward(ids, positions, PlainAttend(decoder, positions, [50]), rows)
    torch.testing.assert_close(some, whole[rows], atol=1e-5, rtol=1e-5)
