"""The head of an extent's file: header, tokens and checksums, to bytes and back. Pure: no I/O.

The metadata starts with two members of fixed width, so that the first 4096 bytes of a file tell its size:

    {"__metadata__":{"head_crc32c":"89abcdef","rows":"00000128","format":"1","id":..., "parent":..., ...},...

`head_crc32c` covers the whole head, itself read as eight zeros: the length, every header byte, the tokens and
the table of chunk checksums. The chunk checksums cover the rest. No byte of a file is outside both.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import inf, isnan
from typing import Final, cast, get_args

import google_crc32c
import numpy as np
import numpy.typing as npt

from afterglow.config import BLOCK_ROWS
from afterglow.errors import DamageError, StoreError
from afterglow.plan.step import ExtentRecord, Kind
from afterglow.store.extents.layout import ALIGNMENT, META_RESERVE, KVLayout, tensor_table

FORMAT_VERSION: Final = 1
Bytes = npt.NDArray[np.uint8]

_OPENING: Final = b'{"__metadata__":{"head_crc32c":"'
_METADATA_AT: Final = len(b'{"__metadata__":')
_CRC_AT: Final = 8 + len(_OPENING)  # where the eight hexadecimal digits lie in the file
_ROWS_KEY: Final = b'","rows":"'
_ROWS_AT: Final = _CRC_AT + 8 + len(_ROWS_KEY)
_ROWS_DIGITS: Final = 8


@dataclass(frozen=True, slots=True, eq=False)
class Sidecar:
    """Holds the further tables of files with probe heads. `crcs` uint32 [layers, file chunks] of the probe keys;
    `order` uint16 [layers, padded rows]: which row of the text is stored at each place (SPEC §IV-D); `version` counts how
    often the rows were put in another order; `parts` uint32 [layers, 2, file parts], of keys and values where the layout has
    parts of less than a chunk; `means` uint32 [layers], of the mean keys and values where the layout has them.
    """

    crcs: npt.NDArray[np.uint32]
    order: npt.NDArray[np.uint16]
    version: int = 0
    parts: npt.NDArray[np.uint32] | None = None
    means: npt.NDArray[np.uint32] | None = None

    @property
    def reordered(self) -> bool:
        """Tell whether some layer's rows are not in the order of the text."""
        return self.version > 0


@dataclass(frozen=True, slots=True)
class Head:
    """Holds a verified head. `crcs` is uint32 [layers, 2, file chunks]; the record's `last_used` and `hits` are 0.

    `sidecar`: None where the layout has no probe heads. `edition` names the head's bytes, for readers of chunks (`chunks`).
    """

    record: ExtentRecord
    crcs: npt.NDArray[np.uint32]
    sidecar: Sidecar | None = None
    edition: str = ""


def crc32c(data: Bytes | bytes) -> int:
    """Compute the CRC32C of a contiguous buffer."""
    # The wheel accepts bytes and numpy arrays, not memoryviews.
    return int(google_crc32c.value(data))


def encode_head(
    layout: KVLayout,
    digest: str,
    record: ExtentRecord,
    crcs: npt.NDArray[np.uint32],
    sidecar: Sidecar | None = None,
) -> bytes:
    """Make the file's first `layout.head_bytes(rows)` bytes.

    `crcs`: uint32, layers x 2 x file chunks values in any shape; `sidecar` goes with layouts that have probe heads.

    Raises:
        StoreError: the names in the record are too long to fit.
    """
    rows = record.rows
    meta = {
        "format": str(FORMAT_VERSION),
        "id": record.id,
        "parent": record.parent or "",
        "parent_rows": str(record.parent_rows),
        "salt": record.salt,
        "kind": record.kind,
        "model": digest,
    }
    if record.expires < inf:  # the expiry at the time of writing: the catalog has the present one
        meta["expires"] = repr(record.expires)
    tables = crcs.astype("<u4").tobytes()
    if sidecar is not None:
        meta["version"] = f"{sidecar.version:08d}"
        tables += sidecar.crcs.astype("<u4").tobytes() + sidecar.order.astype("<u2").tobytes()
        for more in (sidecar.parts, sidecar.means):
            tables += more.astype("<u4").tobytes() if more is not None else b""
    members = json.dumps(meta, separators=(",", ":")).encode()[1:]  # without the opening brace
    text = _OPENING + b"0" * 8 + _ROWS_KEY + b"%08d" % rows + b'",' + members
    if len(text) + 2 > META_RESERVE:
        raise StoreError(f"extent {record.id}: its metadata takes {len(text)} bytes, over {META_RESERVE}")
    text += _after_metadata(layout, rows)
    size = layout.header_bytes(rows)
    tokens = record.tokens.ljust(4 * layout.padded_rows(rows), b"\0")
    head = bytearray(struct.pack("<Q", size) + text.ljust(size) + tokens + tables)
    assert len(head) == layout.head_bytes(rows), "the tables have another shape than the layout"
    head[_CRC_AT : _CRC_AT + 8] = b"%08x" % crc32c(bytes(head))
    return bytes(head)


