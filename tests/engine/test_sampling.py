"""Sampling: filters against a slow reference, seeds, log-probabilities."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from afterglow.engine.sampling import Sampler, _filtered, logprobs_of, sample
from afterglow.errors import RequestError
from afterglow.request import SamplingParams

WORDS = 12


def reference(logits: list[float], p: SamplingParams) -> dict[int, float]:
    """Temperature, top-k, top-p, min-p, one token at a time."""
    scaled = [x / max(p.temperature, 1e-5) for x in logits]
    top = max(scaled)
    weights = {i: math.exp(x - top) for i, x in enumerate(scaled)}
    order = sorted(weights, key=lambda i: -weights[i])
    if p.top_k > 0:
        order = order[: p.top_k]
    total = sum(weights[i] for i in order)
    kept, mass = [], 0.0
    for i in order:
        if p.top_p < 1 and mass >= p.top_p and kept:
            break
        kept.append(i)
        mass += weights[i] / total
    kept = [i for i in kept if weights[i] >= p.min_p * weights[order[0]]]
    total = sum(weights[i] for i in kept)
    return {i: weights[i] / total for i in kept}


@settings(max_examples=150, deadline=None)
@given(
    logits=st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=12, unique_by=lambda x: round(x, 2)),
    temperature=st.floats(0.1, 3),
    top_k=st.integers(0, 12),
    top_p=st.floats(0.05, 1),
    min_p=st.floats(0, 0.9),
)
def test_filters_equal_the_reference(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = reference(logits, params)
    if any(abs(v - params.min_p * max(expected.values())) < 1e-4 for v in expected.values()):
        return  # at the edge of a filter float rounding may decide either way
    probs = _filtered(torch.tensor([logits]), [params])[0]
    got = {i: float(v) for i, v in enumerate(probs / probs.sum()) if v > 0}
    if got.keys() != expected.keys():  # only rounding at the top-p edge may differ, by one token
        assert len(got.keys() ^ expected.keys()) <= 1
        return
    assert got == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("top_p", [5e-324, 1e-46, 1e-30])
def test_the_likeliest_token_stays_however_small_top_p_is(top_p: float) -> None:
    """The first two are 0 as float32."""
    sampler = Sampler.of(SamplingParams(top_p=top_p, seed=1), torch.device("cpu"))
    assert sample(torch.tensor([[0.0, 1.0, 2.0]]), [sampler]) == [2]


def test_seeded_draws_do_not_depend_on_the_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 50)
    params = SamplingParams(temperature=1.0, seed=3, top_p=0.9)

    def draws(batch: int, row: int) -> list[int]:
        samplers = [
            Sampler.of(SamplingParams(temperature=1.0, seed=100 + i), torch.device("cpu")) for i in range(batch)
        ]
        samplers[row] = Sampler.of(params, torch.device("cpu"))
        rows = logits[torch.tensor([4] * batch)]
        return [sample(rows, samplers)[row] for _ in range(20)]

    alone = draws(1, 0)
    assert draws(4, 2) == alone
    assert len(set(alone)) > 1


def test_draws_follow_the_distribution() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).expand(20_000, 4)
    sampler = Sampler.of(SamplingParams(temperature=1.0, seed=1), torch.device("cpu"))
    drawn = torch.tensor(sample(logits, [sampler] * len(logits)))
    shares = torch.bincount(drawn, minlength=4) / len(logits)
    assert torch.allclose(shares, torch.tensor([0.5, 0.3, 0.15, 0.05]), atol=0.02)


def test_requests_without_a_seed_are_drawn_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).expand(20_000, 4)
    free = Sampler.of(SamplingParams(temperature=1.0), torch.device("cpu"))
    seeded = [Sampler.of(SamplingParams(temperature=1.0, seed=i), torch.device("cpu")) for i in range(2)]
    greedy = Sampler.of(SamplingParams(temperature=0), torch.device("cpu"))
    alone = [sample(logits[:1], [Sampler.of(each.params, torch.device("cpu"))])[0] for each in seeded]
    launches, real = [], Tensor.exponential_

    def exponential(self: Tensor, **how: torch.Generator) -> Tensor:
        launches.append(len(self))
        return real(self, **how)

    monkeypatch.setattr(Tensor, "exponential_", exponential)
    drawn = sample(logits, [*seeded, greedy, *[free] * (len(logits) - 3)])
    assert len(launches) == 1 + len(seeded)
    assert drawn[:3] == [*alone, 0]
    shares = torch.bincount(torch.tensor(drawn[3:]), minlength=4) / len(logits)
    assert torch.allclose(shares, torch.tensor([0.5, 0.3, 0.15, 0.05]), atol=0.02)
    sample(logits, [free] * len(logits))
    assert len(launches) == 2 + len(seeded)


def test_greedy_and_drawn_rows_mix() -> None:
    logits = torch.tensor([[0.0, 5.0], [0.0, 5.0]])
    greedy = Sampler.of(SamplingParams(temperature=0), torch.device("cpu"))
    narrow = Sampler.of(SamplingParams(temperature=1, top_k=1, seed=0), torch.device("cpu"))
    assert sample(logits, [greedy, narrow]) == [1, 1]


def shaped(logits: Tensor, params: SamplingParams, prompt: list[int], reply: list[int], stops: set[int]) -> Tensor:
    """What a sampler draws from, after it has drawn `reply`."""
    shaping = Sampler.of(params, torch.device("cpu"), prompt, stops).shaping
    assert shaping is not None
    for token in reply:
        shaping.apply(torch.zeros_like(logits))  # as for any token: what it does to other logits is forgotten
        shaping.drew(token)
    row = logits.clone()
    shaping.apply(row)
    return row


TOKENS = st.lists(st.integers(0, WORDS - 1), max_size=8)
LOGITS = st.lists(st.floats(-20, 20, width=32), min_size=WORDS, max_size=WORDS).map(torch.tensor)


@settings(max_examples=100, deadline=None)
@given(logits=LOGITS, prompt=TOKENS.filter(len), reply=TOKENS, penalty=st.floats(0.2, 3))
def test_the_repetition_penalty_is_transformers(
    logits: Tensor, prompt: list[int], reply: list[int], penalty: float
) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    if penalty == 1:
        return
    ids = torch.tensor([prompt + reply])
    wanted = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits[None].clone())[0]
    assert torch.allclose(shaped(logits, SamplingParams(repetition_penalty=penalty), prompt, reply, set()), wanted)


@settings(max_examples=60, deadline=None)
@given(logits=LOGITS, reply=TOKENS, least=st.integers(1, 9), stops=st.sets(st.integers(0, WORDS - 1), min_size=1))
def test_min_tokens_is_transformers(logits: Tensor, reply: list[int], least: int, stops: set[int]) -> None:
    from transformers import MinNewTokensLengthLogitsProcessor

    prompt = [1, 2, 3]
    processor = MinNewTokensLengthLogitsProcessor(len(prompt), least, sorted(stops))
    wanted = processor(torch.tensor([prompt + reply]), logits[None].clone())[0]
    assert torch.equal(shaped(logits, SamplingParams(min_tokens=least), prompt, reply, stops), wanted)


@settings(max_examples=100, deadline=None)
@given(
    logits=LOGITS,
    prompt=TOKENS,
    reply=TOKENS,
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    bias=st.dictionaries(st.integers(0, WORDS - 1), st.floats(-100, 100)),
)
def test_the_other_penalties_are_openais(
    logits: Tensor, prompt: list[int], reply: list[int], presence: float, frequency: float, bias: dict[int, float]
) -> None:
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency, logit_bias=bias)
    if params == SamplingParams():
        return
    wanted = [
        value + bias.get(token, 0) - reply.count(token) * frequency - (token in reply) * presence
        for token, value in enumerate(logits.tolist())
    ]
    assert shaped(logits, params, prompt, reply, set()).tolist() == pytest.approx(wanted, abs=1e-4)


ASKING = SamplingParams(temperature=0, presence_penalty=2, repetition_penalty=1.5, logit_bias={3: 9}, min_tokens=4)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), asking=st.lists(st.booleans(), min_size=1, max_size=6), greedy=st.booleans())
def test_penalties_touch_no_other_request(seed: int, asking: list[bool], greedy: bool) -> None:
    """Each row of a batch is drawn as it is alone, and the logits that log-probabilities are read from stay."""
    logits = torch.randn((len(asking), WORDS), generator=torch.Generator().manual_seed(seed)) * 3
    plain = SamplingParams(temperature=0 if greedy else 1, seed=seed)

    def samplers() -> list[Sampler]:
        return [Sampler.of(ASKING if a else plain, torch.device("cpu"), [1, 2], {0}) for a in asking]

    together, alone = samplers(), samplers()
    for step in range(6):
        rows = logits.roll(step, 1)
        before = rows.clone()
        drawn = sample(rows, together)
        assert torch.equal(rows, before)
        assert drawn == [sample(row[None], [sampler])[0] for row, sampler in zip(rows, alone, strict=True)]


def test_who_asks_for_nothing_pays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy of the logits is made, and no table kept."""
    samplers = [Sampler.of(SamplingParams(temperature=0), torch.device("cpu"), [1], {2}) for _ in range(3)]
    assert [s.shaping for s in samplers] == [None] * 3
    monkeypatch.setattr(torch.Tensor, "clone", None)
    assert sample(torch.tensor([[0.0, 5.0]] * 3), samplers) == [1, 1, 1]


def test_logprobs() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, 0.0, 9.0]])
    first, second = logprobs_of(logits, [2, 0], [2, 0])
    expected = torch.log_softmax(logits, -1)
    assert first.logprob == pytest.approx(float(expected[0, 2]))
    assert first.rank == 2
    assert [t for t, _ in first.top] == [1, 2]
    assert second.top == ()
    assert second.rank == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", 2.0),
        ("seed", 2**64),
        ("presence_penalty", 2.1),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("min_tokens", 17),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
    ],
)
def test_absurd_values_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(RequestError, match=field) as error:
        SamplingParams(**{field: value})
    assert error.value.param == field
