"""GGUF files: metadata and tensors of one file or of all parts of a split one. They are mapped, and not copied.

The `gguf` library does the reading; it is imported when a file is opened.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afterglow.errors import ModelError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True, eq=False)
class FileTensor:
    """A tensor of a GGUF file: `shape` outermost first, `blocks` the mapped bytes, uint8 [rows, bytes of a row].

    `block_format` is the type's name in the `gguf` library: "F32", "Q4_0", "Q6_K".
    """

    name: str
    shape: tuple[int, ...]
    block_format: str
    blocks: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class GgufFile:
    """An opened GGUF file, all its parts together. It stays mapped as long as one of its tensors is in use."""

    paths: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, FileTensor]


def is_gguf(model: str | Path) -> bool:
    """Return whether `model` is to be read as a GGUF file: its name says so, or it is a file and no directory."""
    path = Path(model)
    return path.is_file() or (path.suffix.lower() == ".gguf" and not path.is_dir())


def file_stem(path: Path) -> str:
    """Return the name of a GGUF file without its ending, or without the numbers of a split one."""
    match = PART.fullmatch(path.name)
    return match["stem"] if match is not None else path.stem


def part_paths(path: Path) -> list[Path]:
    """Return the files of a model whose first (or only) file is `path`, in order.

    Raises: ModelError if `path` or another part is missing, or `path` is a later part, or no part can have its name.
    """
    if not path.is_file():
        raise ModelError(f"{path}: no such GGUF file")
    match = PART.fullmatch(path.name)
    if match is None:
        return [path]
    number, count = int(match["number"]), int(match["count"])
    if count < 1 or number > count:
        raise ModelError(
            f"{path} is named as part {number} of {count}, which is impossible; give the file its name back"
        )
    paths = [path.with_name(f"{match['stem']}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1)]
    if number != 1:
        raise ModelError(f"{path} is part {number} of {count}; name the first, {paths[0].name}")
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        raise ModelError(f"{path}: the model is split into {count} files, and {missing[0]} is missing; download it")
    return paths


def read_metadata(path: Path) -> Mapping[str, Any]:
    """Return the metadata of a GGUF file: numbers, texts, and lists of them. No tensors are read.

    Raises: ModelError if it is no GGUF file, or damaged, or one of its parts is missing.
    """
    return open_gguf(path).metadata


def open_gguf(path: Path) -> GgufFile:
    """Map a GGUF file and read its header. Errors as in `read_metadata`."""
    from afterglow.gguf_reader import MappedReader, Metadata, as_bytes

    paths = part_paths(path)
    readers = [MappedReader(part) for part in paths]
    metadata = Metadata(readers[0])
    _check_split(path, metadata, len(paths))
    tensors: dict[str, FileTensor] = {}
    for part, reader in zip(paths, readers, strict=True):
        for found in reader.tensors:
            shape = tuple(int(size) for size in reversed(found.shape))
            if found.name in tensors:
                raise ModelError(f"{part}: tensor {found.name} is in two parts of the model; download it again")
            blocks = as_bytes(found.data, found.n_elements // shape[-1])
            tensors[found.name] = FileTensor(found.name, shape, found.tensor_type.name, blocks)
    expected = _count(path, metadata, "split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise ModelError(f"{path}: its parts hold {len(tensors)} tensors, not {expected}; download it again")
    return GgufFile(tuple(paths), metadata, tensors)


def _check_split(path: Path, metadata: Mapping[str, Any], parts: int) -> None:
    """Refuse a part of a split model that was renamed, so that its other parts cannot be found."""
    number, count = _count(path, metadata, "split.no", 0), _count(path, metadata, "split.count", 1)
    if number or max(count, 1) != parts:
        raise ModelError(
            f"{path} is part {number + 1} of a model of {count} files, which must be named "
            f"NAME-00001-of-{count:05}.gguf and so on; give the files their names back, and name the first"
        )


def _count(path: Path, metadata: Mapping[str, Any], name: str, default: int) -> int:
    return check_whole(metadata.get(name, default), f"{path}: {name}")


def check_whole(value: Any, what: str, least: int = 0) -> int:
    """Return a value of the metadata that must be a whole number, at least `least`. Raises: ModelError, which calls it `what`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        kind = "positive whole number" if least else "whole number"
        raise ModelError(f"{what} = {reprlib.repr(value)}; it must be a {kind}: the file is damaged")
    return value
