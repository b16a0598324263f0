"""The files of a Hugging Face model directory: its JSON, and the tensors of its safetensors files, read one at a time."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from afterglow.errors import ModelError
from afterglow.gguf_file import is_gguf, part_paths
from afterglow.memory.free import TRIM_AFTER, trim
from afterglow.memory.pages import give_back, read_soon

Progress = Callable[[int, int], None]
"""`progress(done_bytes, total_bytes)`."""

OTHER_NAMES = {"embed_out.weight": "lm_head.weight"}  # GPT-NeoX, by newer versions of transformers
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises: ModelError if it cannot be read, or is no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
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
    refuse_other_weights(directory)
    if (directory / INDEX).is_file():
        files = _index(directory).values()
        found = sorted({directory / name for name in files})
        for path in found:
            if not path.is_file():
                raise ModelError(f"{path}: missing, but {INDEX} lists it; download the model again")
        return found
    single = directory / SINGLE
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


def refuse_other_weights(directory: Path) -> None:
    """Refuse a directory whose weights are not certain: adapters, which transformers adds where the package peft is installed, and a single file
    beside an index of others. Raises: ModelError."""
    if (directory / ADAPTER).exists():
        raise ModelError(
            f"{directory}: adapters ({ADAPTER}) are not supported; merge it into the weights, or remove it"
        )
    if all((directory / name).exists() for name in (SINGLE, INDEX)) and {*_index(directory).values()} != {SINGLE}:
        raise ModelError(f"{directory}: there are both {SINGLE} and {INDEX}; remove what does not belong to the model")


def _index(directory: Path) -> dict[str, str]:
    files = read_json(directory / INDEX).get("weight_map")
    if not isinstance(files, dict) or not all(
        isinstance(name, str) and name == Path(name).name for name in files.values()
    ):
        raise ModelError(f"{directory / INDEX}: weight_map must map tensor names to file names")
    return files


class Checkpoint:
    """The tensors of a model directory's safetensors files, read one at a time."""

    in_blocks = False  # are there tensors for `packed`?

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


class UnpackedCheckpoint:
    """A source of weights over a checkpoint; what it does not have to unpack is read as it is."""

    def __init__(self, files: Checkpoint) -> None:
        """Read `files`."""
        self._files = files

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._files.__exit__(*exc)

    def dtype_of(self, name: str) -> str:
        """Return the dtype of a tensor of floats. Raises: ModelError."""
        return self._files.dtype_of(name)
