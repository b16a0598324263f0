"""Every family against transformers: the same logits within 1e-4, from the same files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from afterglow.model.decoder import Decoder, PlainAttend
from afterglow.model.loader import load_model, read_spec
from tests.model.families_hf import CASES, LIMITS, save_case

LENGTHS = (1, 40, 23)


def batch(lengths: tuple[int, ...] = LENGTHS, vocab: int = 97) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, vocab, (sum(lengths),), generator=generator)
    return ids, torch.cat([torch.arange(n) for n in lengths])


def our_logits(decoder: Decoder) -> torch.Tensor:
    ids, positions = batch()
    return decoder.logits(decoder.forward(ids, positions, PlainAttend(decoder, positions, LENGTHS)))


def their_logits(model: torch.nn.Module) -> torch.Tensor:
    ids, _ = batch()
    with torch.inference_mode():
        return torch.cat([model(part[None]).logits[0] for part in ids.split(list(LENGTHS))])


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    theirs = their_logits(save_case(case, tmp_path))
    decoder = load_model(tmp_path, max_model_len=LIMITS.get(case))
    ours = our_logits(decoder)
    assert theirs.std() > 0.3, "logits this flat would hide errors"
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", ["llama-yarn-mscale", "llama-llama3", "llama-linear", "phi-2", "qwen2", "falcon-new"])
def test_a_version_4_config_reads_the_same(case: str, tmp_path: Path) -> None:
    save_case(case, tmp_path)
    modern, _ = read_spec(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    config["torch_dtype"] = config.pop("dtype")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = {"type": kind, **rope} if kind != "default" else None
    path.write_text(json.dumps(config))
    assert read_spec(tmp_path)[0] == modern


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["llama-tied", "opt"])
def test_narrow_checkpoints_are_computed_in_float32(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = save_case(case, tmp_path / "wide").to(dtype)
    model.save_pretrained(tmp_path / "narrow")
    decoder = load_model(tmp_path / "narrow")
    assert decoder.dtype == torch.float32
    assert decoder.spec.dtype == str(dtype).removeprefix("torch.")
    # Read again: converting the model would have rounded its rotary table as well.
    theirs = type(model).from_pretrained(tmp_path / "narrow", dtype=torch.float32)
    torch.testing.assert_close(our_logits(decoder), their_logits(theirs), atol=1e-4, rtol=0)


def test_bfloat16_arithmetic_stays_near(tmp_path: Path) -> None:
    theirs = their_logits(save_case("llama", tmp_path))
    ours = our_logits(load_model(tmp_path, dtype="bfloat16"))
    assert ours.dtype == torch.float32
    assert (ours - theirs).abs().mean() < 0.05 * theirs.abs().mean()
    assert (ours - theirs).abs().max() > 1e-4, "that was not computed in bfloat16"


def test_sharded_checkpoints(tmp_path: Path) -> None:
    model = save_case("qwen3", tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    torch.testing.assert_close(our_logits(load_model(tmp_path)), their_logits(model), atol=1e-4, rtol=0)


def test_a_batch_changes_nothing(tmp_path: Path) -> None:
    save_case("llama", tmp_path)
    decoder = load_model(tmp_path)
    together = our_logits(decoder)
    ids, positions = batch()
    start = 0
    for length in LENGTHS:
        rows = slice(start, start + length)
        alone = decoder.forward(ids[rows], positions[rows], PlainAttend(decoder, positions[rows], [length]))
        torch.testing.assert_close(decoder.logits(alone), together[rows], atol=2e-5, rtol=0)
        start += length
