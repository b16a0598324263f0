"""From a Hugging Face model directory, or a GGUF file, to a Decoder or an Encoder. No code of a directory is executed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from afterglow.choices import DtypeName, QuantizationName
from afterglow.errors import ModelError
from afterglow.gguf_file import is_gguf, part_paths
from afterglow.memory.free import TRIM_AFTER, trim
from afterglow.memory.pages import give_back, read_soon
from afterglow.model.decoder import Decoder
from afterglow.model.encoder import Encoder
from afterglow.model.encoder_families import ENCODERS, encoder_from_config
from afterglow.model.fallback.fallback_config import read_fallback_spec, runs_through_transformers
from afterglow.model.families import replace_eos, spec_from_config
from afterglow.model.gguf.mapped_weights import GgufWeights, read_gguf_spec
from afterglow.model.memory_check import check_memory, weight_bytes
from afterglow.model.names import Names
from afterglow.model.presets import PRESETS, random_model
from afterglow.model.quantization_config import unpacking
from afterglow.model.quantized import QuantizedWeights
from afterglow.model.spec import EncoderSpec, ModelSpec
from afterglow.model.stacked_experts import StackedExperts
from afterglow.model.weights import WeightAssembler

Progress = Callable[[int, int], None]
"""`progress(done_bytes, total_bytes)`."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
OTHER_NAMES = {"embed_out.weight": "lm_head.weight"}  # GPT-NeoX, by newer versions of transformers
INDEX = "model.safetensors.index.json"
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
    """Return the dtype of the arithmetic; `checkpoint` is the dtype of the weights' file."""
    if wanted == "auto":
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


