"""The metadata of a GGUF file: typed access, and what all architectures have in common as `config.json` would say it."""

from __future__ import annotations

import math
import reprlib
from typing import Any

import numpy as np

from afterglow.errors import ModelError
from afterglow.gguf_file import FileTensor, GgufFile, check_whole
from afterglow.text.gguf_tokenizer import GgufVocabulary


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

    def shape(self, tensor: str, dimensions: int = 2) -> tuple[int, ...]:
        """Return the shape of a tensor. Raises: ModelError if it is missing, or has not so many dimensions."""
        shape = self._tensor(tensor).shape
        if len(shape) != dimensions:
            raise ModelError(f"{self.path}: {tensor} has shape {shape}, and should have {dimensions} dimensions")
        return shape

    def numbers(self, tensor: str) -> list[float]:
        """Return the numbers of a tensor. Raises: ModelError if it is missing, or not float32."""
        found = self._tensor(tensor)
        if found.block_format != "F32":
            raise ModelError(f"tensor {tensor} has type {found.block_format}, and should have F32; the file is damaged")
        return [float(number) for number in found.blocks.view(np.float32).ravel()]

    def _tensor(self, tensor: str) -> FileTensor:
        if tensor not in self.tensors:
            raise ModelError(f"{self.path}: the weights lack {tensor}; the file is incomplete")
        return self.tensors[tensor]


def common_config(keys: Keys) -> dict[str, Any]:
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
    if keys.has("rope_factors_short.weight"):
        if kind not in ("linear", "longrope") or factor not in (0.0, 1.0):
            raise ModelError(f"{keys.path}: rotary scaling {kind!r} besides rope_factors_short.weight is not supported")
        rope |= {
            "rope_type": "longrope",
            "short_factor": keys.numbers("rope_factors_short.weight"),
            "long_factor": keys.numbers("rope_factors_long.weight"),
            "original_max_position_embeddings": keys.count("rope.scaling.original_context_length"),
            "attention_factor": stretch,
        }
    elif keys.has("rope_freqs.weight"):
        rope |= {"rope_type": "frequency_factors", "factors": keys.numbers("rope_freqs.weight")}
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


def turned_share(keys: Keys) -> float:
    """Return a share of a head that, times its dimensions and cut to a whole number, is how many the rotary embedding turns.

    It is 1 if all turn. Raises: ModelError.
    """
    head_dim = _head_dim(keys)
    turned = keys.whole("rope.dimension_count", head_dim)
    if not 0 < turned <= head_dim:
        raise ModelError(
            f"{keys.path}: a rotary embedding of {turned} of {head_dim} dimensions of a head is impossible"
        )
    # The product of the exact share can be a little too small, and would be cut to one less: 58 of 100 became 57.
    return 1.0 if turned == head_dim else (turned + 0.5) / head_dim


def whole_head(keys: Keys) -> None:
    """Refuse a rotary embedding of a part of the head. Raises: ModelError."""
    head_dim = _head_dim(keys)
    turned = keys.whole("rope.dimension_count", head_dim)
    if turned != head_dim:
        raise ModelError(
            f"{keys.path}: a rotary embedding of {turned} of {head_dim} dimensions of a head is not supported here"
        )


def _head_dim(keys: Keys) -> int:
    return keys.whole("attention.key_length") or keys.count("embedding_length") // keys.count("attention.head_count")
