"""Rotary scaling: from a config to a RopeSpec, and on to inverse frequencies and the factor on cos and sin.

All formulas are float32, in the order of operations of `transformers` (tests hold them together).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from afterglow.errors import ModelError
from afterglow.kernels.rope import LayerRopes, RopeTable
from afterglow.model.spec import ModelSpec, RopeSpec

MOST_DIMENSIONS = 65_536  # of a head that is turned: a damaged config must not ask for gigabytes


def rope_table(spec: RopeSpec, device: torch.device | str = "cpu") -> RopeTable:
    """Return the table of `spec`; its type must be one of `SCALINGS`. Raises: ModelError if its parameters make no frequencies."""
    try:
        inv_freq, factor = SCALINGS[spec.type](spec, dict(spec.scaling))
        if not math.isfinite(factor) or not inv_freq.isfinite().all():
            raise ValueError("it has frequencies that are not finite")
    except (ArithmeticError, TypeError, ValueError, RuntimeError) as error:  # RuntimeError: torch's, of sizes
        raise ModelError(f"rotary scaling {spec.type!r} with base {spec.base} cannot be computed: {error}") from None
    return RopeTable(inv_freq.to(device), attention_factor=factor)


def layer_ropes(spec: ModelSpec, device: torch.device | str = "cpu") -> LayerRopes | None:
    """Return the tables of all layers; None for learned positions."""
    if spec.rope is None:
        return None
    ropes = [spec.rope] if spec.sliding_rope is None else [spec.rope, spec.sliding_rope]
    slides = frozenset(spec.sliding if len(ropes) == 2 else ())
    of_layer = [None if layer in spec.unturned else int(layer in slides) for layer in range(spec.layers)]
    return LayerRopes([rope_table(rope, device) for rope in ropes], of_layer)


def _powers(spec: RopeSpec) -> Tensor:
    return torch.as_tensor(spec.base ** (torch.arange(0, spec.dim, 2, dtype=torch.float32) / spec.dim))


def _default(spec: RopeSpec, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    return 1.0 / _powers(spec), 1.0


def _linear(spec: RopeSpec, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    return 1.0 / _powers(spec) / scaling["factor"], 1.0


def _llama3(spec: RopeSpec, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    """Divide long wavelengths by the factor, keep short ones, blend the others (Llama 3.1)."""
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    original = scaling["original_max_position_embeddings"]
    inv_freq = 1.0 / _powers(spec)
    wavelength = 2 * math.pi / inv_freq
    blend = (original / wavelength - low) / (high - low)
    blended = (1 - blend) * inv_freq / factor + blend * inv_freq
    scaled = torch.where(wavelength > original / low, inv_freq / factor, blended)
    return torch.where(wavelength < original / high, inv_freq, scaled), 1.0


def _yarn(spec: RopeSpec, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    """Interpolate below `beta_slow` turns per original window, keep above `beta_fast` (arXiv 2309.00071)."""
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        return spec.dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(spec.base))

    low = dimension(scaling.get("beta_fast") or 32)
    high = dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    if low == high:
        high += 0.001  # a ramp needs a width
    ramp = ((torch.arange(spec.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    powers = _powers(spec)
    inv_freq = ramp / (factor * powers) + (1 - ramp) / powers
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if mscale and all_dim:
            attention_factor = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, all_dim)
        else:
            attention_factor = _yarn_mscale(factor, 1.0)
    return inv_freq, float(attention_factor)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(spec: RopeSpec, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    """Apply the short factors only: contexts beyond the original window are refused (spec.context)."""
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    short = torch.tensor(scaling["short_factor"], dtype=torch.float32)
    return 1.0 / (short * _powers(spec)), float(attention_factor)


def _frequency_factors(spec: RopeSpec, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    """Divide each frequency by a number of its own, as GGUF files write Llama 3.1's formula down."""
    return 1.0 / (torch.tensor(scaling["factors"], dtype=torch.float32) * _powers(spec)), 1.0


SCALINGS = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "frequency_factors": _frequency_factors,
    "dynamic": _default,  # up to the original window dynamic NTK changes nothing; beyond it is refused
}

