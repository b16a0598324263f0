"""The families in which some layers see a window of the context only, and plain Gemma, which has parts of theirs."""

from __future__ import annotations

from typing import Any

from afterglow.errors import ModelError
from afterglow.model.config_reading import Config, Family, head_dim, need
from afterglow.model.layer_norm_families import LAYER_NORM_FAMILIES
from afterglow.model.names import Names
from afterglow.model.rms_families import RMS_FAMILIES
from afterglow.model.rotary import read_rope
from afterglow.model.spec import ExpertsSpec

LAYER = "model.layers.{l}."
SLIDING, FULL = "sliding_attention", "full_attention"
_LLAMA, _OLMO2, _COHERE = RMS_FAMILIES["llama"], RMS_FAMILIES["olmo2"], LAYER_NORM_FAMILIES["cohere"]


def _windows(config: Config, every: int, *, patterns: bool = True) -> dict[str, Any]:
    """Read the window, and which layers have it: `layer_types`, or all but each layer of so many (`every`, or
    `sliding_window_pattern` where the family has `patterns`)."""
    layers, kinds = need(config, "num_hidden_layers"), config.get("layer_types")
    if kinds is None:
        given = config.get("sliding_window_pattern") or every
        if not isinstance(given, int):
            raise ModelError(f"sliding_window_pattern = {given!r} in config.json is no number; name all layer_types")
        if not patterns and given != every:  # transformers reads no pattern here, and would take the usual one
            raise ModelError(f"sliding_window_pattern = {given} in config.json is not usual here; name all layer_types")
        every = given
        kinds = [SLIDING if (layer + 1) % every else FULL for layer in range(layers)]
    if len(kinds) != layers:
        raise ModelError(f"layer_types in config.json names {len(kinds)} layers of {layers}")
    for kind in kinds:
        if kind not in (SLIDING, FULL):
            raise ModelError(f"layers of type {kind!r} are not supported; supported are {SLIDING} and {FULL}")
    window = config.get("sliding_window", 4096)
    if window is None:
        return {}
    return {"window": window, "sliding": tuple(layer for layer, kind in enumerate(kinds) if kind == SLIDING)}


def _ropes(config: Config, theta: dict[str, float]) -> dict[str, Any]:
    """Read a rotation for each type of layers, in the style of transformers 4 or 5. `theta`: the bases of each type, where the
    config names none. In the older style `rope_scaling` was that of full layers."""
    given = config.get("rope_parameters") or {}
    if given and not all(isinstance(value, dict) or value is None for value in given.values()):
        raise ModelError(f"rope_parameters in config.json must name {SLIDING} and {FULL}")
    plain = {
        key: value for key, value in config.items() if key not in ("rope_parameters", "rope_scaling", "rope_theta")
    }
    found = {}
    for kind in (FULL, SLIDING):
        params = dict(given.get(kind) or {})
        if kind == FULL:
            params |= config.get("rope_scaling") or {}
        params = {"rope_theta": theta[kind], **params}
        found[kind] = read_rope({**plain, "rope_parameters": params}, head_dim(config))
    sliding = found[SLIDING].pop("rope")
    return found[SLIDING] | found[FULL] | {"sliding_rope": None if sliding == found[FULL]["rope"] else sliding}


def _gemma_parts(config: Config, activation: str) -> dict[str, Any]:
    return _LLAMA.read({**config, "hidden_act": activation}) | {
        "head_dim": head_dim(config),
        "embed_scale": float(need(config, "hidden_size") ** 0.5),
        "norm_plus_one": bool(config.get("rms_norm_plus_one", True)),  # GGUF files have the one in their weights
    }


def _gemma(config: Config) -> dict[str, Any]:
    activation = config.get("hidden_act") or "gelu_pytorch_tanh"
    # Its first files say "gelu", and mean this.
    return _gemma_parts(config, "gelu_pytorch_tanh" if activation == "gelu" else activation)


def _gemma_windows(config: Config, every: int, *, patterns: bool) -> dict[str, Any]:
    """Read what Gemma 2 and 3 have in common. See `_windows`."""
    fields = _gemma_parts(config, config.get("hidden_activation") or "gelu_pytorch_tanh")
    return fields | {
        "norm_after": True,
        "attention_scale": float(config.get("query_pre_attn_scalar", 256) ** -0.5),
        "score_cap": config.get("attn_logit_softcapping"),
        "logit_cap": config.get("final_logit_softcapping"),
        **_windows(config, every, patterns=patterns),
    }


def _gemma2(config: Config) -> dict[str, Any]:
    return _gemma_windows(config, 2, patterns=False)


