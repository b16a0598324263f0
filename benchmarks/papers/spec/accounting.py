"""What a selection costs to load: vectors, bytes, chunks (SPEC, Figure 9).

A vector is one head's key, or value, of one row. All numbers are for one layer of one request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from afterglow.errors import ConfigError
from afterglow.importance.select import Kind


class Vectors(NamedTuple):
    """Vectors to load. `probe_keys` come before the selection, `keys` and `values` after it."""

    probe_keys: int
    keys: int
    values: int

    @property
    def total(self) -> int:
        """The sum of the three."""
        return self.probe_keys + self.keys + self.values


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer's shape: `kv_heads`, `probe_heads` among them with their keys in a sidecar, and bytes of a vector.

    `reread`: whether the probe heads' selected keys are loaded once more with the others, as the paper counts; without
    it they are taken from the sidecar that has been loaded.
    """

    kv_heads: int
    probe_heads: int
    vector_bytes: int
    chunk: int = 64
    reread: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.probe_heads <= self.kv_heads or self.vector_bytes < 1 or self.chunk < 1:
            raise ConfigError(
                f"{self.probe_heads} probe heads of {self.kv_heads}, vectors of {self.vector_bytes} bytes and chunks of "
                f"{self.chunk} rows: probe heads must be among the heads, sizes 1 or more"
            )

    def vectors(self, kind: Kind, rows: int, kept: int) -> Vectors:
        """Of `rows` prefix rows each head keeps `kept`. A layer that fell back, or keeps all, has loaded all keys."""
        probe = self.probe_heads * rows
        if kind == "shared":
            heads = self.kv_heads - (0 if self.reread else self.probe_heads)
            return Vectors(probe, heads * kept, self.kv_heads * kept)
        return Vectors(probe, (self.kv_heads - self.probe_heads) * rows, self.kv_heads * kept)

    def bytes(self, kind: Kind, rows: int, kept: int) -> int:
        """The same in bytes, were rows loaded one by one."""
        return self.vectors(kind, rows, kept).total * self.vector_bytes

    def chunk_bytes(self, kind: Kind, rows: int, chunks: int) -> int:
        """Count the bytes off a disk that is read in whole chunks; the wanted rows lie in `chunks` chunks. The sidecar is read as
        a whole; a layer that falls back reads all key chunks besides, probe heads and all. Where all heads are probe heads, the
        sidecar has all keys."""
        row = self.kv_heads * self.vector_bytes
        all_rows = -(-rows // self.chunk) * self.chunk
        values = chunks * self.chunk * row
        keys = values if kind == "shared" else all_rows * row
        if self.probe_heads == self.kv_heads:
            keys = 0
        return all_rows * self.probe_heads * self.vector_bytes + keys + values

    @property
    def sidecar_overhead(self) -> float:
        """The sidecar's bytes over those of all keys and values: P / (2 * kv_heads). (The paper says 1.2 %; three of
        32 heads are 4.7 %.)"""
        return self.probe_heads / (2 * self.kv_heads)


def amplification(chunks: int, chunk: int, wanted: int) -> float:
    """Divide the rows in the chunks that are read by the wanted rows in them (SPEC, Figure 5); 1 where none is."""
    return chunks * chunk / wanted if wanted else 1.0
