"""Attention over segments and their merge, against the formula in float64."""

from __future__ import annotations

import math
from itertools import pairwise, permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from afterglow.kernels import attention
from afterglow.kernels.attention import attend, merge, merge_into, with_sinks
from tests import doors

D = 16
SCALE = 0.3


def reference(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool, window: int = 0, cap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The formula, in float64, one head at a time."""
    n, heads, _ = q.shape
    rows, kv_heads, _ = keys.shape
    out = torch.zeros(n, heads, values.shape[-1], dtype=torch.float64)
    lse = torch.full((n, heads), -math.inf, dtype=torch.float64)
    for i in range(n):
        seen = rows - n + i + 1 if causal else rows
        if seen <= 0:
            continue
        first = max(0, seen - window) if window else 0
        for h in range(heads):
            g = h // (heads // kv_heads)
            scores = keys[first:seen, g].double() @ q[i, h].double() * scale
            if cap:
                scores = cap * torch.tanh(scores / cap)
            lse[i, h] = scores.logsumexp(0)
            out[i, h] = (scores - lse[i, h]).exp() @ values[first:seen, g].double()
    return out, lse


def draw(n: int, rows: int, heads: int, kv_heads: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(n, heads, D, generator=generator) * 2
    keys, values = torch.randn(2, rows, kv_heads, D, generator=generator).unbind(0)
    return q, keys, values


def close(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor], atol: float = 1e-5) -> None:
    assert ours[1].dtype == torch.float32
    torch.testing.assert_close(ours[0].double(), theirs[0].double(), atol=atol, rtol=0)
    torch.testing.assert_close(ours[1].double(), theirs[1].double(), atol=max(atol, 3e-6), rtol=1e-6)


HEADS = st.sampled_from([(4, 4), (4, 1), (8, 2), (8, 1), (1, 1), (6, 2)])


@settings(deadline=None, max_examples=60)
@given(n=st.integers(0, 9), extra=st.integers(-4, 80), heads=HEADS, causal=st.booleans(), seed=st.integers(0, 9))
def test_attend_is_the_formula(n: int, extra: int, heads: tuple[int, int], causal: bool, seed: int) -> None:
    q, keys, values = draw(n, max(0, n + extra), *heads, seed=seed)
    close(attend(q, keys, values, scale=SCALE, causal=causal), reference(q, keys, values, SCALE, causal))


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(0, 9),
    extra=st.integers(-4, 80),
    heads=HEADS,
    window=st.integers(1, 90),
    cap=st.sampled_from([0.0, 0.7, 30.0]),
    seed=st.integers(0, 9),
)
def test_windows_and_caps_are_the_formula(
    n: int, extra: int, heads: tuple[int, int], window: int, cap: float, seed: int
) -> None:
    q, keys, values = draw(n, max(0, n + extra), *heads, seed=seed)
    expected = reference(q, keys, values, SCALE, True, window, cap)
    for rows in (keys, values):  # they may be anything, and are not read
        rows[: max(0, len(rows) - n + 1 - window)] = math.nan
    close(attend(q, keys, values, scale=SCALE, causal=True, window=window, cap=cap), expected)
    if cap and n:
        q, keys, values = draw(n, 50, *heads, seed=seed)
        expected = reference(q, keys, values, SCALE, False, 0, cap)
        close(attend(q, keys, values, scale=SCALE, causal=False, cap=cap), expected)


def test_many_queries_behind_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles of queries, each with its own part of the rows."""
    monkeypatch.setattr(attention, "TILE", 16)
    q, keys, values = draw(70, 200, 4, 2)
    close(
        attend(q, keys, values, scale=SCALE, causal=True, window=30), reference(q, keys, values, SCALE, True, window=30)
    )


@pytest.mark.parametrize(("n", "rows"), [(1, 0), (3, 0), (0, 5), (1, 1), (5, 2), (2, 2)])
def test_edges(n: int, rows: int) -> None:
    q, keys, values = draw(n, rows, 8, 2)
    for causal in (False, True):
        out, lse = attend(q, keys, values, scale=SCALE, causal=causal)
        close((out, lse), reference(q, keys, values, SCALE, causal))
        if rows == 0:
            assert (lse == -math.inf).all()
            assert (out == 0).all()


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize(("n", "rows"), [(1, 300), (64, 300), (70, 70), (33, 1100)])
def test_long_segments_in_any_storage(group: int, n: int, rows: int) -> None:
    """Both storage orders, slices of larger buffers, and queries that are a view of fused projections."""
    heads, kv_heads = 2 * group, 2
    q, keys, values = draw(n, rows, heads, kv_heads)
    expected = reference(q, keys, values, SCALE, True)
    heads_first = torch.full((2, kv_heads, rows + 7, D), math.nan)
    heads_first[0, :, :rows], heads_first[1, :, :rows] = keys.transpose(0, 1), values.transpose(0, 1)
    fused = torch.cat((q, torch.full((n, 3, D), math.nan)), 1)
    views = heads_first[:, :, :rows].transpose(1, 2)
    close(attend(q, keys, values, scale=SCALE, causal=True), expected)
    close(attend(fused[:, :heads], views[0], views[1], scale=SCALE, causal=True), expected)


def cut(rows: int, cuts: list[int]) -> list[slice]:
    edges = [0, *sorted(min(c, rows) for c in cuts), rows]
    return [slice(a, b) for a, b in pairwise(edges)]


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(1, 4),
    rows=st.integers(0, 120),
    cuts=st.lists(st.integers(0, 120), max_size=5),
    heads=HEADS,
    seed=st.integers(0, 9),
)
def test_any_split_merges_to_the_whole(n: int, rows: int, cuts: list[int], heads: tuple[int, int], seed: int) -> None:
    q, keys, values = draw(n, rows, *heads, seed=seed)
    parts = [attend(q, keys[s], values[s], scale=SCALE, causal=False) for s in cut(rows, cuts)]
    close(merge(parts), reference(q, keys, values, SCALE, False))


