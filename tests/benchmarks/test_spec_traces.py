"""Importance of requests that count in SPEC's benchmarks is not that of requests in the warm-up."""

from __future__ import annotations

import contextlib
import math
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.papers.spec import io
from benchmarks.papers.spec.traces import Recorded, stretched

SCALE = 1e3  # between recordings: much more than the noise


def test_even_requests_take_even_recordings_and_each_has_its_own_noise() -> None:
    recorded = Recorded([torch.full((2, 2, 64), SCALE**number) for number in range(11)])
    found = [torch.stack(stretched(recorded, request, 2, 4, 96, 1)) for request in range(44)]
    taken = [round(math.log(sums.median().item(), SCALE)) for sums in found]
    assert taken[:12] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1]
    assert all(number % 2 == request % 2 for request, number in enumerate(taken))
    assert set(taken) == set(range(11))
    assert taken[12] == taken[0]
    assert not torch.equal(found[12], found[0])
    assert torch.equal(found[5], torch.stack(stretched(recorded, 5, 2, 4, 96, 1)))


def test_requests_that_count_have_other_numbers_than_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io, "asked", lambda *_: None)
    engine = SimpleNamespace(vocab_size=10, settle=lambda: None)
    bench: Any = SimpleNamespace(sizes=[64, 64, 64], data=1, engine=lambda _: contextlib.nullcontext(engine))
    work = io.Bench.fill(bench, Random(0), 8)
    warm, judged = ([number for _, number, _ in requests] for requests in (work.warm, work.judged))
    assert (len(set(warm)), len(set(judged))) == (8 + 3, 8)
    assert not any(number % 2 for number in warm)
    assert all(number % 2 for number in judged)
    assert {at for at, _, _ in work.warm} == {0, 1, 2}
