"""Guesses for the next layer, cut to a budget, and their fate."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afterglow.errors import ConfigError
from afterglow.importance.select import SelectionRules, fall_back, judge
from afterglow.importance.speculation import (
    ReadBudget,
    Speculation,
    SpeculationTally,
    Worth,
    guess,
    ranking,
    sinks,
    within,
)

SUMS = torch.tensor([[0.9, 0.1, 0.8, 0.0, 0.3], [0.9, 0.2, 0.1, 0.0, 0.4], [0.5, 0.9, 0.8, 0.0, 0.1]])


def test_a_layer_that_passes_ranks_as_it_votes_and_one_that_falls_back_by_votes_too() -> None:
    passed = judge(SUMS, 2, SelectionRules(force="pass")).selection
    assert passed is not None
    assert ranking(passed, None, 2).tolist() == [0, 2]  # two votes and 2.3, before one vote and more
    fallen = fall_back(SUMS, 2, SelectionRules(), judge(SUMS, 2, SelectionRules()))
    # Votes: row 0 two, row 1 one, row 2 two, row 4 one; sums 2.3, 1.2, 1.7, 0.8
    assert ranking(fallen, None, 10).tolist() == [0, 2, 1, 4]
    assert ranking(fallen, None, 2).tolist() == [0, 2]


def test_the_first_layer_goes_by_what_has_been_important() -> None:
    mean = torch.tensor([0.5, 2.0, 0.0, 2.0, 1.0])
    assert ranking(None, mean, 3).tolist() == [1, 3, 4]
    assert ranking(None, mean, 5).tolist() == [1, 3, 4, 0]  # not the one that never was
    assert ranking(None, None, 3).tolist() == []


def test_priors() -> None:
    passed = judge(SUMS, 2, SelectionRules(force="pass")).selection
    assert guess("prior", passed, None, 5, 2).tolist() == [0, 2]
    assert guess("cut", passed, None, 5, 2).tolist() == [0]
    assert guess("none", passed, None, 5, 2).tolist() == []
    drawn = guess("random", None, None, 100, 30, generator=torch.Generator().manual_seed(1)).tolist()
    assert len(set(drawn)) == 30
    assert drawn != sorted(drawn)
    assert guess("sinks", None, None, 100, 6).tolist() == [0, 1, 2, 3, 99, 98]
    assert sinks(3, 2).tolist() == [0, 1]
    assert sinks(6, 6).tolist() == [0, 1, 2, 3, 5, 4]
    with pytest.raises(ConfigError, match="got 'luck'"):
        guess("luck", None, None, 5, 2)  # type: ignore[arg-type]


def test_a_budget_buys_whole_chunks_in_order() -> None:
    missing = {3: ["3k", "3v"], 0: [], 2: ["2v"], 1: ["1k", "1v"]}
    assert within(missing, missing.__getitem__, 100) == ["3k", "3v", "2v", "1k", "1v"]
    assert within(missing, missing.__getitem__, 4) == ["3k", "3v", "2v"], "a chunk that does not fit ends the list"
    assert within(missing, missing.__getitem__, 3) == ["3k", "3v", "2v"]
    assert within(missing, missing.__getitem__, 1) == []


def test_the_budget_follows_the_layers_seconds() -> None:
    budget = ReadBudget()
    assert budget.bytes(5e9) == 0
    budget.measured(0.010)
    assert budget.bytes(5e9) == 50_000_000
    budget.measured(0.020)
    assert budget.bytes(5e9) == pytest.approx(60_000_000, abs=1)


@pytest.mark.parametrize(("guessed", "not_guessed", "share"), [(0.9, 1.0, 7 / 8), (1.0, 0.9, 1 / 8)])
def test_layers_are_guessed_for_where_that_is_quicker(guessed: float, not_guessed: float, share: float) -> None:
    """Also where some layers take ten times as long, for reasons of their own."""
    worth = Worth()
    assert worth.pays
    chosen = []
    for layer in range(800):
        chosen.append(worth.next())
        seconds = guessed if chosen[-1] else not_guessed
        worth.took(chosen[-1], 10 * seconds if layer % 5 == 0 else seconds)
    assert sum(chosen[80:]) / 720 == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize("layers", [8, 16, 24, 30, 32])
def test_layers_that_take_longer_anyway_do_not_decide(layers: int) -> None:
    """Every eighth layer takes 15 % longer, with guesses or without; guesses cost 10 %."""
    worth = Worth()
    chosen = []
    for layer in range(100 * layers):
        chosen.append(worth.next())
        own = 1.15 if layer % 8 == 7 else 1.0
        worth.took(chosen[-1], own * 1.1 if chosen[-1] else own)
    assert sum(chosen[len(chosen) // 4 :]) < 0.3 * len(chosen)


def test_what_pays_is_found_out_again_when_rates_change() -> None:
    worth = Worth()
    for layer in range(400):
        guesses = worth.next()
        slow_disk = layer >= 200
        worth.took(guesses, 1.0 if guesses else 2.0 if slow_disk else 0.5)
        if layer == 199:
            assert not worth.pays
    assert worth.pays


@settings(max_examples=200)
@given(st.data())
def test_every_guessed_byte_is_used_wasted_or_not_read(data: st.DataObject) -> None:
    tally, wanted_bytes = SpeculationTally(), 0
    for _ in range(data.draw(st.integers(1, 4))):
        layer = Speculation(tally)
        guessed = data.draw(st.lists(st.integers(0, 9), unique=True))
        for chunk in guessed:
            layer.submit(chunk, chunk + 1)
        landed = data.draw(st.sets(st.sampled_from(guessed))) if guessed else set()
        for chunk in landed:
            layer.landed(chunk)
        wanted = data.draw(st.lists(st.integers(0, 9), unique=True))
        queued = [chunk for chunk in guessed if chunk not in landed and chunk not in wanted]
        gone = data.draw(st.sets(st.sampled_from(queued))) if queued else set()
        before = (tally.hit, tally.late, tally.wasted, tally.cancelled)
        missing = layer.settle(((chunk, chunk + 1) for chunk in wanted), gone)
        assert missing == [chunk for chunk in wanted if chunk not in guessed]
        assert tally.hit - before[0] == sum(c + 1 for c in wanted if c in landed)
        assert tally.late - before[1] == sum(c + 1 for c in wanted if c in guessed and c not in landed)
        assert tally.wasted - before[2] == sum(c + 1 for c in guessed if c not in wanted and c not in gone)
        assert tally.cancelled - before[3] == sum(c + 1 for c in gone)
        wanted_bytes += sum(c + 1 for c in wanted)
        layer.settle(())  # nothing is left to be settled
    tally.check()
    assert tally.used + tally.missing == wanted_bytes
    assert 0 <= tally.recall <= 1
    assert 0 <= tally.precision <= 1


def test_nothing_is_guessed_twice() -> None:
    layer = Speculation(SpeculationTally())
    layer.submit("a", 1)
    with pytest.raises(AssertionError):
        layer.submit("a", 1)
