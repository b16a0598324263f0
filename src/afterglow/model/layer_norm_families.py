"""The families with layer norms."""

from __future__ import annotations

from typing import Any

from afterglow.errors import ModelError
from afterglow.model.config_reading import Config, Family, every_layer, head_dim, need, read_activation, windowed
from afterglow.model.names import Names
from afterglow.model.rotary import read_rope
from afterglow.model.spec import ModelSpec


def _norms(config: Config, activation: str, *, eps: str = "layer_norm_eps", key: str = "hidden_act") -> dict[str, Any]:
    """Read the norms and the activation, `activation` where there is none under `key`. `eps`: the key of the norms' epsilon."""
    return {
        "norm": "layer",
        "norm_eps": config.get(eps, 1e-5),
        "activation": read_activation(config.get(key, activation)),
    }


def _plain(config: Config, activation: str, bias: bool, **keys: str) -> dict[str, Any]:
    """Read what families with a plain MLP have in common. `bias`: do all matrices have biases? `keys`: see `_norms`."""
    biases = {"qkv_bias": bias, "out_bias": bias, "mlp_bias": bias}
    return _norms(config, activation, **keys) | {"gated_mlp": False} | biases


def _phi(config: Config) -> dict[str, Any]:
    return _plain(config, "gelu_new", True) | {
        "ffn": need(config, "intermediate_size"),
        "residual": "parallel",
        "mlp_norm": False,
        "head_bias": True,
        **read_rope(config, head_dim(config), partial=0.5),
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
    return _plain(config, "gelu", bias, eps="layer_norm_epsilon", key="activation") | {
        "kv_heads": kv_heads,
        "ffn": config.get("ffn_hidden_size") or 4 * need(config, "hidden_size"),
        "residual": "parallel" if parallel else "sequential",
        "mlp_norm": not parallel or norms == 2,
        **read_rope(config, head_dim(config)),
    }


def _opt(config: Config) -> dict[str, Any]:
    return _plain(config, "relu", bool(config.get("enable_bias", True)), key="activation_function") | {
        "ffn": need(config, "ffn_dim"),
        "positions": "learned",
        "position_offset": 2,
        "norm_eps": 1e-5,
    }


def _starcoder2(config: Config) -> dict[str, Any]:
    fields = _plain(config, "gelu_pytorch_tanh", bool(config.get("use_bias", True)), eps="norm_epsilon") | {
        "ffn": need(config, "intermediate_size"),
        **read_rope(config, head_dim(config)),
    }
    return windowed(fields, config.get("sliding_window"), every_layer(config))


def _gpt_neox(config: Config) -> dict[str, Any]:
    share = config.get("rotary_pct", 0.25)
    config = {"rope_theta": config.get("rotary_emb_base"), **config}
    return _plain(config, "gelu", bool(config.get("attention_bias", True))) | {
        "kv_heads": need(config, "num_attention_heads"),
        "ffn": need(config, "intermediate_size"),
        "residual": "parallel" if config.get("use_parallel_residual", True) else "sequential",
        "mlp_bias": True,
        **read_rope(config, head_dim(config), partial=share),
    }


def _gpt2(config: Config) -> dict[str, Any]:
    return _plain(config, "gelu_new", True, eps="layer_norm_epsilon", key="activation_function") | {
        "ffn": config.get("n_inner") or 4 * need(config, "hidden_size"),
        "positions": "learned",
    }


def _stablelm(config: Config) -> dict[str, Any]:
    parallel = bool(config.get("use_parallel_residual"))
    return _norms(config, "silu") | {
        "ffn": need(config, "intermediate_size"),
        "residual": "parallel" if parallel else "sequential",
        "mlp_norm": not parallel,
        "qkv_bias": bool(config.get("use_qkv_bias")),
        "qk_norm": bool(config.get("qk_layernorm")),
        "qk_norm_over": "heads",
        **read_rope(config, head_dim(config), partial=0.25),
    }


def _cohere(config: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias"))
    return _norms(config, "silu") | {
        "ffn": need(config, "intermediate_size"),
        "residual": "parallel",
        "mlp_norm": False,
        "norm_bias": False,
        "qkv_bias": bias,
        "out_bias": bias,
        "qk_norm": bool(config.get("use_qk_norm")),
        "qk_norm_over": "heads",
        "logit_scale": float(config["logit_scale"]),
        **read_rope(config, head_dim(config)),
    }


def _falcon_names(spec: ModelSpec) -> Names:
    layer = "transformer.h.{l}."
    two = spec.residual == "parallel" and spec.mlp_norm
    return Names(
        embed="transformer.word_embeddings",
        attn_norm=layer + ("ln_attn" if two else "input_layernorm"),
        mlp_norm=layer + ("ln_mlp" if two else "post_attention_layernorm"),
        qkv=(layer + "self_attention.query_key_value",),
        grouped=True,
        out=layer + "self_attention.dense",
        mlp=(layer + "mlp.dense_h_to_4h",),
        mlp_out=layer + "mlp.dense_4h_to_h",
        final_norm="transformer.ln_f",
    )


_LAYER = "model.layers.{l}."
_PHI_NAMES = Names(
    out=_LAYER + "self_attn.dense",
    mlp=(_LAYER + "mlp.fc1",),
    mlp_out=_LAYER + "mlp.fc2",
    final_norm="model.final_layernorm",
)
_STARCODER2_NAMES = Names(mlp=(_LAYER + "mlp.c_fc",), mlp_out=_LAYER + "mlp.c_proj")
_STABLELM_NAMES = Names(
    q_norm=_LAYER + "self_attn.q_layernorm.norms.{h}", k_norm=_LAYER + "self_attn.k_layernorm.norms.{h}"
)
_OPT_LAYER = "model.decoder.layers.{l}."
_OPT_NAMES = Names(
    embed="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    attn_norm=_OPT_LAYER + "self_attn_layer_norm",
    mlp_norm=_OPT_LAYER + "final_layer_norm",
    qkv=tuple(f"{_OPT_LAYER}self_attn.{x}_proj" for x in "qkv"),
    out=_OPT_LAYER + "self_attn.out_proj",
    mlp=(_OPT_LAYER + "fc1",),
    mlp_out=_OPT_LAYER + "fc2",
    final_norm="model.decoder.final_layer_norm",
)
_GPT_NEOX_LAYER = "gpt_neox.layers.{l}."
_GPT_NEOX_NAMES = Names(
    embed="gpt_neox.embed_in",
    attn_norm=_GPT_NEOX_LAYER + "input_layernorm",
    mlp_norm=_GPT_NEOX_LAYER + "post_attention_layernorm",
    qkv=(_GPT_NEOX_LAYER + "attention.query_key_value",),
    grouped=True,
    out=_GPT_NEOX_LAYER + "attention.dense",
    mlp=(_GPT_NEOX_LAYER + "mlp.dense_h_to_4h",),
    mlp_out=_GPT_NEOX_LAYER + "mlp.dense_4h_to_h",
    final_norm="gpt_neox.final_layer_norm",
    head="embed_out",
)
_GPT2_LAYER = "transformer.h.{l}."
_GPT2_NAMES = Names(
    embed="transformer.wte",
    positions="transformer.wpe",
    attn_norm=_GPT2_LAYER + "ln_1",
    mlp_norm=_GPT2_LAYER + "ln_2",
    qkv=(_GPT2_LAYER + "attn.c_attn",),
    out=_GPT2_LAYER + "attn.c_proj",
    mlp=(_GPT2_LAYER + "mlp.c_fc",),
    mlp_out=_GPT2_LAYER + "mlp.c_proj",
    final_norm="transformer.ln_f",
    transposed=True,
)
_GPT2_KEYS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}
_TIED = {"tie_word_embeddings": True}

LAYER_NORM_FAMILIES: dict[str, Family] = {
    "phi": Family("PhiForCausalLM", _phi, _PHI_NAMES),
    "falcon": Family("FalconForCausalLM", _falcon, _falcon_names, usual=_TIED),
    "opt": Family("OPTForCausalLM", _opt, _OPT_NAMES, usual=_TIED),
    "starcoder2": Family("Starcoder2ForCausalLM", _starcoder2, _STARCODER2_NAMES, usual=_TIED),
    "gpt_neox": Family("GPTNeoXForCausalLM", _gpt_neox, _GPT_NEOX_NAMES, honoured=frozenset({"attention_bias"})),
    "gpt2": Family("GPT2LMHeadModel", _gpt2, _GPT2_NAMES, usual=_TIED, renamed=_GPT2_KEYS),
    "stablelm": Family("StableLmForCausalLM", _stablelm, _STABLELM_NAMES, honoured=frozenset({"qk_layernorm"})),
    "cohere": Family(
        "CohereForCausalLM",
        _cohere,
        Names(neighbours=True),
        usual=_TIED | {"logit_scale": 0.0625, "rope_theta": 500000.0},
        honoured=frozenset({"attention_bias", "logit_scale", "use_qk_norm"}),
    ),
}