def _after_metadata(layout: KVLayout, rows: int) -> bytes:
    """Return the JSON behind the metadata: a function of layout and rows, and so compared as bytes."""
    return b"," + tensor_table(layout, rows) + b"}"


def peek_rows(start: bytes) -> int:
    """Return the row count written in the first bytes (at least 4096) of a file; nothing is verified yet.

    Raises:
        DamageError: this is not the start of an extent.
    """
    digits = start[_ROWS_AT : _ROWS_AT + _ROWS_DIGITS]
    if start[8:_CRC_AT] != _OPENING or not digits.isdigit() or int(digits) < 1:
        raise DamageError("not the start of an extent file")
    return int(digits)


def decode_head(
    head: bytes, layout: KVLayout, digest: str, *, extent: str | None = None, rows: int | None = None
) -> Head:
    """Verify a head and take it apart. `head` has exactly the head's bytes.

    Raises:
        DamageError: a byte is wrong, or the head belongs to another extent (`extent`, `rows`), model (`digest`), layout or
            format.
    """
    stored = head[_CRC_AT : _CRC_AT + 8]
    zeroed = head[:_CRC_AT] + b"0" * 8 + head[_CRC_AT + 8 :]
    if stored != b"%08x" % crc32c(zeroed):
        raise DamageError("the header's checksum is wrong")
    found_rows = peek_rows(head)
    size = int.from_bytes(head[:8], "little")
    if len(head) != layout.head_bytes(found_rows) or size != layout.header_bytes(found_rows):
        raise DamageError("written with another KV layout")
    text, table = head[8 : 8 + size].rstrip(b" "), _after_metadata(layout, found_rows)
    if not text.endswith(table):
        raise DamageError("written with another KV layout")
    meta = _metadata(text[_METADATA_AT : -len(table)], versioned=bool(layout.probe_heads))
    if meta["format"] != str(FORMAT_VERSION):
        raise DamageError(f"written in format {meta['format']}, this version reads {FORMAT_VERSION}")
    if meta["model"] != digest:
        raise DamageError(f"written by another model ({meta['model'][:16]})")
    if (extent is not None and meta["id"] != extent) or (rows is not None and found_rows != rows):
        raise DamageError(f"holds another extent ({meta['id'][:16]}, {found_rows} rows)")
    if meta["kind"] not in get_args(Kind):
        raise DamageError(f"unknown kind {meta['kind']!r}")
    record = ExtentRecord(
        id=meta["id"],
        parent=meta["parent"] or None,
        parent_rows=int(meta["parent_rows"]),
        salt=meta["salt"],
        kind=cast(Kind, meta["kind"]),
        tokens=head[8 + size : 8 + size + 4 * found_rows],
        file_bytes=layout.file_bytes(found_rows),
        last_used=0.0,
        expires=float(meta.get("expires", inf)),
    )
    layers, chunks, at = layout.layers, layout.file_chunks(found_rows), 8 + size + 4 * layout.padded_rows(found_rows)
    crcs = np.frombuffer(head, "<u4", 2 * layers * chunks, at).reshape(layers, 2, -1)
    if not layout.probe_heads:
        return Head(record, crcs)
    probe_crcs = np.frombuffer(head, "<u4", layers * chunks, at + crcs.nbytes).reshape(layers, -1)
    at += crcs.nbytes + probe_crcs.nbytes
    order = np.frombuffer(head, "<u2", layers * layout.padded_rows(found_rows), at).reshape(layers, -1)
    rest = np.frombuffer(head, "<u4", offset=at + order.nbytes)
    means = rest[len(rest) - layers :] if layout.means else None
    parts = None
    if layout.part_rows < BLOCK_ROWS:
        parts = rest[: 2 * layers * layout.file_parts(found_rows)].reshape(layers, 2, -1)
    return Head(record, crcs, Sidecar(probe_crcs, order, int(meta["version"]), parts, means))


def _metadata(text: bytes, versioned: bool) -> dict[str, str]:
    """Read the metadata. A file that was made by others may have a right checksum, and anything in it.

    Raises:
        DamageError: a value is missing, or is not what it has to be.
    """
    try:
        found: dict[str, str] = json.loads(text)
        for key in ("format", "model", "id", "parent", "salt", "kind"):
            found[key].encode()  # neither another type nor half a surrogate pair
        numbers = (int(found["parent_rows"]), int(found["version"]) if versioned else 0)
        if not 0 <= min(numbers) <= max(numbers) < 10**_ROWS_DIGITS or isnan(float(found.get("expires", "inf"))):
            raise ValueError("a number is out of its range")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DamageError(f"the header's metadata cannot be read: {error!r}") from error
    return found


assert META_RESERVE < ALIGNMENT  # `peek_rows` needs no more than one aligned page
