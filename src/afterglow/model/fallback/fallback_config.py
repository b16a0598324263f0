"""Which architectures run through transformers, and their shape, as its config describes it. Imports no transformers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from afterglow.errors import ModelError
from afterglow.model.checkpoint import refuse_other_weights
from afterglow.model.config_reading import Config, reading, refuse_architecture, token_ids
from afterglow.model.refusals import UNSUPPORTED, refuse_keys
from afterglow.model.spec import ModelSpec

INSTALL = "pip install 'afterglow-llm[transformers]'"

# Model types that tests hold against transformers, with the class that writes text.
FALLBACK: dict[str, str] = {
    "apertus": "ApertusForCausalLM",
    "arcee": "ArceeForCausalLM",
    "biogpt": "BioGptForCausalLM",
    "cwm": "CwmForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "flex_olmo": "FlexOlmoForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt_bigcode": "GPTBigCodeForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitemoeshared": "GraniteMoeSharedForCausalLM",
    "helium": "HeliumForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "hunyuan_v1_moe": "HunYuanMoEV1ForCausalLM",
    "hyperclovax": "HyperCLOVAXForCausalLM",
    "jais2": "Jais2ForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "nanochat": "NanoChatForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "olmo": "OlmoForCausalLM",
    "persimmon": "PersimmonForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "solar_open": "SolarOpenForCausalLM",
}

# Keys of a config that its modules would honour, and our attention would not.
REFUSED = frozenset(
    (
        "quantization_config", "alibi", "kv_lora_rank", "q_lora_rank", "vision_config", "audio_config", "text_config",
        "is_encoder_decoder", "add_cross_attention", "attention_chunk_size",
    )
)  # fmt: skip
# Keys that would have transformers read other files than were checked here, and than the digest names.
OTHER_FILES = ("configuration_files", "transformers_weights")
# Keys that would have it compute with other code, which it may fetch from a hub.
OTHER_CODE = ("_attn_implementation", "experts_implementation", "_experts_implementation", "fusion_config")
# Keys that say where a model comes from, and change nothing.
ABOUT = frozenset(("_name_or_path", "transformers_version", "torch_dtype", "dtype"))


def runs_through_transformers(config: Config) -> bool:
    """Return whether the parsed `config.json` is of a model type that runs through transformers."""
    return config.get("model_type") in FALLBACK


def read_fallback_spec(directory: Path, config: Config) -> ModelSpec:
    """Return the shape of a model that runs through transformers. Which keys turn is found out when it is loaded.

    Raises: ModelError if transformers is not installed, cannot read the config, or describes what our attention cannot do.
    """
    with reading():
        return _read(directory, config, str(config["model_type"]))


def _read(directory: Path, config: Config, kind: str) -> ModelSpec:
    refuse_keys(config, frozenset(UNSUPPORTED) - REFUSED)
    refuse_architecture(config, FALLBACK[kind])
    _refuse_other_files(directory, config)
    read = _their_config(directory, kind)
    heads = read.num_attention_heads
    limit, reason = _limit(read)
    return ModelSpec(
        family=kind,
        layers=read.num_hidden_layers,
        hidden=read.hidden_size,
        heads=heads,
        kv_heads=_kv_heads(read),
        head_dim=getattr(read, "head_dim", None) or read.hidden_size // heads,
        ffn=getattr(read, "intermediate_size", None) or getattr(read, "n_inner", None) or 4 * read.hidden_size,
        vocab=read.vocab_size,
        max_positions=read.max_position_embeddings,
        positions="modules",
        position_limit=limit,
        position_limit_reason=reason,
        bos_id=read.bos_token_id,
        eos_ids=token_ids(read.eos_token_id),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        config_digest=_digest(config),
    )


def _refuse_other_files(directory: Path, config: Config) -> None:
    """Refuse what makes transformers read other files than those whose bytes are in the digest, or other code than its own.
    Raises: ModelError."""
    for key in OTHER_FILES:
        if config.get(key) is not None:
            raise ModelError(
                f"{key} in config.json names other files, which are not read; use a directory of config.json and "
                "model.safetensors"
            )
    for key in OTHER_CODE:
        if config.get(key) is not None:
            raise ModelError(
                f"{key} in config.json names code that computes a part of it; take the key out of config.json"
            )
    refuse_other_weights(directory)


def _their_config(directory: Path, kind: str) -> Any:
    try:
        from transformers import AutoConfig
    except ImportError:
        raise ModelError(f"model type {kind!r} runs through transformers, which is not installed: {INSTALL}") from None
    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # its checks raise errors of many kinds
        raise ModelError(f"{directory}: transformers cannot read its config.json ({_line(error)})") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _kv_heads(read: Any) -> int:
    if getattr(read, "multi_query", False):  # GPTBigCode
        return 1
    return int(getattr(read, "num_key_value_heads", None) or read.num_attention_heads)


def _limit(read: Any) -> tuple[int | None, str]:
    """Return the longest context in which keys do not depend on the longest request beside them, and the reason."""
    rope: Mapping[str, Any] = getattr(read, "rope_parameters", None) or {}
    limit, reason = None, ""
    by_layer = (value for value in rope.values() if isinstance(value, Mapping))  # some say it by type of layer
    for each in (rope, *by_layer):
        kind = each.get("rope_type")
        if kind in ("dynamic", "longrope"):
            original = each.get("original_max_position_embeddings") or read.max_position_embeddings
            limit = min(original, read.max_position_embeddings, limit or original)
            reason = f"rotary scaling {kind!r} makes keys depend on the total length, so stored ones would turn wrong"
    return limit, reason


def _digest(config: Config) -> str:
    """Return 64 hex digits of all that a config says: which keys change the arithmetic is for transformers to know."""
    said = {key: value for key, value in config.items() if key not in ABOUT}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
