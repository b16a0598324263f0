"""What models that run through transformers refuse, by name, and what their digests depend on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from afterglow.config import EngineConfig
from afterglow.engine.engine import Engine
from afterglow.errors import ConfigError, ModelError
from afterglow.model.decoder import Decoder, PlainAttend
from afterglow.model.loader import load_model, read_spec
from tests.engine.conftest import LLAMA, VOCAB
from tests.engine.fallback_kit import fallback_config

Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Write a tiny random model."""

    def write(kind: str, **changes: Any) -> Path:
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fallback_config(kind, LLAMA) | changes))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(tmp_path)
        return tmp_path

    return write


def changed(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def differs(folder: Path, decoder: Decoder, rows: int) -> float:
    """The largest difference of logits to those of transformers."""
    from transformers import AutoModelForCausalLM

    ids, positions = torch.arange(rows) * 7 % VOCAB, torch.arange(rows)
    ours = decoder.logits(decoder.forward(ids, positions, PlainAttend(decoder, positions, [rows])))
    with torch.inference_mode():
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids[None]).logits[0]
    return float((ours - theirs).abs().max())


def test_transformers_is_imported_for_such_models_only() -> None:
    code = "import sys, afterglow.model.loader; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_the_extra_the_error_says_what_to_install(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make("olmo")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match=r"olmo.*pip install 'afterglow-llm\[transformers\]'"):
        load_model(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"attention_chunk_size": 64}, "attention_chunk_size"),
        ({"architectures": ["OlmoForSequenceClassification"]}, "OlmoForSequenceClassification"),
        ({"auto_map": {"AutoModelForCausalLM": "code.OtherForCausalLM"}}, "own code"),
        ({"num_attention_heads": 5}, "5 attention heads"),
    ],
)
def test_configs_are_refused_by_name(make: Make, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        load_model(changed(make("olmo"), **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [("configuration_files", ["config.4.0.0.json"]), ("transformers_weights", "other.safetensors")],
)
def test_other_files_than_those_of_the_digest_are_not_read(make: Make, key: str, value: Any) -> None:
    folder = make("olmo")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.4.0.0.json").write_text(json.dumps(config | {"clip_qkv": 0.1}))
    (folder / "other.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match=f"{key}.*other files"):
        load_model(changed(folder, **{key: value}))


@pytest.mark.parametrize("key", ["_attn_implementation", "experts_implementation", "_experts_implementation"])
def test_code_from_elsewhere_is_not_run(make: Make, key: str) -> None:
    with pytest.raises(ModelError, match=f"{key} in config.json names code.*take the key out"):
        load_model(changed(make("granitemoe"), **{key: "owner/kernels"}))


@pytest.mark.parametrize("name", ["adapter_config.json", "model.safetensors.index.json"])
def test_directories_that_can_be_read_in_two_ways_are_refused(make: Make, name: str) -> None:
    """Transformers takes the whole file where there is an index, and adapters where there is a package for them."""
    folder = make("olmo")
    (folder / name).write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(ModelError, match=name):
        load_model(folder)


def test_what_modules_raise_in_the_trial_is_one_line(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.olmo.modeling_olmo import OlmoAttention

    def broken(*args: Any, **kwargs: Any) -> None:
        raise TypeError("two\nlines")

    monkeypatch.setattr(OlmoAttention, "forward", broken)
    with pytest.raises(ModelError, match=r"olmo.*cannot run through transformers here: two lines"):
        load_model(make("olmo"))


@pytest.mark.parametrize("what", ["lacks", "has more"])
def test_weights_that_the_config_does_not_describe(make: Make, what: str) -> None:
    folder = make("olmo")
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    if what == "lacks":
        del weights[name]
    else:
        name = "model.layers.1.mlp.up_proj.bias"
        weights[name] = torch.zeros(48)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=name):
        load_model(folder)


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 30.0},
        {"s_aux": torch.zeros(4)},
        {"attention_mask": torch.zeros(1, 1, 2, 2)},
        {"dropout": 0.1},
        {"is_causal": False},
    ],
)
def test_attention_that_asks_for_more_is_refused(make: Make, options: dict[str, Any]) -> None:
    """The function that modules call, as they would call it."""
    from transformers import AttentionInterface

    load_model(make("olmo"))
    rows = torch.zeros(1, 4, 2, 8)
    module = torch.nn.Module()
    module.afterglow = None  # type: ignore[assignment]
    options = {"attention_mask": None, **options}
    name = next((key for key in options if key not in ("attention_mask", "is_causal")), "causal|attention_mask")
    with pytest.raises(ModelError, match=name):
        AttentionInterface()["afterglow"](module, rows, rows, rows, **options)


