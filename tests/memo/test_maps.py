"""The map store: packing, records, budgets, damage."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afterglow.errors import ConfigError, DamageError
from afterglow.memo.maps import HEADER_BYTES, MAPS, RECORDS, Identity, MapStore, token_key
from afterglow.memo.packing import pack, packed_size, unpack

IDENTITY = Identity(
    model_digest="d" * 64,
    quantisation="float32",
    template="{text}",
    layers=2,
    heads=3,
    causal=True,
    dtype="float32",
)


def maps_of(tokens: int, seed: int = 0, *, causal: bool = True) -> np.ndarray:
    scores = torch.randn(2, 3, tokens, tokens, generator=torch.Generator().manual_seed(seed))
    if causal:
        scores.masked_fill_(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf)
    return scores.softmax(-1).numpy()


@settings(deadline=None)
@given(st.integers(1, 40), st.booleans(), st.integers(0, 1000))
def test_what_is_packed_comes_back(tokens: int, causal: bool, seed: int) -> None:
    maps = maps_of(tokens, seed, causal=causal)
    packed = pack(maps, causal=causal)
    assert packed.shape == (2, 3, packed_size(tokens, causal=causal))
    back = unpack(torch.from_numpy(np.ascontiguousarray(packed)), tokens, causal=causal)
    np.testing.assert_array_equal(back.numpy(), maps)


def test_a_causal_map_takes_half(tmp_path: Path) -> None:
    assert packed_size(32, causal=True) == 528
    llama = dataclasses.replace(IDENTITY, layers=32, heads=32, dtype="float16")
    assert llama.record_bytes(32) == 32 * 32 * 528 * 2
    assert dataclasses.replace(llama, causal=False).record_bytes(32) == 2 << 20  # n H s^2 2 bytes: 2 MiB


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("causal", [True, False])
def test_records_come_back_from_another_opening(tmp_path: Path, dtype: str, causal: bool) -> None:
    identity = dataclasses.replace(IDENTITY, dtype=dtype, causal=causal)
    store = MapStore.create(tmp_path, identity)
    kept = [maps_of(tokens, tokens, causal=causal) for tokens in (4, 1, 7)]
    for number, maps in enumerate(kept):
        assert store.append(maps, token_key([number]), later=number == 2) == number
    store.close()
    store = MapStore.open(tmp_path)
    assert store.identity == identity
    assert store.tokens.tolist() == [4, 1, 7]
    assert store.keys() == [token_key([number]) for number in range(3)]
    assert store.later.tolist() == [False, False, True]
    for number, maps in enumerate(kept):
        back = unpack(torch.from_numpy(store.read(number).copy()), maps.shape[-1], causal=causal)
        np.testing.assert_allclose(back.numpy(), maps, atol=0 if dtype == "float32" else 5e-4)
    assert list(store.check()) == []


def test_nbytes_is_what_is_on_disk_and_cost_what_a_record_adds(tmp_path: Path) -> None:
    store = MapStore.create(tmp_path, IDENTITY)
    for tokens in (5, 3, 9):
        before, cost = store.nbytes, store.cost(tokens)
        store.append(maps_of(tokens), token_key([tokens]))
        store.flush()
        assert store.nbytes == before + cost == sum((tmp_path / name).stat().st_size for name in (MAPS, RECORDS))


def test_only_the_damaged_record_is_refused(tmp_path: Path) -> None:
    store = MapStore.create(tmp_path, IDENTITY)
    for number in range(3):
        store.append(maps_of(6, number), token_key([number]))
    store.close()
    second = HEADER_BYTES + IDENTITY.record_bytes(6) + 100
    with (tmp_path / MAPS).open("r+b") as file:
        file.seek(second)
        byte = file.read(1)
        file.seek(second)
        file.write(bytes([byte[0] ^ 1]))
    store = MapStore.open(tmp_path)
    assert list(store.check()) == [1]
    store.read(0), store.read(2)
    with pytest.raises(DamageError, match="record 1 is damaged"):
        store.read(1)


def test_a_record_is_checked_when_it_is_first_read(tmp_path: Path) -> None:
    """A second look at one that was whole costs nothing; `check` reads all anew, and a number that is given again counts as new."""
    store = MapStore.create(tmp_path, IDENTITY)
    for number in range(3):
        store.append(maps_of(6, number), token_key([number]))
    store.flush()
    whole = store.read(2).copy()
    with (tmp_path / MAPS).open("r+b") as file:
        file.seek(HEADER_BYTES + 2 * -(-IDENTITY.record_bytes(6) // 64) * 64)
        file.write(b"\xff\xff")
    assert not np.array_equal(store.read(2), whole)
    assert list(store.check()) == [2]
    with pytest.raises(DamageError, match="record 2 is damaged"):
        store.read(2)
    store.cut(1)
    store.append(maps_of(6, 7), token_key([7]))
    store.flush()
    store.read(1)
    store.cut(1)
    store.append(maps_of(6, 8), token_key([8]))
    store.flush()
    with (tmp_path / MAPS).open("r+b") as file:
        file.seek(HEADER_BYTES + -(-IDENTITY.record_bytes(6) // 64) * 64)
        file.write(b"\xff\xff")
    with pytest.raises(DamageError, match="record 1 is damaged"):
        store.read(1)
    store.close()


def test_a_cut_file_loses_what_is_cut(tmp_path: Path) -> None:
    store = MapStore.create(tmp_path, IDENTITY)
    for number in range(3):
        store.append(maps_of(6, number), token_key([number]))
    store.close()
    os.truncate(tmp_path / MAPS, HEADER_BYTES + IDENTITY.record_bytes(6))
    assert list(MapStore.open(tmp_path).check()) == [1, 2]


def test_entries_that_were_not_finished_do_not_count(tmp_path: Path) -> None:
    store = MapStore.create(tmp_path, IDENTITY)
    for number in range(3):
        store.append(maps_of(6, number), token_key([number]))
    store.close()
    raw = (tmp_path / RECORDS).read_bytes()
    (tmp_path / RECORDS).write_bytes(raw[:-7])
    store = MapStore.open(tmp_path, writable=True)
    assert len(store) == 2
    store.append(maps_of(4), token_key([9]))
    store.close()
    assert MapStore.open(tmp_path).tokens.tolist() == [6, 6, 4]
    assert list(MapStore.open(tmp_path).check()) == []


@pytest.mark.parametrize("damaged", [1, 2])
def test_a_damaged_entry_is_only_its_own_record(tmp_path: Path, damaged: int) -> None:
    store = MapStore.create(tmp_path, IDENTITY)
    for number in range(3):
        store.append(maps_of(6, number), token_key([number]))
    store.close()
    raw = bytearray((tmp_path / RECORDS).read_bytes())
    raw[damaged * 40 + 8] ^= 1
    (tmp_path / RECORDS).write_bytes(raw)
    store = MapStore.open(tmp_path)
    assert store.tokens.tolist() == [0 if number == damaged else 6 for number in range(3)]
    assert list(store.check()) == [damaged]


def test_headers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no attention maps"):
        MapStore.open(tmp_path)
    MapStore.create(tmp_path, IDENTITY).close()
    raw = (tmp_path / MAPS).read_bytes()
    (tmp_path / MAPS).write_bytes(raw.replace(b'"format": 1', b'"format": 7'))
    with pytest.raises(ConfigError, match="format 7, this program reads 1"):
        MapStore.open(tmp_path)
    (tmp_path / MAPS).write_bytes(b"x" * HEADER_BYTES)
    with pytest.raises(DamageError, match="header is damaged"):
        MapStore.open(tmp_path)


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    store = MapStore.create(tmp_path, IDENTITY)
    with pytest.raises(ConfigError, match="being written by another process"):
        MapStore.open(tmp_path, writable=True)
    store.close()
    MapStore.open(tmp_path, writable=True).close()


def test_opening_reads_no_maps(tmp_path: Path) -> None:
    """10,000 sentences: only their entries are read. A minute's margin over what it takes, against a full read."""
    store = MapStore.create(tmp_path, IDENTITY)
    maps = maps_of(3)
    for number in range(10_000):
        store.append(maps, token_key([number]))
    store.close()
    os.truncate(tmp_path / MAPS, HEADER_BYTES)  # had it looked at a single map, it would have noticed
    began = time.monotonic()
    assert len(MapStore.open(tmp_path)) == 10_000
    assert time.monotonic() - began < 60
