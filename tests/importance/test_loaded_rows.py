"""Loaded rows of a layer: those of the selection, whatever came before, and no row copied twice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from afterglow.importance.loaded_rows import LoadedRows
from afterglow.importance.select import Selection

ROWS, HEADS, DIM, K = 90, 3, 4, 20


def draw(seed: int, per_head: bool) -> Selection:
    generator = torch.Generator().manual_seed(seed)
    sets = [torch.randperm(ROWS, generator=generator)[:K].sort().values for _ in range(HEADS)]
    rows = torch.stack(sets) if per_head else sets[0]
    return Selection("per_head" if per_head else "shared", ROWS, rows, rows.unique())


def contents() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(ROWS, HEADS, DIM, generator=generator), torch.randn(ROWS, HEADS, DIM, generator=generator)


def pick(part: Tensor, selection: Selection) -> Tensor:
    rows = selection.rows.expand(HEADS, -1).T
    return part[rows, torch.arange(HEADS)]


def full_of(keys: Tensor, values: Tensor) -> LoadedRows:
    held = LoadedRows(ROWS, keys)
    held.keys.copy_(keys)
    held.values.copy_(values)
    return held


def same_set(found: Tensor, wanted: Tensor) -> None:
    """Of each head the same rows in any order."""
    for head in range(HEADS):
        lists = [sorted(part[:, head].tolist()) for part in (found, wanted)]
        assert lists[0] == lists[1]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("second", [True, False])
def test_any_selection_can_follow_any_other(first: bool, second: bool) -> None:
    keys, values = contents()
    held = LoadedRows(ROWS, torch.empty(0, HEADS, DIM))
    before = draw(1, first)
    held.begin(before, (pick(keys, before), pick(values, before)))
    ever = before.mask()
    for seed in range(2, 8):
        selection = draw(seed, second)
        wanted = selection.wanted()
        missing = held.without_keys(wanted)
        held.put_keys(missing, keys[missing])
        missing = held.without_values(wanted)
        assert not set(missing.tolist()) & set(before.rows.tolist() if not first else [])
        held.put_values(missing, values[missing])
        held.renew(selection)
        same_set(held.kept[0], pick(keys, selection))
        same_set(held.kept[1], pick(values, selection))
        assert held.kept[0].shape == (K, HEADS, DIM)
        ever |= selection.mask()
        assert torch.equal(held.ever, ever)
        assert len(held.without_keys(wanted)) == len(held.without_values(wanted)) == 0


def test_probe_keys_are_known_of_all_rows_and_others_of_those_selected() -> None:
    keys, values = contents()
    held = LoadedRows(ROWS, torch.empty(0, HEADS, DIM))
    selection = draw(1, False)
    held.begin(selection, (pick(keys, selection), pick(values, selection)))
    held.put_keys(slice(None), keys[:, :2])
    assert torch.equal(held.keys[:, :2], keys[:, :2])
    assert len(held.without_keys()) == ROWS - K
    held.put_keys(slice(None), keys)
    assert len(held.without_keys()) == 0


@pytest.mark.parametrize("count", [1, K - 1, K + 5])
def test_more_or_fewer_rows_may_follow(count: int) -> None:
    keys, values = contents()
    held = full_of(keys, values)
    before = draw(1, False)
    held.begin(before, (pick(keys, before), pick(values, before)))
    rows = torch.arange(count) * 2
    held.renew(Selection("shared", ROWS, rows, rows))
    same_set(held.kept[0], keys[rows])
    same_set(held.kept[1], values[rows])
    assert set(held.ever.nonzero().flatten().tolist()) == {*before.wanted().tolist(), *rows.tolist()}
    held.renew(before)
    same_set(held.kept[0], pick(keys, before))


def test_all_rows_are_taken_for_good() -> None:
    keys, values = contents()
    held = full_of(keys, values)
    selection = draw(1, True)
    held.begin(selection, (pick(keys, selection), pick(values, selection)))
    every = torch.arange(ROWS)
    held.renew(Selection("all", ROWS, every, every))
    assert held.whole
    assert bool(held.ever.all())
