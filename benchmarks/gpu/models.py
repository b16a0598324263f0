"""Models of the papers' shapes, with random weights that the device draws itself, and engines of them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from afterglow.choices import QuantizationName
from afterglow.config import BLOCK_ROWS
from afterglow.engine.engine import Engine
from afterglow.engine.sizes import READ_BUFFER_BYTES, READ_BUFFER_PART
from afterglow.model import loader
from afterglow.model.decoder import Decoder
from afterglow.model.families import spec_from_config
from afterglow.model.presets import INIT_STD, PRESETS
from afterglow.model.spec import ModelSpec
from afterglow.model.weights import WeightAssembler
from afterglow.sim.machine.catalogue import model
from afterglow.sim.machine.shape import ModelShape
from afterglow.store.extents.throttle import Throttle
from benchmarks.common.engines import engine_of
from benchmarks.gpu.setting import DTYPE, Setting

MARGIN = 2048  # rows that an engine has room for besides those that are asked of it


def shape_of(name: str, setting: Setting) -> ModelShape:
    """Look up a shape in the catalogue; tiny ones keep its kind, its groups of heads and its window."""
    full = model(name)
    if not setting.tiny:
        return full
    heads = 4
    kv_heads = max(1, heads * full.kv_heads // full.heads)
    return dataclasses.replace(
        full, layers=2, hidden=64, heads=heads, kv_heads=kv_heads, head_dim=16, ffn=128, vocab=512
    )


def config_of(shape: ModelShape) -> dict[str, Any]:
    """Make the `config.json` of a shape, in the style of Llama or of OPT."""
    common = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.window,
        "tie_word_embeddings": shape.tied_embeddings,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if shape.positions == "learned":
        return {
            **common,
            "architectures": ["OPTForCausalLM"],
            "model_type": "opt",
            "ffn_dim": shape.ffn,
            "word_embed_proj_dim": shape.hidden,
            "activation_function": "relu",
            "do_layer_norm_before": True,
        }
    return {
        **common,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "intermediate_size": shape.ffn,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    }


class DrawnOnDevice:
    """Weights as `presets.RandomSource` draws them, other numbers, on the device that takes them: billions take it a second."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._device = device
        self._generator = torch.Generator(device)
        self._generator.manual_seed(seed)

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Draw a tensor; see `WeightSource.get`."""
        drawn = torch.empty(shape, dtype=DTYPE, device=self._device).normal_(0, INIT_STD, generator=self._generator)
        if len(shape) == 1 and name.endswith(".weight"):
            drawn.add_(1.0)
        return drawn

    def packed(self, name: str, shape: tuple[int, int]) -> None:
        """Return None: all weights are numbers."""
        return


@contextlib.contextmanager
def random_preset(shape: ModelShape, seed: int) -> Iterator[str]:
    """While this lasts, a preset of the name that it yields has the shape."""
    spec, names = spec_from_config(config_of(shape))

    def drawn(
        spec: ModelSpec, seed: int, dtype: torch.dtype, device: str, quantization: QuantizationName = "auto"
    ) -> Decoder:
        place = torch.device(device)
        return WeightAssembler(spec, names, DrawnOnDevice(seed, place), dtype, place, quantization).decoder()

    with mock.patch.dict(PRESETS, {shape.name: spec}), mock.patch.object(loader, "random_model", drawn):
        yield shape.name


def with_read_buffer(context_bytes: int) -> int:
    """Return what `--device-cache` must be, for so many bytes to be left for contexts."""
    return context_bytes + min(context_bytes // (READ_BUFFER_PART - 1), READ_BUFFER_BYTES)


@contextlib.contextmanager
def engine_on_device(
    shape: ModelShape,
    setting: Setting,
    *,
    device_rows: int,
    host_rows: int,
    disk_rows: int = 0,
    throttle: Throttle | None = None,
    cache: dict[str, Any] | None = None,
    **config: Any,
) -> Iterator[Engine]:
    """Run an engine of a shape, with room for so many rows in each tier besides a margin and the read buffer. It guesses no tokens
    ahead: replies of random weights repeat themselves, and a step would then be no token."""
    row = shape.kv_bytes_per_token("bfloat16")
    margin = setting.of(MARGIN, 512)
    tiers = {
        "device_cache": with_read_buffer((device_rows + margin) * row),
        "host_cache": (host_rows + margin) * row,
        "disk_cache": (disk_rows + margin) * row if disk_rows else 0,
        "source": "load",
        **(cache or {}),
    }
    longest = min(shape.window, device_rows + margin - 64)
    options = {"device": "cuda", "dtype": "bfloat16", "speculate": "off", "max_model_len": longest, **config}
    with (
        random_preset(shape, setting.seed) as name,
        engine_of(name, throttle=throttle, cache=tiers, **options) as engine,
    ):
        room = engine.parts.sizes.device_rows
        if room + BLOCK_ROWS <= device_rows + margin:
            raise RuntimeError(f"the device has room for {room} rows, not for {device_rows} and {margin}")
        yield engine