# What each type must say, what it may say, and how long its contexts may be.
REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "frequency_factors": ("factors",),
    "longrope": ("factor", "short_factor", "long_factor", "original_max_position_embeddings"),
}
OPTIONAL: dict[str, tuple[str, ...]] = {
    "dynamic": ("original_max_position_embeddings",),
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("attention_factor",),
}


def given_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `rope_parameters` or of `rope_scaling`, empty where there is none.

    Raises: ModelError if there are both and they differ: transformers would take the second alone.
    """
    new, old = ({**(config.get(key) or {})} for key in ("rope_parameters", "rope_scaling"))
    if new and old and _named(config, new) != _named(config, old):
        raise ModelError("config.json says rope_scaling and rope_parameters, which differ; keep one")
    return new or old


def _named(config: Mapping[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """Return what `rope` means in `config`: with the keys that may stand outside, usual values, and each under its newer name."""
    said = {key: value for key, value in rope.items() if value is not None}
    usual = {
        "rope_theta": config.get("rope_theta") or 10000.0,
        "partial_rotary_factor": config.get("partial_rotary_factor") or 1.0,
    }
    outer = {"original_max_position_embeddings": config.get("original_max_position_embeddings")}
    old = said.pop("type", None)
    kind = said.pop("rope_type", None) or old or "default"
    return usual | said | (outer if any(outer.values()) else {}) | {"rope_type": "longrope" if kind == "su" else kind}


def read_rope(config: Mapping[str, Any], head_dim: int, *, partial: float | None = None) -> dict[str, Any]:
    """Read the rotary fields of a ModelSpec from `rope_parameters` or from `rope_theta` and `rope_scaling`.

    Transformers 5 writes the first, version 4 wrote the others. `partial` is the family's default share of
    `head_dim` that turns; None: the whole head turns, whatever `partial_rotary_factor` says, as in transformers.
    """
    params = given_rope(config)
    if any(isinstance(value, dict) for value in params.values()):
        raise ModelError("rotary parameters that differ between layer types are not supported")
    old = params.pop("type", None)
    kind = params.pop("rope_type", None) or old or "default"
    theta = params.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    share = params.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or partial or 1.0
    if partial is None and share != 1.0:
        if kind != "default":  # transformers shortens the table and cannot compute with it
            raise ModelError(
                f"partial_rotary_factor = {share} with rotary scaling {kind!r} means nothing to model type "
                f"{config.get('model_type')!r}; take one of the two out of config.json"
            )
        share = 1.0
    if kind == "su":  # LongRoPE's first name
        kind = "longrope"
    if kind not in REQUIRED:
        raise ModelError(f"rotary scaling {kind!r} is not supported; supported are {', '.join(REQUIRED)}")
    window = config.get("max_position_embeddings") or 2048
    if "original_max_position_embeddings" in REQUIRED[kind]:
        original = (
            config.get("original_max_position_embeddings") or params.get("original_max_position_embeddings") or window
        )
        params["original_max_position_embeddings"] = original
        if params.get("factor") is None and kind != "llama3":
            params["factor"] = window / original
    missing = [key for key in REQUIRED[kind] if params.get(key) is None]
    if missing:
        raise ModelError(f"rotary scaling {kind!r} lacks {', '.join(missing)} in config.json")
    known = {key: params[key] for key in (*REQUIRED[kind], *OPTIONAL.get(kind, ())) if params.get(key) is not None}
    unknown = sorted(key for key, value in params.items() if key not in known and value is not None)
    if unknown and kind != "default":
        raise ModelError(f"rotary scaling {kind!r} with {unknown[0]!r} is not supported")
    pairs = tuple(sorted((key, tuple(v) if isinstance(v, list) else v) for key, v in known.items()))
    rope = RopeSpec(dim=int(head_dim * share), base=float(theta), type=kind, scaling=pairs)
    if rope.dim > MOST_DIMENSIONS:
        raise ModelError(
            f"a rotary embedding of {rope.dim} dimensions is not possible; the model's config.json is damaged"
        )
    rope_table(rope)  # what cannot be computed is refused before weights are read
    fields: dict[str, Any] = {"rope": rope}
    if kind in ("dynamic", "longrope"):
        fields["position_limit"] = known.get("original_max_position_embeddings", window)
        fields["position_limit_reason"] = (
            f"rotary scaling {kind!r} makes keys depend on the total length, so stored ones would turn wrong"
        )
    return fields
