"""What selections cost to load, as formulas."""

from __future__ import annotations

import pytest
from benchmarks.papers.spec.accounting import Layer
from hypothesis import given
from hypothesis import strategies as st

from afterglow.errors import ConfigError


def cheaper(layer: Layer, rows: int, kept: int) -> bool:
    """Whether one set for all heads loads fewer vectors than a set for each."""
    return layer.vectors("shared", rows, kept).total < layer.vectors("per_head", rows, kept).total


@pytest.mark.parametrize(
    ("kv_heads", "percent"), [(32, 4.7), (40, 3.75), (56, 2.7), (8, 18.75)]
)  # not 1.2 %, whatever the model
def test_what_a_sidecar_adds(kv_heads: int, percent: float) -> None:
    layer = Layer(kv_heads=kv_heads, probe_heads=3, vector_bytes=256)
    assert 100 * layer.sidecar_overhead == pytest.approx(percent, abs=0.05)
    rows = 640
    probe = layer.vectors("shared", rows, 0).probe_keys * 256
    assert probe / layer.bytes("all", rows, rows) == pytest.approx(layer.sidecar_overhead)


@given(st.integers(1, 64), st.data())
def test_when_one_set_for_all_is_cheaper(kv_heads: int, data: st.DataObject) -> None:
    """As the paper counts: if and only if k / n < (H - P) / H."""
    probes = data.draw(st.integers(1, min(3, kv_heads)))
    rows = data.draw(st.integers(1, 5000))
    kept = data.draw(st.integers(1, rows))
    layer = Layer(kv_heads=kv_heads, probe_heads=probes, vector_bytes=2, reread=True)
    assert cheaper(layer, rows, kept) == (kept * kv_heads < rows * (kv_heads - probes))
    assert layer.vectors("all", rows, rows).total == 2 * kv_heads * rows
    sparing = Layer(kv_heads=kv_heads, probe_heads=probes, vector_bytes=2)
    assert cheaper(sparing, rows, kept) == (kept < rows and kv_heads > probes)
    for kind in ("shared", "per_head", "all"):
        assert sparing.vectors(kind, rows, kept).total <= layer.vectors(kind, rows, kept).total


def test_bytes_in_whole_chunks() -> None:
    layer = Layer(kv_heads=8, probe_heads=3, vector_bytes=32)
    row = 8 * 32
    assert layer.chunk_bytes("shared", 130, 2) == 192 * 3 * 32 + 2 * 2 * 64 * row  # keys and values of two chunks
    assert (
        layer.chunk_bytes("per_head", 130, 2) == 192 * 3 * 32 + 192 * row + 2 * 64 * row
    )  # all keys, two chunks of values
    assert layer.chunk_bytes("shared", 130, 0) == 192 * 3 * 32


def test_layers_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="4 probe heads of 3"):
        Layer(kv_heads=3, probe_heads=4, vector_bytes=2)
