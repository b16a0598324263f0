"""The families: from a Hugging Face `config.json` to a ModelSpec, and where each weight is found.

A row of `RMS_FAMILIES`, `LAYER_NORM_FAMILIES` or `WINDOWED_FAMILIES` says how a family differs from Llama; no other place does. Refused keys are in
`refusals.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from afterglow.errors import ModelError
from afterglow.model.config_reading import Config, need, need_layers, reading, refuse_architecture, token_ids
from afterglow.model.fallback.fallback_config import FALLBACK
from afterglow.model.layer_norm_families import LAYER_NORM_FAMILIES
from afterglow.model.names import Names
from afterglow.model.quantized import unpacking
from afterglow.model.refusals import refuse_keys, refused_kind
from afterglow.model.rms_families import RMS_FAMILIES
from afterglow.model.spec import ModelSpec
from afterglow.model.windowed_families import WINDOWED_FAMILIES


def spec_from_config(config: Config) -> tuple[ModelSpec, Names]:
    """Return the spec and weight names of a parsed `config.json`, in the style of transformers 4 or 5.

    Raises: ModelError that names the key that is missing or not honoured.
    """
    kind = config.get("model_type")
    if kind is None:
        raise ModelError("config.json names no model_type; is this a Hugging Face model directory?")
    if kind not in FAMILIES:
        raise refused_kind(kind, ", ".join((*FAMILIES, *FALLBACK)))
    family = FAMILIES[kind]
    with reading():
        unpacking(config)
        refuse_keys(config, family.honoured | {"quantization_config"})
        refuse_architecture(config, family.architecture)
        renamed = {name: config[key] for key, name in family.renamed.items() if key in config}
        config = {**family.usual, **config, **renamed}
        spec = ModelSpec(family=kind, **_read_common(config) | family.read(config))
        return spec, family.names_of(spec)


def _read_common(config: Config) -> dict[str, Any]:
    hidden, heads = need(config, "hidden_size"), need(config, "num_attention_heads")
    return {
        "layers": need_layers(config),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or hidden // heads,
        "vocab": need(config, "vocab_size"),
        "max_positions": config.get("max_position_embeddings") or 2048,
        "bos_id": (token_ids(config.get("bos_token_id")) or (None,))[0],
        "eos_ids": token_ids(config.get("eos_token_id")),
        "dtype": str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
    }


GENERATION_EOS = "eos_token_id in generation_config.json"
FAMILIES = RMS_FAMILIES | LAYER_NORM_FAMILIES | WINDOWED_FAMILIES


def replace_eos(spec: ModelSpec, eos: Any) -> ModelSpec:
    """Return `spec` with the ids of `generation_config.json` added to its end-of-sequence ids."""
    return dataclasses.replace(spec, eos_ids=tuple(dict.fromkeys((*spec.eos_ids, *token_ids(eos, GENERATION_EOS)))))
