"""The `gguf` library's reader, with arrays that are read in one go and errors that name the tensor.

The library makes three objects for each number of an array: the tokens and merges of one vocabulary take it two seconds. Imports
the library, so import this module only where a file is opened.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType
from gguf.gguf_reader import ReaderField

from afterglow.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_LENGTH = struct.Struct("<Q").unpack_from
_ARRAY = struct.Struct("<IQ").unpack_from  # the type and the number of its values
_ARRAY_BYTES = 12


class MappedReader(GGUFReader):
    """The metadata and tensors of one GGUF file, which stays mapped as long as one of them is in use."""

    def __init__(self, path: Path) -> None:
        """Map the file and read its header. Raises: ModelError if it is no GGUF file, or not a whole one."""
        self.path = path
        _check_start(path)
        try:
            super().__init__(path)
        except (ValueError, KeyError, IndexError, OverflowError, RecursionError, struct.error, OSError) as error:
            reason = error.args[0] if error.args else type(error).__name__
            raise ModelError(f"{path}: truncated or damaged GGUF file ({reason}); download it again") from None

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        """Find the end of one value of the metadata, an array in one go; see the library."""
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind, count = _ARRAY(self.data.data, orig_offs)
        start = orig_offs + _ARRAY_BYTES
        types = [GGUFValueType.ARRAY, GGUFValueType(kind)]
        if kind == GGUFValueType.STRING:
            data, end = self.data.data, start
            for _ in range(count):
                end += 8 + _LENGTH(data, end)[0]
            part = self.data[start:end]
            whole = len(part) == end - start
        elif types[1] in self.gguf_scalar_to_np:
            part = self._get(start, self.gguf_scalar_to_np[types[1]], count)
            whole = len(part) == count
        else:
            raise ValueError(f"an array of {types[1].name}")
        if not whole:
            raise ValueError("an array that ends after the file")
        return _ARRAY_BYTES + part.nbytes, [part], [0], types

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        """Check that each tensor is of a known type and within the file, then make them; see the library."""
        size = len(self.data)
        start_offs = int(start_offs)  # of 32 bits where the file names its alignment: sums with it would overflow
        for field in fields:
            _, name, _, dims, raw_type, offset = field.parts
            where = f"{self.path}: tensor {bytes(name).decode(errors='replace')}"
            try:
                weights, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(int(raw_type[0]))]
            except (ValueError, KeyError):
                raise ModelError(
                    f"{where} has the unknown block type {raw_type[0]}; the file may be newer than the gguf package: "
                    "upgrade it, or use another file of the model"
                ) from None
            shape = [int(size) for size in dims]
            if not shape or 0 in shape or shape[0] % weights:
                raise ModelError(
                    f"{where} has the shape {shape}, which is no rows of whole blocks of {weights}: damaged"
                )
            end = start_offs + int(offset[0]) + int(np.prod(shape, dtype=object)) // weights * num_bytes
            if end > size:
                raise ModelError(
                    f"{where} ends {end - size:,} bytes after the file, which is truncated; download it again"
                )
        super()._build_tensors(start_offs, fields)


class Metadata(Mapping[str, Any]):
    """The metadata of a file: numbers, texts, and lists of them, each decoded when it is first asked for."""

    def __init__(self, reader: MappedReader) -> None:
        """Take the metadata of a file that was opened."""
        self._path = reader.path
        self._decoded: dict[str, Any] = {}
        self._fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}

    def __len__(self) -> int:
        return len(self._fields)

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __getitem__(self, name: str) -> Any:
        """Return a value. Raises: KeyError; ModelError if a text is not UTF-8."""
        if name not in self._decoded:
            field = self._fields[name]
            try:
                self._decoded[name] = (
                    list(_texts(field.parts[-1].tobytes()))
                    if field.types == [GGUFValueType.ARRAY, GGUFValueType.STRING]
                    else field.contents()
                )
            except UnicodeDecodeError as error:
                raise ModelError(f"{self._path}: damaged GGUF file ({name} is not UTF-8: {error})") from None
        return self._decoded[name]


def _texts(data: bytes) -> Iterator[str]:
    """Yield the texts of an array: each is its length, uint64, and its bytes."""
    at = 0
    while at < len(data):
        end = at + 8 + _LENGTH(data, at)[0]
        yield str(data[at + 8 : end], "utf-8")
        at = end


def as_bytes(data: npt.NDArray[Any], rows: int) -> npt.NDArray[np.uint8]:
    """Return a mapped tensor as uint8 [rows, bytes of a row]: the same memory."""
    return data.reshape(rows, -1).view(np.uint8)


def _check_start(path: Path) -> None:
    try:
        with path.open("rb") as file:
            start = file.read(8)
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}; name a GGUF file or a model directory") from None
    if start[:4] != MAGIC:
        raise ModelError(f"{path}: no GGUF file (it begins with {start[:4]!r}); name a GGUF file or a model directory")
    version = int.from_bytes(start[4:], "little") if len(start) == 8 else 0
    if version not in VERSIONS:
        hint = "its numbers are big-endian" if version and not version & 65535 else f"its version is {version}"
        raise ModelError(f"{path}: {hint}; supported are GGUF versions {VERSIONS} in little-endian")