def _gemma3(config: Config) -> dict[str, Any]:
    theta = {FULL: config.get("rope_theta") or 1e6, SLIDING: config.get("rope_local_base_freq") or 1e4}
    ropes = _ropes(config, theta)
    plain = {key: value for key, value in config.items() if key not in ("rope_parameters", "rope_scaling")}
    fields = _gemma_windows(plain, 6, patterns=True) | ropes
    return fields | {"qk_norm": True, "max_positions": config["max_position_embeddings"]}


def _olmo3(config: Config) -> dict[str, Any]:
    base = config.get("rope_theta") or 500000.0
    ropes = _ropes(config, {FULL: base, SLIDING: base})
    plain = {key: value for key, value in config.items() if key not in ("rope_parameters", "rope_scaling")}
    return _OLMO2.read(plain) | ropes | _windows(config, 4, patterns=False)


def _unturned(config: Config, fields: dict[str, Any]) -> tuple[int, ...]:
    """Return the layers without a window: they have no positions."""
    return tuple(layer for layer in range(need(config, "num_hidden_layers")) if layer not in fields.get("sliding", ()))


def _exaone4(config: Config) -> dict[str, Any]:
    fields = _OLMO2.read(config) | {"qk_norm_over": "head"} | _windows(config, 4)
    return fields | {"unturned": _unturned(config, fields) if "window" in fields else ()}


def _cohere2(config: Config) -> dict[str, Any]:
    fields = _COHERE.read(config) | _windows(config, 4)
    return fields | {"unturned": _unturned(config, fields)}


def _above_0(config: Config, key: str, usual: float) -> float:
    value = usual if config.get(key) is None else config[key]
    if not isinstance(value, int | float) or not value > 0:
        raise ModelError(f"{key} = {value!r} in config.json must be a number above 0")
    return float(value)


def _gpt_oss(config: Config) -> dict[str, Any]:
    """Read gpt-oss: attention sinks, clamped gates, a router and experts with biases."""
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        yarn = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
        config = {**config, "rope_parameters": yarn}
    experts = ExpertsSpec(
        count=need(config, "num_local_experts"),
        chosen=need(config, "num_experts_per_tok"),
        ffn=need(config, "intermediate_size"),
        layers=tuple(range(need(config, "num_hidden_layers"))),
    )
    return _LLAMA.read(config) | {
        "head_dim": head_dim(config),
        "mlp_bias": True,
        "router_bias": True,
        "sinks": True,
        "gate_clamp": (_above_0(config, "swiglu_alpha", 1.702), _above_0(config, "swiglu_limit", 7.0)),
        "experts": experts,
        **_windows(config, 2, patterns=False),
    }


_GPT_OSS_NAMES = Names(
    router=LAYER + "mlp.router",
    expert_mlp=(LAYER + "mlp.experts.{e}.gate_up_proj",),
    expert_mlp_out=LAYER + "mlp.experts.{e}.down_proj",
    sinks=LAYER + "self_attn.sinks",
    gates_in_turn=True,
)
_GEMMA_NAMES = Names(
    attn_after=LAYER + "post_attention_layernorm",
    mlp_norm=LAYER + "pre_feedforward_layernorm",
    mlp_after=LAYER + "post_feedforward_layernorm",
)
_BIAS = frozenset({"attention_bias"})
_SCORES = _BIAS | {"final_logit_softcapping", "query_pre_attn_scalar"}
_CAPS = frozenset({"attn_logit_softcapping"})  # Gemma 3's own code leaves scores as they are, whatever this key says
_GEMMA = {"head_dim": 256, "tie_word_embeddings": True}
_GEMMA2_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_GPT_OSS = {"head_dim": 64, "rms_norm_eps": 1e-5, "attention_bias": True, "rope_theta": 150000.0, "sliding_window": 128}

WINDOWED_FAMILIES: dict[str, Family] = {
    "gemma": Family("GemmaForCausalLM", _gemma, usual=_GEMMA, honoured=_BIAS),
    "gemma2": Family("Gemma2ForCausalLM", _gemma2, _GEMMA_NAMES, usual=_GEMMA | _GEMMA2_CAPS, honoured=_SCORES | _CAPS),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        _gemma3,
        _GEMMA_NAMES,
        usual=_GEMMA | {"max_position_embeddings": 131072},
        honoured=_SCORES,
    ),
    "olmo3": Family("Olmo3ForCausalLM", _olmo3, _OLMO2.names, usual=_OLMO2.usual, honoured=_BIAS),
    "exaone4": Family("Exaone4ForCausalLM", _exaone4, _OLMO2.names, usual=_OLMO2.usual),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        _gpt_oss,
        _GPT_OSS_NAMES,
        usual=_GPT_OSS,
        honoured=_BIAS | {"num_experts", "num_local_experts"},
    ),
    "cohere2": Family(
        "Cohere2ForCausalLM",
        _cohere2,
        _COHERE.names,
        usual={**_COHERE.usual, "rope_theta": 10000.0},
        honoured=_BIAS | {"logit_scale"},
    ),
}
