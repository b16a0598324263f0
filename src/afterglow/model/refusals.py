"""Refusals, with reason and remedy: config keys that change the arithmetic, and model types that are no family here.

A nearly right model gives nearly right answers, and the error stays unseen: so a key that is not honoured is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afterglow.errors import ModelError

OTHER_MODEL = "use a model without"
PLAIN = "use the checkpoint that it was quantised from; --quantization int8 rounds it here"
TEXT_MODEL = "use a text-only model"

# Config keys that change the arithmetic: the values that leave it alone, what to call them, and what helps.
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str, str]] = {
    "quantization_config": ((None,), "quantised weights", PLAIN),
    "alibi": ((None, False), "ALiBi positions", OTHER_MODEL),
    "kv_lora_rank": ((None,), "multi-head latent attention (MLA)", OTHER_MODEL),
    "q_lora_rank": ((None,), "multi-head latent attention (MLA)", OTHER_MODEL),
    "num_experts": ((None, 0), "mixture-of-experts layers", "use a dense model of the same family"),
    "num_local_experts": ((None, 0), "mixture-of-experts layers", "use a dense model of the same family"),
    "mlp_only_layers": ((None, []), "mixture-of-experts layers", "use a dense model of the same family"),
    "n_routed_experts": ((None, 0), "mixture-of-experts layers", "use a dense model of the same family"),
    "vision_config": ((None,), "multimodal models", TEXT_MODEL),
    "audio_config": ((None,), "multimodal models", TEXT_MODEL),
    "text_config": ((None,), "nested (multimodal) configs", TEXT_MODEL),
    "is_encoder_decoder": ((None, False), "encoder-decoder models", "use a decoder-only model"),
    "add_cross_attention": ((None, False), "cross attention", "use a decoder-only model"),
    "attn_logit_softcapping": ((None,), "soft-capped attention scores", OTHER_MODEL),
    "final_logit_softcapping": ((None,), "soft-capped logits", OTHER_MODEL),
    "logit_scale": ((None, 1), "scaled logits", OTHER_MODEL),
    "logits_scaling": ((None, 1), "scaled logits", OTHER_MODEL),
    "residual_multiplier": ((None, 1), "scaled residuals", OTHER_MODEL),
    "embedding_multiplier": ((None, 1), "scaled embeddings", OTHER_MODEL),
    "scale_emb": ((None, 1), "scaled embeddings", OTHER_MODEL),
    "scale_depth": ((None, 1), "scaled residuals", OTHER_MODEL),
    "attention_multiplier": ((None,), "scaled attention", OTHER_MODEL),
    "query_pre_attn_scalar": ((None,), "scaled attention", OTHER_MODEL),
    "clip_qkv": ((None,), "clipped queries, keys and values", OTHER_MODEL),
    "qk_layernorm": ((None, False), "query/key layer norm", OTHER_MODEL),
    "use_qk_norm": ((None, False), "query/key norm", "use a Qwen3 checkpoint, whose norms are read"),
    "use_bidirectional_attention": ((None, False), "tokens that see later ones", OTHER_MODEL),
    "is_causal": ((None, True), "tokens that see later ones", OTHER_MODEL),
    "attention_chunk_size": ((None,), "chunked attention", OTHER_MODEL),
    "no_rope_layers": ((None, []), "layers without positions", OTHER_MODEL),
    "no_rope_layer_interval": ((None, 0), "layers without positions", OTHER_MODEL),
    "rope_interleaved": ((None, False), "interleaved rotary embedding", OTHER_MODEL),
    "attention_bias": ((None, False), "attention biases", OTHER_MODEL),
    "mlp_bias": ((None, False), "MLP biases", OTHER_MODEL),
    "word_embed_proj_dim": (
        (None,),
        "projected embeddings (word_embed_proj_dim other than hidden_size)",
        "use another size of OPT: all but 350m are read",
    ),
    "do_layer_norm_before": (
        (None, True),
        "layer norm after the block",
        "use another size of OPT: all but 350m are read",
    ),
    "_remove_final_layer_norm": ((None, False), "models without a final norm", OTHER_MODEL),
    "lm_head_bias": ((None, False), "biases of the head", OTHER_MODEL),
    "scale_attn_weights": ((None, True), "scores that are not scaled", OTHER_MODEL),
    "scale_attn_by_inverse_layer_idx": ((None, False), "scores that are scaled by the layer", OTHER_MODEL),
    "layer_norm_elementwise_affine": ((None, True), "layer norms without weights", OTHER_MODEL),
}

# Model types that people will try, by the reason for which they are no row of `families.FAMILIES`.
REASONS: dict[str, tuple[str, ...]] = {
    "ALiBi positions": ("bloom", "mpt"),
    "mixture of experts": ("afmoe", "exaone_moe", "cohere2_moe", "granitemoe_swa", "dbrx"),
    "its attention chooses experts": ("jetmoe",),
    "multi-head latent attention (MLA)": (
        "deepseek_v2", "deepseek_v3", "deepseek_v32", "minicpm3", "longcat_flash", "glm4_moe_lite", "youtu",
    ),
    "soft-capped scores and alternating windows": ("vaultgemma",),
    "layers that share keys and values, and embeddings in each layer": ("gemma3n_text", "gemma4_text"),
    "windows in some layers only": ("mimo_v2_flash", "granite_swa"),
    "its module of transformers computes attention itself": ("gptj", "codegen", "gpt_neo", "openai-gpt", "xglm", "gpt_neox_japanese"),
    "chunked attention, mixture of experts": ("llama4", "llama4_text"),
    "state-space or linear-attention layers, which keep a state and no keys": (
        "mamba", "mamba2", "falcon_mamba", "falcon_h1", "jamba", "bamba", "zamba", "zamba2", "nemotron_h", "rwkv",
        "recurrent_gemma", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "kimi_linear", "minimax",
        "lfm2", "lfm2_moe", "granitemoehybrid", "xlstm", "bailing_hybrid", "olmo_hybrid",
    ),
    "multimodal models": (
        "gemma3", "gemma3n", "gemma4", "mllama", "llava", "llava_next", "qwen2_vl", "qwen2_5_vl", "qwen3_vl",
        "mistral3", "phi4_multimodal", "pixtral", "idefics3", "smolvlm", "fuyu", "emu3",
    ),
    "encoder-decoder models": ("t5", "mt5", "bart", "mbart", "pegasus", "whisper", "marian"),
}  # fmt: skip
KNOWN_REFUSED = {kind: reason for reason, kinds in REASONS.items() for kind in kinds}


def refuse_keys(config: Mapping[str, Any], honoured: frozenset[str]) -> None:
    """Refuse a key of UNSUPPORTED that changes the arithmetic and is not among the `honoured`. Raises: ModelError."""
    for key, (neutral, what, remedy) in UNSUPPORTED.items():
        value = config.get(key)
        if key == "word_embed_proj_dim" and value == config.get("hidden_size"):
            continue
        if key not in honoured and value not in neutral:
            raise ModelError(f"{what} are not supported, and config.json says {key} = {_short(value)}; {remedy}")


def refused_kind(kind: object, supported: str) -> ModelError:
    """Make the error for a model type that is no family, with reason and remedy."""
    reason = KNOWN_REFUSED.get(str(kind), "nothing here has been held against its arithmetic")
    return ModelError(f"model type {kind!r} is not supported ({reason}); use a model of one of the types {supported}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
