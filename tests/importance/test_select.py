"""Who votes, what similarity is asked for, and exactly which rows come out."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from afterglow.errors import ConfigError
from afterglow.importance import select
from afterglow.importance.select import (
    SelectionRules,
    all_rows,
    all_sums,
    fall_back,
    judge,
    probe_sums,
    probes_of,
    similarity,
    threshold,
    top,
    vote,
)
from afterglow.importance.sums import grouped, head_sums
from afterglow.kernels.built import native


@pytest.mark.parametrize(
    ("retention", "expected", "wanted"),
    [(0.5, 0.3333, 0.5173), (0.4, 0.25, 0.4353), (0.25, 0.1429, 0.3111), (0.1, 0.0526, 0.1709), (0.05, 0.0256, 0.1110)],
)
def test_golden_thresholds(retention: float, expected: float, wanted: float) -> None:
    k = round(10_000 * retention)
    assert threshold(k, 10_000, 1) == pytest.approx(expected, abs=5e-5)
    assert threshold(k, 10_000, 0.6) == pytest.approx(wanted, abs=5e-5)
    assert threshold(k, 10_000, 1) == pytest.approx(retention / (2 - retention))


def test_the_threshold_is_what_random_sets_have() -> None:
    """E[J] as a ratio of expectations: random sets are about as similar."""
    generator = torch.Generator().manual_seed(0)
    rows, k = 4000, 1000
    found = [similarity(top(torch.rand(3, rows, generator=generator), k)) for _ in range(30)]
    assert sum(found) / len(found) == pytest.approx(threshold(k, rows, 1), rel=0.03)


def test_alpha_0_always_falls_back_and_the_comparison_is_strict() -> None:
    same = torch.rand(1, 100).repeat(3, 1)
    verdict = judge(same, 25, SelectionRules(alpha=0))
    assert (verdict.similarity, verdict.threshold, verdict.selection) == (1.0, 1.0, None)
    assert judge(same, 25, SelectionRules(alpha=0.01)).selection is not None


def test_how_many_rows_are_kept() -> None:
    rules = SelectionRules(retention=0.25)
    assert rules.keep(0) is None
    assert rules.keep(63) is None  # too few to choose from
    assert rules.keep(64) == 16
    assert rules.keep(1000) == 250
    assert SelectionRules(retention=1).keep(1000) is None
    assert SelectionRules(retention=0.999).keep(100) is None  # rounds to all
    assert SelectionRules(retention=0.001).keep(100) == 1
    assert SelectionRules(retention=0.25, least=0).keep(4) == 1
    assert SelectionRules(retention=0.01, least=0).keep(1) is None


@pytest.mark.parametrize(("mass", "alone", "both"), [(0.3, 1, 1), (0.5, 2, 2), (0.7, 3, 2), (0.9, 4, 3), (0.99, 4, 4)])
def test_the_fewest_rows_that_hold_a_share_of_the_attention(mass: float, alone: int, both: int) -> None:
    """Heads' own largest rows hold 4, 7, 8, 8 and 3, 5, 7, 8 of 8; those of the mean hold 3.5, 5.5, 7 and 8."""
    sums = torch.tensor([[4.0, 0.0, 3.0, 1.0], [3.0, 2.0, 1.0, 2.0]])
    rules = SelectionRules(mass=mass)
    assert rules.enough(sums.mean(0), 4) == alone
    assert rules.enough(sums, 4) == both
    assert rules.enough(sums, 2) == min(2, both)


