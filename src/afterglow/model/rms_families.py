"""The families with RMS norms: Llama, and what differs from it in a few places."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from afterglow.errors import ModelError
from afterglow.model.config_reading import Config, Family, every_layer, head_dim, need, read_activation, windowed
from afterglow.model.names import Names
from afterglow.model.rotary import given_rope, read_rope
from afterglow.model.spec import ExpertsSpec

LAYER = "model.layers.{l}."
FUSED_MLP = (LAYER + "mlp.gate_up_proj",)


def _llama(config: Config, *, partial: float | None = None) -> dict[str, Any]:
    bias, mlp_bias = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    return {
        "ffn": need(config, "intermediate_size"),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "activation": read_activation(config.get("hidden_act", "silu")),
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": mlp_bias,
        **read_rope(config, head_dim(config), partial=partial),
    }


def _mistral(config: Config) -> dict[str, Any]:
    return windowed(_llama(config), config.get("sliding_window", 4096), every_layer(config))  # left out means 4096


def _sliding(config: Config, otherwise: Iterable[int] | None) -> Iterable[int] | None:
    """Return the layers that `layer_types` gives a window; `otherwise` where there is no such key. Raises: ModelError."""
    kinds = config.get("layer_types")
    if not kinds:
        return otherwise
    if len(kinds) != need(config, "num_hidden_layers"):
        raise ModelError(f"layer_types in config.json names {len(kinds)} layers of {config['num_hidden_layers']}")
    return [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"]


def _ministral(config: Config) -> dict[str, Any]:
    return windowed(_llama(config), config.get("sliding_window", 4096), _sliding(config, every_layer(config)))


def _ministral3(config: Config) -> dict[str, Any]:
    """Read Ministral 3, whose queries are scaled by their position from the end of the original window on."""
    rope = given_rope(config) or dict(_MINISTRAL3_ROPE)
    beta, original = rope.pop("llama_4_scaling_beta", None), rope.get("original_max_position_embeddings")
    rope.pop("max_position_embeddings", None)
    fields = _llama({**config, "rope_parameters": rope, "rope_scaling": None}) | {"head_dim": head_dim(config)}
    fields = windowed(fields, config.get("sliding_window"), every_layer(config))
    if not beta:
        return fields
    if original is None:
        raise ModelError("llama_4_scaling_beta without original_max_position_embeddings in config.json means nothing")
    if original >= fields.get("position_limit", 1 << 62):
        return fields
    reason = f"queries that are scaled by their position (llama_4_scaling_beta = {beta}) are not supported"
    return fields | {"position_limit": original, "position_limit_reason": reason}


def _qwen(config: Config, fields: dict[str, Any], layers: Iterable[int] | None) -> dict[str, Any]:
    """Return `fields` with the window of a Qwen, in `layers` unless the config names others."""
    if not config.get("use_sliding_window"):
        return fields
    return windowed(fields, config.get("sliding_window", 4096), _sliding(config, layers))


def _later_layers(config: Config) -> Iterable[int] | None:
    """Return the layers from `max_window_layers` on; None where that is negative: it is not known."""
    first = config.get("max_window_layers", 28)
    return None if first < 0 else range(first, need(config, "num_hidden_layers"))


def _qwen2(config: Config) -> dict[str, Any]:
    return _qwen(config, _llama(config) | {"qkv_bias": True, "out_bias": False}, _later_layers(config))


def _qwen3(config: Config) -> dict[str, Any]:
    fields = _llama(config) | {"qk_norm": True, "head_dim": head_dim(config)}
    return _qwen(config, fields, _later_layers(config))


def _experts(config: Config, count: str, ffn: str, **other: Any) -> ExpertsSpec:
    """Read a mixture of experts; `count` and `ffn` name the keys. All layers have one, but for `mlp_only_layers` and those that
    `decoder_sparse_step` leaves out."""
    layers, step = need(config, "num_hidden_layers"), config.get("decoder_sparse_step") or 1
    dense = config.get("mlp_only_layers") or ()
    return ExpertsSpec(
        count=need(config, count),
        chosen=need(config, "num_experts_per_tok"),
        ffn=need(config, ffn),
        layers=tuple(layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0),
        **other,
    )


def _mixtral(config: Config) -> dict[str, Any]:
    fields = _llama(config) | {"experts": _experts(config, "num_local_experts", "intermediate_size")}
    return windowed(fields, config.get("sliding_window"), every_layer(config))


def _qwen2_moe(config: Config) -> dict[str, Any]:
    shared = need(config, "shared_expert_intermediate_size")
    normed = bool(config.get("norm_topk_prob"))
    fields = _llama(config) | {
        "qkv_bias": bool(config.get("qkv_bias", True)),
        "out_bias": False,
        "experts": _experts(config, "num_experts", "moe_intermediate_size", normed=normed, shared_ffn=shared),
    }
    return _qwen(config, fields, range(0, min(config.get("max_window_layers", 28), config["num_hidden_layers"]), 2))


def _qwen3_moe(config: Config) -> dict[str, Any]:
    normed = bool(config.get("norm_topk_prob"))
    fields = _llama(config) | {
        "qk_norm": True,
        "experts": _experts(config, "num_experts", "moe_intermediate_size", normed=normed),
    }
    return _qwen({**config, "layer_types": None}, fields, every_layer(config))


def _olmoe(config: Config) -> dict[str, Any]:
    normed = bool(config.get("norm_topk_prob"))
    return _llama(config) | {
        "qk_norm": True,
        "qk_norm_over": "width",
        "experts": _experts(config, "num_experts", "intermediate_size", normed=normed),
    }


def _phi3(config: Config) -> dict[str, Any]:
    rope = given_rope(config)
    if (rope.get("rope_type") or rope.get("type")) == "yarn":  # as its first files call LongRoPE
        config = {**config, "rope_parameters": rope | {"rope_type": "longrope"}, "rope_scaling": None}
    original = rope.get("original_max_position_embeddings", 4096)
    config = {"original_max_position_embeddings": original, **config}
    return windowed(_llama(config, partial=1.0), config.get("sliding_window"), every_layer(config))


def _smollm3(config: Config) -> dict[str, Any]:
    """Read SmolLM3, where some layers have no positions: those with a 0 in `no_rope_layers`, or one in an interval."""
    layers = need(config, "num_hidden_layers")
    turned = config.get("no_rope_layers")
    if turned is None:
        interval = config.get("no_rope_layer_interval", 4)
        turned = [(layer + 1) % interval != 0 for layer in range(layers)]
    if len(turned) < layers:
        raise ModelError(f"no_rope_layers in config.json has {len(turned)} numbers for {layers} layers")
    fields = _llama(config) | {"unturned": tuple(layer for layer in range(layers) if not turned[layer])}
    slides = _sliding(config, fields["unturned"])
    return windowed(fields, config.get("sliding_window") if config.get("use_sliding_window") else None, slides)


def _olmo2(config: Config) -> dict[str, Any]:
    return _llama(config) | {"norm_before": False, "norm_after": True, "qk_norm": True, "qk_norm_over": "width"}


def _granite(config: Config) -> dict[str, Any]:
    return _llama(config) | {
        "embed_scale": float(config.get("embedding_multiplier", 1.0)),
        "attention_scale": float(config.get("attention_multiplier", 1.0)),
        "residual_scale": float(config.get("residual_multiplier", 1.0)),
        "logit_scale": 1.0 / float(config.get("logits_scaling", 1.0)),
    }


def _glm(config: Config) -> dict[str, Any]:
    return _llama(config, partial=0.5) | {"head_dim": head_dim(config), "out_bias": False}


def _glm4(config: Config) -> dict[str, Any]:
    return _glm(config) | {"norm_after": True}


_PHI3_NAMES = Names(qkv=(LAYER + "self_attn.qkv_proj",), mlp=FUSED_MLP)
_OLMO2_NAMES = Names(attn_after=LAYER + "post_attention_layernorm", mlp_after=LAYER + "post_feedforward_layernorm")
_MIXTRAL_NAMES = Names(
    router=LAYER + "block_sparse_moe.gate",
    expert_mlp=tuple(LAYER + f"block_sparse_moe.experts.{{e}}.{x}" for x in ("w1", "w3")),
    expert_mlp_out=LAYER + "block_sparse_moe.experts.{e}.w2",
)
_GLM_NAMES = Names(
    attn_after=LAYER + "post_self_attn_layernorm",
    mlp_after=LAYER + "post_mlp_layernorm",
    mlp=FUSED_MLP,
    neighbours=True,
)

_BIAS = frozenset({"attention_bias"})
_BIASES = _BIAS | {"mlp_bias"}
_EXPERTS = frozenset({"num_experts", "mlp_only_layers"})
_MULTIPLIERS = frozenset({"embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"})
_NO_ROPE = frozenset({"no_rope_layers", "no_rope_layer_interval"})

_EPS = {"rms_norm_eps": 1e-5}
_GLM = {"head_dim": 128, "rms_norm_eps": 1.5625e-07, "attention_bias": True}
_SMOLLM3 = {"rope_theta": 2000000.0, "tie_word_embeddings": True}
_HEAD_128 = {"head_dim": 128}  # whatever the hidden size
_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}

RMS_FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", _llama, honoured=_BIASES),
    "mistral": Family("MistralForCausalLM", _mistral),
    "ministral": Family("MinistralForCausalLM", _ministral),
    "ministral3": Family("Ministral3ForCausalLM", _ministral3, usual=_HEAD_128 | _EPS),
    "qwen2": Family("Qwen2ForCausalLM", _qwen2),
    "qwen3": Family("Qwen3ForCausalLM", _qwen3, usual=_HEAD_128, honoured=_BIAS),
    "mixtral": Family(
        "MixtralForCausalLM",
        _mixtral,
        _MIXTRAL_NAMES,
        usual=_EPS | {"rope_theta": 1e6},
        honoured=frozenset({"num_local_experts"}),
    ),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", _qwen2_moe, honoured=_EXPERTS),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        _qwen3_moe,
        renamed={"num_local_experts": "num_experts"},
        honoured=_BIAS | _EXPERTS | {"num_local_experts"},
    ),
    "olmoe": Family("OlmoeForCausalLM", _olmoe, usual=_EPS, honoured=_BIAS | _EXPERTS),
    "phi3": Family("Phi3ForCausalLM", _phi3, _PHI3_NAMES, usual=_EPS),
    "smollm3": Family("SmolLM3ForCausalLM", _smollm3, usual=_SMOLLM3, honoured=_BIASES | _NO_ROPE),
    "olmo2": Family("Olmo2ForCausalLM", _olmo2, _OLMO2_NAMES, usual=_EPS, honoured=_BIAS),
    "granite": Family("GraniteForCausalLM", _granite, honoured=_BIASES | _MULTIPLIERS),
    "glm": Family("GlmForCausalLM", _glm, _GLM_NAMES, usual=_GLM, honoured=_BIAS),
    "glm4": Family("Glm4ForCausalLM", _glm4, _GLM_NAMES, usual=_GLM, honoured=_BIAS),
}