def test_masks_that_are_not_causal_are_refused(make: Make) -> None:
    from transformers.masking_utils import (
        AttentionMaskInterface,
        and_masks,
        causal_mask_function,
        chunked_causal_mask_function,
        sliding_window_causal_mask_function,
    )

    load_model(make("olmo"))
    make_mask = AttentionMaskInterface()["afterglow"]
    assert make_mask(mask_function=causal_mask_function) is None
    beyond = and_masks(causal_mask_function, lambda batch, head, query, key: key > 2)
    for function, options in (
        (beyond, {}),
        (beyond, {"local_size": 8}),
        (chunked_causal_mask_function(8, torch.tensor([0])), {"local_size": 8}),
        (sliding_window_causal_mask_function(8), {"local_size": 8, "use_vmap": True}),
    ):
        with pytest.raises(ModelError, match="mask"):
            make_mask(mask_function=function, **options)
    assert make_mask(mask_function=sliding_window_causal_mask_function(8), local_size=8).rows == 8


@pytest.mark.parametrize("kind", ["phimoe", "dots1"])
def test_windows_are_honoured(make: Make, kind: str) -> None:
    """Phi-3.5-MoE's are in the mask alone; those of dots.llm1, in one layer, are told to its attention as well."""
    more = {"layer_types": ["full_attention", "sliding_attention"]} if kind == "dots1" else {}
    folder = make(kind, sliding_window=16, **more)
    decoder = load_model(folder)
    assert decoder.spec.window == 16
    assert decoder.spec.sliding == ((1,) if kind == "dots1" else (0, 1))
    assert differs(folder, decoder, 60) < 1e-4
    short = load_model(folder, max_model_len=16)
    assert short.spec.plain_scores
    assert differs(folder, short, 60) > 1e-3, "the window matters"


def test_windows_of_several_sizes_are_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.olmo.modeling_olmo import OlmoAttention

    plain = OlmoAttention.forward
    monkeypatch.setattr(
        OlmoAttention, "forward", lambda self, *a, **k: plain(self, *a, sliding_window=8 + self.layer_idx, **k)
    )
    with pytest.raises(ModelError, match=r"olmo.*windows of 8 and 9 tokens"):
        load_model(make("olmo"))


def test_scalings_that_depend_on_the_length_stop_at_the_original_window(make: Make) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0] * 4}
    rope |= {"short_mscale": 1.1, "long_mscale": 1.3, "original_max_position_embeddings": 64, "factor": 8.0}
    folder = make("phimoe", rope_parameters=rope)
    with pytest.raises(ModelError, match=r"longrope.*--max-model-len 64"):
        load_model(folder)
    decoder = load_model(folder, max_model_len=64)
    assert decoder.rope is not None
    assert decoder.rope.tables[0].attention_factor == pytest.approx(1.1), "as the module computes it"
    assert differs(folder, decoder, 64) < 1e-4


def test_rounded_rotations_are_not_turned_back(make: Make) -> None:
    folder = make("olmo")
    assert load_model(folder).rope is not None
    assert load_model(folder, dtype="bfloat16").rope is None


def test_options_that_need_our_layers_are_refused(make: Make) -> None:
    folder = make("olmo")
    with pytest.raises(ConfigError, match=r"--quantization int8.*olmo.*--quantization none"):
        load_model(folder, quantization="int8")
    with pytest.raises(ConfigError, match=r"--importance.*olmo"):
        Engine.load(folder, EngineConfig(importance=0.5))


def test_a_slower_way_is_told(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    load_model(make("olmo"))
    (line,) = [record.getMessage() for record in caplog.records if "olmo" in record.getMessage()]
    assert "transformers" in line
    assert "slower" in line


def test_the_digest_holds_the_whole_config_and_the_version(make: Make) -> None:
    from transformers import __version__

    folder = make("olmo")
    first, _ = read_spec(folder)
    assert read_spec(changed(folder, transformers_version="0"))[0].fingerprint() == first.fingerprint()
    assert read_spec(changed(folder, unheard_of=1))[0].fingerprint() != first.fingerprint()
    assert __version__ in load_model(folder).arithmetic
