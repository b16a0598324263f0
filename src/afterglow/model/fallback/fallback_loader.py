"""Load a model that runs through transformers."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging as their_logging

from afterglow.choices import QuantizationName
from afterglow.errors import ConfigError, ModelError
from afterglow.model.fallback.handing import ATTENTION
from afterglow.model.fallback.module_decoder import FallbackDecoder
from afterglow.model.fallback.trial import tried
from afterglow.model.spec import ModelSpec

log = logging.getLogger("afterglow.model")

COMPUTED = "rotary_emb.inv_freq"  # older versions of transformers saved it


def load_fallback(
    directory: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    quantization: QuantizationName,
    context: int,
) -> FallbackDecoder:
    """Load the model for contexts of at most `context` tokens, and try how it turns keys.

    Raises: ModelError where its weights are not what its config describes, or its attention cannot be ours; ConfigError for
    quantised weights.
    """
    if quantization not in ("auto", "none"):
        raise ConfigError(
            f"--quantization {quantization} is not for model type {spec.family!r}, which runs through transformers; "
            "use --quantization none"
        )
    model = _model(directory, spec, dtype).to(device).eval()
    try:
        decoder = tried(spec, model, context)
    except Exception as error:  # modules raise errors of many kinds, and a trial asks for all that they do
        line = " ".join(str(error).split())[:300]
        raise ModelError(f"model type {spec.family!r} cannot run through transformers here: {line}") from None
    log.warning(
        "model type %r runs through the modules of transformers %s: slower than the types that Afterglow computes itself. %s",
        spec.family,
        transformers.__version__,
        "After a truncation the rest is computed again" if decoder.rope is None else "Keys are kept without positions",
    )
    return decoder


def _model(directory: Path, spec: ModelSpec, dtype: torch.dtype) -> Any:
    """Read the model's weights. Raises: ModelError unless they are all there, and of the right shapes."""
    with _quiet():
        try:
            model, about = transformers.AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=dtype,
                attn_implementation=ATTENTION,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
        except Exception as error:  # of many kinds: files, shapes, and what a config asks for
            raise ModelError(
                f"{directory}: transformers cannot load it ({' '.join(str(error).split())[:300]})"
            ) from None
    lacking = sorted({*about["missing_keys"], *(name for name, *_ in about["mismatched_keys"])})
    if lacking:
        raise ModelError(
            f"{directory}: the weights lack {lacking[0]}, or its shape is another; they are not what config.json describes"
        )
    unread = sorted(name for name in about["unexpected_keys"] if not name.endswith(COMPUTED))
    if unread:
        raise ModelError(f"{directory}: model type {spec.family!r} has no place for the tensor {unread[0]}")
    return model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from writing bars and reports, as long as it loads."""
    bars, level = their_logging.is_progress_bar_enabled(), their_logging.get_verbosity()
    their_logging.disable_progress_bar()
    their_logging.set_verbosity_error()
    try:
        yield
    finally:
        their_logging.set_verbosity(level)
        if bars:
            their_logging.enable_progress_bar()
