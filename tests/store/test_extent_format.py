"""The format alone: sizes, round trips, and that no byte escapes the checksums."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from afterglow.errors import ConfigError, DamageError, StoreError
from afterglow.store.extents.disk_tier import DiskTier
from afterglow.store.extents.head import crc32c, decode_head, encode_head, peek_rows
from afterglow.store.extents.layout import KVLayout, tensor_table
from tests.store.store_kit import ALIGNED, DIGEST, EIGHT_BITS, ODD, arena_of, contents, record

layouts = st.builds(
    KVLayout,
    layers=st.integers(1, 4),
    kv_heads=st.integers(1, 5),
    head_dim=st.integers(1, 24),
    dtype=st.sampled_from(["F32", "BF16", "F16", "I8"]),
)


def head_of(layout, rows, **more):
    shape = (layout.layers, 2, layout.file_chunks(rows))
    crcs = np.random.default_rng(1).integers(0, 2**32, shape, np.uint32)
    return encode_head(layout, DIGEST, record(3, rows, **more), crcs), crcs


@settings(max_examples=60, deadline=None)
@given(
    layout=layouts,
    rows=st.integers(1, 1024),
    parent=st.none() | st.just("ab" * 32),
    text=st.text(max_size=60),
)
def test_heads_come_back(layout, rows, parent, text):
    wanted = record(3, rows, parent=parent, parent_rows=rows + 5, salt=text, kind="session")
    crcs = np.arange(layout.layers * 2 * layout.file_chunks(rows), dtype=np.uint32)
    crcs = crcs.reshape(layout.layers, 2, -1)
    raw = encode_head(layout, DIGEST, wanted, crcs)
    assert len(raw) == layout.head_bytes(rows)
    assert peek_rows(raw[:4096]) == rows
    found = decode_head(raw, layout, DIGEST, extent=wanted.id, rows=rows)
    assert np.array_equal(found.crcs, crcs)
    for name in ("id", "parent", "parent_rows", "salt", "kind", "tokens"):
        assert getattr(found.record, name) == getattr(wanted, name)
    assert found.record.file_bytes == layout.file_bytes(rows)


@settings(max_examples=100, deadline=None)
@given(layout=layouts, rows=st.integers(1, 1100))
def test_every_tensor_starts_aligned_and_sizes_add_up(layout, rows):
    assert layout.file_bytes(rows) % 4096 == 0
    if layout.aligned:
        assert layout.head_bytes(rows) % 4096 == 0
        assert layout.tensor_bytes(rows) % 4096 == 0
    else:
        assert layout.tensor_bytes(rows) == layout.blocks(rows) * layout.chunk_bytes
    assert layout.tensor_bytes(rows) >= layout.blocks(rows) * layout.chunk_bytes
    assert layout.offset(rows, 0, 0) == layout.head_bytes(rows)
    assert layout.offset(rows, layout.layers, 0) == layout.file_bytes(rows)
    second = layout.head_bytes(rows) + layout.tensor_bytes(rows) + layout.chunk_bytes
    assert layout.offset(rows, 0, 1, 1) == second


def test_any_flipped_bit_of_the_head_is_found():
    raw, _ = head_of(ALIGNED, 65)
    for position in range(len(raw)):
        damaged = bytearray(raw)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(DamageError):
            decode_head(bytes(damaged), ALIGNED, DIGEST)


@pytest.mark.parametrize(
    ("layout", "digest", "expect", "says"),
    [
        (KVLayout(2, 2, 4, "F32"), DIGEST, {}, "layout"),
        (KVLayout(2, 4, 4, "F32"), DIGEST, {}, "layout"),  # the same sizes, another shape
        (KVLayout(2, 2, 16, "BF16"), DIGEST, {}, "layout"),
        (ALIGNED, "0" * 64, {}, "another model"),
        (ALIGNED, DIGEST, {"extent": "ff"}, "another extent"),
        (ALIGNED, DIGEST, {"rows": 64}, "another extent"),
    ],
)
def test_heads_of_something_else_are_refused(layout, digest, expect, says):
    raw, _ = head_of(ALIGNED, 65)
    with pytest.raises(DamageError, match=says):
        decode_head(raw, layout, digest, **expect)


def test_a_head_with_anything_behind_its_tensor_table_is_refused():
    raw, _ = head_of(ALIGNED, 65)
    end = 8 + int.from_bytes(raw[:8], "little")
    assert raw[end - 1 :][:1] == b" "
    changed = signed(raw[: end - 1] + b"}" + raw[end:])
    with pytest.raises(DamageError, match="layout"):
        decode_head(changed, ALIGNED, DIGEST)


def signed(raw):
    """Give the head of a file, changed by hand, its right checksum."""
    changed = bytearray(raw)
    crc_at = raw.index(b"head_crc32c") + len(b'head_crc32c":"')
    changed[crc_at : crc_at + 8] = b"0" * 8
    changed[crc_at : crc_at + 8] = b"%08x" % crc32c(bytes(changed))
    return bytes(changed)


def with_metadata(raw, old, new):
    """Put other bytes into the metadata of a head, and its right checksum."""
    end = 8 + int.from_bytes(raw[:8], "little")
    text = raw[8:end].rstrip(b" ")
    assert text.count(old) == 1
    return signed(raw[:8] + text.replace(old, new).ljust(end - 8) + raw[end:])


MADE = [  # by others, with a right checksum
    (b'"parent_rows":"0"', b'"parent_rows":"x"'),
    (b'"parent_rows":"0"', b'"parent_rows":"-1"'),
    (b'"parent_rows":"0"', b'"parents":"0"'),
    (b'"salt":"s"', b'"salt":7'),
    (b'"salt":"s"', b'"salt":"\xff"'),
    (b'"salt":"s"', b'"salt":' + b"[" * 900),
    (b'"kind":"exact"', b'"expires":"nan","kind":"exact"'),
    (b'"kind":"exact"', b'"kind":["exact"]'),
    (b'"format":', b"format:"),
    (b'"salt":"s"', b'"salt":"\\ud800"'),
    (b'"parent_rows":"0"', b'"parent_rows":"1' + b"0" * 30 + b'"'),
    (b'"parent_rows":"0"', b'"parent_rows":1e400'),
    (b'"kind":"exact"', b'"expires":1' + b"0" * 400 + b',"kind":"exact"'),
]


@pytest.mark.parametrize(("old", "new"), MADE)
def test_metadata_that_others_have_made_is_damage(old, new):
    raw, _ = head_of(ALIGNED, 65)
    with pytest.raises(DamageError, match="metadata"):
        decode_head(with_metadata(raw, old, new), ALIGNED, DIGEST)


def test_names_that_do_not_fit_are_refused():
    with pytest.raises(StoreError, match="metadata"):
        head_of(ALIGNED, 64, salt="x" * 2000)


def test_eight_bits_take_a_quarter():
    """At head dimension 64: 68 bytes of each head, where float32 has 256; files as well, from a few hundred rows on."""
    for heads in (1, 3, 8):
        wide, narrow = KVLayout(30, heads, 64, "F32"), KVLayout(30, heads, 64, "I8")
        assert wide.block_bytes / narrow.block_bytes == 256 / 68
        assert wide.data_bytes(100) / narrow.data_bytes(100) == 256 / 68
        assert wide.file_bytes(64) > (3.5 if heads > 1 else 3.3) * narrow.file_bytes(
            64
        )  # a head of the file is the same for both


@pytest.mark.parametrize("values", [(0, 1, 1, "F32"), (1, 0, 1, "F32"), (1, 1, 1, "F64")])
def test_impossible_layouts_are_refused(values):
    with pytest.raises(ConfigError):
        KVLayout(*values)


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 1024])
@pytest.mark.parametrize("layout", [ALIGNED, ODD, EIGHT_BITS], ids=str)
def test_the_safetensors_package_reads_an_extent(tmp_path, layout, rows):
    tier = DiskTier(tmp_path, layout, DIGEST)
    arena = arena_of(layout, 20)
    slots = list(range(layout.blocks(rows)))
    wanted = contents(arena, slots, rows)
    source = record(1, rows, parent="cd" * 32)
    assert tier.write(source, arena, slots, lambda: None) == layout.file_bytes(rows)
    path = tier.path(source.id)
    assert path.stat().st_size == layout.file_bytes(rows)
    with safe_open(path, "pt") as file:
        meta = file.metadata()
        assert (meta["id"], meta["parent"], int(meta["rows"])) == (source.id, "cd" * 32, rows)
        tokens = file.get_tensor("tokens").numpy()
        assert tokens[:rows].tobytes() == source.tokens
        assert not tokens[rows:].any()
        for layer in range(layout.layers):
            for kv, name in enumerate(("keys", "values")):
                tensor = file.get_tensor(f"layers.{layer}.{name}")
                assert tuple(tensor.shape) == (layout.padded_rows(rows), layout.kv_heads, layout.width)
                raw = tensor.contiguous().view(torch.uint8).reshape(len(tensor), -1).numpy()
                assert np.array_equal(raw[:rows], wanted[layer, kv])
                assert not raw[rows:].any()


def test_the_first_bytes_tell_the_size(tmp_path):
    raw, _ = head_of(KVLayout(80, 8, 128, "BF16"), 1024)
    size = int.from_bytes(raw[:8], "little")
    assert size + 8 > 4096
    assert peek_rows(raw[:4096]) == 1024
    assert json.loads(raw[8 : 8 + size])["__metadata__"]["format"] == "1"
    with pytest.raises(DamageError):
        peek_rows(b"\0" * 4096)


@pytest.mark.parametrize("layout", [ALIGNED, ODD, EIGHT_BITS])
def test_all_row_counts_of_one_padding_share_a_table(layout):
    """It has thousands of bytes for a large model, and a cache has extents of any length."""
    assert tensor_table(layout, 1) is tensor_table(layout, 64)
    assert tensor_table(layout, 1) == tensor_table(layout, layout.padded_rows(1))
