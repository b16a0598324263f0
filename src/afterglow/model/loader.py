"""From a Hugging Face model directory, or a GGUF file, to a Decoder or an Encoder. No code of a directory is executed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TypeAlias

import torch

from afterglow.choices import DtypeName, QuantizationName
from afterglow.config import format_size
from afterglow.errors import ModelError
from afterglow.gguf_file import is_gguf
from afterglow.memory.free import free_bytes, trim
from afterglow.model.checkpoint import Checkpoint, Progress, read_json, weight_files
from afterglow.model.decoder import Decoder
from afterglow.model.encoder import Encoder
from afterglow.model.encoder_families import ENCODERS, encoder_from_config
from afterglow.model.fallback.fallback_config import read_fallback_spec, runs_through_transformers
from afterglow.model.families import replace_eos, spec_from_config
from afterglow.model.gguf.mapped_weights import GgufWeights, read_gguf_spec
from afterglow.model.keeping import has_float8, keeps_blocks
from afterglow.model.names import Names
from afterglow.model.presets import PRESETS, random_model
from afterglow.model.quantized import QuantizedWeights, unpacking
from afterglow.model.spec import EncoderSpec, ModelSpec
from afterglow.model.stacked_experts import StackedExperts
from afterglow.model.weights import WeightAssembler

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ROUNDED = {"int8": 1.0, "float8": 1.0, "int4": 4.5 / 8}  # bytes of a rounded weight, its part of the scales included
DEVICE_GROWTH = 1.2  # about, of groups that become groups of 32 on a device


def load_model(
    model: str | Path,
    *,
    dtype: DtypeName = "auto",
    device: str = "cpu",
    quantization: QuantizationName = "auto",
    max_model_len: int | None = None,
    kv_bytes: int = 0,
    progress: Progress | None = None,
) -> Decoder:
    """Load the decoder of a model directory, of a GGUF file, or of a preset (`bench-100m`) with seed 0.

    `dtype` "auto" computes in float32 on CPU whatever the checkpoint, on CUDA in the checkpoint's dtype.
    `max_model_len` is checked here (see `ModelSpec.context`), so that a refusal comes before the
    weights; windows that no context outgrows are left out (see `ModelSpec.within`).
    `kv_bytes`: of keys and values, which an error says where weights do not fit into memory.

    Raises: ModelError, one line, if a part of the model is missing, damaged or not supported, or the weights do not fit into
    memory; ConfigError if the model cannot be quantised so.
    """
    place = torch.device(device)
    if is_preset(model):
        spec = PRESETS[str(model)]
        spec = spec.within(spec.context(max_model_len))
        return random_model(spec, 0, compute_dtype(dtype, spec.dtype, place), device, quantization)
    directory = Path(model)
    spec, names = read_spec(directory)
    if isinstance(spec, EncoderSpec):
        raise ModelError(
            f"{directory} holds an encoder ({spec.family}), which embeds texts and generates none; use it with "
            "afterglow embed, or with afterglow serve for /v1/embeddings and /v1/rerank"
        )
    context = spec.context(max_model_len)
    spec = spec.within(context)
    if spec.positions == "modules":
        return _through_transformers(directory, spec, dtype, place, quantization, context, kv_bytes)
    with open_weights(directory, progress) as source:
        spec = dataclasses.replace(spec, dtype=source.dtype_of(names.embed + ".weight"))
        quantization = _possible(quantization, source, place)
        computed = compute_dtype(dtype, spec.dtype, place)
        needed = weight_bytes(spec, computed, place, quantization, _block_bytes(source, directory, place))
        check_memory(directory, spec.num_parameters, needed, kv_bytes, place)
        decoder = WeightAssembler(spec, names, source, computed, place, quantization).decoder()
    trim()  # joined and rounded parts were freed, and up to half a gigabyte of them would stay with the process
    return decoder


def _through_transformers(
    directory: Path,
    spec: ModelSpec,
    dtype: DtypeName,
    place: torch.device,
    quantization: QuantizationName,
    context: int,
    kv_bytes: int,
) -> Decoder:
    """Load a model that runs through transformers, which is imported only now."""
    from afterglow.model.fallback.fallback_loader import load_fallback

    computed = compute_dtype(dtype, spec.dtype, place)
    with Checkpoint(directory) as files:
        parameters = files.num_parameters
    check_memory(directory, parameters, parameters * computed.itemsize, kv_bytes, place)
    return load_fallback(directory, spec, computed, place, quantization, context)


def load_encoder(
    directory: Path,
    *,
    dtype: DtypeName = "auto",
    device: str = "cpu",
    quantization: QuantizationName = "auto",
    progress: Progress | None = None,
) -> Encoder:
    """Load the encoder of a model directory; `dtype` and errors as in `load_model`."""
    place = torch.device(device)
    spec, names = read_spec(directory)
    if not isinstance(spec, EncoderSpec):
        raise ModelError(f"{directory} holds a {spec.family} decoder, not an encoder ({', '.join(ENCODERS)})")
    with open_weights(directory, progress) as source:
        spec = dataclasses.replace(spec, dtype=source.dtype_of(names.embed + ".weight"))
        quantization = _possible(quantization, source, place)
        return WeightAssembler(
            spec, names, source, compute_dtype(dtype, spec.dtype, place), place, quantization
        ).encoder()


def is_encoder(directory: Path) -> bool:
    """Return whether a model directory holds an encoder. Raises: ModelError if it is no model directory."""
    return isinstance(read_spec(directory)[0], EncoderSpec)


def is_preset(model: str | Path) -> bool:
    """Return whether `model` names a preset, and no directory of that name hides it."""
    return str(model) in PRESETS and not Path(model).is_dir()


def compute_dtype(wanted: DtypeName, checkpoint: str, device: torch.device) -> torch.dtype:
    """Return the dtype of the arithmetic; `checkpoint` is the dtype of the weights' file. Raises: ModelError."""
    if wanted == "auto":
        if device.type != "cpu" and checkpoint not in DTYPES:
            raise ModelError(
                f"the model's config says dtype {checkpoint!r}, which is none of {', '.join(DTYPES)}; choose one with --dtype"
            )
        return torch.float32 if device.type == "cpu" else DTYPES[checkpoint]
    if wanted == "float16" and device.type == "cpu":
        raise ModelError(
            "--dtype float16 is not possible on CPU: its arithmetic there is a hundred times slower than "
            "float32 and less exact; use --dtype float32 (the checkpoint may stay in float16)"
        )
    return DTYPES[wanted]