def _block_bytes(source: Weights, model: Path, device: torch.device) -> int | None:
    """Return the bytes of the weights, kept as the files have them, if they are in blocks."""
    if isinstance(source, Checkpoint) or (isinstance(source, GgufWeights | StackedExperts) and not source.in_blocks):
        return None
    if device.type == "cpu":
        return sum(path.stat().st_size for path in weight_files(model))
    if isinstance(source, GgufWeights):
        return source.device_bytes
    return int(sum(path.stat().st_size for path in weight_files(model)) * DEVICE_GROWTH)


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


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises: ModelError if it cannot be read, or is no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object")
    return value


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a model directory, in the order of their names; of a GGUF file, all its parts.

    Raises: ModelError if there are none, or a file that the index names is missing.
    """
    if is_gguf(directory):
        return part_paths(directory)
    if (directory / INDEX).is_file():
        files = _index(directory).values()
        found = sorted({directory / name for name in files})
        for path in found:
            if not path.is_file():
                raise ModelError(f"{path}: missing, but {INDEX} lists it; download the model again")
        return found
    single = directory / "model.safetensors"
    if single.is_file():
        return [single]
    pickled = sorted(p.name for end in ("*.bin", "*.pt", "*.pth") for p in directory.glob(end))
    if pickled:
        raise ModelError(
            f"{directory}: the weights are only there as {pickled[0]}, a pickle, which can run code when "
            "opened; convert them: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...) writes "
            "safetensors"
        )
    found = sorted(directory.glob("*.gguf"))
    if found:
        raise ModelError(f"{directory}: there are no safetensors, but a GGUF file; name it: {found[0]}")
    raise ModelError(f"{directory}: no model.safetensors and no {INDEX}; the weights are missing")


def _index(directory: Path) -> dict[str, str]:
    files = read_json(directory / INDEX).get("weight_map")
    if not isinstance(files, dict) or not all(
        isinstance(name, str) and name == Path(name).name for name in files.values()
    ):
        raise ModelError(f"{directory / INDEX}: weight_map must map tensor names to file names")
    return files


class Checkpoint:
    """The tensors of a model directory's safetensors files, read one at a time."""

    def __init__(self, directory: Path, progress: Progress | None = None) -> None:
        self._directory, self._progress = directory, progress
        self._files: dict[str, Any] = {}  # tensor name -> open file
        self._open = contextlib.ExitStack()
        self._done = self._total = self._trimmed = 0
        self._last: Tensor | None = None
        for path in weight_files(directory):
            try:
                handle = self._open.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                self.close()
                raise ModelError(f"{path}: damaged or incomplete ({error}); download it again") from None
            self._files |= dict.fromkeys(handle.keys(), handle)
            self._total += path.stat().st_size

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        if exc[0] is None and self._progress is not None:
            self._progress(self._total, self._total)  # headers and tensors that are not read
        self.close()

    def close(self) -> None:
        """Unmap the files; tensors that were read stay valid."""
        self._last = None
        self._open.close()
        self._files.clear()

    @property
    def num_parameters(self) -> int:
        """Return the number of numbers in all tensors."""
        return sum(math.prod(file.get_slice(name).get_shape()) for name, file in self._files.items())

    @property
    def names(self) -> Iterable[str]:
        """The names of the tensors."""
        return self._files

    def _find(self, name: str) -> str:
        # Checkpoints saved from the bare model lack the outermost module's name.
        for candidate in (name, name.partition(".")[2], OTHER_NAMES.get(name)):
            if candidate in self._files:
                return candidate
        raise ModelError(f"{self._directory}: the weights lack {name}; they are not what config.json describes")

    def dtype_of(self, name: str) -> str:
        """Return the dtype of a tensor by our name. Raises: ModelError unless float32, bfloat16 or float16."""
        found = self._find(name)
        return self._checked(found, self._files[found].get_slice(found).get_dtype())

    def _checked(self, name: str, dtype: str) -> str:
        names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
        if dtype not in names:
            raise ModelError(
                f"{self._directory}: {name} has dtype {dtype}; supported are float32, bfloat16 and float16 "
                "(and what quantization_config says)"
            )
        return names[dtype]

    def packed(self, name: str, shape: tuple[int, int]) -> None:
        """Return None: all tensors are numbers."""
        return

    def has(self, name: str) -> bool:
        """Return whether there is a tensor by our name."""
        return name in self._files or name.partition(".")[2] in self._files

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor: see `WeightSource.get`. NOTE: it may be a view of the mapped file; copy it to keep it, and never
        write to it. The next call gives its pages back: memory holds those of one tensor."""
        found = self._find(name)
        about = self._files[found].get_slice(found)
        self._checked(found, about.get_dtype())
        if tuple(about.get_shape()) != shape:
            raise ModelError(
                f"{self._directory}: {found} has shape {tuple(about.get_shape())}, config.json asks for {shape}"
            )
        return self.read(found)

    def piece(self, name: str, index: int) -> Tensor:
        """Return `tensor[index]` of any dtype, as `get` does; no other part of the tensor is read."""
        found = self._find(name)
        about = self._files[found].get_slice(found)
        if len(about.get_shape()) < 2 or index >= about.get_shape()[0]:
            raise ModelError(f"{self._directory}: {found} has shape {tuple(about.get_shape())}, and no part {index}")
        try:
            return self._taken(about[index : index + 1][0])
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ModelError(f"{self._directory}: {found} cannot be read ({error})") from None

    def read(self, name: str) -> Tensor:
        """Return a tensor of any dtype and shape, as `get` does."""
        found = self._find(name)
        try:
            return self._taken(self._files[found].get_tensor(found))
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ModelError(f"{self._directory}: {found} cannot be read ({error})") from None

    def _taken(self, tensor: Tensor) -> Tensor:
        """Return a tensor that is read next, give the pages of the one before back, and count bytes."""
        if self._last is not None:
            give_back(self._last.data_ptr(), self._last.nbytes)
        read_soon(tensor.data_ptr(), tensor.nbytes)
        self._last = tensor
        self._done += tensor.nbytes
        if self._done - self._trimmed > TRIM_AFTER:  # rounded parts that were freed lie between matrices that stay
            self._trimmed = self._done
            trim()
        if self._progress is not None:
            self._progress(self._done, self._total)
        return tensor


Weights: TypeAlias = Checkpoint | QuantizedWeights | StackedExperts | GgufWeights
