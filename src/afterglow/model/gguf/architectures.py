"""From the metadata of a GGUF file to the keys of a `config.json`, and where each weight is found.

A row of `ARCHITECTURES` says how llama.cpp lays out the files of one architecture; the arithmetic is that of a family of
`families.FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from afterglow.errors import ModelError
from afterglow.gguf_file import GgufFile
from afterglow.model.gguf.keys import Keys, common_config, turned_share, whole_head
from afterglow.model.names import Names
from afterglow.model.refusals import KNOWN_REFUSED
from afterglow.model.spec import ModelSpec

LAYER = "blk.{l}."


@dataclass(frozen=True, slots=True)
class Architecture:
    """The way to read the files of one architecture. `kind`: its model type; None: `read` says it."""

    kind: str | None
    read: Callable[[Keys], dict[str, Any]]  # keys of config.json besides the common ones
    names: Names | Callable[[ModelSpec], Names]
    experts: bool = False  # whether its files may hold a mixture of experts


def read_architecture(file: GgufFile) -> tuple[Architecture, dict[str, Any]]:
    """Return the architecture of a file, and its metadata as `config.json` would say it.

    Raises: ModelError for an architecture that is not supported, and for metadata that are missing or not honoured.
    """
    name = str(file.metadata.get("general.architecture"))
    if name not in ARCHITECTURES:
        reason = KNOWN_REFUSED.get(name, "nothing here has been held against its arithmetic")
        raise ModelError(
            f"{file.paths[0]}: GGUF architecture {name!r} is not supported ({reason}); supported are "
            f"{', '.join(ARCHITECTURES)}"
        )
    keys = Keys(file, name)
    architecture = ARCHITECTURES[name]
    if keys.whole("expert_count") and not architecture.experts:
        raise ModelError(f"{keys.path}: mixture-of-experts layers are not supported; use a dense model")
    config = common_config(keys) | architecture.read(keys)
    if architecture.kind is not None:
        config["model_type"] = architecture.kind
    return architecture, {key: value for key, value in config.items() if value is not None}


def _llama(keys: Keys) -> dict[str, Any]:
    whole_head(keys)
    bias = keys.has(LAYER + "attn_q.bias")
    common = {
        "hidden_act": "silu",
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "sliding_window": keys.whole("attention.sliding_window") or None,
    }
    if keys.whole("expert_count"):
        return common | _experts(keys) | {"model_type": "mixtral", "num_experts": None}
    if common["sliding_window"] is not None:
        return common | {"model_type": "mistral"}
    if bias and not keys.has(LAYER + "attn_output.bias"):  # the arithmetic of Qwen2 under another name
        return common | {"model_type": "qwen2"}
    return common | {"model_type": "llama", "attention_bias": bias, "mlp_bias": keys.has(LAYER + "ffn_gate.bias")}


def _qwen2(keys: Keys) -> dict[str, Any]:
    whole_head(keys)
    window = keys.whole("attention.sliding_window") or None
    return {
        "hidden_act": "silu",
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": -1,  # files do not say which layers have it
    }


def _qwen3(keys: Keys) -> dict[str, Any]:
    return _qwen2(keys) | {"attention_bias": keys.has(LAYER + "attn_q.bias")}


def _phi2(keys: Keys) -> dict[str, Any]:
    return {
        "hidden_act": "gelu_new",
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
        "partial_rotary_factor": turned_share(keys),
    }


def _falcon(keys: Keys) -> dict[str, Any]:
    heads = keys.count("attention.head_count")
    kv_heads = keys.whole("attention.head_count_kv", heads)
    two = keys.has(LAYER + "attn_norm_2.weight")
    new = two or kv_heads not in (1, heads)
    whole_head(keys)
    return {
        "new_decoder_architecture": new,
        "num_ln_in_parallel_attn": 2 if two else 1,
        "parallel_attn": True,
        "multi_query": kv_heads == 1,
        "num_kv_heads": kv_heads,
        "ffn_hidden_size": keys.count("feed_forward_length"),
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
    }


def _experts(keys: Keys) -> dict[str, Any]:
    if keys.number("expert_weights_scale", 1.0) not in (0.0, 1.0):
        raise ModelError(f"{keys.path}: scaled weights of experts (expert_weights_scale) are not supported")
    _, width, _ = keys.shape("blk.0.ffn_gate_exps.weight", 3)
    count = keys.count("expert_count")
    return {
        "num_experts": count,
        "num_local_experts": count,
        "num_experts_per_tok": keys.count("expert_used_count"),
        "intermediate_size": width,
        "moe_intermediate_size": width,
    }


def _qwen2_moe(keys: Keys) -> dict[str, Any]:
    width, _ = keys.shape("blk.0.ffn_gate_shexp.weight", 2)
    return _mixture(keys) | {
        "shared_expert_intermediate_size": width,
        "qkv_bias": keys.has(LAYER + "attn_q.bias"),
    }


def _qwen3_moe(keys: Keys) -> dict[str, Any]:
    return _mixture(keys) | {"norm_topk_prob": True}


def _mixture(keys: Keys) -> dict[str, Any]:
    return _llama(keys) | _experts(keys) | {"num_local_experts": None, "norm_topk_prob": False}


def _gpt_oss(keys: Keys) -> dict[str, Any]:
    config = _mixture(keys) | {"num_local_experts": keys.count("expert_count"), "norm_topk_prob": None}
    config["rope_parameters"] = common_config(keys)["rope_parameters"] | {"truncate": False}  # as the model was made
    return config | {"attention_bias": True}


def _phi3(keys: Keys) -> dict[str, Any]:
    return {
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "partial_rotary_factor": turned_share(keys),
        "sliding_window": keys.whole("attention.sliding_window", _phi3_window(keys)) or None,
    }


def _phi3_window(keys: Keys) -> int:
    """Return the window of files that were made before there was a key for it: Phi-3 mini and medium for 4K tokens have one."""
    return 2047 if keys.count("block_count") in (32, 40) and keys.count("context_length") == 4096 else 0


def _smollm3(keys: Keys) -> dict[str, Any]:
    return _llama(keys) | {"no_rope_layer_interval": 4}  # the only one that llama.cpp knows


def _olmo2(keys: Keys) -> dict[str, Any]:
    if keys.whole("attention.sliding_window"):
        raise ModelError(f"{keys.path}: windows in some layers only (OLMo 3) are not supported; use OLMo 2")
    return _llama(keys)


def _granite(keys: Keys) -> dict[str, Any]:
    head_dim = keys.count("embedding_length") // keys.count("attention.head_count")
    return _llama(keys) | {
        "embedding_multiplier": keys.number("embedding_scale", 0.0) or 1.0,
        "attention_multiplier": keys.number("attention.scale", 0.0) or head_dim**-0.5,
        "residual_multiplier": keys.number("residual_scale", 0.0) or 1.0,
        "logits_scaling": keys.number("logit_scale", 0.0) or 1.0,
    }


def _glm4(keys: Keys) -> dict[str, Any]:
    if keys.get("rope.dimension_sections") is not None:
        raise ModelError(
            f"{keys.path}: rotary positions of several axes (GLM-4V) are not supported; use a text-only model"
        )
    return {
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "partial_rotary_factor": turned_share(keys),
        "attention_bias": keys.has(LAYER + "attn_q.bias"),
    }


def _starcoder2(keys: Keys) -> dict[str, Any]:
    whole_head(keys)
    return {
        "norm_epsilon": keys.number("attention.layer_norm_epsilon"),
        "use_bias": keys.has(LAYER + "attn_q.bias"),
        # All its sizes have a window, though files may not say so.
        "sliding_window": keys.whole("attention.sliding_window") or 4096,
        "max_window_layers": 0 if keys.whole("attention.sliding_window") else -1,
    }


def _gpt_neox(keys: Keys) -> dict[str, Any]:
    return {
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
        "partial_rotary_factor": turned_share(keys),
        "use_parallel_residual": bool(keys.get("use_parallel_residual")),
        "attention_bias": keys.has(LAYER + "attn_qkv.bias"),
    }


def _gpt2(keys: Keys) -> dict[str, Any]:
    return {
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
        "n_inner": keys.count("feed_forward_length"),
    }


def _stablelm(keys: Keys) -> dict[str, Any]:
    return {
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
        "partial_rotary_factor": turned_share(keys),
        "use_parallel_residual": not keys.has(LAYER + "ffn_norm.weight"),
        "use_qkv_bias": keys.has(LAYER + "attn_q.bias"),
        "qk_layernorm": keys.has(LAYER + "attn_q_norm.weight"),
    }


def _command_r(keys: Keys) -> dict[str, Any]:
    whole_head(keys)
    return {
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
        "logit_scale": keys.number("logit_scale"),
        "attention_bias": keys.has(LAYER + "attn_q.bias"),
        "use_qk_norm": keys.has(LAYER + "attn_q_norm.weight"),
    }


def _gemma(keys: Keys) -> dict[str, Any]:
    whole_head(keys)
    return {
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rms_norm_plus_one": False,
    }


def _gemma_scores(keys: Keys, largest: int) -> dict[str, Any]:
    """Return what Gemma 2 and 3 have in common. Scores are scaled by the head's size, but by hidden_size / heads in the largest
    model, which has so many layers: files do not say it, and llama.cpp does the same."""
    hidden, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    head_dim = keys.whole("attention.key_length") or hidden // heads
    return _gemma(keys) | {
        "query_pre_attn_scalar": hidden / heads if keys.count("block_count") == largest else head_dim,
        "sliding_window_pattern": keys.whole("attention.sliding_window_pattern") or None,
    }


def _gemma2(keys: Keys) -> dict[str, Any]:
    return _gemma_scores(keys, 46) | {
        "sliding_window": keys.whole("attention.sliding_window") or 4096,
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
    }


def _gemma3(keys: Keys) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10000.0)}
    return _gemma_scores(keys, 62) | {
        "sliding_window": keys.count("attention.sliding_window"),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
        "rope_parameters": {"full_attention": common_config(keys)["rope_parameters"], "sliding_attention": local},
    }


def _cohere2(keys: Keys) -> dict[str, Any]:
    return _command_r(keys) | {
        "sliding_window": keys.count("attention.sliding_window"),
        "sliding_window_pattern": keys.whole("attention.sliding_window_pattern") or None,
    }


_USUAL = Names(  # of a sequential model with a gated MLP
    embed="token_embd",
    attn_norm=LAYER + "attn_norm",
    mlp_norm=LAYER + "ffn_norm",
    qkv=tuple(f"{LAYER}attn_{x}" for x in "qkv"),
    q_norm=LAYER + "attn_q_norm",
    k_norm=LAYER + "attn_k_norm",
    out=LAYER + "attn_output",
    mlp=(LAYER + "ffn_gate", LAYER + "ffn_up"),
    mlp_out=LAYER + "ffn_down",
    router=LAYER + "ffn_gate_inp",
    expert_mlp=(LAYER + "ffn_gate_exps.{e}", LAYER + "ffn_up_exps.{e}"),
    expert_mlp_out=LAYER + "ffn_down_exps.{e}",
    shared_mlp=(LAYER + "ffn_gate_shexp", LAYER + "ffn_up_shexp"),
    shared_mlp_out=LAYER + "ffn_down_shexp",
    shared_gate=LAYER + "ffn_gate_inp_shexp",
    final_norm="output_norm",
    head="output",
)
_PLAIN = replace(_USUAL, mlp=(LAYER + "ffn_up",))
_NEIGHBOURS = replace(_USUAL, neighbours=True)
_NORMED_AFTER = replace(_USUAL, attn_after=LAYER + "post_attention_norm", mlp_after=LAYER + "post_ffw_norm")
_GLM4 = replace(_NORMED_AFTER, mlp=(LAYER + "ffn_up",), neighbours=True)
_GPT_OSS = replace(_USUAL, mlp_norm=LAYER + "post_attention_norm", sinks=LAYER + "attn_sinks.weight")
_GPT2 = replace(_PLAIN, positions="position_embd")


def _falcon_names(spec: ModelSpec) -> Names:
    return replace(_PLAIN, attn_norm=LAYER + "attn_norm_2", mlp_norm=LAYER + "attn_norm") if spec.mlp_norm else _PLAIN


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(None, _llama, _NEIGHBOURS, experts=True),
    "qwen2": Architecture("qwen2", _qwen2, _USUAL),
    "qwen3": Architecture("qwen3", _qwen3, _USUAL),
    "qwen2moe": Architecture("qwen2_moe", _qwen2_moe, _USUAL, experts=True),
    "qwen3moe": Architecture("qwen3_moe", _qwen3_moe, _USUAL, experts=True),
    "olmoe": Architecture("olmoe", _mixture, _USUAL, experts=True),
    "gpt-oss": Architecture("gpt_oss", _gpt_oss, _GPT_OSS, experts=True),
    "phi2": Architecture("phi", _phi2, _PLAIN),
    "phi3": Architecture("phi3", _phi3, _PLAIN),
    "smollm3": Architecture("smollm3", _smollm3, _NEIGHBOURS),
    "olmo2": Architecture("olmo2", _olmo2, _NORMED_AFTER),
    "granite": Architecture("granite", _granite, _NEIGHBOURS),
    "glm4": Architecture("glm4", _glm4, _GLM4),
    "starcoder2": Architecture("starcoder2", _starcoder2, _PLAIN),
    "gptneox": Architecture("gpt_neox", _gpt_neox, _PLAIN),
    "gpt2": Architecture("gpt2", _gpt2, _GPT2),
    "stablelm": Architecture("stablelm", _stablelm, _USUAL),
    "command-r": Architecture("cohere", _command_r, _NEIGHBOURS),
    "gemma": Architecture("gemma", _gemma, _USUAL),
    "gemma2": Architecture("gemma2", _gemma2, _NORMED_AFTER),
    "gemma3": Architecture("gemma3_text", _gemma3, _NORMED_AFTER),
    "cohere2": Architecture("cohere2", _cohere2, _NEIGHBOURS),
    "falcon": Architecture("falcon", _falcon, _falcon_names),
}
