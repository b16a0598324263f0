"""Column sums by head against the formula, and what a system prompt does to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from afterglow.importance import sums as module
from afterglow.importance.sums import group_sums, grouped, head_sums
from afterglow.kernels.attention import attend
from afterglow.kernels.built import native


def random(n: int, rows: int, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    q = torch.randn(n, heads, 8, generator=generator)
    keys, own = (torch.randn(count, kv_heads, 8, generator=generator) for count in (rows, n))
    return q, keys, own


def by_formula(q: Tensor, keys: Tensor, own: Tensor, scale: float) -> Tensor:
    """Softmax over everything, then the columns of the first rows: [heads, rows]."""
    n, heads, rows = len(q), q.shape[1], len(keys)
    every = torch.cat((keys, own)).repeat_interleave(heads // keys.shape[1], 1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), every.double()) * scale
    ahead = torch.ones(n, rows + n, dtype=torch.bool).triu(1 + rows)
    return scores.masked_fill(ahead, -torch.inf).softmax(-1).sum(1)[:, :rows].float()


@pytest.mark.parametrize("most", [1, 300, 2**20])
@pytest.mark.parametrize(("n", "rows"), [(1, 1), (1, 40), (7, 3), (13, 50), (70, 30)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_the_formula(n: int, rows: int, heads: int, kv_heads: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WEIGHTS", most)
    q, keys, own = random(n, rows, heads, kv_heads)
    found = head_sums(q, keys, own, scale=0.3)
    torch.testing.assert_close(found, by_formula(q, keys, own, 0.3))
    torch.testing.assert_close(grouped(found, kv_heads).sum(0) * (heads // kv_heads), found.sum(0))


def test_a_system_prompt_takes_its_share() -> None:
    q, keys, own = random(9, 50, 6, 2)
    system, keys = keys[:20], keys[20:]
    lse = attend(q, system, system, scale=0.3, causal=False)[1]
    found = head_sums(q, keys, own, scale=0.3, extra_lse=lse)
    torch.testing.assert_close(found, by_formula(q, torch.cat((system, keys)), own, 0.3)[:, 20:])
    without = head_sums(q, keys, own, scale=0.3)
    assert (without > found).all()
    uneven = (without / found).max() / (without / found).min()
    assert uneven > 1.05  # so the order may change: queries that look at the system prompt count less


def test_tokens_that_came_before_are_seen_too() -> None:
    q, keys, own = random(9, 50, 6, 2)
    whole = by_formula(q, keys, own, 0.3)
    last = head_sums(q[6:], keys, own, scale=0.3)
    torch.testing.assert_close(last, whole - head_sums(q[:6], keys, own[:6], scale=0.3))


def test_sums_are_bounded_and_never_nan() -> None:
    q, keys, own = random(5, 40, 4, 2)
    assert float(head_sums(q * 1e4, keys * 1e4, own, scale=1.0).sum()) <= 4 * 5 + 1e-3
    keys[3] = torch.nan
    assert head_sums(q, keys, own, scale=0.3).isfinite().all()
    assert head_sums(q, keys[:0], own, scale=0.3).shape == (4, 0)


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor):
            self.elements = max(self.elements, found.numel())
        return found


def test_memory_stays_bounded_with_a_prefix_of_10000_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(150, 8, 8, generator=generator)
    keys, own = (torch.randn(count, 4, 8, generator=generator) for count in (10_000, 150))
    with Largest() as largest:
        found = head_sums(q, keys, own, scale=0.3)
    assert found.shape == (8, 10_000)
    assert largest.elements <= module.MAX_WEIGHTS  # of 12 million weights


def test_bfloat16_ranks_nearly_alike() -> None:
    q, keys, own = random(32, 400, 4, 4)
    wide = head_sums(q, keys, own, scale=0.3)
    narrow = head_sums(*(t.bfloat16() for t in (q, keys, own)), scale=0.3)
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow, wide, rtol=0.03, atol=1e-3)


@pytest.mark.parametrize("width", [16, 8])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("n", "rows"), [(1, 1), (1, 40), (7, 3), (13, 50), (70, 30), (33, 1000)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_sums_of_groups_in_one_call(
    n: int, rows: int, heads: int, kv_heads: int, threads: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = native()
    if library is None or library.width < width:
        pytest.skip("nothing has been built for this machine")
    monkeypatch.setattr(library, "width", width)
    monkeypatch.setattr(module.torch, "get_num_threads", lambda: threads)
    q, keys, own = random(n, rows, heads, kv_heads)
    apart = torch.zeros(kv_heads, n + 5, 8)  # as a context holds them
    apart[:, :n] = own.transpose(0, 1)
    wide = torch.cat((keys, keys), 1)[:, :kv_heads]
    found = group_sums(q, wide, apart[:, :n].transpose(0, 1), scale=0.3)
    torch.testing.assert_close(found, grouped(by_formula(q, keys, own, 0.3), kv_heads))
    last = group_sums(q[n // 2 :], keys, own, scale=0.3)
    torch.testing.assert_close(last, grouped(head_sums(q[n // 2 :], keys, own, scale=0.3), kv_heads))
    lse = attend(q, keys[:1], keys[:1], scale=0.3, causal=False)[1]
    found = group_sums(q, keys[1:], own, scale=0.3, extra_lse=lse)
    torch.testing.assert_close(found, grouped(by_formula(q, keys, own, 0.3)[:, 1:], kv_heads))


@pytest.mark.parametrize("head_dim", [2, 4, 6, 10, 12, 18, 20, 30])
def test_heads_of_any_size(head_dim: int) -> None:
    """The compiled kernel takes four dimensions at a time."""
    generator = torch.Generator().manual_seed(head_dim)
    q, keys, own = (torch.randn(n, heads, head_dim, generator=generator) for n, heads in ((9, 4), (40, 2), (9, 2)))
    found = group_sums(q, keys, own, scale=0.3)
    torch.testing.assert_close(found, grouped(by_formula(q, keys, own, 0.3), 2))


def test_sums_that_are_not_numbers_become_0() -> None:
    q, keys, own = random(3, 20, 4, 4)
    keys[4, 1] = torch.nan
    found = group_sums(q, keys, own, scale=0.3)
    assert found.isfinite().all()
    assert (found[[0, 2, 3]] > 0).all()
