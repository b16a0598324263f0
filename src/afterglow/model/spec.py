"""The description of a model, as data. One decoder and one encoder serve all models; no weights or tensors here."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal

from afterglow.errors import ModelError

Positions = Literal["rope", "learned", "modules"]
Residual = Literal["sequential", "parallel"]
Norm = Literal["rms", "layer"]
QkNormOver = Literal["head", "heads", "width"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding: the first `dim` dimensions of each head turn, `base` is theta.

    `scaling` is the rope type with its parameters as sorted pairs, `()` where there is none.
    """

    dim: int
    base: float
    type: str = "default"
    scaling: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """A mixture of experts: `count` MLPs of width `ffn` in each of the `layers`, of which a router takes `chosen` for a token.

    `normed`: the weights of those that were chosen add up to 1. `shared_ffn`: width of an MLP beside them that serves all
    tokens, through a gate of its own; 0 for none.
    """

    count: int
    chosen: int
    ffn: int
    layers: tuple[int, ...]
    normed: bool = True
    shared_ffn: int = 0

    def __post_init__(self) -> None:
        for name in ("count", "chosen", "ffn"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ModelError(f"the experts' {name} must be a positive number, the model's config says {value!r}")
        if self.chosen > self.count:
            raise ModelError(f"{self.chosen} of {self.count} experts cannot be chosen; the model's config is damaged")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The shape and arithmetic of one decoder.

    `residual="parallel"`: attention and MLP both read the layer's input (Phi-2, Falcon), through one norm,
    or, with `mlp_norm`, each through its own. `norm_before` and `norm_after`: attention and MLP have norms of what goes into them,
    and of what comes out of them.
    `unturned`: layers whose queries and keys are not rotated. `qk_norm_over`: queries and keys are normed head by head with
    one weight for all heads, or with weights for each, or over the whole width.
    `*_scale`: what embeddings, scores, outputs of attention and MLP, and logits are multiplied by; scores by the root of the
    head's size where there is no number. `norm_plus_one`: what RMS norms multiply with is one more than their weights.
    `sliding`: layers whose queries see no more than the last `window` rows, their own included (None: all rows). `sliding_rope`:
    the rotation of these layers, where it is another than `rope`. `*_cap`: scores, or logits, are cap * tanh(x / cap).
    `sinks`: each query head has a score of its own that takes part in the softmax, and has no value. `router_bias`: of experts.
    `gate_clamp`: gates are clamped, with these numbers, instead of going through SiLU (see `kernels.passes.gated_clamped`).
    `position_limit`: longest context in which stored KV stays valid, where that is below `max_positions`;
    `position_limit_reason` says why.
    `positions="modules"`: modules of transformers compute the model, and know; `config_digest` names all that its config says.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    positions: Positions = "rope"
    rope: RopeSpec | None = None
    position_offset: int = 0  # OPT's learned table starts at row 2
    residual: Residual = "sequential"
    mlp_norm: bool = True
    norm: Norm = "rms"
    norm_eps: float = 1e-6
    gated_mlp: bool = True
    activation: Activation = "silu"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    norm_before: bool = True
    norm_after: bool = False
    norm_bias: bool = True  # of layer norms
    qk_norm_over: QkNormOver = "head"
    unturned: tuple[int, ...] = ()
    embed_scale: float = 1.0
    attention_scale: float | None = None
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    norm_plus_one: bool = False
    window: int | None = None
    sliding: tuple[int, ...] = ()
    sliding_rope: RopeSpec | None = None
    score_cap: float | None = None
    logit_cap: float | None = None
    experts: ExpertsSpec | None = None
    config_digest: str = ""
    router_bias: bool = False
    gate_clamp: tuple[float, float] | None = None
    sinks: bool = False
    position_limit: int | None = None
    position_limit_reason: str = ""
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    dtype: str = "float32"  # of the checkpoint

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "max_positions"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ModelError(f"the model's {name} must be a positive number, its config says {value!r}")
        if self.heads % self.kv_heads:
            raise ModelError(
                f"{self.heads} attention heads cannot share {self.kv_heads} key/value heads evenly; "
                "the model's config.json is damaged"
            )
        for name in ("window", "score_cap", "logit_cap"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int | float) or isinstance(value, bool) or not value > 0):
                raise ModelError(f"the model's {name} must be a positive number, its config says {value!r}")
        if not isinstance(self.norm_eps, int | float) or isinstance(self.norm_eps, bool) or not 0 <= self.norm_eps < 1:
            raise ModelError(
                f"the model's norm epsilon must be a number from 0 to 1, its config says {self.norm_eps!r}"
            )
        if (self.positions == "rope") != (self.rope is not None):
            raise ModelError("a model has rotary or learned positions, one of the two")
        for rope in (self.rope, self.sliding_rope):
            if rope is not None and not (0 < rope.dim <= self.head_dim and rope.dim % 2 == 0):
                raise ModelError(
                    f"rotary embedding needs an even number of at most {self.head_dim} dimensions, "
                    f"the model's config asks for {rope.dim}"
                )

    @property
    def causal(self) -> bool:
        """Return whether a token sees only itself and earlier tokens."""
        return True

    @property
    def scale(self) -> float:
        """Return the factor of scores before the softmax."""
        return float(self.head_dim**-0.5) if self.attention_scale is None else self.attention_scale

    @property
    def plain_scores(self) -> bool:
        """Return whether each query sees all rows up to its own, and nothing else, with scores as they are."""
        return self.window is None and self.score_cap is None and not self.sinks

    def window_of(self, layer: int) -> int:
        """Return how many rows a query of the layer sees, its own included; 0 for all."""
        return self.window if self.window is not None and layer in self.sliding else 0

    def within(self, context: int) -> ModelSpec:
        """Return the spec for contexts of at most `context` tokens: without a window that is no shorter, for it changes nothing.
        What was stored before windows were honoured stays valid where they never mattered."""
        if self.window is None or self.window < context:
            return self
        return dataclasses.replace(self, window=None, sliding=self.sliding if self.sliding_rope is not None else ())

    @property
    def decoupled(self) -> bool:
        """Return whether keys have no position before rotation, so that rows can be reused at other positions."""
        return self.positions == "rope"

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Return the bytes of one token's keys and values over all layers, when stored as `dtype`."""
        return 2 * self.layers * self.kv_heads * self.head_dim * DTYPE_BYTES[dtype]

    def context(self, max_model_len: int | None = None) -> int:
        """Return the longest context in tokens that is served; `max_model_len` is the operator's wish, or None.

        Raises: ModelError if the wish exceeds the context that the model was made for, or that is honoured exactly.
        """
        wanted = self.max_positions if max_model_len is None else max_model_len
        if self.position_limit is not None and wanted > self.position_limit:
            raise ModelError(
                f"{self.position_limit_reason}: contexts beyond {self.position_limit} tokens are not "
                f"supported; use --max-model-len {self.position_limit} or less"
            )
        if wanted > self.max_positions:
            raise ModelError(
                f"--max-model-len {wanted} is more than the model's {self.max_positions} positions; "
                f"use at most {self.max_positions}"
            )
        return wanted

    def fingerprint(self) -> str:
        """Return canonical JSON of all fields that change the arithmetic: part of the model digest."""
        fields = dataclasses.asdict(self)
        for name in (
            "max_positions",
            "position_limit",
            "position_limit_reason",
            "bos_id",
            "eos_ids",
            "dtype",
        ):
            del fields[name]
        for name, usual in LATER_FIELDS.items():  # stored keys and values of models without them stay valid
            if fields[name] == usual:
                del fields[name]
        return json.dumps(fields, sort_keys=True)

    @property
    def num_parameters(self) -> int:
        """Return the number of weights, biases and norms aside."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        times = 3 if self.gated_mlp else 2
        mlp = self.hidden * self.ffn * times
        tables = self.vocab * self.hidden * (1 if self.tied_embeddings else 2)
        if self.positions == "learned":
            tables += (self.max_positions + self.position_offset) * self.hidden
        if self.experts is not None:
            width, layers = self.experts.count * self.experts.ffn + self.experts.shared_ffn, len(self.experts.layers)
            of_experts = layers * self.hidden * (width * times + self.experts.count)
            return self.layers * attention + (self.layers - layers) * mlp + of_experts + tables
        return self.layers * (attention + mlp) + tables


# Fields that came after there were stored keys and values, and their defaults.
LATER_FIELDS = {
    field.name: field.default
    for field in dataclasses.fields(ModelSpec)
    if field.name.endswith(("_scale", "_cap"))
    or field.name
    in (
        *("norm_before", "norm_after", "norm_bias", "norm_plus_one", "qk_norm_over"),
        *("unturned", "experts", "window", "sliding", "sliding_rope", "config_digest"),
        *("router_bias", "gate_clamp", "sinks"),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec(ModelSpec):
    """The shape and arithmetic of one bidirectional encoder: learned positions, a norm after the embeddings and
    after each residual (post-norm), biases everywhere, no head. `token_types`: rows of that table, 0 for none."""

    token_types: int = 0

    @property
    def causal(self) -> bool:
        return False

    @property
    def num_parameters(self) -> int:
        tables = self.vocab + self.max_positions + self.position_offset + self.token_types
        return self.layers * (4 * self.hidden * self.hidden + 2 * self.hidden * self.ffn) + tables * self.hidden
