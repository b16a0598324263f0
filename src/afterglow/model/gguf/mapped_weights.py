"""The tensors of a GGUF file as weights: in their blocks, or dequantised."""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from afterglow.errors import ModelError
from afterglow.gguf_file import FileTensor, open_gguf
from afterglow.kernels.device_blocks import DEVICE_BITS
from afterglow.kernels.packed import BLOCK_FORMATS, dequantize
from afterglow.memory.free import TRIM_AFTER, trim
from afterglow.memory.pages import give_back, read_soon
from afterglow.model.families import spec_from_config
from afterglow.model.gguf.architectures import read_architecture
from afterglow.model.names import Names
from afterglow.model.spec import ModelSpec
from afterglow.model.tables import PackedTensor

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
JOINED = 3  # tensors that become one matrix: their pages are read when the last one is there
# Tensors that are read with the metadata.
UNUSED = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


def read_gguf_spec(path: Path) -> tuple[ModelSpec, Names]:
    """Read the spec of a GGUF file and the names of its weights; no weights are read. The file is read again if it changes.

    Raises: ModelError.
    """
    try:
        about = path.stat()
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}; name a GGUF file or a model directory") from None
    return _read_once(path, about.st_size, about.st_mtime_ns, about.st_ino)


@functools.lru_cache(maxsize=8)
def _read_once(path: Path, *version: int) -> tuple[ModelSpec, Names]:
    file = open_gguf(path)
    architecture, config = read_architecture(file)
    try:
        spec, _ = spec_from_config(config)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    return spec, architecture.names(spec) if callable(architecture.names) else architecture.names


