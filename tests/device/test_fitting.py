"""What an engine takes of its device by itself, and what it says of sizes that do not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from afterglow.config import CacheConfig, EngineConfig
from afterglow.engine.kv_shape import KVShape
from afterglow.engine.prefill_pass import Between
from afterglow.engine.sizes import pass_bytes, recorded_bytes
from afterglow.errors import ConfigError
from afterglow.model.presets import PRESETS
from afterglow.model.spec import ExpertsSpec
from tests.device.test_pretend import play

GiB, MiB = 2**30, 2**20

# Of `tiny` in float32: hidden 64, MLP 128, 4 query heads and 2 of keys and values of 16 each, 512 words, 2 layers.
ROW = 4 * (4 * 64 + 3 * 128 + (2 * (4 + 2 * 2) + 2 * 4) * 16)
HANDED_ON = 512 * (2 * 64 * 4 + 2 * 2 * 2 * 2 * 16 * 4)  # between graphs of 2 layers
RECORDED = HANDED_ON + 3 * 512 * ROW + 4096 * 4 * 17 * 4
REQUEST = 512 * (4 + 3 * 4) + 16 * 2 * 2 * 2 * 16 * 4


def test_a_gpu_gives_what_its_weights_and_a_pass_leave(tmp_path: Path) -> None:
    auto = int(0.9 * GiB) - (2048 + 128) * ROW - 128 * REQUEST - RECORDED
    few = int(0.9 * GiB) - (4096 + 3) * ROW - 3 * REQUEST - RECORDED
    found, _ = play("fitting", "cuda", tmp_path / "cuda")
    assert found[0] == [auto, 0, 128, 2048]
    assert found[1] == [few, 0, 3, 4096], "a longer chunk, for fewer requests"
    assert found[2] == [GiB // 2, 0, 128, 2048], "as it was told"
    assert found[3] == (
        "--device-cache 2.0 GiB is more than the 1.0 GiB that cuda:0 has free beside the weights; give it less, or auto"
    )
    assert found[4] == [auto * 3 // 4, auto // 4, 128, 2048], "chunks of prefixes have their part"
    assert "leave 0 B of the device free for keys and values, which is 0 tokens" in found[5]
    assert "a smaller --max-batch" in found[5]


def test_a_cpu_has_what_it_had(tmp_path: Path) -> None:
    found, _ = play("fitting", "cpu", tmp_path / "cpu")
    assert found == [
        [2 * GiB, 0, 24, 512],
        [2 * GiB, 0, 3, 4096],
        [GiB // 2, 0, 24, 512],
        [2 * GiB, 0, 24, 512],
        [GiB * 3 // 2, GiB // 2, 24, 512],
        [2 * GiB, 0, 24, 512],
    ]


def test_what_a_pass_needs() -> None:
    tiny = PRESETS["tiny"]
    assert pass_bytes(tiny, torch.float32, 1, 512) == 2049 * ROW + REQUEST, "2,048 rows, if chunks are shorter"
    assert pass_bytes(tiny, torch.float32, 1, 5000) == 5001 * ROW + REQUEST
    assert pass_bytes(tiny, torch.bfloat16, 1, 0) == 2049 * ROW // 2 + REQUEST - 2 * (512 + 16 * 2 * 2 * 2 * 16)
    kept = pass_bytes(tiny, torch.bfloat16, 1, 0, widened=True) - pass_bytes(tiny, torch.bfloat16, 1, 0)
    assert kept == 2**24 * 10, "weights of few bits that are widened"
    plain = pass_bytes(replace(tiny, gated_mlp=False), torch.float32, 1, 512)
    assert plain == pass_bytes(tiny, torch.float32, 1, 512) - 2049 * 4 * 128
    wide = ExpertsSpec(count=4, chosen=2, ffn=32, layers=(0,), shared_ffn=256)
    mixed = pass_bytes(replace(tiny, experts=wide), torch.float32, 1, 512)
    assert mixed == pass_bytes(tiny, torch.float32, 1, 512) + 2049 * 4 * 3 * 128, "of the widest MLP"


def test_what_graphs_keep() -> None:
    tiny = PRESETS["tiny"]
    assert recorded_bytes(tiny, torch.float32, 128) == RECORDED
    shape = KVShape(2, 2, 16, torch.float32, torch.device("cpu"))
    between = Between(shape, tiny.hidden, torch.float32)
    assert sum(each.nbytes for each in (between.x, between.normed, between.new(0), between.new(1))) == HANDED_ON
    assert recorded_bytes(tiny, torch.float32, 128, widened=True) == RECORDED + 2**24 * 12
    few = replace(tiny, layers=7)
    assert recorded_bytes(few, torch.float32, 128) == RECORDED + HANDED_ON - 512 * 2 * 64 * 4, (
        "of 4 layers, however many there are"
    )


@pytest.mark.parametrize("size", [-1, 1.5, "8G", True, None])
def test_sizes_that_are_none(size: Any) -> None:
    with pytest.raises(ConfigError, match="--device-cache is auto, or a size of at least 0 bytes, got"):
        CacheConfig(device_cache=size)


def test_defaults_and_numbers_by_device() -> None:
    assert (EngineConfig().batch_on("cpu"), EngineConfig().chunk_on("cpu")) == (24, 512)
    assert (EngineConfig().batch_on("cuda"), EngineConfig().chunk_on("cuda")) == (128, 2048)
    told = EngineConfig(max_batch=7, prefill_chunk=0)
    assert [(told.batch_on(each), told.chunk_on(each)) for each in ("cpu", "cuda")] == [(7, 0)] * 2
    for wrong in ({"max_batch": 0}, {"max_batch": 4097}, {"prefill_chunk": -1}):
        with pytest.raises(ConfigError, match="must lie between"):
            EngineConfig(**wrong)
