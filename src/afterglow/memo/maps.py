"""The map store: one file of attention maps, a contiguous record for each sentence, mapped into memory.

    maps.bin      offset 0   4096 bytes   JSON: format, model digest, quantisation, template, layout; then spaces
                  4096       record 0     [layers, heads, packed] float16 or float32, from a multiple of 64 bytes on
                  ...        record 1
    records.bin   40 bytes a record       where, how many tokens, checksums, whose maps (see ENTRY)

A record's layers follow each other (AttnCache, 3.1), so that one read ahead brings them all; a lookup yields views, no
copies. A record counts from the moment its entry is complete, and entries come after the bytes they describe: what a
killed process leaves beyond the last complete entry is overwritten. Knows no models and no vectors.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from afterglow.errors import ConfigError, DamageError
from afterglow.memo.packing import pack, packed_size

FORMAT: Final = 1
HEADER_BYTES: Final = 4096
ALIGNMENT: Final = 64
MAPS, RECORDS = "maps.bin", "records.bin"
DTYPES: Final[dict[str, np.dtype[Any]]] = {"float16": np.dtype("<f2"), "float32": np.dtype("<f4")}
ENTRY: Final = np.dtype(
    [("offset", "<u8"), ("tokens", "<u4"), ("crc", "<u4"), ("key", "V16"), ("later", "<u4"), ("own_crc", "<u4")]
)  # crc: CRC32C of the record; own_crc: of the entry before it; later: 1 where added after the projector's training


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """All that maps depend on besides the tokens: two stores with the same are interchangeable."""

    model_digest: str
    quantisation: str  # of the weights: float32, int8, ...
    template: str  # what each text was put into; "{}" is the text alone
    layers: int
    heads: int
    causal: bool
    dtype: str  # of the stored maps

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"maps are stored as {' or '.join(DTYPES)}, not {self.dtype!r}")

    def record_bytes(self, tokens: int) -> int:
        """Bytes of one sentence's maps: layers x heads x tokens squared (causal: half as many) x 2 or 4."""
        return self.layers * self.heads * packed_size(tokens, causal=self.causal) * DTYPES[self.dtype].itemsize


def token_key(ids: Sequence[int]) -> bytes:
    """16 bytes that name a sentence's tokens."""
    return hashlib.blake2b(np.asarray(ids, "<u4").tobytes(), digest_size=16).digest()


