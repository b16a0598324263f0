"""Models whose weights and modules come to a device in ways of their own: scenes for `play.py`."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
from torch import Tensor

from afterglow.choices import QuantizationName
from afterglow.model.decoder import Decoder, PlainAttend
from afterglow.model.loader import load_model
from afterglow.model.names import Names
from afterglow.model.presets import PRESETS, RandomSource, save_hf
from afterglow.model.weights import WeightAssembler
from tests.device import pretend
from tests.device.scenes import Widened
from tests.engine.conftest import FAMILIES, LLAMA, write_model
from tests.engine.fallback_kit import fallback_config
from tests.model.test_quantized import CASES, SPEC, write


def chosen(model: Decoder, on: str) -> list[int]:
    """Return the likeliest token behind each of some tokens, which are on a device."""
    ids, positions = (torch.arange(20).to(on) * by for by in (7, 1))
    rows = model.logits(model.forward(ids, positions, PlainAttend(model, positions, [20])))
    tokens: list[int] = rows.argmax(dim=1).cpu().tolist()
    return tokens


class Drawn(RandomSource):
    """Random weights that are on a device already."""

    def __init__(self, on: str) -> None:
        super().__init__(3)
        self._on = on

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return super().get(name, shape).to(self._on)


def families(device: str, folder: Path) -> list[list[int]]:
    """Norms that count from 1; biases in an order of their own; modules of transformers; GPTQ in activation order; weights that the
    device draws, of which the table is rounded."""
    cuda = device == "cuda"
    on = "cuda:0" if cuda else device
    kept: QuantizationName = "auto" if cuda else "none"
    rounded: QuantizationName = "int4" if cuda else "none"
    folder.mkdir()
    save_hf(SPEC, folder / "plain")
    (folder / "gptq").mkdir()
    configs = [FAMILIES["gemma"], FAMILIES["gpt_neox"], fallback_config("arcee", LLAMA)]
    paths = [write_model({**config, "vocab_size": 256}, folder / config["model_type"]) for config in configs]
    paths.append(write(folder / "plain", folder / "gptq", CASES["gptq 4 bits, activation order"])[0])
    with pretend.active() if cuda else contextlib.nullcontext():
        found = [chosen(load_model(path, dtype="float32", device=on, quantization=kept), on) for path in paths]
        source = Drawn(on) if cuda else Widened("int4")
        model = WeightAssembler(PRESETS["tiny"], Names(), source, torch.float32, torch.device(on), rounded).decoder()
        found.append(chosen(model, on))
    return found
