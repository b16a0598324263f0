"""Files in blocks on a pretend CUDA device: what they stand for is multiplied, without a second rounding, and kept narrow."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from afterglow.model.gguf.mapped_weights import GgufWeights
from afterglow.model.loader import weight_bytes
from tests.device.test_pretend import play

TRITON = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed (the extra gpu)"
)


@pytest.mark.parametrize("kernels", [False, pytest.param(True, id="triton", marks=[TRITON, pytest.mark.long])])
def test_logits_are_those_of_the_dequantised_model(
    kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every format of GGUF files; GPTQ, AWQ and compressed-tensors, in groups, by output, with activation order, and in floats."""
    pytest.importorskip("gguf")
    theirs, _ = play("block_scenes.logits", "cpu", tmp_path / "cpu")
    if kernels:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    ours, log = play("block_scenes.logits", "cuda", tmp_path / "cuda")
    assert len(ours) == 9 + 7 + 5
    assert {each[1] for each in theirs} == {"none"}
    for (name, kept, found), (_, _, wanted) in zip(ours, theirs, strict=True):
        assert kept == "blocks alone", name
        assert found == pytest.approx(wanted, abs=1e-4), name
    assert not kernels or "is not used" not in log
    assert "weights in blocks take" in log
    assert "(Q4_K " in log


@TRITON
def test_triton_multiplies_a_whole_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel, which leaves weights narrow, takes the rows of as many requests as decode together by default."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found, log = play("block_scenes.batches", "cuda", tmp_path)
    assert found == [1, 1, 0]
    assert "is not used" not in log


def test_reuse_is_exact_and_the_dequantised_models(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    theirs, _ = play("block_scenes.reuse", "cpu", tmp_path / "cpu")
    ours, log = play("block_scenes.reuse", "cuda", tmp_path / "cuda")
    assert [each[:2] for each in ours] == [each[:2] for each in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert a[2] == pytest.approx(b[2], abs=1e-4)
    for reused, cold in zip(ours[1::2], ours[2::2], strict=True):
        assert reused[1] >= 144
        assert cold[1] == 0
        assert reused[0] == cold[0]
        assert reused[2] == pytest.approx(cold[2], abs=1e-4)
    assert "Traceback" not in log


def test_memory_that_is_asked_for_is_what_is_taken(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from tests.device.block_scenes import SMALL, write_random

    write_random(tmp_path / "model.gguf", SMALL, "Q4_K", head_format="Q6_K")
    file, table = GgufWeights(tmp_path / "model.gguf"), SMALL.vocab * SMALL.hidden
    rest, norms = SMALL.num_parameters - 2 * table, 3 * SMALL.hidden
    assert file.device_bytes == (table + rest) * 6 // 8 + table * 10 // 8 + norms * 4
    asked = [
        weight_bytes(SMALL, torch.bfloat16, torch.device(device), "auto", file.device_bytes)
        for device in ("cuda", "cpu")
    ]
    assert asked[0] == file.device_bytes
    assert asked[1] > 2 * SMALL.num_parameters