def test_no_attention_at_all_keeps_what_may_be_kept() -> None:
    assert SelectionRules(mass=0.5).enough(torch.zeros(2, 9), 3) == 3
    assert SelectionRules().enough(torch.ones(2, 9), 3) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mass": 0.0}, "mass must be more than 0 and at most 1, got 0"),
        ({"mass": 1.1}, "got 1.1"),
        ({"retention": 0.0}, "retention must be more than 0 and at most 1, got 0"),
        ({"retention": 1.5}, "got 1.5"),
        ({"probe_heads": 0}, "one probe head or more"),
        ({"alpha": -1.0}, "alpha must be 0 or more, got -1"),
    ],
)
def test_rules_that_make_no_sense(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SelectionRules(**arguments)  # type: ignore[arg-type]


def test_who_votes() -> None:
    """The first three heads; with grouped heads the first three groups; with fewer KV heads single query heads of all of
    them in turn."""
    assert probes_of(32, 32).voters == ((0,), (1,), (2,))
    assert probes_of(32, 8).voters == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11))
    assert probes_of(32, 8).kv_heads == 3
    assert probes_of(12, 2).voters == ((0,), (6,), (1,))
    assert probes_of(12, 2).kv_heads == 2
    assert probes_of(71, 1).voters == ((0,), (1,), (2,))
    assert probes_of(2, 1).voters == ((0,), (1,))
    assert probes_of(1, 1).voters == ((0,),)
    assert probes_of(8, 8, 5).kv_heads == 5


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (16, 8), (6, 3), (6, 2), (4, 2), (6, 1), (2, 2), (1, 1)])
def test_sums_of_voters_and_of_all(heads: int, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(heads)
    q = torch.randn(9, heads, 8, generator=generator)
    keys, own = (torch.randn(count, kv_heads, 8, generator=generator) for count in (70, 9))
    lse = torch.randn(9, heads, generator=generator)
    probes = probes_of(heads, kv_heads)
    every = head_sums(q, keys, own, scale=0.3, extra_lse=lse)
    voted = probe_sums(probes, q, keys[:, : probes.kv_heads], own, scale=0.3, extra_lse=lse)
    torch.testing.assert_close(voted, torch.stack([every[list(voter)].mean(0) for voter in probes.voters]))
    found = all_sums(probes, voted, q, keys, own, scale=0.3, extra_lse=lse)
    torch.testing.assert_close(found, grouped(every, kv_heads))


def brute_force(sums: Tensor, k: int) -> tuple[list[set[int]], list[int]]:
    """Each head's set, and the vote's ranking, from sorted lists."""
    rows = range(sums.shape[1])
    sets = [set(sorted(rows, key=lambda i, h=head: (-float(h[i]), i))[:k]) for head in sums]  # type: ignore[misc]
    mean = sums.mean(0)
    ranked = sorted(rows, key=lambda i: (-sum(i in s for s in sets), -float(mean[i]), i))
    return sets, ranked[:k]


@settings(max_examples=150, deadline=None)
@given(data=st.data(), heads=st.integers(1, 5), rows=st.integers(2, 12))
def test_exactly_k_rows_by_votes_then_mean_then_index(data: st.DataObject, heads: int, rows: int) -> None:
    k = data.draw(st.integers(1, rows - 1))
    few = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=rows, max_size=rows)  # ties abound
    sums = torch.tensor(data.draw(st.lists(few, min_size=heads, max_size=heads)))
    sets, ranked = brute_force(sums, k)
    assert [set(mask.nonzero().squeeze(1).tolist()) for mask in top(sums, k)] == sets
    pairs = list(itertools.combinations(sets, 2))
    alike = sum(len(a & b) / len(a | b) for a, b in pairs) / len(pairs) if pairs else 1.0
    verdict = judge(sums, k, SelectionRules())
    assert verdict.similarity == pytest.approx(alike)
    assert (verdict.selection is not None) == (verdict.similarity > verdict.threshold)
    passed = judge(sums, k, SelectionRules(force="pass")).selection
    assert passed is not None
    assert passed.ranked.tolist() == ranked
    assert passed.rows.tolist() == sorted(ranked)
    assert passed.mask().nonzero().squeeze(1).tolist() == sorted(ranked)
    assert judge(sums, k, SelectionRules(force="fallback")).selection is None
    fallen = fall_back(sums, k, SelectionRules(), verdict)
    assert [set(head.tolist()) for head in fallen.rows] == sets
    assert (fallen.kind, fallen.kept) == ("per_head", k)
    assert fallen.wanted().tolist() == sorted(set.union(*sets))
    assert fallen.ranked.tolist()[:k] == ranked
    whole = fall_back(sums, k, SelectionRules(fallback="all"), verdict)
    assert whole.rows.tolist() == list(range(rows))
    assert whole.ranked.tolist() == fallen.ranked.tolist()


@pytest.mark.skipif(native() is None, reason="nothing has been built here")
@pytest.mark.parametrize("heads", [1, 3, 40])
@pytest.mark.parametrize("rows", [1, 2, 65, 7000])
def test_votes_are_the_same_built_or_not(heads: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(rows)
    of_any_size = torch.randn(heads, rows, generator=draw) ** 3
    few = torch.randint(-2, 3, (heads, rows), generator=draw) * 0.5  # ties, zeros of both signs
    for sums in (of_any_size, few, -few, torch.zeros(heads, rows), torch.cat((few, few), 1)[:, :rows]):
        for k in {1, (rows + 1) // 2, rows}:
            found = vote(sums, k)
            with monkeypatch.context() as patch:
                patch.setattr(select, "suited", lambda _: None)
                expected = vote(sums, k)
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other)


def test_similarity_does_not_depend_on_the_order_of_the_heads() -> None:
    sets = top(torch.rand(3, 50), 20)
    found = {round(similarity(sets[list(order)]), 12) for order in itertools.permutations(range(3))}
    assert len(found) == 1


def test_everything_is_a_selection_too() -> None:
    selection = all_rows(5)
    assert selection.rows.tolist() == selection.wanted().tolist() == [0, 1, 2, 3, 4]
    assert selection.mask().all()
    assert all_rows(0).mask().shape == (0,)
