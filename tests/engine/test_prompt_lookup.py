"""What is guessed, and how much of it is verified."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afterglow.engine.speculation import row_costs
from afterglow.engine.speculation.guesser import (
    CANDIDATES,
    MARGIN,
    MAX_GUESSES,
    SHORTEST,
    Acceptance,
    Guesser,
    Lookup,
    StepCosts,
    allot,
)
from afterglow.engine.speculation.row_costs import PROBE_LAYERS, PROBE_ROWS, PROBE_SECONDS, RowCosts
from afterglow.model.decoder import Decoder


def naive(text: list[int]) -> tuple[int, int]:
    """The place with the longest match, the last of equal ones, and its length; (0, 0) if none is long enough."""
    best = (0, 0)
    for place in range(1, len(text)):
        length = 0
        while length < place and text[place - 1 - length] == text[len(text) - 1 - length]:
            length += 1
        if length >= SHORTEST and length >= best[1]:
            best = place, length
    return best


@given(st.lists(st.integers(0, 2), max_size=CANDIDATES + 1), st.integers(0, 6))
def test_the_longest_match_is_found(text: list[int], first: int) -> None:
    lookup = Lookup(text[:first])
    assert (lookup.at, lookup.length) == naive(text[:first])
    for end in range(first, len(text)):
        lookup.add(text[end])
        assert (lookup.at, lookup.length) == naive(text[: end + 1])


@given(st.lists(st.integers(0, 3), max_size=300))
def test_a_match_is_one_in_long_texts_too(text: list[int]) -> None:
    lookup = Lookup()
    for end, token in enumerate(text, 1):
        lookup.add(token)
        at, length = lookup.at, lookup.length
        assert at < end
        assert (length == 0) == (at == 0)
        if at:
            assert length >= SHORTEST
            assert text[at - length : at] == text[end - length : end]
            guess = lookup.guess(9)
            assert (text[:end] + guess)[at : at + 9] == guess  # where it overlaps the end, it goes on as itself
        else:
            assert naive(text[:end]) == (0, 0)
            assert lookup.guess(9) == []


def test_a_place_is_followed_without_looking_again() -> None:
    """A text repeated once is one match, as long as the text; after an edit the match is found again."""
    text = list(range(1000))
    lookup = Lookup(text)
    right = 0
    for token in [*text[:500], 5000, *text[500:]]:
        right += lookup.guess(1) == [token]
        lookup.add(token)
    assert right == 1001 - 2 - 1 - SHORTEST
    assert lookup.length == 500


@given(
    st.lists(st.lists(st.floats(0.05, 1.0), max_size=3), min_size=1, max_size=3),
    st.lists(st.floats(0.0, 1.0), min_size=12, max_size=12),
)
def test_no_other_number_of_guesses_is_better(shares: list[list[float]], more: list[float]) -> None:
    """Against all choices, where attention costs the same for all."""
    chances = []
    for each in shares:
        falling, chance = [], 1.0
        for share in each:
            chance *= share
            falling.append(chance)
        chances.append(falling)
    seconds = [1.0]
    for each in more:
        seconds.append(seconds[-1] + each)

    def rate(counts: tuple[int, ...]) -> float:
        tokens = len(chances) + sum(sum(falling[:count]) for falling, count in zip(chances, counts, strict=True))
        return tokens / seconds[len(chances) + sum(counts) - 1]

    every = list(product(*(range(len(falling) + 1) for falling in chances)))
    found = tuple(allot(chances, lambda rows: seconds[rows - 1], [0.0] * len(chances)))
    none = (0,) * len(chances)
    best = max(map(rate, every))
    if best > MARGIN * rate(none) * (1 + 1e-9):
        assert rate(found) == pytest.approx(best)
    elif best < MARGIN * rate(none) * (1 - 1e-9):
        assert found == none


def test_guesses_end_where_they_do_not_pay() -> None:
    """In a text that never goes on as it did before, guesses that cost a step each are given up; free ones are not."""

    def guessed(costs: StepCosts | None) -> int:
        guesser = Guesser(costs)
        guesser.begin(1, [], ())
        total = 0
        for number in range(200):
            guesser.drew(1, [1, 2, 3, 10 + number])  # [1, 2] is known, and so is [2, 3]; what follows is new
            guesser.drew(1, [1, 2, 3])
            total += len(guesser.guesses([(1, 100)]).get(1, ()))
            guesser.drew(1, [1000 + number])
        return total

    assert guessed(StepCosts(lambda rows: float(rows), 0.0, 0.0)) == 0
    assert guessed(StepCosts(lambda rows: 1.0 + 0.01 * rows, 0.0, 0.0)) < 200
    assert guessed(None) > 1000


def test_guesses_that_are_right_are_long() -> None:
    guesser = Guesser(StepCosts(lambda rows: 1.0 + 0.02 * rows, 0.0, 0.0))
    text = list(range(100))
    guesser.begin(1, text, ())
    for token in text[:60]:
        guesser.drew(1, [token])
    assert guesser.guesses([(1, 160)]) == {1: tuple(text[60 : 60 + MAX_GUESSES])}
    assert guesser.guesses([(2, 160)]) == {}


def test_nothing_is_guessed_behind_a_token_that_ends_the_reply() -> None:
    guesser = Guesser(None)
    guesser.begin(1, [1, 2, 3, 4, 5, 6], {5})
    guesser.drew(1, [1, 2])
    assert guesser.guesses([(1, 8)]) == {1: (3, 4)}
    guesser.forget(1)
    guesser.drew(1, [3])
    assert guesser.guesses([(1, 9)]) == {}


def test_acceptance_follows_a_reply() -> None:
    acceptance = Acceptance()
    for _ in range(100):
        acceptance.note(3, True)
        acceptance.note(8, False)
    assert acceptance.chances(3, 1)[0] > 0.95
    assert acceptance.chances(8, 1) == []


def test_costs_between_measurements_and_disturbed_ones() -> None:
    costs = RowCosts.of({1: 9.0, 2: 4.0, 4: 6.0, 8: 6.0})
    assert [costs.step(rows) for rows in (1, 2, 3, 4, 6, 8, 10)] == [4.0, 4.0, 5.0, 6.0, 6.0, 6.0, 6.0]
    costs = RowCosts.of({1: 1.0, 2: 2.0, 4: 6.0})
    assert [costs.step(rows) for rows in (1, 3, 4, 6)] == [1.0, 4.0, 6.0, 10.0]


def test_costs_of_a_slow_model_are_measured_with_few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = SimpleNamespace(spec=SimpleNamespace(layers=22))
    passes: list[tuple[int, int]] = []
    clock = [0.0]

    def slow(seconds: float) -> RowCosts:
        def one_pass(decoder: object, rows: int, layers: int) -> tuple[float, float]:
            passes.append((rows, layers))
            clock[0] += seconds * layers
            return seconds * layers, 0.0

        passes.clear()
        monkeypatch.setattr(row_costs, "_pass", one_pass)
        monkeypatch.setattr(row_costs.time, "perf_counter", lambda: clock[0])
        return RowCosts.measured(cast(Decoder, decoder))

    costs = slow(PROBE_SECONDS)
    assert [rows for rows, layers in passes[2:]] == list(PROBE_ROWS)
    assert {layers for _, layers in passes} == {1}
    assert costs.step(1) == pytest.approx(22 * PROBE_SECONDS)
    assert slow(PROBE_SECONDS / 1000).step(1) == pytest.approx(22 * PROBE_SECONDS / 1000)
    assert {layers for _, layers in passes[2:]} == {PROBE_LAYERS}
    assert len(passes) > 2 + 2 * len(PROBE_ROWS)
