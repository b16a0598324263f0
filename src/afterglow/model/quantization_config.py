"""The key `quantization_config` of `config.json`: which method packed the weights, and whether it is one that is read here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afterglow.errors import ModelError
from afterglow.model.quantized import Unpack, awq, compressed, gptq, gptq_v2

KEYS = ("quantization_config", "compression_config")
SUPPORTED = "awq, gptq and compressed-tensors, with weights of 4 or 8 bits, and mxfp4 of gpt-oss"
REMEDY = "use the checkpoint that it was quantised from; --quantization int4 or int8 rounds it here"


def unpacking(config: Mapping[str, Any]) -> Unpack | None:
    """Return how to unpack the matrices of a checkpoint; None if it is not quantised, or in blocks (`stacked_experts`).

    Raises: ModelError, with the method, for one that is not read.
    """
    about = next((config[key] for key in KEYS if config.get(key) is not None), None)
    if about is None:
        return None
    method = about.get("quant_method") if isinstance(about, Mapping) else None
    if method == "gptq":
        _check(method, "bits", about.get("bits"), (4, 8))
        _check(
            method,
            "checkpoint_format",
            about.get("checkpoint_format") or about.get("format") or "gptq",
            ("gptq", "gptq_v2"),
        )
        return gptq_v2 if "gptq_v2" in (about.get("checkpoint_format"), about.get("format")) else gptq
    if method == "awq":
        _check(method, "bits", about.get("bits", about.get("w_bit")), (4,))
        _check(method, "version", str(about.get("version") or about.get("format") or "gemm").lower(), ("gemm",))
        return awq
    if method == "mxfp4" and config.get("model_type") == "gpt_oss":
        return None
    if method == "compressed-tensors":
        _check_compressed(about)
        return compressed
    raise ModelError(
        f"quantised weights of the method {method!r} are not supported (quantization_config in config.json; supported are "
        f"{SUPPORTED}); {REMEDY}"
    )


def _check(method: str, key: str, value: Any, known: tuple[Any, ...]) -> None:
    if value not in known:
        raise ModelError(
            f"quantised weights of the method {method!r} with {key} = {value!r} are not supported (supported: "
            f"{', '.join(map(str, known))}); {REMEDY}"
        )


def _check_compressed(about: Mapping[str, Any]) -> None:
    method, formats = "compressed-tensors", ("pack-quantized", "int-quantized", "naive-quantized")
    groups = [group for group in (about.get("config_groups") or {}).values() if isinstance(group, Mapping)]
    for group in groups or [{}]:
        weights, inputs = group.get("weights") or {}, group.get("input_activations")
        _check(method, "format", group.get("format") or about.get("format"), formats)
        _check(method, "type of weights", weights.get("type", "int"), ("int",))
        _check(method, "num_bits of weights", weights.get("num_bits"), (4, 8))
        _check(method, "strategy of weights", weights.get("strategy"), ("group", "channel", "tensor"))
        if inputs is not None:  # rows are rounded to 8 bits here in any case, by a scale of their own
            kind = (inputs.get("type", "int"), inputs.get("num_bits"), inputs.get("dynamic"))
            _check(method, "input_activations (type, num_bits, dynamic)", kind, (("int", 8, True),))
        _check(method, "output_activations", group.get("output_activations"), (None,))
    _check(method, "sparsity", (about.get("sparsity_config") or {}).get("format", "dense"), ("dense",))
    _check(method, "transform_config", about.get("transform_config") or None, (None,))
