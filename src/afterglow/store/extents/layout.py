"""Where every byte of an extent lies, from the KV layout and a row count alone. Pure: no I/O, no contents.

    offset 0        8 bytes        length of the JSON header, little-endian (safetensors)
           8        JSON           metadata first, then the tensor table, then spaces
           ...      tokens         uint32 [padded_rows]
           ...      crc32c         uint32 [layers, 2, chunks]
    head_bytes      layers.0.keys    [padded_rows, kv_heads, head_dim]
                    layers.0.values  the same
                    layers.1.keys    ...
                    layers.0.probe_keys  [padded_rows, probe_heads, head_dim]   only in layouts with probe heads, which
                    layers.1.probe_keys  ...                                    have two more tables before `head_bytes`:
                                     probe_crc32c uint32 [layers, chunks], order uint16 [layers, padded_rows],
                                     and in layouts with parts of less than 64 rows
                                     part_crc32c uint32 [layers, 2, parts]
                    layers.0.means   [mean_rows, kv_heads, head_dim]            only in layouts with means: of each 64 rows of the
                    layers.1.means   ...                                        text the mean key, float32; then the mean values;
                                     and a table mean_crc32c uint32 [layers]

The spaces in the header make `head_bytes` a multiple of 4096, and `padded_rows` makes every tensor one, so
that each layer's keys and values start aligned for direct I/O (safetensors allows no gaps between tensors).

Rows in 8 bits ("I8") are [padded_rows, kv_heads, head_dim + 4]: of each head its numbers, and the bytes of their scale, a
float32. To make tensors of such rows multiples of 4096 would take up to 960 rows; so they follow each other at any offset,
padded to whole chunks only, and the spaces make the whole file a multiple of 4096. Readers of aligned pages read a little more.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from afterglow.config import BLOCK_ROWS, SCALE_BYTES
from afterglow.errors import ConfigError

ALIGNMENT: Final = 4096
META_RESERVE: Final = 1024  # room for the metadata JSON, so that the head's size does not depend on its values
KEYS, VALUES, PROBES, MEANS = 0, 1, 2, 3

KV_DTYPES: Final = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "I8": "int8"}  # as options name them
_ITEMSIZE: Final = {"F32": 4, "BF16": 2, "F16": 2, "I8": 1}


def align_up(num_bytes: int) -> int:
    """Compute the least multiple of 4096 that is not below `num_bytes`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Describes the shape of one token's keys and values. `dtype` is safetensors' word: "F32", "BF16", "F16", or "I8" for numbers
    of 8 bits with a scale for each head.

    `probe_heads`: the keys of so many first heads are stored once more, by themselves (SPEC's sidecar), and rows
    may be stored in another order than the text's. `part_rows`: of the least part of keys or values that is read by itself, with a
    checksum of its own where it is less than a chunk. `means`: the mean key and value of each 64 rows of the text are stored as well.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    probe_heads: int = 0
    part_rows: int = BLOCK_ROWS
    means: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in _ITEMSIZE:
            raise ConfigError(f"KV dtype must be one of {', '.join(_ITEMSIZE)}, got {self.dtype!r}")
        for name in ("layers", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"a KV layout needs {name} of at least 1, got {getattr(self, name)}")
        if not 0 <= self.probe_heads <= self.kv_heads:
            raise ConfigError(f"{self.probe_heads} probe heads are not among {self.kv_heads} KV heads")
        if self.part_rows not in (16, 32, BLOCK_ROWS) or (self.part_rows < BLOCK_ROWS and not self.probe_heads):
            raise ConfigError(f"parts have 16, 32 or 64 rows, less than 64 with probe heads only, got {self.part_rows}")
        if self.means and not self.probe_heads:
            raise ConfigError("means are stored with probe heads only")

    @property
    def width(self) -> int:
        """Count the elements of one head in a row, its scale's bytes included."""
        return self.head_dim + (SCALE_BYTES if self.dtype == "I8" else 0)

    @property
    def aligned(self) -> bool:
        """Tell whether each tensor starts at a multiple of 4096 bytes."""
        return self.dtype != "I8"

    @property
    def row_bytes(self) -> int:
        """Compute the bytes of one token's keys (or values) in one layer."""
        return self.kv_heads * self.width * _ITEMSIZE[self.dtype]

    @property
    def chunk_bytes(self) -> int:
        """Compute the bytes of 64 rows of one layer's keys (or values)."""
        return BLOCK_ROWS * self.row_bytes

    @property
    def part_bytes(self) -> int:
        """Compute the bytes of the least part of one layer's keys (or values) that is read by itself."""
        return self.part_rows * self.row_bytes

    def file_parts(self, rows: int) -> int:
        """Count the parts of each tensor in the file, padding included."""
        return self.padded_rows(rows) // self.part_rows

    @property
    def probe_row_bytes(self) -> int:
        """Compute the bytes of one token's probe keys in one layer: the keys of the first heads."""
        return self.probe_heads * self.width * _ITEMSIZE[self.dtype]

    @property
    def probe_chunk_bytes(self) -> int:
        """Compute the bytes of 64 rows of one layer's probe keys."""
        return BLOCK_ROWS * self.probe_row_bytes

    @property
    def block_bytes(self) -> int:
        """Compute the bytes of 64 rows in all layers, keys and values: the size of a slot of the arena."""
        return self.layers * 2 * self.chunk_bytes

    @staticmethod
    def blocks(rows: int) -> int:
        """Count the blocks (slots) that `rows` rows take."""
        return -(-rows // BLOCK_ROWS)

    def padded_rows(self, rows: int) -> int:
        """Count the rows of each tensor in the file: whole chunks, and a multiple of 4096 bytes where tensors are aligned."""
        return _padded_rows(self, rows)

    def file_chunks(self, rows: int) -> int:
        """Count the chunks of each tensor in the file, padding included."""
        return self.padded_rows(rows) // BLOCK_ROWS

    def tensor_bytes(self, rows: int) -> int:
        """Compute the bytes of one layer's keys (or values) in the file, padding included."""
        return self.padded_rows(rows) * self.row_bytes

    def probe_bytes(self, rows: int) -> int:
        """Compute the bytes of one layer's probe keys in the file, padding included."""
        return self.padded_rows(rows) * self.probe_row_bytes

    @property
    def mean_row_bytes(self) -> int:
        """Compute the bytes of one mean key, or value, of all heads in one layer: float32. 0 where none are stored."""
        return 4 * self.kv_heads * self.head_dim if self.means else 0

    def mean_rows(self, rows: int) -> int:
        """Count the rows of one layer's means in the file: two for each chunk, and padding where tensors are aligned."""
        step = ALIGNMENT // math.gcd(self.mean_row_bytes, ALIGNMENT) if self.aligned else 1
        return -(-2 * self.file_chunks(rows) // step) * step

    def mean_bytes(self, rows: int) -> int:
        """Compute the bytes of one layer's means in the file, padding included."""
        return self.mean_rows(rows) * self.mean_row_bytes

    def table_bytes(self, rows: int) -> int:
        """Compute the bytes of the tables between the header and `layers.0.keys`."""
        return sum(size for *_, size in self.tables(rows))

    def tables(self, rows: int) -> Iterator[tuple[str, str, list[int], int]]:
        """Yield name, dtype, shape and bytes of each tensor between the header and `layers.0.keys`, in order."""
        padded, chunks = self.padded_rows(rows), self.file_chunks(rows)
        yield "tokens", "U32", [padded], 4 * padded
        yield "crc32c", "U32", [self.layers, 2, chunks], 8 * self.layers * chunks
        if self.probe_heads:
            yield "probe_crc32c", "U32", [self.layers, chunks], 4 * self.layers * chunks
            yield "order", "U16", [self.layers, padded], 2 * self.layers * padded
        if self.part_rows < BLOCK_ROWS:
            parts = self.file_parts(rows)
            yield "part_crc32c", "U32", [self.layers, 2, parts], 8 * self.layers * parts
        if self.means:
            yield "mean_crc32c", "U32", [self.layers], 4 * self.layers

    def head_bytes(self, rows: int) -> int:
        """Compute the bytes before `layers.0.keys`: the safetensors header, the tokens, the checksums."""
        return _head_bytes(self, rows)

    def header_bytes(self, rows: int) -> int:
        """Compute the length of the JSON header, with its spaces, without the 8 bytes before it."""
        return self.head_bytes(rows) - self.table_bytes(rows) - 8

    def offset(self, rows: int, layer: int, kv: int, chunk: int = 0) -> int:
        """Compute where a chunk of `layers.{layer}.keys` (kv 0), `.values` (kv 1) or `.probe_keys` (kv 2), or where all of `.means`
        (kv 3), starts in the file of `rows` rows.
        """
        if kv == MEANS:
            before = self.layers * (2 * self.tensor_bytes(rows) + self.probe_bytes(rows))
            return self.head_bytes(rows) + before + layer * self.mean_bytes(rows)
        if kv == PROBES:
            before = self.layers * 2 * self.tensor_bytes(rows) + layer * self.probe_bytes(rows)
            return self.head_bytes(rows) + before + chunk * self.probe_chunk_bytes
        tensor = (layer * 2 + kv) * self.tensor_bytes(rows)
        return self.head_bytes(rows) + tensor + chunk * self.chunk_bytes

    def data_bytes(self, rows: int) -> int:
        """Compute the bytes of all keys and values in the file, and of the probe keys and means."""
        return self.layers * (2 * self.tensor_bytes(rows) + self.probe_bytes(rows) + self.mean_bytes(rows))

    def file_bytes(self, rows: int) -> int:
        """Compute the size of the file of an extent of `rows` rows: a multiple of 4096."""
        return _file_bytes(self, rows)

    def as_dict(self) -> dict[str, int | str]:
        """Return the layout as `afterglow.json` keeps it."""
        more = {"probe_heads": self.probe_heads} if self.probe_heads else {}
        if self.part_rows < BLOCK_ROWS:
            more["part_rows"] = self.part_rows
        if self.means:
            more["means"] = True
        return {
            "layers": self.layers,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "dtype": self.dtype,
            "block_rows": BLOCK_ROWS,
            **more,
        }

    def __str__(self) -> str:
        return f"{self.layers} layers x {self.kv_heads} heads x {self.head_dim} {self.dtype}"


def tensor_table(layout: KVLayout, rows: int) -> bytes:
    """Return the safetensors header's entries for all tensors: JSON members, without the braces around them."""
    return _padded_table(layout, layout.padded_rows(rows))


# Every read asks for these sizes, of a few row counts.


@lru_cache(maxsize=1024)
def _padded_rows(layout: KVLayout, rows: int) -> int:
    if not layout.aligned:
        return layout.blocks(rows) * BLOCK_ROWS
    # Chunks that make up whole 4096s; gcd(0, n) is n.
    step = ALIGNMENT // math.gcd(layout.chunk_bytes, layout.probe_chunk_bytes, ALIGNMENT)
    return -(-layout.blocks(rows) // step) * step * BLOCK_ROWS


@lru_cache(maxsize=1024)
def _head_bytes(layout: KVLayout, rows: int) -> int:
    fixed = 8 + META_RESERVE + len(tensor_table(layout, rows))
    data = layout.data_bytes(rows)  # a multiple of 4096 where tensors are aligned
    return align_up(fixed + layout.table_bytes(rows) + data) - data


@lru_cache(maxsize=1024)
def _file_bytes(layout: KVLayout, rows: int) -> int:
    return layout.head_bytes(rows) + layout.data_bytes(rows)


@lru_cache(maxsize=256)
def _padded_table(layout: KVLayout, rows: int) -> bytes:
    def entries() -> Iterator[tuple[str, str, list[int], int]]:
        padded = layout.padded_rows(rows)
        yield from layout.tables(rows)
        for layer in range(layout.layers):
            for name in ("keys", "values"):
                shape = [padded, layout.kv_heads, layout.width]
                yield f"layers.{layer}.{name}", layout.dtype, shape, layout.tensor_bytes(rows)
        for layer in range(layout.layers if layout.probe_heads else 0):
            shape = [padded, layout.probe_heads, layout.width]
            yield f"layers.{layer}.probe_keys", layout.dtype, shape, layout.probe_bytes(rows)
        for layer in range(layout.layers if layout.means else 0):
            shape = [layout.mean_rows(rows), layout.kv_heads, layout.head_dim]
            yield f"layers.{layer}.means", "F32", shape, layout.mean_bytes(rows)

    table, start = {}, 0
    for name, dtype, shape, size in entries():
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + size]}
        start += size
    return json.dumps(table, separators=(",", ":")).encode()[1:-1]