class GgufWeights:
    """The weights of a GGUF file, one tensor at a time: see `WeightSource`."""

    def __init__(self, path: Path, progress: Callable[[int, int], None] | None = None) -> None:
        """Map the file. Raises: ModelError if it cannot be read, or holds a type of tensor that is not supported."""
        self._file = open_gguf(path)
        self._path, self._progress = path, progress
        self._spec, _ = read_gguf_spec(path)
        self._used: set[str] = set()
        self._recent: deque[npt.NDArray[np.uint8]] = deque()
        self._since_trim = 0
        self._done = 0
        self._total = sum(tensor.blocks.nbytes for tensor in self._file.tensors.values())
        for tensor in self._file.tensors.values():
            if tensor.block_format not in FLOATS and tensor.block_format not in BLOCK_FORMATS:
                raise ModelError(
                    f"{path}: tensor {tensor.name} has the block type {tensor.block_format}; supported are "
                    f"{', '.join((*FLOATS, *_file_formats()))}: use another file of the model"
                )

    def __enter__(self) -> GgufWeights:
        return self

    def __exit__(self, *exc: object) -> None:
        self._give_back()
        if exc[0] is not None:
            return
        if self._progress is not None:
            self._progress(self._total, self._total)
        left = sorted(set(self._file.tensors) - self._used - set(UNUSED))
        if left:  # a nearly right model gives nearly right answers
            raise ModelError(
                f"{self._path}: {len(left)} tensors are none that {self._spec.family} models have here, such as {left[0]}; "
                "use a model of a supported kind"
            )

    @property
    def in_blocks(self) -> bool:
        """Whether there are tensors for `packed`."""
        return any(tensor.block_format in BLOCK_FORMATS for tensor in self._file.tensors.values())

    @property
    def device_bytes(self) -> int:
        """The bytes of all tensors where blocks are kept on a device."""
        return int(sum(map(_device_bytes, self._file.tensors.values())))

    def dtype_of(self, name: str) -> str:
        """Return the dtype of a tensor, by our name; bfloat16 for one in blocks."""
        kind = FLOATS.get(self._find(name).block_format, torch.bfloat16)
        return str(kind).removeprefix("torch.")

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor, dequantised if it is in blocks: see `WeightSource.get`. It may be a view of the mapped file."""
        tensor = self._checked(name, shape)
        blocks = self._blocks(tensor)
        if tensor.block_format in FLOATS:
            return blocks.view(FLOATS[tensor.block_format]).view(shape)
        return dequantize(blocks, tensor.block_format).view(shape)

    def packed(self, name: str, shape: tuple[int, ...]) -> PackedTensor | None:
        """Return a tensor in its blocks: see `WeightSource.packed`. It may be a view of the mapped file."""
        tensor = self._checked(name, shape)
        if tensor.block_format not in BLOCK_FORMATS:
            return None
        return PackedTensor(self._blocks(tensor), tensor.block_format)

    def _find(self, name: str) -> FileTensor:
        if name in self._file.tensors:
            self._used.add(name)
            return self._file.tensors[name]
        part = self._part_of_qkv(name) or self._expert(name)
        if part is None:
            raise ModelError(f"{self._path}: the weights lack {name}; they are not what the metadata describe")
        return part

    def _part_of_qkv(self, name: str) -> FileTensor | None:
        """Return the rows of q, k or v where all three are one tensor."""
        place, _, rest = name.rpartition(".attn_")
        which, _, kind = rest.partition(".")
        fused = self._file.tensors.get(f"{place}.attn_qkv.{kind}")
        if fused is None or which not in ("q", "k", "v"):
            return None
        self._used.add(fused.name)
        spec = self._spec
        starts = np.cumsum([0, spec.heads, spec.kv_heads, spec.kv_heads]) * spec.head_dim
        start, stop = starts["qkv".index(which) :][:2]
        if len(fused.shape) == 1:
            size = fused.blocks.shape[1] // fused.shape[0]
            blocks = fused.blocks[:, start * size : stop * size]
        else:
            blocks = fused.blocks[start:stop]
        if starts[-1] != fused.shape[0]:
            raise ModelError(f"{self._path}: {fused.name} has {fused.shape[0]} rows, the metadata ask for {starts[-1]}")
        shape = (int(stop - start), *fused.shape[1:])
        return dataclasses.replace(fused, name=name, shape=shape, blocks=blocks)

    def _expert(self, name: str) -> FileTensor | None:
        """Return the matrix of one expert, `...exps.NUMBER.weight`, or its bias: all experts are one tensor [experts, outputs, inputs],
        or [experts, outputs]."""
        place, _, rest = name.rpartition("exps.")
        number, _, kind = rest.partition(".")
        experts = self._file.tensors.get(f"{place}exps.{kind}")
        if experts is None or not number.isdigit() or len(experts.shape) < 2 or int(number) >= experts.shape[0]:
            return None
        self._used.add(experts.name)
        rows = experts.shape[1] if len(experts.shape) == 3 else 1
        blocks = experts.blocks[int(number) * rows : (int(number) + 1) * rows]
        return dataclasses.replace(experts, name=name, shape=experts.shape[1:], blocks=blocks)

    def _checked(self, name: str, shape: tuple[int, ...]) -> FileTensor:
        tensor = self._find(name)
        if shape not in (tensor.shape, (1, *tensor.shape)):  # a matrix of one row may be a vector
            raise ModelError(f"{self._path}: {name} has shape {tensor.shape}, the metadata ask for {shape}")
        return tensor

    def _blocks(self, tensor: FileTensor) -> Tensor:
        """Return the bytes of a tensor, uint8 [rows, bytes of a row]."""
        self._give_back(JOINED - 1)
        self._recent.append(tensor.blocks)
        read_soon(tensor.blocks.ctypes.data, tensor.blocks.nbytes)
        blocks = torch.from_numpy(_unguarded(tensor.blocks))
        self._done += blocks.nbytes
        if self._progress is not None:
            self._progress(min(self._done, self._total), self._total)
        return blocks

    def _give_back(self, keep: int = 0) -> None:
        """Let the pages of tensors go that were read before the last `keep`; memory holds those of a few."""
        while len(self._recent) > keep:
            blocks = self._recent.popleft()
            give_back(blocks.ctypes.data, blocks.nbytes)
            self._since_trim += blocks.nbytes
        if self._since_trim > TRIM_AFTER:  # copies that were joined and freed lie between matrices that stay
            self._since_trim = 0
            trim()


def _device_bytes(tensor: FileTensor) -> float:
    about = BLOCK_FORMATS.get(tensor.block_format)
    if about is None:
        return tensor.blocks.nbytes
    return tensor.blocks.nbytes // about.num_bytes * about.weights * DEVICE_BITS[tensor.block_format] / 8


def _file_formats() -> list[str]:
    """Return the block formats that files have: some are our own."""
    from gguf import GGMLQuantizationType

    return [name for name in BLOCK_FORMATS if name in GGMLQuantizationType.__members__]


class _Unguarded:
    """Mapped bytes that say they may be written: torch warns of others. Nothing writes to them."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._kept = array  # mapped as long as this is there
        about = array.__array_interface__
        self.__array_interface__ = about | {"data": (about["data"][0], False)}


def _unguarded(array: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return np.asarray(_Unguarded(array))