@settings(deadline=None, max_examples=30)
@given(lengths=st.lists(st.integers(0, 20), min_size=3, max_size=3), seed=st.integers(0, 9))
def test_merge_is_associative_and_commutative(lengths: list[int], seed: int) -> None:
    q, keys, values = draw(2, sum(lengths), 4, 2, seed=seed)
    parts = [
        attend(q, k, v, scale=SCALE, causal=False)
        for k, v in zip(keys.split(lengths), values.split(lengths), strict=True)
    ]
    whole = reference(q, keys, values, SCALE, False)
    for a, b, c in permutations(parts):
        close(merge([a, b, c]), whole)
        close(merge([merge([a, b]), c]), whole)
        close(merge([a, merge([b, c])]), whole)


Parts = list[tuple[Tensor, Tensor]]


def weighed(parts: Parts) -> tuple[Tensor, Tensor]:
    """The merge by its definition, in float64: each out weighs e^lse."""
    lses = torch.stack([lse.double() for _, lse in parts])
    lse = lses.logsumexp(0)
    weights = (lses - lse).exp().nan_to_num(0)
    return (weights[..., None] * torch.stack([out.double() for out, _ in parts])).sum(0), lse


@settings(deadline=None, max_examples=80)
@given(
    empty=st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=6),
    spread=st.sampled_from([0.1, 5.0, 60.0]),
    data=st.data(),
    seed=st.integers(0, 99),
)
def test_merging_in_any_order_and_grouping(
    empty: list[list[bool]], spread: float, data: st.DataObject, seed: int
) -> None:
    """Some parts have seen no row for some queries and heads; two random neighbours merge until one part is left."""
    generator = torch.Generator().manual_seed(seed)
    parts: Parts = []
    for flags in empty:
        nothing = torch.tensor(flags).view(2, 3)
        out = torch.randn(2, 3, D, generator=generator).masked_fill(nothing[..., None], 0)
        lse = (torch.randn(2, 3, generator=generator) * spread).masked_fill(nothing, -torch.inf)
        parts.append((out, lse))
    whole = weighed(parts)
    left = data.draw(st.permutations(parts))
    while len(left) > 1:
        i = data.draw(st.integers(0, len(left) - 2))
        left[i : i + 2] = [merge(left[i : i + 2])]
    close(left[0], whole)
    close(merge(parts), whole)
    out, lse = torch.zeros(4, 3, D), torch.full((4, 3), -torch.inf)
    for part in parts:
        merge_into(out, lse, torch.tensor([3, 1]), part)
    close((out[[3, 1]], lse[[3, 1]]), whole)
    assert (lse[[0, 2]] == -torch.inf).all()
    assert (out[[0, 2]] == 0).all()