class MapStore:
    """Maps by record number, 0, 1, 2, ... in the order of appending."""

    def __init__(self, folder: Path, identity: Identity, file: int, entries: NDArray[Any], *, writable: bool) -> None:
        """Use `create` or `open`."""
        self.folder, self.identity, self.writable = folder, identity, writable
        self._file, self._entries = file, entries
        self._count = len(entries)  # `_entries` may have room for more
        self._mapped: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._pending: list[bytes] = []
        self._checked: set[int] = set()  # numbers of records that were whole when they were first read

    @staticmethod
    def create(folder: Path, identity: Identity) -> MapStore:
        """Make an empty store, locked for writing. Raises: ConfigError where another process writes to it."""
        folder.mkdir(parents=True, exist_ok=True)
        header = json.dumps({"format": FORMAT, **dataclasses.asdict(identity)}).encode()
        if len(header) > HEADER_BYTES:
            raise ConfigError(
                f"the template has {len(identity.template)} characters, which is more than a header holds"
            )
        file = os.open(folder / MAPS, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(file, folder)
            os.ftruncate(file, 0)
            (folder / RECORDS).write_bytes(b"")
            os.pwrite(file, header.ljust(HEADER_BYTES), 0)
        except BaseException:
            os.close(file)
            raise
        return MapStore(folder, identity, file, np.empty(0, ENTRY), writable=True)

    @staticmethod
    def open(folder: Path, *, writable: bool = False) -> MapStore:
        """Open a store. Raises: ConfigError (no store, another format, a second writer), DamageError (header)."""
        if not (folder / MAPS).is_file():
            raise ConfigError(f"{folder} holds no attention maps; afterglow memo build makes them")
        file = os.open(folder / MAPS, os.O_RDWR if writable else os.O_RDONLY)
        try:
            if writable:
                _lock(file, folder)
            identity = _read_header(os.pread(file, HEADER_BYTES, 0), folder)
            entries = _read_entries(folder / RECORDS)
        except BaseException:
            os.close(file)
            raise
        return MapStore(folder, identity, file, entries, writable=writable)

    def close(self) -> None:
        """Write pending entries and unlock. Views that were handed out stay valid."""
        if self._file >= 0:
            self.flush()
            os.close(self._file)
            self._file = -1

    def __len__(self) -> int:
        return self._count

    @property
    def tokens(self) -> NDArray[np.int64]:
        """Lengths of all records, in tokens; 0 where an entry is damaged."""
        return self._entries["tokens"][: self._count].astype(np.int64)

    @property
    def later(self) -> NDArray[np.bool_]:
        """Which records came after the projector had been trained."""
        return self._entries["later"][: self._count].astype(bool)

    def keys(self) -> list[bytes]:
        """`token_key` of every record."""
        return [bytes(key) for key in self._entries["key"][: self._count]]

    @property
    def nbytes(self) -> int:
        """Bytes on disk of maps and entries, header included: what a budget counts."""
        return self._end() + self._count * ENTRY.itemsize

    def cost(self, tokens: int) -> int:
        """By how much a record of `tokens` tokens makes `nbytes` grow."""
        return _align(self._end()) - self._end() + self.identity.record_bytes(tokens) + ENTRY.itemsize

    def append(self, maps: NDArray[Any], key: bytes, *, later: bool = False) -> int:
        """Add `maps` [layers, heads, s, s] under `key`; returns its number. Counts for others after `flush`."""
        assert self.writable
        tokens = maps.shape[-1]
        assert maps.shape == (self.identity.layers, self.identity.heads, tokens, tokens)
        dtype = DTYPES[self.identity.dtype]
        payload = np.ascontiguousarray(pack(maps, causal=self.identity.causal), dtype).tobytes()
        entry = np.zeros(1, ENTRY)
        entry["offset"], entry["tokens"] = _align(self._end()), tokens
        entry["crc"], entry["key"], entry["later"] = google_crc32c.value(payload), np.void(key), int(later)
        entry["own_crc"] = google_crc32c.value(entry.tobytes()[:-4])
        _write_all(self._file, payload, int(entry["offset"][0]))
        if self._count == len(self._entries):
            self._entries = np.concatenate((self._entries, np.zeros(max(64, self._count), ENTRY)))
        self._entries[self._count] = entry[0]
        self._count += 1
        self._pending.append(entry.tobytes())
        return self._count - 1

    def flush(self) -> None:
        """Write the entries of appended records; from now on a killed process loses none."""
        if self._pending:
            with open(self.folder / RECORDS, "r+b") as records:
                records.seek((self._count - len(self._pending)) * ENTRY.itemsize)
                records.write(b"".join(self._pending))
                records.truncate()
            self._pending.clear()

    def cut(self, count: int) -> None:
        """Forget all records from number `count` on."""
        assert self.writable
        self.flush()
        self._count = min(count, self._count)
        self._checked = {number for number in self._checked if number < self._count}
        os.truncate(self.folder / RECORDS, self._count * ENTRY.itemsize)

    def prefetch(self, numbers: NDArray[np.int64]) -> None:
        """Ask the kernel to bring these records' bytes, all layers, into memory; returns at once."""
        if hasattr(os, "posix_fadvise"):
            for number in numbers:
                entry = self._entries[int(number)]
                size = self.identity.record_bytes(int(entry["tokens"]))
                os.posix_fadvise(self._file, int(entry["offset"]), size, os.POSIX_FADV_WILLNEED)

    def read(self, number: int) -> NDArray[Any]:
        """Read record `number` as a read-only view [layers, heads, packed], and check it when it is read for the first time.

        Raises: DamageError.
        """
        entry = self._entries[number]
        start, size = int(entry["offset"]), self.identity.record_bytes(int(entry["tokens"]))
        if start + size > self._mapped.size:
            self._map()
        payload = self._mapped[start : start + size]
        if not size:
            raise DamageError(f"{self.folder / RECORDS}: entry {number} is damaged")
        if payload.size < size:
            raise DamageError(f"{self.folder / MAPS}: ends before record {number} does")
        if number not in self._checked:
            if google_crc32c.value(payload) != entry["crc"]:
                raise DamageError(f"{self.folder / MAPS}: record {number} is damaged (its checksum differs)")
            self._checked.add(number)
        return payload.view(DTYPES[self.identity.dtype]).reshape(self.identity.layers, self.identity.heads, -1)

    def check(self) -> Iterator[int]:
        """Read all records anew. Yields the numbers of damaged ones."""
        self._checked.clear()
        for number in range(len(self)):
            try:
                self.read(number)
            except DamageError:
                yield number

    def _end(self) -> int:
        whole = np.flatnonzero(self._entries["tokens"][: self._count])
        if not len(whole):
            return HEADER_BYTES
        last = self._entries[whole[-1]]
        return int(last["offset"]) + self.identity.record_bytes(int(last["tokens"]))

    def _map(self) -> None:
        size = os.fstat(self._file).st_size
        self._mapped = np.frombuffer(mmap.mmap(self._file, size, access=mmap.ACCESS_READ), np.uint8)


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _lock(file: int, folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ConfigError(f"{folder} is being written by another process; wait for it to end") from None


def _write_all(file: int, payload: bytes, offset: int) -> None:
    left = memoryview(payload)
    while left:
        written = os.pwrite(file, left, offset)
        left, offset = left[written:], offset + written


def _read_header(raw: bytes, folder: Path) -> Identity:
    try:
        found = json.loads(raw)
        version = found.pop("format")
        if version == FORMAT:
            return Identity(**found)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise DamageError(f"{folder / MAPS}: its header is damaged; build it anew") from None
    raise ConfigError(f"{folder} has format {version}, this program reads {FORMAT}; build it anew")


def _read_entries(path: Path) -> NDArray[Any]:
    """All entries but a last one that was never finished; damaged ones have 0 tokens."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raw = b""
    entries = np.frombuffer(raw[: len(raw) // ENTRY.itemsize * ENTRY.itemsize], ENTRY).copy()
    good = np.array([google_crc32c.value(entry.tobytes()[:-4]) == entry["own_crc"] for entry in entries], bool)
    entries["tokens"][~good] = 0
    return entries
