"""The families with layer norms."""

from __future__ import annotations

from typing import Any

from afterglow.errors import ModelError
from afterglow.model.config_reading import Config, Family, every_layer, head_dim, need, read_activation, windowed
from afterglow.model.names import Names
from afterglow.model.rotary import read_rope
from afterglow.model.spec import ModelSpec


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
        **read_rope(config, head_dim(config)),
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


def _starcoder2(config: Config) -> dict[str, Any]:
    bias = bool(config.get("use_bias", True))
    fields = {
        "ffn": need(config, "intermediate_size"),
        "norm": "layer",
        "norm_eps": config.get("norm_epsilon", 1e-5),
        "gated_mlp": False,
        "activation": read_activation(config.get("hidden_act", "gelu_pytorch_tanh")),
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": bias,
        "tied_embeddings": bool(config.get("tie_word_embeddings", True)),
        **read_rope(config, head_dim(config)),
    }
    return windowed(fields, config.get("sliding_window"), every_layer(config))


def _gpt_neox(config: Config) -> dict[str, Any]:
    share = config.get("rotary_pct", 0.25)
    config = {"rope_theta": config.get("rotary_emb_base"), **config}
    bias = bool(config.get("attention_bias", True))
    return {
        "kv_heads": need(config, "num_attention_heads"),
        "ffn": need(config, "intermediate_size"),
        "residual": "parallel" if config.get("use_parallel_residual", True) else "sequential",
        "norm": "layer",
        "norm_eps": config.get("layer_norm_eps", 1e-5),
        "gated_mlp": False,
        "activation": read_activation(config.get("hidden_act", "gelu")),
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": True,
        **read_rope(config, head_dim(config), partial=share),
    }


def _gpt2(config: Config) -> dict[str, Any]:
    return {
        "ffn": config.get("n_inner") or 4 * need(config, "hidden_size"),
        "positions": "learned",
        "norm": "layer",
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "gated_mlp": False,
        "activation": read_activation(config.get("activation_function", "gelu_new")),
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "tied_embeddings": bool(config.get("tie_word_embeddings", True)),
    }


def _stablelm(config: Config) -> dict[str, Any]:
    parallel = bool(config.get("use_parallel_residual"))
    return {
        "ffn": need(config, "intermediate_size"),
        "residual": "parallel" if parallel else "sequential",
        "mlp_norm": not parallel,
        "norm": "layer",
        "norm_eps": config.get("layer_norm_eps", 1e-5),
        "activation": read_activation(config.get("hidden_act", "silu")),
        "qkv_bias": bool(config.get("use_qkv_bias")),
        "qk_norm": bool(config.get("qk_layernorm")),
        "qk_norm_over": "heads",
        **read_rope(config, head_dim(config), partial=0.25),
    }


def _cohere(config: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias"))
    return {
        "ffn": need(config, "intermediate_size"),
        "residual": "parallel",
        "mlp_norm": False,
        "norm": "layer",
        "norm_bias": False,
        "norm_eps": config.get("layer_norm_eps", 1e-5),
        "activation": read_activation(config.get("hidden_act", "silu")),
        "qkv_bias": bias,
        "out_bias": bias,
        "qk_norm": bool(config.get("use_qk_norm")),
        "qk_norm_over": "heads",
        "logit_scale": float(config.get("logit_scale", 0.0625)),
        "tied_embeddings": bool(config.get("tie_word_embeddings", True)),
        **read_rope({"rope_theta": 500000.0, **config}, head_dim(config)),
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
        grouped=True,
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


def _starcoder2_names(spec: ModelSpec) -> Names:
    return Names(mlp=("model.layers.{l}.mlp.c_fc",), mlp_out="model.layers.{l}.mlp.c_proj")


def _gpt_neox_names(spec: ModelSpec) -> Names:
    layer = "gpt_neox.layers.{l}."
    return Names(
        embed="gpt_neox.embed_in",
        attn_norm=layer + "input_layernorm",
        mlp_norm=layer + "post_attention_layernorm",
        qkv=(layer + "attention.query_key_value",),
        grouped=True,
        out=layer + "attention.dense",
        mlp=(layer + "mlp.dense_h_to_4h",),
        mlp_out=layer + "mlp.dense_4h_to_h",
        final_norm="gpt_neox.final_layer_norm",
        head="embed_out",
    )


def _gpt2_names(spec: ModelSpec) -> Names:
    layer = "transformer.h.{l}."
    return Names(
        embed="transformer.wte",
        positions="transformer.wpe",
        attn_norm=layer + "ln_1",
        mlp_norm=layer + "ln_2",
        qkv=(layer + "attn.c_attn",),
        out=layer + "attn.c_proj",
        mlp=(layer + "mlp.c_fc",),
        mlp_out=layer + "mlp.c_proj",
        final_norm="transformer.ln_f",
        transposed=True,
    )


def _stablelm_names(spec: ModelSpec) -> Names:
    layer = "model.layers.{l}.self_attn."
    return Names(q_norm=layer + "q_layernorm.norms.{h}", k_norm=layer + "k_layernorm.norms.{h}")


def _cohere_names(spec: ModelSpec) -> Names:
    return Names(neighbours=True)


LAYER_NORM_FAMILIES: dict[str, Family] = {
    "phi": Family(architecture="PhiForCausalLM", read=_phi, names=_phi_names),
    "falcon": Family(architecture="FalconForCausalLM", read=_falcon, names=_falcon_names),
    "opt": Family(architecture="OPTForCausalLM", read=_opt, names=_opt_names),
    "starcoder2": Family(architecture="Starcoder2ForCausalLM", read=_starcoder2, names=_starcoder2_names),
    "gpt_neox": Family(
        architecture="GPTNeoXForCausalLM", read=_gpt_neox, names=_gpt_neox_names, honoured=frozenset({"attention_bias"})
    ),
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        read=_gpt2,
        names=_gpt2_names,
        renamed={
            "n_embd": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_positions": "max_position_embeddings",
        },
    ),
    "stablelm": Family(
        architecture="StableLmForCausalLM",
        read=_stablelm,
        names=_stablelm_names,
        honoured=frozenset({"qk_layernorm"}),
    ),
    "cohere": Family(
        architecture="CohereForCausalLM",
        read=_cohere,
        names=_cohere_names,
        honoured=frozenset({"attention_bias", "logit_scale", "use_qk_norm"}),
    ),
}
