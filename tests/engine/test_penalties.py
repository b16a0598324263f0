"""Penalties, bias and least lengths in a running engine: whatever the cache does, the reply is the one that a loop over
transformers' own model gives."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from afterglow.errors import RequestError
from afterglow.request import Request, SamplingParams
from tests.engine.conftest import VOCAB, Handle

Start = Callable[..., Handle]
Models = Callable[[str], Path]
PARAMS = {
    "presence_penalty": 1.5,
    "frequency_penalty": 0.7,
    "repetition_penalty": 1.8,
    "logit_bias": {3: -100.0, 5: 2.5},
    "stop_token_ids": (7, 11),
    "min_tokens": 20,
}


def text(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(n)]


def asking(n: int, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=n, temperature=0, logprobs=VOCAB, **{**PARAMS, **more})  # type: ignore[arg-type]


class ByHand:
    """The formulas, one token at a time, over transformers' logits."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def reply(self, prompt: list[int], p: SamplingParams, eos: tuple[int, ...] = ()) -> tuple[list[int], list[float]]:
        """Tokens, and the log-probability that the model itself gave them."""
        reply: list[int] = []
        logprobs: list[float] = []
        ends = {*p.stop_token_ids, *eos}
        while len(reply) < p.max_tokens and not ends & set(reply):
            raw = self.model(torch.tensor([[*prompt, *reply]])).logits[0, -1]
            values = raw.tolist()
            for token in range(VOCAB):
                if token in ends and len(reply) < p.min_tokens:
                    values[token] = float("-inf")
                values[token] += p.logit_bias.get(token, 0.0)
                if token in prompt or token in reply:
                    values[token] *= 1 / p.repetition_penalty if values[token] > 0 else p.repetition_penalty
                values[token] -= p.frequency_penalty * reply.count(token) + p.presence_penalty * (token in reply)
            reply.append(max(range(VOCAB), key=values.__getitem__))
            logprobs.append(float(raw.log_softmax(-1)[reply[-1]]))
        return reply, logprobs


def same(answer: object, wanted: tuple[list[int], list[float]]) -> None:
    assert list(answer.tokens) == wanted[0]  # type: ignore[attr-defined]
    assert [lp.logprob for lp in answer.logprobs] == pytest.approx(wanted[1], abs=1e-3)  # type: ignore[attr-defined]


def test_over_turns_in_a_batch(start: Start, model_of: Models, tmp_path: Path) -> None:
    """Tiny tiers: prefixes come from every tier, and other requests run beside."""
    folder = model_of("llama")
    by_hand = ByHand(folder)
    handle = start(folder, tmp_path, device_cache=128 * 1024, host_cache=512 * 1024, disk_cache=8 << 20, max_batch=6)
    talks = [text(i, 60) for i in range(4)]
    cached = 0
    for turn in range(2):
        requests = []
        for i, talk in enumerate(talks):
            talk += text(100 * turn + i, 20)
            params = asking(40) if i % 2 else SamplingParams(max_tokens=40, temperature=0, logprobs=VOCAB)
            requests.append(Request(f"r{turn}-{i}", list(talk), params))
        for talk, request, answer in zip(talks, requests, handle.engine.generate(requests), strict=True):
            same(answer, by_hand.reply(list(request.prompt), request.sampling))
            talk += answer.tokens
            cached += answer.cached.total
    assert cached > 0


def test_over_preemptions(start: Start, model_of: Models) -> None:
    """A request that is sent back remembers what it had generated."""
    folder = model_of("llama")
    by_hand = ByHand(folder)
    handle = start(folder, device_cache=128 * 1024, max_batch=4)
    requests = [Request(f"r{i}", text(i, 60), asking(130, min_tokens=130)) for i in range(4)]
    for request, answer in zip(requests, handle.engine.generate(requests), strict=True):
        same(answer, by_hand.reply(list(request.prompt), request.sampling))
    assert handle.engine.stats().plan.counters.preemptions > 0


def test_what_was_left_out_of_a_prompt_is_not_repeated(start: Start, model_of: Models) -> None:
    """The repetition penalty looks at the prompt that the model sees."""
    folder = model_of("opt")  # learned positions: the rest of a cut prompt is computed as another prompt
    handle = start(folder, max_model_len=128)
    prompt = [3] * 4 + [1] * 96 + [2, 4, 6] * 9  # the first four tokens stay
    params = SamplingParams(max_tokens=20, temperature=0, logprobs=VOCAB, ignore_eos=True, repetition_penalty=3.0)
    (answer,) = handle.engine.generate([Request("r", prompt, params, truncation=True, turns=(0, 100, 127))])
    assert answer.truncation is not None
    kept = prompt[:4] + prompt[4 + answer.truncation.dropped :]
    assert 1 not in kept
    same(answer, ByHand(folder).reply(kept, params))


def test_no_stop_token_before_the_least_length(start: Start, model_of: Models) -> None:
    handle = start(model_of("llama"))
    stops = tuple(range(10))
    for least in (0, 3, 12):
        params = SamplingParams(max_tokens=12, temperature=0, stop_token_ids=stops, min_tokens=least)
        (answer,) = handle.engine.generate([Request(f"r{least}", text(1, 30), params)])
        assert not set(answer.tokens[:least]) & set(stops)
        assert (answer.finish_reason == "stop") == (answer.tokens[-1] in stops)
        assert least < 12 or answer.finish_reason == "length"


@pytest.mark.parametrize("stop", [999_999, VOCAB, -5])
def test_a_stop_token_that_there_is_not(start: Start, model_of: Models, stop: int) -> None:
    """It ends nothing, and no other token is kept back for it."""
    handle = start(model_of("llama"))
    params = SamplingParams(max_tokens=3, temperature=0, logit_bias={VOCAB - 5: 100.0}, min_tokens=2)
    for number, stops in enumerate(((stop,), ())):
        request = Request(f"r{number}", text(1, 30), replace(params, stop_token_ids=stops))
        (answer,) = handle.engine.generate([request])
        assert answer.tokens == (VOCAB - 5,) * 3
    assert handle.engine.healthy


def test_a_bias_for_a_token_that_there_is_not(start: Start, model_of: Models) -> None:
    handle = start(model_of("llama"))
    params = SamplingParams(max_tokens=1, logit_bias={VOCAB: 1.0})
    with pytest.raises(RequestError, match=f"logit_bias: token id {VOCAB} is outside the vocabulary"):
        handle.engine.submit(Request("r", [1], params), lambda output: None)
