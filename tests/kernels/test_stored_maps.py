"""Stored attention maps times values are the mean of the maps, unpacked, times values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afterglow.kernels.built import native
from afterglow.kernels.stored_maps import StoredMaps, apply_stored
from afterglow.memo.packing import pack

pytestmark = pytest.mark.skipif(native() is None, reason="nothing has been built for this machine")


@given(
    count=st.integers(1, 4),
    length=st.integers(1, 40),
    heads=st.sampled_from([(1, 1), (4, 4), (6, 2), (9, 3)]),
    head_dim=st.sampled_from([8, 16, 24, 32, 48, 64, 80, 96, 128]),
    parts=st.integers(1, 3),
    causal=st.booleans(),
    dtype=st.sampled_from([np.float16, np.float32]),
    threads=st.sampled_from([1, 3]),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=150)
def test_as_the_mean_of_maps_times_values(
    count: int,
    length: int,
    heads: tuple[int, int],
    head_dim: int,
    parts: int,
    causal: bool,
    dtype: type,
    threads: int,
    seed: int,
) -> None:
    """Some parts weigh nothing, values are a part of wider rows, and rows between those of sentences stay as they are."""
    random = np.random.default_rng(seed)
    (query_heads, kv_heads), layers = heads, 2
    maps = (
        random.random((count, parts, layers, query_heads, length, length), np.float32) ** 8
    )  # some have few bits in half precision
    maps = np.tril(maps) if causal else maps
    stored = np.ascontiguousarray(pack(maps, causal=causal)).astype(dtype)
    weights = random.random((count, parts), np.float32)
    weights[random.random((count, parts)) < 0.2] = 0
    weights[:, 0] += 0.1
    layer = stored[:, :, 1]
    addresses = np.array([[layer[i, j].ctypes.data for j in range(parts)] for i in range(count)])
    addresses[weights == 0] = 0
    wide = torch.from_numpy(random.standard_normal((count * length, kv_heads * head_dim + 5), np.float32))
    values = wide[:, : kv_heads * head_dim].view(count, length, kv_heads, head_dim)
    rows = random.permutation(count) * (length + 1)
    out = torch.full((count * (length + 1), query_heads, head_dim), 7.0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert apply_stored(
            StoredMaps(addresses, weights, np.dtype(dtype), query_heads, length, causal), values, rows, out
        )
    finally:
        torch.set_num_threads(before)
    whole = (maps.astype(dtype).astype(np.float64) * weights[..., None, None, None, None]).sum(1)[:, 1]
    per_head = values.double().numpy().repeat(query_heads // kv_heads, 2)
    wanted = np.einsum("nhij,njhd->nihd", whole, per_head)
    for sentence, row in enumerate(rows):
        found = out[row : row + length].double().numpy()
        np.testing.assert_allclose(found, wanted[sentence], atol=2e-6 * length, rtol=0)
        assert bool((out[row + length] == 7).all())


def test_a_sentences_bits_do_not_depend_on_the_others() -> None:
    random = np.random.default_rng(0)
    stored = random.random((5, 3, 37 * 37), np.float32).astype(np.float16)
    values = torch.from_numpy(random.standard_normal((5, 37, 3, 32), np.float32))
    together = torch.empty(5 * 37, 3, 32)
    addresses, weights = np.array([[one.ctypes.data] for one in stored]), np.ones((5, 1), np.float32)
    maps = StoredMaps(addresses, weights, stored.dtype, 3, 37, False)
    assert apply_stored(maps, values, np.arange(5) * 37, together)
    for n in range(5):
        alone = torch.empty(37, 3, 32)
        one = StoredMaps(addresses[n : n + 1], weights[n : n + 1], stored.dtype, 3, 37, False)
        assert apply_stored(one, values[n : n + 1], np.zeros(1, np.int64), alone)
        assert torch.equal(alone, together[n * 37 : (n + 1) * 37])


def test_what_the_kernel_cannot_do_is_left_to_torch() -> None:
    half, single = np.dtype(np.float16), np.dtype(np.float32)
    rows = np.zeros(2, np.int64)
    for dtype, values, kind in (
        (half, torch.empty(2, 4, 2, 12), torch.float32),  # no whole vectors
        (half, torch.empty(2, 4, 2, 16).double(), torch.float64),
        (half, torch.empty(2, 2, 4, 16).transpose(1, 2), torch.float32),  # heads apart
        (single, torch.empty(2, 6, 2, 16)[:, :4], torch.float32),  # rows between sentences
        (np.dtype(np.float64), torch.empty(2, 4, 2, 16), torch.float32),
    ):
        maps = StoredMaps(np.zeros((2, 1), np.int64), np.ones((2, 1), np.float32), dtype, 2, 4, True)
        out = torch.full((8, 2, values.shape[-1]), 7.0, dtype=kind)
        assert not apply_stored(maps, values, rows, out)
        assert bool((out == 7).all())


def test_rows_may_be_a_part_of_others() -> None:
    stored = np.full((2, 2, 16), 0.25, np.float32)
    addresses, weights = np.array([[one.ctypes.data] for one in stored]), np.ones((2, 1), np.float32)
    out = torch.full((12, 2, 16), 7.0)
    maps = StoredMaps(addresses, weights, stored.dtype, 2, 4, False)
    assert apply_stored(maps, torch.ones(2, 4, 2, 16), (np.arange(4) * 4)[::2], out)
    assert out[:, 0, 0].tolist() == [1.0] * 4 + [7.0] * 4 + [1.0] * 4
