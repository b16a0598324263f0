"""The families: from a Hugging Face `config.json` to a ModelSpec, and where each weight is found.

A row of `FAMILIES` says how a family differs from Llama; no other place does. Refused keys are in `refusals.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from afterglow.errors import ModelError
from afterglow.model.quantization_config import unpacking
from afterglow.model.refusals import refuse_keys, refused_kind
from afterglow.model.rotary import read_rope
from afterglow.model.spec import Activation, ModelSpec

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Module names in the checkpoint, `{l}` being the layer; `.weight` and `.bias` are appended.

    `qkv`: q, k and v, or one module that has, per KV head, its query heads, its key and its value.
    `mlp`: gate and up, or the first layer of a plain MLP.
    """

    embed: str = "model.embed_tokens"
    positions: str = "model.embed_positions"
    attn_norm: str = "model.layers.{l}.input_layernorm"
    mlp_norm: str = "model.layers.{l}.post_attention_layernorm"
    qkv: tuple[str, ...] = tuple(f"model.layers.{{l}}.self_attn.{x}_proj" for x in "qkv")
    q_norm: str = "model.layers.{l}.self_attn.q_norm"
    k_norm: str = "model.layers.{l}.self_attn.k_norm"
    out: str = "model.layers.{l}.self_attn.o_proj"
    mlp: tuple[str, ...] = ("model.layers.{l}.mlp.gate_proj", "model.layers.{l}.mlp.up_proj")
    mlp_out: str = "model.layers.{l}.mlp.down_proj"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    token_types: str = ""  # encoders only, as is the norm after the embeddings
    embed_norm: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The way to read `config.json` of one model type."""

    architecture: str
    read: Callable[[Config], dict[str, Any]]  # ModelSpec fields that differ from Llama's reading
    names: Callable[[ModelSpec], Names]
    honoured: frozenset[str] = frozenset()  # keys of refusals.UNSUPPORTED that this family does honour


ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def spec_from_config(config: Config) -> tuple[ModelSpec, Names]:
    """Return the spec and weight names of a parsed `config.json`, in the style of transformers 4 or 5.

    Raises: ModelError that names the key that is missing or not honoured.
    """
    kind = config.get("model_type")
    if kind is None:
        raise ModelError("config.json names no model_type; is this a Hugging Face model directory?")
    if kind not in FAMILIES:
        raise refused_kind(kind, ", ".join(FAMILIES))
    family = FAMILIES[kind]
    unpacking(config)
    refuse_keys(config, family.honoured | {"quantization_config"})
    _refuse_architecture(config, family)
    fields = _read_common(config) | family.read(config)
    spec = ModelSpec(family=kind, **fields)
    return spec, family.names(spec)


def _refuse_architecture(config: Config, family: Family) -> None:
    for name in config.get("architectures") or ():
        if name.lower() != family.architecture.lower():
            raise ModelError(
                f"architecture {name!r} of model type {config['model_type']!r} writes no text, or is not known here; "
                f"use a checkpoint that was saved as {family.architecture}"
            )
    own_code = (config.get("auto_map") or {}).get("AutoModelForCausalLM")
    if own_code and own_code.rsplit(".", 1)[-1] != family.architecture:
        raise ModelError(f"the model brings its own code ({own_code}), which is never run; use a plain checkpoint")


def need(config: Config, key: str) -> Any:
    """Return the value of a required key. Raises: ModelError if it is missing."""
    if config.get(key) is None:
        raise ModelError(f"config.json lacks {key!r}; the model directory is incomplete")
    return config[key]


def read_activation(name: Any) -> Activation:
    """Return our name of an activation. Raises: ModelError if it is not known."""
    if name not in ACTIVATIONS:
        raise ModelError(f"activation {name!r} is not supported; supported are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _read_common(config: Config) -> dict[str, Any]:
    hidden, heads = need(config, "hidden_size"), need(config, "num_attention_heads")
    return {
        "layers": need(config, "num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or hidden // heads,
        "vocab": need(config, "vocab_size"),
        "max_positions": config.get("max_position_embeddings") or 2048,
        "bos_id": (_ids(config.get("bos_token_id")) or (None,))[0],
        "eos_ids": _ids(config.get("eos_token_id")),
        "dtype": str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
    }


def _windowed(fields: dict[str, Any], window: int | None) -> dict[str, Any]:
    """Return `fields` with the sliding window as a limit: within it, windowed and full attention are the same."""
    if window is None or window >= fields.get("position_limit", 1 << 62):
        return fields
    reason = f"sliding-window attention ({window} tokens) is not supported"
    return fields | {"position_limit": window, "position_limit_reason": reason}


def _head_dim(config: Config) -> int:
    return int(config.get("head_dim") or need(config, "hidden_size") // need(config, "num_attention_heads"))


def _llama(config: Config) -> dict[str, Any]:
    bias, mlp_bias = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    return {
        "ffn": need(config, "intermediate_size"),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "activation": read_activation(config.get("hidden_act", "silu")),
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": mlp_bias,
        **read_rope(config, _head_dim(config)),
    }


def _mistral(config: Config) -> dict[str, Any]:
    return _windowed(_llama(config), config.get("sliding_window", 4096))  # left out means 4096


def _qwen_window(config: Config) -> int | None:
    if not config.get("use_sliding_window"):
        return None
    kinds = config.get("layer_types")
    if kinds:
        slides = "sliding_attention" in kinds
    else:
        slides = config.get("max_window_layers", 28) < config["num_hidden_layers"]
    return config.get("sliding_window", 4096) if slides else None


def _qwen2(config: Config) -> dict[str, Any]:
    return _windowed(_llama(config) | {"qkv_bias": True, "out_bias": False}, _qwen_window(config))


def _qwen3(config: Config) -> dict[str, Any]:
    config = {"head_dim": 128, **config}  # its default, whatever the hidden size
    fields = _llama(config) | {"qk_norm": True, "head_dim": _head_dim(config)}
    return _windowed(fields, _qwen_window(config))


def _phi(config: Config) -> dict[str, Any]:
    return {
        "ffn": need(config, "intermediate_size"),
        "residual": "parallel",
        "mlp_norm": False,
        "norm": "layer",
        "norm_eps": config.get("layer_norm_eps", 1e-5),
        "gated_mlp": False,
        "activation": read_activation(config.get("hidden_act", "gelu_new")),
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "head_bias": True,
        **read_rope(config, _head_dim(config), partial=0.5),
    }


def _falcon(config: Config) -> dict[str, Any]:
    new = bool(config.get("new_decoder_architecture", False))
    parallel = bool(config.get("parallel_attn", True))
    norms = config.get("num_ln_in_parallel_attn") or (2 if new else 1)
    if (new and not parallel) or (norms == 2 and not new):
        raise ModelError(
            f"Falcon with new_decoder_architecture = {new}, parallel_attn = {parallel} and {norms} parallel "
            "norms is not supported"
        )
    heads, bias = need(config, "num_attention_heads"), bool(config.get("bias", False))
    if new:
        kv_heads = config.get("num_kv_heads") or heads
    else:
        kv_heads = 1 if config.get("multi_query", True) else heads
    return {
        "kv_heads": kv_heads,
        "ffn": config.get("ffn_hidden_size") or 4 * need(config, "hidden_size"),
        "residual": "parallel" if parallel else "sequential",
        "mlp_norm": not parallel or norms == 2,
        "norm": "layer",
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "gated_mlp": False,
        "activation": read_activation(config.get("activation", "gelu")),
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": bias,
        "tied_embeddings": bool(config.get("tie_word_embeddings", True)),
        **read_rope(config, _head_dim(config)),
    }


def _opt(config: Config) -> dict[str, Any]:
    bias = bool(config.get("enable_bias", True))
    return {
        "ffn": need(config, "ffn_dim"),
        "positions": "learned",
        "position_offset": 2,
        "norm": "layer",
        "norm_eps": 1e-5,
        "gated_mlp": False,
        "activation": read_activation(config.get("activation_function", "relu")),
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": bias,
        "tied_embeddings": bool(config.get("tie_word_embeddings", True)),
    }


def _phi_names(spec: ModelSpec) -> Names:
    return Names(
        out="model.layers.{l}.self_attn.dense",
        mlp=("model.layers.{l}.mlp.fc1",),
        mlp_out="model.layers.{l}.mlp.fc2",
        final_norm="model.final_layernorm",
    )


def _falcon_names(spec: ModelSpec) -> Names:
    layer = "transformer.h.{l}."
    two = spec.residual == "parallel" and spec.mlp_norm
    return Names(
        embed="transformer.word_embeddings",
        attn_norm=layer + ("ln_attn" if two else "input_layernorm"),
        mlp_norm=layer + ("ln_mlp" if two else "post_attention_layernorm"),
        qkv=(layer + "self_attention.query_key_value",),
        out=layer + "self_attention.dense",
        mlp=(layer + "mlp.dense_h_to_4h",),
        mlp_out=layer + "mlp.dense_4h_to_h",
        final_norm="transformer.ln_f",
    )


def _opt_names(spec: ModelSpec) -> Names:
    layer = "model.decoder.layers.{l}."
    return Names(
        embed="model.decoder.embed_tokens",
        positions="model.decoder.embed_positions",
        attn_norm=layer + "self_attn_layer_norm",
        mlp_norm=layer + "final_layer_norm",
        qkv=tuple(f"{layer}self_attn.{x}_proj" for x in "qkv"),
        out=layer + "self_attn.out_proj",
        mlp=(layer + "fc1",),
        mlp_out=layer + "fc2",
        final_norm="model.decoder.final_layer_norm",
    )


def _llama_names(spec: ModelSpec) -> Names:
    return Names()


_BIAS = frozenset({"attention_bias", "mlp_bias"})

FAMILIES: dict[str, Family] = {
    "llama": Family(architecture="LlamaForCausalLM", read=_llama, names=_llama_names, honoured=_BIAS),
    "mistral": Family(architecture="MistralForCausalLM", read=_mistral, names=_llama_names),
    "qwen2": Family(architecture="Qwen2ForCausalLM", read=_qwen2, names=_llama_names),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        read=_qwen3,
        names=_llama_names,
        honoured=frozenset({"attention_bias"}),
    ),
    "phi": Family(architecture="PhiForCausalLM", read=_phi, names=_phi_names),
    "falcon": Family(architecture="FalconForCausalLM", read=_falcon, names=_falcon_names),
    "opt": Family(architecture="OPTForCausalLM", read=_opt, names=_opt_names),
}


def replace_eos(spec: ModelSpec, eos: Any) -> ModelSpec:
    """Return `spec` with the ids of `generation_config.json` added to its end-of-sequence ids."""
    return dataclasses.replace(spec, eos_ids=tuple(dict.fromkeys((*spec.eos_ids, *_ids(eos)))))
