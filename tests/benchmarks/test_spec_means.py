"""One key and value for what is left out of each chunk."""

from __future__ import annotations

import pytest
import torch
from benchmarks.papers.spec import left_out
from benchmarks.papers.spec.attend import prefill
from benchmarks.papers.spec.means import means_of
from benchmarks.papers.spec.prefixes import Query, Shared

from afterglow.importance.left_out import ChunkMeans, ChunkPlaces
from afterglow.importance.select import Selection
from afterglow.kernels.attention import attend, merge
from afterglow.model.loader import load_model

SCALE = 0.4


def places_of(rows: int, chunk: int) -> ChunkPlaces:
    places = torch.arange(rows) // chunk
    return ChunkPlaces(places, torch.cat((places.bincount(), torch.zeros(1))))


@pytest.mark.parametrize("rows", [torch.tensor([0, 1, 9, 30]), torch.tensor([[0, 5, 6, 7], [8, 9, 10, 11]])])
def test_a_mean_stands_for_the_rows_that_are_left_out(rows: torch.Tensor) -> None:
    """As if each of them were the mean."""
    generator = torch.Generator().manual_seed(0)
    count, chunk, kv_heads = 37, 4, 2
    keys, values = (torch.randn(10, kv_heads, 16, generator=generator) for _ in range(2))
    q = torch.randn(3, 4, 16, generator=generator)
    selection = Selection("shared" if rows.ndim == 1 else "per_head", count, rows, rows.unique())
    out, lse = ChunkMeans.of(keys, values, places_of(count, chunk), None).without(selection).attend(q, SCALE)
    for head in range(kv_heads):
        kept = set(rows.expand(kv_heads, -1)[head].tolist())
        at = torch.tensor([row // chunk for row in range(count) if row not in kept])
        expected = attend(
            q[:, 2 * head : 2 * head + 2],
            keys[at, head : head + 1],
            values[at, head : head + 1],
            scale=SCALE,
            causal=False,
        )
        torch.testing.assert_close(out[:, 2 * head : 2 * head + 2], expected[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(lse[:, 2 * head : 2 * head + 2], expected[1], atol=1e-5, rtol=0)


def test_nothing_is_attended_to_where_nothing_is_left_out() -> None:
    selection = Selection("shared", 8, torch.arange(8), torch.arange(8))
    means = ChunkMeans(torch.ones(1, 2, 16), torch.ones(1, 2, 16), places_of(8, 4))
    out, lse = means.without(selection).attend(torch.ones(1, 1, 16), SCALE)
    other = torch.randn(1, 1, 16), torch.tensor([[-80.0]])
    assert torch.equal(merge([(out, lse), other])[0], other[0])


def test_keys_that_do_not_depend_on_their_positions_have_an_exact_mean() -> None:
    """Turned one by one and averaged, or averaged and turned by the mean rotation."""
    decoder = load_model("tiny")
    raw = prefill(decoder, [5] * 70)
    means = means_of(decoder, raw, 32)
    turned = raw.turn(decoder).keys[0]  # of the first layer: each token has the same key
    for chunk, (start, stop) in enumerate(((0, 32), (32, 64), (64, 70))):
        torch.testing.assert_close(means[0].keys[:, chunk], turned[start:stop].mean(0), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(means[1].values[:, chunk], raw.values[1][start:stop].mean(0), atol=1e-5, rtol=1e-4)


def test_every_arm_is_measured() -> None:
    shared = Shared(list(range(1, 140)), [Query([7, 8, 9], [10, 11, 12]), Query([3, 4], [5, 6], 1)], 0)
    rows, goals = left_out.measure("tiny", load_model("tiny"), [shared])
    assert len(rows) == 2 * len(left_out.ARMS)
    assert {row["tokens"] for row in rows} == {3}
    assert all("recall" in row for row in rows)
    assert len(goals) == 2
