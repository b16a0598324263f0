"""From the metadata of a GGUF file to the keys of a `config.json`, and where each weight is found.

A row of `ARCHITECTURES` says how llama.cpp lays out the files of one architecture; the arithmetic is that of a family of
`families.FAMILIES`.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from afterglow.errors import ModelError
from afterglow.gguf_file import FileTensor, GgufFile, check_whole
from afterglow.model.names import Names
from afterglow.model.refusals import KNOWN_REFUSED
from afterglow.model.spec import ModelSpec
from afterglow.text.gguf_tokenizer import GgufVocabulary

LAYER = "blk.{l}."


class Keys:
    """The metadata of one file, without the architecture's name in front of its keys."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.path, self.tensors = file.paths[0], file.tensors
        self.metadata, self._architecture = file.metadata, architecture

    def get(self, key: str) -> Any:
        """Return a value, None if there is none. Raises: ModelError if it differs from layer to layer."""
        value = self.metadata.get(f"{self._architecture}.{key}")
        if not isinstance(value, list):
            return value
        if len(set(value)) != 1:
            raise ModelError(f"{self.path}: {key} differs between layers ({value[:3]}...), which is not supported")
        return value[0]

    def need(self, key: str) -> Any:
        """Return a value. Raises: ModelError if it is missing."""
        value = self.get(key)
        if value is None:
            raise ModelError(f"{self.path}: the metadata lacks {self._architecture}.{key}; the file is incomplete")
        return value

    def count(self, key: str) -> int:
        """Return a positive whole number that must be there. Raises: ModelError."""
        return check_whole(self.need(key), self._called(key), 1)

    def whole(self, key: str, default: int = 0) -> int:
        """Return a whole number of at least 0, `default` if it is missing. Raises: ModelError."""
        value = self.get(key)
        return default if value is None else check_whole(value, self._called(key))

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number of at least 0; without a `default` it must be there. Raises: ModelError."""
        value = self.need(key) if default is None else self.get(key)
        if value is None:
            assert default is not None
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ModelError(
                f"{self._called(key)} = {reprlib.repr(value)}; it must be a number of at least 0: the file is damaged"
            )
        return value

    def _called(self, key: str) -> str:
        return f"{self.path}: {self._architecture}.{key}"

    def has(self, tensor: str) -> bool:
        """Return whether there is a tensor of this name; of layers, in the first one."""
        return tensor.format(l=0) in self.tensors

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Return the shape of a tensor. Raises: ModelError if it is missing."""
        if tensor not in self.tensors:
            raise ModelError(f"{self.path}: the weights lack {tensor}; the file is incomplete")
        return self.tensors[tensor].shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The way to read the files of one architecture."""

    read: Callable[[Keys], dict[str, Any]]  # keys of config.json besides the common ones
    names: Callable[[ModelSpec], Names]
    neighbours: bool = False  # rotary pairs are neighbours in the rows of q and k, where checkpoints have halves


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
    if keys.whole("expert_count"):
        raise ModelError(f"{keys.path}: mixture-of-experts layers are not supported; use a dense model")
    architecture = ARCHITECTURES[name]
    config = _common(keys) | architecture.read(keys)
    return architecture, {key: value for key, value in config.items() if value is not None}


def _common(keys: Keys) -> dict[str, Any]:
    hidden, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    head_dim = keys.whole("attention.key_length") or hidden // heads
    if keys.whole("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{keys.path}: values of another size than keys are not supported")
    return {
        "hidden_size": hidden,
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.whole("attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "intermediate_size": keys.count("feed_forward_length"),
        "vocab_size": keys.shape("token_embd.weight")[0],
        "max_position_embeddings": keys.count("context_length"),
        "tie_word_embeddings": not keys.has("output.weight"),
        "rope_parameters": _rope(keys),
        **_special_tokens(keys),
    }


def _special_tokens(keys: Keys) -> dict[str, Any]:
    """Return the ids of the token that begins a text and of the tokens that end a reply."""
    try:
        vocabulary = GgufVocabulary(keys.metadata)
    except ModelError:  # of a kind that is not read: the model can still be used with token ids
        ends = keys.metadata.get("tokenizer.ggml.eos_token_id")
        return {"bos_token_id": keys.metadata.get("tokenizer.ggml.bos_token_id"), "eos_token_id": ends}
    return {"bos_token_id": vocabulary.id_of("bos_token_id"), "eos_token_id": list(vocabulary.end_tokens())}


def _rope(keys: Keys) -> dict[str, Any]:
    """Return `rope_parameters`. Raises: ModelError for scaling that is not honoured."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base", 10000.0)}
    kind = keys.get("rope.scaling.type") or "linear"  # as in llama.cpp
    factor = keys.number("rope.scaling.factor", 0.0) or keys.number("rope.scale_linear", 0.0)
    if kind == "none":
        factor = 0.0
    stretch = keys.number("rope.scaling.attn_factor", 1.0)
    if keys.has("rope_freqs.weight"):
        rope |= {"rope_type": "frequency_factors", "factors": _numbers(keys.tensors["rope_freqs.weight"])}
        if factor not in (0.0, 1.0):
            raise ModelError(f"{keys.path}: rotary scaling {kind!r} besides rope_freqs.weight is not supported")
    elif kind == "yarn":
        rope |= {
            "rope_type": "yarn",
            "factor": factor or keys.need("rope.scaling.factor"),
            "original_max_position_embeddings": keys.count("rope.scaling.original_context_length"),
            "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 0.0) or None,
            "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 0.0) or None,
            # llama.cpp multiplies by the factor on attention what YaRN's own formula gives.
            "attention_factor": None if stretch == 1 else stretch * (1 + 0.1 * float(np.log(max(factor, 1.0)))),
        }
    elif kind in ("none", "linear"):
        if factor not in (0.0, 1.0):
            rope |= {"rope_type": "linear", "factor": factor}
    else:
        raise ModelError(f"{keys.path}: rotary scaling {kind!r} is not supported; supported are none, linear and yarn")
    return rope


