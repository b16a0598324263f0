"""A key that is not honoured is refused, by name and before any weight is read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from afterglow.errors import ModelError
from afterglow.model.fallback.fallback_config import FALLBACK
from afterglow.model.families import FAMILIES, spec_from_config
from afterglow.model.refusals import KNOWN_REFUSED, REASONS, UNSUPPORTED
from afterglow.model.rotary import rope_table
from afterglow.model.spec import LATER_FIELDS, ModelSpec, RopeSpec

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
}


def read(**changes: Any) -> ModelSpec:
    config = {key: value for key, value in (LLAMA | changes).items() if value is not ...}
    return spec_from_config(config)[0]


def plain(kind: str) -> dict[str, Any]:
    return {"model_type": kind, "architectures": [FAMILIES[kind].architecture]}


OPT = {**plain("opt"), "ffn_dim": 100}
FALCON = plain("falcon")
OSS = {**plain("gpt_oss"), "num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}

# What a family needs besides LLAMA.
NEEDED: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 64},
    "qwen3_moe": EXPERTS,
    "olmoe": EXPERTS,
    "opt": {"ffn_dim": 100, "word_embed_proj_dim": 64},
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "bloom"}, ["bloom", "ALiBi", "llama"]),
        ({"model_type": "dbrx"}, ["dbrx", "mixture of experts"]),
        ({"model_type": "deepseek_v3"}, ["MLA"]),
        ({"model_type": "nonsense"}, ["nonsense", "held against", "use a model of one of the types", "qwen3"]),
        ({"model_type": "gptj"}, ["gptj", "computes attention itself", "use a model"]),
        ({"model_type": "mamba"}, ["mamba", "keep a state", "use a model"]),
        ({"model_type": ...}, ["model_type"]),
        ({"hidden_act": "quick_gelu"}, ["quick_gelu", "gelu_new"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantised", "gptq", "--quantization int4 or int8"]),
        ({"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping", "50.0"]),
        ({"vision_config": {}}, ["multimodal"]),
        ({"num_local_experts": 8}, ["mixture-of-experts", "dense model"]),
        ({"architectures": ["LlamaForSequenceClassification"]}, ["LlamaForSequenceClassification"]),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_x.XForCausalLM"}}, ["own code", "XForCausalLM"]),
        (OSS | {"swiglu_limit": 0.0}, ["swiglu_limit", "0.0", "above 0"]),
        (OSS | {"swiglu_alpha": "x"}, ["swiglu_alpha", "'x'", "above 0"]),
        (OSS | {"num_experts_per_tok": 9}, ["9 of 4 experts"]),
        ({"num_hidden_layers": ...}, ["num_hidden_layers"]),
        ({"num_hidden_layers": 0}, ["layers", "0"]),
        ({"num_hidden_layers": "two"}, ["layers", "two"]),
        ({"num_key_value_heads": 3}, ["4 attention heads", "3 key/value heads"]),
        ({"rope_scaling": {"type": "proportional", "factor": 2}}, ["proportional", "yarn"]),
        ({"rope_scaling": {"type": "linear"}}, ["linear", "factor"]),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "surprise": 1}}, ["yarn", "surprise"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["llama3", "low_freq_factor"]),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, ["layer types"]),
        (plain("phi") | {"partial_rotary_factor": 0.05}, ["rotary", "even"]),
        (
            {"partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            ["partial_rotary_factor = 0.5", "linear", "llama"],
        ),
        (plain("mistral") | {"attention_bias": True}, ["attention_bias"]),
        (plain("phi") | {"qk_layernorm": True}, ["qk_layernorm"]),
        (FALCON | {"alibi": True}, ["ALiBi", "alibi"]),
        (FALCON | {"num_ln_in_parallel_attn": 2}, ["Falcon", "2 parallel norms"]),
        (FALCON | {"new_decoder_architecture": True, "parallel_attn": False}, ["Falcon", "parallel_attn"]),
        (OPT | {"do_layer_norm_before": False}, ["do_layer_norm_before"]),
        (OPT | {"word_embed_proj_dim": 32}, ["word_embed_proj_dim"]),
        (plain("mixtral") | {"num_local_experts": 2, "num_experts_per_tok": 3}, ["3 of 2 experts"]),
        (plain("mixtral"), ["num_local_experts"]),
        (plain("olmoe") | {"num_experts": 4, "clip_qkv": 8.0}, ["clip_qkv"]),
        (plain("gpt2") | {"scale_attn_by_inverse_layer_idx": True}, ["scaled by the layer"]),
        (plain("gpt2") | {"scale_attn_weights": False}, ["scale_attn_weights = False"]),
        (plain("smollm3") | {"no_rope_layers": [1, 0]}, ["no_rope_layers", "2 numbers for 4 layers"]),
        (plain("ministral3") | {"rope_parameters": {"llama_4_scaling_beta": 0.1}}, ["llama_4_scaling_beta"]),
        (OPT | {"_remove_final_layer_norm": True}, ["final norm"]),
        ({"num_attention_heads": 0}, ["a value in config.json is damaged", "zero"]),
        ({"architectures": 3}, ["a value in config.json is damaged"]),
        (plain("gemma2") | {"query_pre_attn_scalar": 0}, ["a value in config.json is damaged", "negative power"]),
        (plain("gemma2") | {"layer_types": 3}, ["a value in config.json is damaged"]),
        (plain("gemma2") | {"sliding_window_pattern": 3}, ["sliding_window_pattern = 3", "layer_types"]),
        (plain("gemma3_text") | {"rope_parameters": [1]}, ["a value in config.json is damaged"]),
        (OPT | {"layer_norm_elementwise_affine": False}, ["layer norms without weights"]),
        ({"eos_token_id": [[2]]}, ["token id", "[[2]]"]),
        ({"bos_token_id": "<s>"}, ["token id", "'<s>'"]),
        ({"is_causal": False}, ["is_causal", "see later ones"]),
        ({"rms_norm_eps": None}, ["norm epsilon", "None"]),
        ({"rms_norm_eps": "1e-6"}, ["norm epsilon", "'1e-6'"]),
        ({"rms_norm_eps": float("nan")}, ["norm epsilon", "nan"]),
        ({"head_dim": 4_000_000_000}, ["rotary embedding of 4000000000 dimensions", "damaged"]),
    ],
)
def test_refused_by_name(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        read(**changes)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("key", UNSUPPORTED)
def test_every_dangerous_key_is_refused_and_harmless_at_its_neutral_values(key: str) -> None:
    neutral, _, remedy = UNSUPPORTED[key]
    assert remedy.startswith("use ")
    for value in neutral:
        read(**{key: value})
    flag = next((value for value in neutral if isinstance(value, bool)), None)
    changed = 7 if flag is None else not flag
    if key in FAMILIES["llama"].honoured:
        read(**{key: changed})
    else:
        with pytest.raises(ModelError, match=key):
            read(**{key: changed})


def test_known_refusals_are_not_supported_after_all() -> None:
    assert not set(KNOWN_REFUSED) & {*FAMILIES, *FALLBACK}
    assert not set(FALLBACK) & set(FAMILIES), "what the decoder computes itself is faster"
    assert len(KNOWN_REFUSED) == sum(map(len, REASONS.values())), "a model type has one reason"


def test_layer_norm_after_the_block_is_not_called_a_matter_of_conversion() -> None:
    with pytest.raises(ModelError, match="layer norm after the block") as caught:
        read(**OPT, do_layer_norm_before=False)
    assert "converted" not in str(caught.value)
    assert "use another size of OPT" in str(caught.value)


def refused_beyond(spec: ModelSpec, limit: int, word: str) -> None:
    assert spec.context(limit) == limit
    for wish in (None, limit + 1):
        with pytest.raises(ModelError, match=word) as caught:
            spec.context(wish)
        assert f"--max-model-len {limit}" in str(caught.value)


def slides(spec: ModelSpec, window: int, layers: list[int]) -> None:
    assert spec.context() == spec.max_positions
    assert [spec.window_of(layer) for layer in range(spec.layers)] == [
        window if layer in layers else 0 for layer in range(spec.layers)
    ]


def test_windows_of_layers() -> None:
    slides(read(**plain("mistral"), sliding_window=1024), 1024, [0, 1, 2, 3])
    slides(read(**plain("mistral"), sliding_window=None), 0, [])
    slides(read(**plain("mistral"), max_position_embeddings=32768), 4096, [0, 1, 2, 3])
    sliding = {"use_sliding_window": True, "sliding_window": 512}
    slides(read(**plain("qwen2"), **sliding, max_window_layers=2), 512, [2, 3])
    slides(read(**plain("qwen2"), **sliding, max_window_layers=4), 0, [])
    slides(read(**plain("qwen3"), sliding_window=512, use_sliding_window=False), 0, [])
    kinds = ["full_attention"] * 3 + ["sliding_attention"]
    slides(read(**plain("qwen3"), **sliding, layer_types=kinds), 512, [3])
    with pytest.raises(ModelError, match=r"layer_types.*3 layers of 4"):
        read(**plain("qwen3"), **sliding, layer_types=kinds[1:])


def test_a_window_of_unknown_layers_limits_the_context() -> None:
    sliding = {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": -1}
    refused_beyond(read(**plain("qwen2"), **sliding), 512, "sliding-window")


def test_windows_that_no_context_outgrows_change_no_digest() -> None:
    """What was stored when contexts ended with the window stays valid in such contexts, and is not found in longer ones."""
    with_window, without = (read(**plain("mistral"), sliding_window=window) for window in (1024, None))
    assert with_window.within(1024).fingerprint() == without.fingerprint()
    assert with_window.within(1025).fingerprint() != without.fingerprint()
    ropes = {"rope_local_base_freq": 10.0, "sliding_window": 64, "head_dim": 16}
    gemma = read(**plain("gemma3_text"), **ropes)
    assert gemma.within(64).sliding == gemma.sliding, "these layers turn by another base"


def test_queries_that_are_scaled_by_position_stop_where_that_begins() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "llama_4_scaling_beta": 0.1}
    refused_beyond(read(**plain("ministral3"), rope_parameters=rope), 1024, "llama_4_scaling_beta")
    assert read(**plain("ministral3"), rope_parameters=rope | {"llama_4_scaling_beta": 0.0}).context() == 4096


def test_models_of_before_keep_their_digests() -> None:
    """A field more in the fingerprint would orphan all that was stored."""
    fields = json.loads(read().fingerprint())
    assert not fields.keys() & LATER_FIELDS.keys()
    assert "unturned" in json.loads(read(**plain("smollm3")).fingerprint())


def test_scalings_that_depend_on_the_length_stop_at_the_original_window() -> None:
    factors = [1.0] * 8
    longrope = {"type": "longrope", "short_factor": factors, "long_factor": factors}
    refused_beyond(read(rope_scaling=longrope, original_max_position_embeddings=1024), 1024, "longrope")
    dynamic = read(rope_scaling={"type": "dynamic", "factor": 2.0})
    assert dynamic.context() == 4096
    with pytest.raises(ModelError, match="dynamic"):
        dynamic.context(4097)


def test_contexts_longer_than_the_model_are_refused() -> None:
    assert read().context() == 4096
    assert read().context(100) == 100
    with pytest.raises(ModelError, match="4096 positions"):
        read().context(5000)


def test_defaults_that_a_config_may_leave_out() -> None:
    assert read(**plain("phi"), hidden_size=128).rope == RopeSpec(dim=16, base=10000.0)
    assert read(**plain("qwen3")).head_dim == 128
    assert read(**plain("qwen2")).qkv_bias
    assert not read(**plain("qwen2")).tied_embeddings
    assert read(**OPT).tied_embeddings
    falcon = read(**FALCON)
    assert falcon.tied_embeddings
    assert (falcon.kv_heads, falcon.ffn, falcon.residual) == (1, 256, "parallel")
    assert read().kv_heads == 4


def test_derived_numbers() -> None:
    spec = read(num_key_value_heads=2, eos_token_id=[5, 6], torch_dtype="bfloat16")
    assert spec.kv_bytes_per_token("float32") == 2 * 4 * 2 * 16 * 4
    assert spec.kv_bytes_per_token("bfloat16") == 2 * 4 * 2 * 16 * 2
    assert spec.eos_ids == (5, 6)
    assert spec.dtype == "bfloat16"
    assert spec.scale == 0.25
    assert spec.decoupled
    assert not read(**OPT).decoupled


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LONGROPE = {"rope_type": "yarn", "factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    ("kind", "parameters", "scaling"),
    [
        ("qwen3", {"rope_type": "default", "rope_theta": 1e6}, YARN),
        ("qwen3", YARN, YARN | {"factor": 2.0}),
        ("qwen3", YARN | {"attention_factor": 2.0}, YARN),
        ("qwen3", YARN | {"rope_theta": 1e6}, YARN),
        ("ministral3", YARN, YARN | {"llama_4_scaling_beta": 0.1}),
        ("phi3", LONGROPE, LONGROPE | {"short_factor": [3.0] * 8}),
    ],
)
def test_two_scalings_that_differ_are_refused(kind: str, parameters: dict[str, Any], scaling: dict[str, Any]) -> None:
    """Transformers would take `rope_scaling`, and nothing else of `rope_parameters`."""
    with pytest.raises(ModelError, match="rope_scaling and rope_parameters, which differ; keep one"):
        read(**plain(kind), rope_parameters=parameters, rope_scaling=scaling)


@pytest.mark.parametrize(
    ("kind", "rope"),
    [("qwen3", YARN), ("ministral3", YARN | {"llama_4_scaling_beta": 0.1}), ("phi3", LONGROPE)],
)
def test_two_scalings_that_say_the_same_are_read(kind: str, rope: dict[str, Any]) -> None:
    older = {"type" if key == "rope_type" else key: value for key, value in rope.items()}
    one = read(**plain(kind), rope_theta=1e6, rope_parameters=rope)
    both = read(**plain(kind), rope_theta=1e6, rope_parameters=rope | {"rope_theta": 1e6}, rope_scaling=older)
    assert both == one


@pytest.mark.parametrize(
    ("outside", "newer", "older"),
    [
        ({"original_max_position_embeddings": 1024}, {"rope_type": "yarn", "factor": 4.0}, YARN),
        ({}, YARN | {"rope_theta": 10000.0}, YARN),
        ({}, YARN | {"partial_rotary_factor": 1.0}, YARN),
    ],
)
def test_what_one_of_two_scalings_leaves_out_as_usual_is_no_difference(
    outside: dict[str, Any], newer: dict[str, Any], older: dict[str, Any]
) -> None:
    both = read(**plain("qwen3"), **outside, rope_parameters=newer, rope_scaling=older)
    assert both == read(**plain("qwen3"), **outside, rope_scaling=older)


def turns(rope: RopeSpec | None) -> tuple[float, ...]:
    table = None if rope is None else rope_table(rope)
    return () if table is None else (*table.inv_freq.tolist(), table.attention_factor)


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_a_config_leaves_out_is_as_in_transformers(kind: str) -> None:
    said = {key: value for key, value in LLAMA.items() if key not in ("model_type", "architectures")}
    said |= {"num_key_value_heads": 2, "vocab_size": 1000, "hidden_act": "silu"}
    said |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} | NEEDED.get(kind, {})
    theirs = CONFIG_MAPPING[kind](**said).to_dict()
    assert theirs["model_type"] == kind
    mine, full = (spec_from_config({**config, "model_type": kind})[0] for config in (said, theirs))
    for name in ("norm_eps", "window", "sliding", "position_limit"):
        assert getattr(mine, name) == getattr(full, name), name
    for name in ("rope", "sliding_rope"):  # by their frequencies: theirs may spell out what is usual
        assert turns(getattr(mine, name)) == turns(getattr(full, name)), name


@pytest.mark.parametrize("layers", [4_000_000_000, 100_001, -1, 2.0, True])
@pytest.mark.parametrize(
    "changes",
    [
        plain("llama"),
        plain("mistral") | {"sliding_window": 512},
        plain("mixtral") | {"num_local_experts": 2, "num_experts_per_tok": 1},
        plain("gemma2"),
        plain("smollm3"),
    ],
    ids=lambda changes: str(changes["model_type"]),
)
def test_impossible_numbers_of_layers_are_refused_before_they_are_counted_out(
    changes: dict[str, Any], layers: float
) -> None:
    with pytest.raises(ModelError, match=rf"num_hidden_layers .*{layers}"):
        read(**changes, num_hidden_layers=layers)
