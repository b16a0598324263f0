"""A request over the important rows of a prefix: with all rows it is the plain forward, else what a mask would do."""

from __future__ import annotations

import dataclasses
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from benchmarks.papers.spec.attend import Prefix, SelectingAttend, prefill
from benchmarks.papers.spec.baselines import MODES, attend_as
from benchmarks.papers.spec.similarity import head_similarity, jaccard, layer_similarity, recall
from torch import Tensor

from afterglow.errors import ConfigError
from afterglow.importance.select import SelectionRules, judge, top
from afterglow.model.decoder import Attention, Decoder, PlainAttend
from afterglow.model.loader import load_model
from afterglow.model.presets import PRESETS, random_model
from tests.model.families_hf import CASES, LIMITS, save_case

ROWS, NEW = 70, (9, 1, 1, 4)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return random_model(PRESETS["tiny"])


def tokens(count: int, seed: int = 0, vocab: int = 97) -> list[int]:
    return torch.randint(3, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def plain(decoder: Decoder, ids: list[int]) -> Tensor:
    positions = torch.arange(len(ids))
    return decoder.forward(torch.tensor(ids), positions, PlainAttend(decoder, positions, [len(ids)]))


def run(request: SelectingAttend, ids: list[int]) -> Tensor:
    """Prefill, then decode."""
    stops = list(accumulate(NEW))
    return torch.cat([request.extend(ids[stop - size : stop]) for size, stop in zip(NEW, stops, strict=True)])


@pytest.mark.parametrize("case", CASES)
def test_retention_1_is_the_plain_forward(case: str, tmp_path: Path) -> None:
    """Of every family; and with all rows but few heads looked at, a selection that keeps nearly all is near it."""
    save_case(case, tmp_path)
    decoder = load_model(tmp_path, max_model_len=LIMITS.get(case))
    ids, more = tokens(ROWS), tokens(sum(NEW), seed=1)
    if not decoder.spec.plain_scores:
        with pytest.raises(ValueError, match="windows, caps or sinks"):
            SelectingAttend(decoder, prefill(decoder, ids), SelectionRules())
        return
    wanted = decoder.logits(plain(decoder, ids + more)[ROWS:])
    prefix = prefill(decoder, ids)
    for stored in (prefix, prefix.turn(decoder)):
        for request in (
            SelectingAttend(decoder, stored, SelectionRules(retention=1.0)),
            SelectingAttend(decoder, stored, SelectionRules(retention=0.2, force="fallback", fallback="all")),
            SelectingAttend(decoder, stored, SelectionRules(retention=1.0), system=20),
            SelectingAttend(decoder, stored, SelectionRules(), fixed=[torch.arange(ROWS)] * decoder.spec.layers),
        ):
            torch.testing.assert_close(decoder.logits(run(request, more)), wanted, atol=1e-4, rtol=0)
    fewer = run(SelectingAttend(decoder, prefix, SelectionRules(retention=0.2, force="pass")), more)
    assert not torch.allclose(decoder.logits(fewer), wanted, atol=1e-2)


class Masked:
    """Attention by the formula over all tokens at their own positions; each layer and KV head sees the given prefix rows.

    Sums up columns by head and layer on the way, over the rows of a prompt."""

    def __init__(self, decoder: Decoder, total: int, seen: list[Tensor], prompt: slice) -> None:
        self._rotation = decoder.rotation(torch.arange(total))
        self._seen, self._prompt = seen, prompt

    def __call__(self, layer: int, attention: Attention, x: Tensor) -> Tensor:
        q, k, v = attention.project(x)
        q, k = attention.rotate(q, self._rotation), attention.rotate(k, self._rotation)
        group = attention.heads // attention.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * attention.scale
        total = len(x)
        mask = torch.ones(total, total, dtype=torch.bool).tril().expand(len(scores), -1, -1).clone()
        hidden = ~self._seen[layer].repeat_interleave(group, 0)  # [heads, prefix rows]
        mask[:, self._prompt.start :, : hidden.shape[1]] &= ~hidden[:, None]
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


@pytest.mark.parametrize(
    "rules", [SelectionRules(force="pass"), SelectionRules(force="fallback"), SelectionRules(retention=0.5, alpha=2.0)]
)
@pytest.mark.parametrize("case", ["llama", "llama-mha", "falcon-mqa", "opt", "phi-gqa"])
def test_a_selection_is_a_mask_at_the_original_positions(case: str, rules: SelectionRules, tmp_path: Path) -> None:
    """Also for decoding and for sets of each head."""
    save_case(case, tmp_path)
    decoder = load_model(tmp_path)
    ids, more = tokens(ROWS), tokens(sum(NEW), seed=1)
    request = SelectingAttend(decoder, prefill(decoder, ids), rules)
    found = run(request, more)
    kv_heads = decoder.spec.kv_heads
    seen = []
    for selection in request.selections:
        rows = selection.rows.expand(kv_heads, -1) if selection.rows.ndim == 1 else selection.rows
        assert rows.shape == (kv_heads, rules.keep(ROWS))
        seen.append(torch.zeros(kv_heads, ROWS, dtype=torch.bool).scatter(1, rows, True))
    positions = torch.arange(ROWS + len(more))
    masked = Masked(decoder, len(positions), seen, slice(ROWS, None))
    wanted = decoder.forward(torch.tensor(ids + more), positions, masked)[ROWS:]
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_what_is_selected_depends_on_the_query_and_first_on_the_first_layers_attention(decoder: Decoder) -> None:
    prefix = prefill(decoder, tokens(200, vocab=512)).turn(decoder)
    first = attend_as("spec", decoder, prefix, 0.25, observe=True)
    second = attend_as("spec", decoder, prefix, 0.25)
    first.extend(tokens(8, seed=1, vocab=512))
    second.extend(tokens(8, seed=2, vocab=512))
    assert not torch.equal(first.selections[0].ranked, second.selections[0].ranked)
    h2o = attend_as("h2o", decoder, prefix, 0.25)
    h2o.extend(tokens(8, seed=1, vocab=512))
    sets = top(first.sums[0], 50)
    assert h2o.selections[0].rows.tolist() == [mask.nonzero().squeeze(1).tolist() for mask in sets]
    decoded = first.selections
    first.extend([7])
    assert first.selections is decoded
    assert len(decoded) == decoder.spec.layers


def test_a_system_prompt_is_attended_to_whole() -> None:
    """It is not selected from, and takes its share of the weights by which the rest is judged."""
    decoder = random_model(dataclasses.replace(PRESETS["tiny"], kv_heads=4))
    ids, more = tokens(150, vocab=512), tokens(6, seed=1, vocab=512)
    prefix = prefill(decoder, ids)
    request = SelectingAttend(decoder, prefix, SelectionRules(retention=0.2, force="pass"), system=50, observe=True)
    found = request.extend(more)
    whole = SelectingAttend(decoder, prefix, SelectionRules(retention=1.0), observe=True)
    whole.extend(more)
    torch.testing.assert_close(request.sums[0], whole.sums[0][:, 50:])
    wanted = judge(whole.sums[0][:3, 50:], 20, SelectionRules(force="pass"))  # the voters of four KV heads
    assert wanted.selection is not None
    assert request.selections[0].rows.tolist() == wanted.selection.rows.tolist()
    assert request.selections[0].similarity == pytest.approx(wanted.similarity)
    seen = []
    for selection in request.selections:
        assert (selection.count, selection.kept) == (100, 20)
        seen.append(torch.cat((torch.ones(50, dtype=torch.bool), selection.mask())).expand(4, -1))
    masked = Masked(decoder, 156, seen, slice(150, None))
    by_mask = decoder.forward(torch.tensor(ids + more), torch.arange(156), masked)[150:]
    torch.testing.assert_close(found, by_mask, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="151 rows"):
        SelectingAttend(decoder, prefix, SelectionRules(), system=151)


def test_baselines_keep_as_many_rows(decoder: Decoder) -> None:
    prefix = prefill(decoder, tokens(100, vocab=512))
    static = [torch.rand(100) for _ in decoder.layers]
    for mode in MODES:
        request = attend_as(mode, decoder, prefix, 0.25, static=static, generator=torch.Generator().manual_seed(1))
        request.extend(tokens(5, seed=1, vocab=512))
        assert {selection.kept for selection in request.selections} == {100 if mode == "exact" else 25}
        if mode == "spi":
            assert request.selections[1].rows.tolist() == sorted(static[1].topk(25).indices.tolist())
        if mode == "sinks":
            assert request.selections[1].rows.tolist() == [0, 1, 2, 3, *range(79, 100)]
    with pytest.raises(ConfigError, match="mode spi needs"):
        attend_as("spi", decoder, prefix, 0.25)
    with pytest.raises(ConfigError, match="got 'all'"):
        attend_as("all", decoder, prefix, 0.25)  # type: ignore[arg-type]


def test_a_selection_can_be_renewed_for_what_is_decoded(decoder: Decoder) -> None:
    ids, asked, more = tokens(100, vocab=512), tokens(5, seed=1, vocab=512), tokens(2, seed=2, vocab=512)
    prefix = prefill(decoder, ids)
    rules = SelectionRules(retention=0.2, force="fallback")
    renewed, kept = SelectingAttend(decoder, prefix, rules, renew=True), SelectingAttend(decoder, prefix, rules)
    torch.testing.assert_close(renewed.extend(asked), kept.extend(asked))
    before = renewed.selections[0].rows.tolist()
    assert not torch.equal(renewed.extend(more), kept.extend(more))
    assert len(renewed.selections) == len(decoder.layers)
    sums = []
    for ids in (asked, asked + more):
        whole = SelectingAttend(decoder, prefix, SelectionRules(retention=1.0), observe=True)
        whole.extend(ids)
        sums.append(whole.sums[0])  # what the first layer sees does not depend on selections
    wanted = [mask.nonzero().squeeze(1).tolist() for mask in top(sums[1] - sums[0], 20)]
    assert renewed.selections[0].rows.tolist() == wanted != before
    assert kept.selections[0].rows.tolist() == before


def test_short_prefixes_are_kept_whole(decoder: Decoder) -> None:
    request = SelectingAttend(decoder, prefill(decoder, tokens(63)), SelectionRules())
    request.extend(tokens(4))
    assert {selection.kind for selection in request.selections} == {"all"}
    nothing = torch.empty(0, 2, 16)
    empty = SelectingAttend(decoder, Prefix((nothing, nothing), (nothing, nothing)), SelectionRules())
    torch.testing.assert_close(empty.extend(tokens(9)), plain(decoder, tokens(9)), atol=1e-4, rtol=1e-4)


def test_observations() -> None:
    sums = torch.tensor([[4.0, 3, 2, 1], [4.0, 1, 3, 2], [1.0, 2, 3, 4]])
    # Top 2: {0, 1}, {0, 2}, {2, 3}
    assert head_similarity(sums, 2) == pytest.approx((1 / 3 + 0 + 1 / 3) / 3)
    assert layer_similarity(torch.stack((sums[:1], sums[1:2], sums[2:])), 2).tolist() == [pytest.approx(1 / 3)] * 2
    assert jaccard(torch.zeros(3, dtype=torch.bool), torch.zeros(3, dtype=torch.bool)) == 1
    assert recall(torch.tensor([True, False, True]), torch.tensor([True, True, False])) == 0.5