def open_weights(model: Path, progress: Progress | None = None) -> Weights:
    """Open the weights of a model directory, or of a GGUF file. Raises: ModelError."""
    if is_gguf(model):
        return GgufWeights(model, progress)
    unpack = unpacking(read_json(model / "config.json"))
    files = Checkpoint(model, progress)
    if any(".experts.gate_up_proj" in name for name in files.names):
        return StackedExperts(files)
    return files if unpack is None else QuantizedWeights(files, unpack)


def _possible(quantization: QuantizationName, source: Weights, device: torch.device) -> QuantizationName:
    """Return "none" for "auto" where a checkpoint's floats of 8 bits are none of the device's."""
    floats = isinstance(source, QuantizedWeights) and source.floats
    return "none" if quantization == "auto" and floats and not has_float8(device) else quantization


def _block_bytes(source: Weights, model: Path, device: torch.device) -> int | None:
    """Return the bytes of the weights, kept as the files have them, if they are in blocks."""
    if not source.in_blocks:
        return None
    if device.type == "cpu":
        return sum(path.stat().st_size for path in weight_files(model))
    if isinstance(source, GgufWeights):
        return source.device_bytes
    return int(sum(path.stat().st_size for path in weight_files(model)) * DEVICE_GROWTH)


def check_memory(model: Path, parameters: int, weights: int, kv_bytes: int, device: torch.device) -> None:
    """Refuse a model of so many `parameters` whose `weights` (bytes) are more than what is free. `kv_bytes` is what is needed besides.

    Raises: ModelError.
    """
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_bytes()
    if free is None or weights <= free:
        return
    kv = f", besides up to {format_size(kv_bytes)} for keys and values" if kv_bytes else ""
    where = "this machine" if device.type == "cpu" else str(device)
    raise ModelError(
        f"{model}: {parameters / 1e9:.2f} billion weights need about {format_size(weights)}{kv}, and {where} has "
        f"{format_size(free)} free; use a smaller model, a file of fewer bits, or --quantization int8 or int4"
    )


def weight_bytes(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, quantization: QuantizationName, blocks: int | None
) -> int:
    """Return about how many bytes the weights take as they are kept. `blocks`: bytes of the weights where files have blocks, as these
    are kept if they are."""
    if quantization == "auto" and blocks is not None and keeps_blocks(dtype, device):
        return blocks
    table = spec.vocab * spec.hidden
    matrices = spec.num_parameters - (0 if spec.tied_embeddings else table)  # a tied head is reordered: a copy
    looked_up = table * (4 if blocks is not None or spec.dtype == "float32" else 2)
    return int(matrices * ROUNDED.get(quantization, dtype.itemsize)) + looked_up


def read_spec(directory: Path) -> tuple[ModelSpec, Names]:
    """Read the spec of a model directory, or of a GGUF file, and the names of its weights; no weights are read."""
    if is_gguf(directory):
        return read_gguf_spec(directory)
    if not directory.is_dir():
        raise ModelError(f"{directory}: no such model directory (and no preset: {', '.join(PRESETS)})")
    if not (directory / "config.json").is_file():
        raise ModelError(f"{directory}: no config.json, so this is not a Hugging Face model directory")
    config = read_json(directory / "config.json")
    if config.get("model_type") in ENCODERS:
        return encoder_from_config(config)
    if runs_through_transformers(config):
        spec, names = read_fallback_spec(directory, config), Names()
    else:
        spec, names = spec_from_config(config)
    generation = directory / "generation_config.json"
    if generation.is_file():
        spec = replace_eos(spec, read_json(generation).get("eos_token_id"))
    return spec, names


Weights: TypeAlias = Checkpoint | QuantizedWeights | StackedExperts | GgufWeights