def test_merging_nothing_with_nothing_is_nothing() -> None:
    q, keys, values = draw(2, 0, 4, 2)
    nothing = attend(q, keys, values, scale=SCALE, causal=False)
    out, lse = merge([nothing, nothing, nothing])
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_merge_survives_scores_that_overflow_exp() -> None:
    q, keys, values = draw(2, 30, 4, 2)
    parts = [attend(q * 300, keys[s], values[s], scale=SCALE, causal=False) for s in (slice(0, 9), slice(9, None))]
    assert max(lse.max() for _, lse in parts) > 100
    close(merge(parts), reference(q * 300, keys, values, SCALE, False), atol=5e-4)


def test_bfloat16_rounds_once_and_keeps_its_dtype() -> None:
    q, keys, values = (t.bfloat16() for t in draw(40, 200, 8, 2))
    out, lse = attend(q, keys, values, scale=SCALE, causal=True)
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    exact = reference(q, keys, values, SCALE, True)
    torch.testing.assert_close(out.double(), exact[0], atol=0.03, rtol=0)
    torch.testing.assert_close(lse.double(), exact[1], atol=5e-3, rtol=0)


def test_the_fallback_for_other_devices_is_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_attention", doors.attention_by_formula())
    for n, rows in ((1, 50), (20, 50), (9, 9)):
        q, keys, values = draw(n, rows, 8, 2)
        close(attend(q, keys, values, scale=SCALE, causal=True), reference(q, keys, values, SCALE, True))


@pytest.mark.parametrize("queries", [1, 33])
def test_what_the_cuda_operators_return(queries: int) -> None:
    """Their LSEs, as far as they can be seen without such a device: float32, one padded to 32 queries."""
    q = torch.empty(2, 4, queries, 64, device="meta", dtype=torch.bfloat16)
    k = torch.empty(2, 4, 70, 64, device="meta", dtype=torch.bfloat16)
    flash = torch.ops.aten._scaled_dot_product_flash_attention(q, k, k, 0.0, False, False, scale=0.1)
    assert flash[0].shape == q.shape
    assert flash[1].shape == (2, 4, queries)
    q, k = q.float(), k.float()
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, k, None, True, 0.0, False, scale=0.1)
    assert efficient[0].shape == q.shape
    assert efficient[1].shape == (2, 4, -(-queries // 32) * 32)
    assert flash[1].dtype == efficient[1].dtype == torch.float32


@pytest.mark.parametrize(("n", "rows"), [(1, 0), (1, 9), (4, 9)])
def test_a_sink_is_a_row_without_a_value(n: int, rows: int) -> None:
    """A row that every query sees, with the same score for all queries of a head; and what has it can be merged on."""
    q, keys, values = draw(n, rows, 4, 2)
    sinks = torch.tensor([-3.0, 0.0, 2.0, 40.0])
    out, lse = attend(q, keys, values, scale=SCALE, causal=False)
    scores = torch.einsum("qhd,khd->qhk", q.double(), keys.double().repeat_interleave(2, 1)) * SCALE
    scores = torch.cat((scores, sinks.double().expand(n, 4)[..., None]), -1)
    values = torch.cat((values, torch.zeros(1, 2, D))).double().repeat_interleave(2, 1)
    exact = torch.einsum("qhk,khd->qhd", scores.softmax(-1), values), scores.logsumexp(-1)
    close(with_sinks(out, lse, sinks), exact)
    row = torch.zeros(n, 4, D), sinks.expand(n, 4)
    close(merge((row, (out, lse))), exact)
