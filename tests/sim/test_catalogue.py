"""Hardware, models and prices: the numbers that the papers print, any config.json, and names that are not there."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest

from afterglow.errors import ConfigError, ModelError
from afterglow.model.families import spec_from_config
from afterglow.sim.engine_setup import Setup
from afterglow.sim.machine.catalogue import (
    GIB,
    all_hardware,
    all_models,
    all_prices,
    hardware,
    kv_room,
    model,
    prices,
)
from afterglow.sim.machine.shape import ModelShape, shape_of

BUNDLED = Path(__file__).parents[2] / "src/afterglow/assets/model"

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 40,
    "hidden_size": 5120,
    "num_attention_heads": 40,
    "intermediate_size": 13824,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
}


@pytest.mark.parametrize(
    ("name", "mib"),
    [
        # "MB" as printed: CachedAttention 2.1 (GPT-3), 4.2 (the others)
        ("GPT-3", 4.5),
        ("LLaMA-65B", 2.5),
        ("LLaMA-13B", 0.78),
        ("LLaMA-2-13B", 0.78),
        ("LLaMA-2-70B", 0.31),
        ("Falcon-40B", 0.12),
        ("Mistral-7B", 0.125),
        ("OPT-6.7B", 0.5),
        ("OPT-13B", 0.78),
        ("OPT-30B", 1.31),
    ],
)
def test_bytes_per_token_are_those_that_the_papers_print(name: str, mib: float) -> None:
    digits = len(str(mib).partition(".")[2])
    assert round(model(name).kv_bytes_per_token() / 2**20, digits) == mib


def test_two_thousand_tokens_of_llama_65b_are_five_gigabytes() -> None:
    """CachedAttention 2.4: 5 GB, loaded in about 192 ms at 26 GB/s."""
    size = 2048 * model("LLaMA-65B").kv_bytes_per_token()
    assert size == 5 * GIB
    assert size / hardware("A100-80G").host_link_bandwidth == pytest.approx(0.192, rel=0.08)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("LLaMA-7B", 6.74),
        ("LLaMA-13B", 13.02),
        ("LLaMA-30B", 32.53),
        ("LLaMA-65B", 65.29),
        ("LLaMA-2-70B", 68.98),
        ("Llama-3-8B", 8.03),
        ("Llama-3-70B", 70.55),
        ("Mistral-7B", 7.24),
        ("Phi-2", 2.78),
        ("Falcon-40B", 41.3),
        ("OPT-6.7B", 6.66),
        ("OPT-13B", 12.85),
        ("OPT-30B", 29.97),
    ],
)
def test_parameters_are_those_of_the_published_weights(name: str, billions: float) -> None:
    assert model(name).parameters / 1e9 == pytest.approx(billions, rel=2e-3)


def test_llama_65b_needs_130_gb_and_its_prefill_has_the_papers_efficiency() -> None:
    """CachedAttention 2.4: 130 GB of weights; 2K tokens in 360 ms on four A100, that is three fifths of their peak."""
    shape = model("LLaMA-65B")
    assert shape.weight_bytes() / 1e9 == pytest.approx(130, rel=0.01)
    peak = 4 * hardware("A100-80G").flops
    assert shape.prefill_flops(2048) / 0.360 / peak == pytest.approx(0.6, abs=0.02)


def test_arithmetic_of_a_shape_by_hand() -> None:
    shape = ModelShape(
        name="toy", layers=2, hidden=8, heads=4, kv_heads=2, head_dim=2, ffn=16, vocab=10, window=32, gated_mlp=True
    )
    per_layer = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16  # q, k and v, output, mlp
    assert shape.layer_parameters == 2 * per_layer
    assert shape.parameters == 2 * per_layer + 2 * 80
    assert shape.linear_flops_per_token == 4 * per_layer
    # 3 tokens after 5 see 6, 7 and 8; a multiplication and an addition, for scores and for sums
    assert shape.attention_flops(3, 5) == 2 * 4 * 4 * 2 * (6 + 7 + 8)
    assert shape.prefill_flops(3, 5) == 3 * 4 * per_layer + shape.attention_flops(3, 5) + 2 * 80
    assert shape.prefill_flops(1, 7) == 4 * per_layer + 2 * 4 * 4 * 2 * 8 + 2 * 80
    assert shape.kv_bytes_per_token("float32") == 2 * shape.kv_bytes_per_token() == 2 * 2 * 2 * 2 * 4
    assert shape.kv_bytes_per_token("int8") == 2 * 2 * 2 * (2 + 4)  # a scale for each head


def test_rows_below_the_device_may_have_a_dtype_of_their_own() -> None:
    plain = Setup(model=model("Llama-3-8B"), hardware=hardware("A100-80G"))
    narrow = replace(plain, kv_dtype="int8")
    assert plain.row_bytes / narrow.row_bytes == 256 / 132
    assert narrow.rows_on_device == plain.rows_on_device
    assert narrow.capacity.host_slots > 1.93 * plain.capacity.host_slots
    assert narrow.capacity.file_bytes[0] < plain.capacity.file_bytes[0]
    assert narrow.machine().row_bytes == narrow.row_bytes


def test_splitting_a_prefill_changes_no_arithmetic_but_for_logits() -> None:
    shape = model("Llama-3-8B")
    whole = shape.prefill_flops(1000)
    assert shape.prefill_flops(300) + shape.prefill_flops(700, 300) - shape.head_flops == whole


def test_learned_positions_cannot_be_taken_apart() -> None:
    assert {name for name, shape in all_models().items() if not shape.decoupled} == {
        "OPT-6.7B",
        "OPT-13B",
        "OPT-30B",
        "GPT-3",
    }


def test_relayattentions_table_2() -> None:
    table = {
        "A40": (48, 696e9, 37.4e12, 0.40),
        "A100-PCIE-40G": (40, 1555e9, 77.9e12, 0.90),
        "A100-80G": (80, 2039e9, 77.9e12, 1.84),
    }
    for name, (gib, bandwidth, flops, price) in table.items():
        device = hardware(name)
        assert (device.memory_bytes, device.memory_bandwidth, device.vector_flops) == (gib * GIB, bandwidth, flops)
        assert prices("relayattention").device_hour(name) == price


def test_every_row_says_where_it_is_from_and_is_plausible() -> None:
    assert set(all_hardware()) == {"A100-80G", "A100-PCIE-40G", "A40", "H100", "H200", "L40S", "CPU-2"}
    for device in all_hardware().values():
        assert len(device.source) > 20
        assert device.host_link_bandwidth < device.memory_bandwidth < device.flops
    for row in (*all_models().values(), *all_prices().values()):
        assert row.source
    with pytest.raises(FrozenInstanceError):
        hardware("A40").flops = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(("devices", "share"), [(2, 16.4), (4, 9.0)])
def test_storage_is_the_share_of_the_cost_that_the_papers_print(devices: int, share: float) -> None:
    """Spec A20: 128 GB of memory and 10 TB of disk beside two and four A100."""
    paper = prices("cachedattention")
    storage = paper.storage_hour(128 * GIB, 10240 * GIB)
    assert storage == pytest.approx(0.0088 * 128 + 0.000082 * 10240)
    assert 100 * storage / (devices * paper.device_hour("a100-80g") + storage) == pytest.approx(share, abs=0.05)


@pytest.mark.parametrize(
    ("look_up", "name", "near"),
    [
        (hardware, "H1000", "H100"),
        (hardware, "A100", "A100-80G"),
        (model, "lama-13b", "LLaMA-13B"),
        (model, "falcon", "Falcon-40B"),
        (prices, "cached-atention", "cachedattention"),
    ],
)
def test_unknown_names_are_answered_with_the_nearest(look_up: Any, name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"{name!r}: did you mean .*{near}"):
        look_up(name)


def test_what_is_near_to_nothing_is_answered_with_all_there_is() -> None:
    with pytest.raises(ConfigError, match=r"there are A100-80G, .*L40S"):
        hardware("abacus")


@pytest.mark.parametrize("name", ["llama-2-13b", "LLAMA_2 13B", "LLaMA-2-13B"])
def test_case_and_punctuation_do_not_matter(name: str) -> None:
    assert model(name).name == "LLaMA-2-13B"


def test_a_config_gives_the_shape_that_the_engine_reads() -> None:
    """The bundled model and several families: whatever both know must agree."""
    configs: list[dict[str, Any]] = [
        json.loads((BUNDLED / "config.json").read_text()),
        LLAMA,
        {**LLAMA, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True},
        {**LLAMA, "model_type": "mistral", "num_key_value_heads": 8, "sliding_window": 1024},
        {
            "model_type": "opt",
            "num_hidden_layers": 12,
            "hidden_size": 768,
            "num_attention_heads": 12,
            "ffn_dim": 3072,
            "vocab_size": 50272,
            "max_position_embeddings": 2048,
            "word_embed_proj_dim": 768,
            "do_layer_norm_before": True,
            "activation_function": "relu",
        },
        {
            "model_type": "falcon",
            "num_hidden_layers": 60,
            "hidden_size": 8192,
            "num_attention_heads": 128,
            "num_kv_heads": 8,
            "new_decoder_architecture": True,
            "vocab_size": 65024,
        },
        {
            "model_type": "falcon",
            "num_hidden_layers": 32,
            "hidden_size": 4544,
            "num_attention_heads": 71,
            "vocab_size": 65024,
            "multi_query": True,
            "parallel_attn": True,
        },
    ]
    for config in configs:
        spec, _ = spec_from_config(config)
        shape = shape_of(config, "it")
        for name in (
            "layers",
            "hidden",
            "heads",
            "kv_heads",
            "head_dim",
            "ffn",
            "vocab",
            "gated_mlp",
            "tied_embeddings",
        ):
            assert getattr(shape, name) == getattr(spec, name), (config["model_type"], name)
        assert shape.kv_bytes_per_token("float32") == spec.kv_bytes_per_token("float32")
        assert shape.decoupled == spec.decoupled
        assert shape.window == min(spec.max_positions, spec.position_limit or spec.max_positions)


def test_a_config_is_found_by_file_and_by_folder(tmp_path: Path) -> None:
    folder = tmp_path / "some-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    for path in (folder, folder / "config.json"):
        shape = model(str(path))
        assert shape.name == "some-model"
        assert shape.kv_bytes_per_token() == model("LLaMA-2-13B").kv_bytes_per_token()
        assert shape.parameters == model("LLaMA-2-13B").parameters


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": None}, "no num_hidden_layers"),
        ({"num_hidden_layers": -3}, "num_hidden_layers must be a positive number, not -3"),
        ({"num_attention_heads": "many"}, "num_attention_heads must be a positive number, not 'many'"),
        ({"num_key_value_heads": 7}, "40 attention heads cannot share 7"),
        ({"num_local_experts": 8}, "a mixture of experts, which is not modelled"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"is_encoder_decoder": True}, "an encoder"),
    ],
)
def test_a_config_that_cannot_be_modelled_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **change}))
    with pytest.raises(ModelError, match=message):
        model(str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[]", "\0"])
def test_a_damaged_config_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json is not"):
        model(str(tmp_path))
    with pytest.raises(ModelError, match="cannot read"):
        ModelShape.from_config(tmp_path / "nowhere")


def test_room_for_kv_and_a_model_that_does_not_fit() -> None:
    a100 = hardware("A100-80G")
    room = kv_room(model("LLaMA-65B"), a100, devices=4)
    assert room == int(4 * 80 * GIB * 0.9) - model("LLaMA-65B").weight_bytes()
    with pytest.raises(ConfigError, match=r"LLaMA-65B does not fit: .* as float16, .* it takes 2 devices"):
        kv_room(model("LLaMA-65B"), a100)
    with pytest.raises(ConfigError, match="1 or more, got 0"):
        kv_room(model("LLaMA-13B"), a100, devices=0)
    with pytest.raises(ConfigError, match="unknown dtype 'float12'"):
        model("LLaMA-13B").weight_bytes("float12")


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_prices_of_ones_own(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"mine.{suffix}"
    if suffix == "toml":
        path.write_text("dram_gb_hour = 0.004\nssd_gb_hour = 1e-4\n[devices]\nH100 = 2.5\n")
    else:
        path.write_text('{"dram_gb_hour": 0.004, "ssd_gb_hour": 1e-4, "devices": {"H100": 2.5}}')
    mine = prices(str(path))
    assert mine.device_hour("h100") == 2.5
    assert mine.storage_hour(GIB, 10 * GIB) == pytest.approx(0.005)
    with pytest.raises(ConfigError, match="none for A40, only for H100"):
        mine.device_hour("A40")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dram_gb_hour = 1", "ssd_gb_hour must be dollars per hour, there is none"),
        ("dram_gb_hour = -1\nssd_gb_hour = 1", "dram_gb_hour must be dollars per hour, not -1"),
        ("dram_gb_hour = nan\nssd_gb_hour = 1", "dram_gb_hour must be"),
        ("dram_gb_hour = 1\nssd_gb_hour = 1\ngpu = 3", "'gpu', which means nothing"),
        ("dram_gb_hour = 1\nssd_gb_hour = 1\ndevices = 3", "devices must be a table"),
        ("dram_gb_hour = 1\nssd_gb_hour = 1\n[devices]\nA40 = 'cheap'", "A40 must be dollars per hour, not 'cheap'"),
        ("what", "neither TOML nor JSON"),
    ],
)
def test_prices_that_are_none_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        prices(str(path))
