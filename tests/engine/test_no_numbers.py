"""Weights that are no numbers, as a failed conversion leaves them: requests end with an error that says so, and not with an empty reply."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from afterglow import CacheConfig, EngineConfig, RequestError, SamplingParams, load_model
from afterglow.request import Request
from tests.structured_model import random_model


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_weights_that_are_no_numbers_are_told(tmp_path: Path, temperature: float) -> None:
    folder = random_model(tmp_path)
    (file,) = folder.glob("*.safetensors")
    save_file({name: torch.full_like(each, torch.nan) for name, each in load_file(file).items()}, file)
    cache = CacheConfig(device_cache=2**25, host_cache=2**25, disk_cache=0)
    with load_model(folder, EngineConfig(cache=cache, threads=1)) as model:
        sampling = SamplingParams(max_tokens=4, temperature=temperature, seed=1)
        with pytest.raises(RequestError, match="are its weights damaged") as raised:
            model.generate(Request("a", model.tokenizer.encode("The kite"), sampling))
        assert raised.value.status == 500
        assert model.engine.healthy
