"""A decoder as numbers: how many weights, how many bytes a token leaves behind, how much arithmetic it takes.

Any dense decoder's `config.json` can be read, also of families that the engine does not serve: nothing is run here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from afterglow.config import SCALE_BYTES
from afterglow.errors import ConfigError, ModelError

Positions = Literal["rope", "learned", "alibi"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The shape of one decoder. `window`: its longest context in tokens. Arithmetic is in floating-point operations, a
    multiplication and an addition being two; norms, biases, softmax and rotation are left out: they are below 1 %."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    window: int
    gated_mlp: bool = True
    tied_embeddings: bool = False
    positions: Positions = "rope"
    source: str = ""

    def __post_init__(self) -> None:
        for field in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "window"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ModelError(f"{self.name}: {field} must be a positive number, not {value!r}")
        if self.heads % self.kv_heads:
            raise ModelError(
                f"{self.name}: {self.heads} attention heads cannot share {self.kv_heads} key/value heads evenly"
            )
        if self.positions not in get_args(Positions):
            raise ModelError(f"{self.name}: positions are {', '.join(get_args(Positions))}, not {self.positions!r}")

    @property
    def decoupled(self) -> bool:
        """Whether keys can be stored without their positions, and so be reused at other ones (CachedAttention 3.4)."""
        return self.positions != "learned"

    @property
    def layer_parameters(self) -> int:
        """Weights of the matrices of all layers: those that every token is multiplied with."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        mlp = self.hidden * self.ffn * (3 if self.gated_mlp else 2)
        return self.layers * (attention + mlp)

    @property
    def parameters(self) -> int:
        """All weights, tables included."""
        tables = self.vocab * self.hidden * (1 if self.tied_embeddings else 2)
        if self.positions == "learned":
            tables += self.window * self.hidden
        return self.layer_parameters + tables

    def weight_bytes(self, dtype: str = "float16") -> int:
        return self.parameters * dtype_bytes(dtype)

    def kv_bytes_per_token(self, dtype: str = "float16") -> int:
        """Bytes of one token's keys and values over all layers. In int8 each head has a scale besides."""
        head = self.head_dim * dtype_bytes(dtype) + (SCALE_BYTES if dtype == "int8" else 0)
        return 2 * self.layers * self.kv_heads * head

    @property
    def linear_flops_per_token(self) -> int:
        """The matrix products of all layers, attention itself and the head aside."""
        return 2 * self.layer_parameters

    @property
    def head_flops(self) -> int:
        """Logits of one token."""
        return 2 * self.hidden * self.vocab

    def attention_flops(self, new: int, history: int = 0) -> int:
        """Count operations of scores and weighted sums of `new` tokens; each sees `history` tokens, the new ones before it, and itself."""
        seen = new * history + new * (new + 1) // 2
        return 4 * self.layers * self.heads * self.head_dim * seen

    def prefill_flops(self, new: int, history: int = 0) -> int:
        """`new` tokens at once after `history` tokens whose keys and values are there; logits of the last one."""
        return new * self.linear_flops_per_token + self.attention_flops(new, history) + self.head_flops

    @classmethod
    def from_config(cls, path: str | Path) -> ModelShape:
        """Read a Hugging Face `config.json`, given as the file or its folder. Raises: ModelError."""
        file = Path(path)
        if file.is_dir():
            file = file / "config.json"
        try:
            config = json.loads(file.read_bytes())
        except OSError as error:
            raise ModelError(f"cannot read {file}: {error.strerror}") from None
        except (ValueError, RecursionError):
            raise ModelError(f"{file} is not JSON") from None
        if not isinstance(config, dict):
            raise ModelError(f"{file} is not a model's config.json")
        return shape_of(config, file.parent.resolve().name or str(file), str(file))


def dtype_bytes(dtype: str) -> int:
    """Look up the bytes of one number of this type. Raises: ConfigError."""
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"unknown dtype {dtype!r}: there are {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


# ------------------------------------------------------------------------------------ Hugging Face's config.json

_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "head_dim": ("head_dim",),
    "ffn": ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner"),
    "vocab": ("vocab_size",),
    "window": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
}
_TWO_MATRICES = (
    "opt",
    "gpt2",
    "gpt_neo",
    "gpt_neox",
    "gptj",
    "gpt_bigcode",
    "falcon",
    "phi",
    "bloom",
    "mpt",
    "starcoder2",
)
_LEARNED = ("opt", "gpt2", "gpt_neo", "gpt_bigcode")
_ALIBI = ("bloom", "mpt")
_TIED = ("gpt2", "opt", "falcon", "bloom", "mpt", "gemma", "gemma2", "gpt_neo", "gpt_bigcode")
_BEYOND = {
    "is_encoder_decoder": "an encoder with a decoder",
    "kv_lora_rank": "latent attention, whose cache has another shape",
    "num_experts": "a mixture of experts",
    "num_local_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
}


def shape_of(config: Mapping[str, Any], name: str, source: str = "") -> ModelShape:
    """Make the shape from a parsed `config.json`. Raises: ModelError, also for any model but a dense decoder."""
    for key, what in _BEYOND.items():
        if config.get(key):
            raise ModelError(f"{name} is {what}, which is not modelled")
    family = str(config.get("model_type", ""))
    heads = _number(config, "heads", name)
    hidden = _number(config, "hidden", name)
    window = _number(config, "window", name, 2048 if family in ("falcon", "bloom") else None)
    alibi = family in _ALIBI or bool(config.get("alibi"))
    return ModelShape(
        name=name,
        layers=_number(config, "layers", name),
        hidden=hidden,
        heads=heads,
        kv_heads=_kv_heads(config, family, heads, name),
        head_dim=_number(config, "head_dim", name, max(1, hidden // heads)),
        ffn=_number(config, "ffn", name, 4 * hidden),
        vocab=_number(config, "vocab", name),
        window=window,  # a sliding window is no limit: all rows are kept
        gated_mlp=family not in _TWO_MATRICES,
        tied_embeddings=bool(config.get("tie_word_embeddings", family in _TIED)),
        positions="learned" if family in _LEARNED else "alibi" if alibi else "rope",
        source=source,
    )


def _number(config: Mapping[str, Any], field: str, name: str, default: int | None = None) -> int:
    for key in _NAMES[field]:
        value = config.get(key)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ModelError(f"{name}: {key} must be a positive number, not {value!r}")
            return value
    if default is None:
        raise ModelError(f"{name}: its config.json has no {_NAMES[field][0]}")
    return default


def _kv_heads(config: Mapping[str, Any], family: str, heads: int, name: str) -> int:
    if family == "gpt_bigcode" or (family == "falcon" and not config.get("new_decoder_architecture")):
        return 1 if config.get("multi_query", True) else heads
    return _number(config, "kv_heads", name, heads)