def _numbers(tensor: FileTensor) -> list[float]:
    if tensor.block_format != "F32":
        raise ModelError(
            f"tensor {tensor.name} has type {tensor.block_format}, and should have F32; the file is damaged"
        )
    return [float(number) for number in tensor.blocks.view(np.float32).ravel()]


def _whole_head(keys: Keys) -> None:
    """Refuse a rotary embedding of a part of the head. Raises: ModelError."""
    heads = keys.count("attention.head_count")
    head_dim = keys.whole("attention.key_length") or keys.count("embedding_length") // heads
    turned = keys.whole("rope.dimension_count", head_dim)
    if turned != head_dim:
        raise ModelError(
            f"{keys.path}: a rotary embedding of {turned} of {head_dim} dimensions of a head is not supported here"
        )


def _llama(keys: Keys) -> dict[str, Any]:
    _whole_head(keys)
    bias = keys.has(LAYER + "attn_q.bias")
    common = {
        "hidden_act": "silu",
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "sliding_window": keys.whole("attention.sliding_window") or None,
    }
    if common["sliding_window"] is not None:
        return common | {"model_type": "mistral"}
    if bias and not keys.has(LAYER + "attn_output.bias"):  # the arithmetic of Qwen2 under another name
        return common | {"model_type": "qwen2"}
    return common | {
        "model_type": "llama",
        "attention_bias": bias,
        "mlp_bias": keys.has(LAYER + "ffn_gate.bias"),
    }


def _qwen(kind: str) -> Callable[[Keys], dict[str, Any]]:
    def read(keys: Keys) -> dict[str, Any]:
        _whole_head(keys)
        window = keys.whole("attention.sliding_window") or None
        return {
            "model_type": kind,
            "hidden_act": "silu",
            "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
            "attention_bias": keys.has(LAYER + "attn_q.bias") if kind == "qwen3" else None,
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "max_window_layers": 0,
        }

    return read


def _phi2(keys: Keys) -> dict[str, Any]:
    head_dim = keys.count("embedding_length") // keys.count("attention.head_count")
    return {
        "model_type": "phi",
        "hidden_act": "gelu_new",
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
        "partial_rotary_factor": keys.count("rope.dimension_count") / head_dim,
    }


def _falcon(keys: Keys) -> dict[str, Any]:
    heads = keys.count("attention.head_count")
    kv_heads = keys.whole("attention.head_count_kv", heads)
    two = keys.has(LAYER + "attn_norm_2.weight")
    new = two or kv_heads not in (1, heads)
    _whole_head(keys)
    return {
        "model_type": "falcon",
        "new_decoder_architecture": new,
        "num_ln_in_parallel_attn": 2 if two else 1,
        "parallel_attn": True,
        "multi_query": kv_heads == 1,
        "num_kv_heads": kv_heads,
        "ffn_hidden_size": keys.count("feed_forward_length"),
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
    }


def _names(**other: Any) -> Names:
    """Return the names of a sequential model with a gated MLP, but for `other`."""
    usual: dict[str, Any] = {
        "embed": "token_embd",
        "attn_norm": LAYER + "attn_norm",
        "mlp_norm": LAYER + "ffn_norm",
        "qkv": tuple(f"{LAYER}attn_{x}" for x in "qkv"),
        "q_norm": LAYER + "attn_q_norm",
        "k_norm": LAYER + "attn_k_norm",
        "out": LAYER + "attn_output",
        "mlp": (LAYER + "ffn_gate", LAYER + "ffn_up"),
        "mlp_out": LAYER + "ffn_down",
        "final_norm": "output_norm",
        "head": "output",
    }
    return Names(**usual | other)


def _usual_names(spec: ModelSpec) -> Names:
    return _names()


def _plain_names(spec: ModelSpec) -> Names:
    return _names(mlp=(LAYER + "ffn_up",))


def _falcon_names(spec: ModelSpec) -> Names:
    if not spec.mlp_norm:
        return _plain_names(spec)
    return _names(mlp=(LAYER + "ffn_up",), attn_norm=LAYER + "attn_norm_2", mlp_norm=LAYER + "attn_norm")


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(read=_llama, names=_usual_names, neighbours=True),
    "qwen2": Architecture(read=_qwen("qwen2"), names=_usual_names),
    "qwen3": Architecture(read=_qwen("qwen3"), names=_usual_names),
    "phi2": Architecture(read=_phi2, names=_plain_names),
    "falcon": Architecture(read=_falcon, names=_falcon_names),
}
