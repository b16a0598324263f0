"""The examples that SPEC draws: Figures 2, 7, 9, 12, 13. (Figure 14: tests/plan/test_score.py.)"""

from __future__ import annotations

import pytest
import torch
from benchmarks.papers.spec.accounting import Layer, amplification

from afterglow.importance.row_layout import ExtentView, RowLayout, RowOrder
from afterglow.importance.select import similarity
from afterglow.model.spec import ModelSpec

OPT_30B = ModelSpec(
    family="opt",
    layers=48,
    hidden=7168,
    heads=56,
    kv_heads=56,
    head_dim=128,
    ffn=28672,
    vocab=50272,
    max_positions=2048,
    positions="learned",
)


def test_figure_2_a_prefix_makes_a_request_4_times_as_long_and_is_worth_3_4_gb() -> None:
    prefix, query = 2600, 750
    assert (prefix + query) / query > 4
    size = prefix * OPT_30B.kv_bytes_per_token("float16")
    assert size / 2**30 == pytest.approx(3.4, abs=0.1)
    # Each of the three drawn layers waits for its own rows from disk: all rows, or a quarter and the probe keys.
    layer = Layer(kv_heads=56, probe_heads=3, vector_bytes=256)
    whole = layer.bytes("all", prefix, prefix)
    assert whole * 48 == size
    assert layer.bytes("shared", prefix, prefix // 4) < 0.275 * whole
    assert 0.6 * whole < layer.bytes("per_head", prefix, prefix // 4) < 0.63 * whole


def test_figure_7_similarity_of_two_heads() -> None:
    sets = torch.tensor([[True, False, True, False], [True, True, False, False]])
    assert similarity(sets) == pytest.approx(1 / 3)
    assert similarity(torch.cat((sets, sets[:1]))) == pytest.approx((1 / 3 + 1 / 3 + 1) / 3)


def test_figure_9_vectors_to_load() -> None:
    """32 heads, 4 tokens, one important: 160 vectors from all heads, 76 with three probe heads."""
    layer = Layer(kv_heads=32, probe_heads=3, vector_bytes=256, reread=True)
    fallback = layer.vectors("per_head", 4, 1)
    assert (fallback.probe_keys + fallback.keys, fallback.values, fallback.total) == (128, 32, 160)
    passed = layer.vectors("shared", 4, 1)
    assert (passed.probe_keys, passed.keys + passed.values, passed.total) == (12, 64, 76)
    sparing = Layer(kv_heads=32, probe_heads=3, vector_bytes=256)
    assert sparing.vectors("shared", 4, 1).total == 73
    assert sparing.vectors("per_head", 4, 1) == fallback


def test_figure_12_one_chunk_instead_of_two() -> None:
    important, view = torch.tensor([0, 3]), [ExtentView(4, 0, 4)]
    before = RowLayout(view, chunk=2)
    assert before.chunks(important).tolist() == [0, 1]
    assert amplification(2, 2, 2) == 2
    order = RowOrder.by(torch.tensor([0.9, 0.1, 0.1, 0.8]))
    after = RowLayout(view, [order], chunk=2)
    assert after.chunks(important).tolist() == [0]
    assert after.hits(important).tolist() == [2, 0]
    assert amplification(1, 2, 2) == 1


def test_figure_13_orders_within_nodes() -> None:
    """Two prefixes of eight tokens share the first four; t0, t3, t4 and t9 are important. Chunks have two tokens."""
    shared = RowOrder.by(torch.tensor([1.0, 0.1, 0.1, 1.0]))
    first = RowOrder.by(torch.tensor([1.0, 0.1, 0.1, 0.1]))  # t4 .. t7
    second = RowOrder.by(torch.tensor([0.1, 1.0, 0.1, 0.1]))  # t8 .. t11
    tokens = torch.tensor([100, 101, 102, 103])
    assert shared.order.tolist() == [0, 3, 1, 2]
    assert shared.mapping.tolist() == [0, 2, 3, 1]
    assert tokens[shared.order].tolist() == [100, 103, 101, 102]
    assert tokens[shared.order][shared.mapping].tolist() == tokens.tolist()
    assert first.mapping.tolist() == [0, 1, 2, 3]
    assert second.mapping.tolist() == [1, 0, 2, 3]
    views = [ExtentView(4, 0, 4), ExtentView(4, 0, 4)]
    for last, important in ((first, [0, 3, 4]), (second, [0, 3, 5])):
        assert len(RowLayout(views, chunk=2).chunks(torch.tensor(important))) == 3
        assert RowLayout(views, [shared, last], chunk=2).chunks(torch.tensor(important)).tolist() == [0, 2]
