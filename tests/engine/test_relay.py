"""RelayAttention in the engine: the same answers, and fewer reads."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from afterglow.engine.relay import RelayCosts
from afterglow.request import Output, Request, SamplingParams, TokenLogprob
from tests.engine.conftest import FAMILIES, VOCAB, Handle

FREE = RelayCosts(call=0.0, row=1.0, product=0.0, merge=0.0, merged=0.0)
DEAR = RelayCosts(call=1.0, row=0.0, product=0.0, merge=1.0, merged=1.0)


def prompts(rng: random.Random) -> list[list[int]]:
    """A system prompt that all begin with, two documents below it, and conversations below those; and a stranger."""

    def words(count: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(count)]

    system = words(80)
    documents = [system + words(70), system + words(90)]
    found = [[*documents[i % 2], *words(70 + 7 * i)] for i in range(5)]
    return [*found, found[0] + words(80), words(30), list(system)]


def together(handle: Handle, asked: list[list[int]], tokens: int = 12) -> list[tuple[list[int], list[TokenLogprob]]]:
    """All at once: tokens and log-probabilities of each."""
    out: list[tuple[list[int], list[TokenLogprob]]] = [([], []) for _ in asked]
    ended = [threading.Event() for _ in asked]

    def taker(i: int) -> Callable[[Output], None]:
        def take(output: Output) -> None:
            out[i][0].extend(output.tokens)
            out[i][1].extend(output.logprobs or [])
            if output.finish_reason is not None:
                ended[i].set()

        return take

    sampling = SamplingParams(max_tokens=tokens, temperature=0, logprobs=VOCAB, ignore_eos=True)
    for i, prompt in enumerate(asked):
        handle.engine.submit(Request(f"relay-{id(out)}-{i}", prompt, sampling), taker(i))
    for event in ended:
        assert event.wait(60)
    return out


def same(a: list[tuple[list[int], list[TokenLogprob]]], b: list[tuple[list[int], list[TokenLogprob]]]) -> None:
    for (tokens, logprobs), (others, other_logprobs) in zip(a, b, strict=True):
        assert tokens == others
        for one, other in zip(logprobs, other_logprobs, strict=True):
            left, right = dict(one.top), dict(other.top)
            assert max(abs(left[token] - right[token]) for token in left) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_the_same_with_and_without(
    family: str, start: Callable[..., Handle], model_of: Callable[[str], Path]
) -> None:
    asked = prompts(random.Random(3))
    results: list[Any] = []
    for relay in ("off", "on"):
        handle = start(model_of(family), relay=relay, max_batch=8)
        first = together(handle, asked)
        again = [[*prompt, *tokens, 7] for prompt, (tokens, _) in zip(asked, first, strict=True)]
        second = together(handle, again)  # with history on the device, side by side
        results.append((first, second))
        stats = handle.engine.stats()
        if relay == "off":
            assert stats.relay_groups == stats.relay_rows_read == 0
        else:
            assert stats.relay_levels >= 3, "system prompt, document, conversation"
            assert stats.relay_rows_saved > stats.relay_rows_read
    same(results[0][0], results[1][0])
    same(results[0][1], results[1][1])


def test_prefixes_from_the_disk_are_shared_too(
    start: Callable[..., Handle], model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    asked = prompts(random.Random(4))
    plain = together(start(model_of("llama"), relay="off", max_batch=8), asked)
    for _ in range(2):
        handle = start(model_of("llama"), tmp_path, relay="on", max_batch=8)
        same(together(handle, asked), plain)
        handle.engine.close(flush=True)
    assert handle.engine.stats().cached_tokens_disk > 0
    assert handle.engine.stats().relay_rows_saved > 0


def test_tenants_share_no_reads(start: Callable[..., Handle], model_of: Callable[[str], Path]) -> None:
    handle = start(model_of("llama"), relay="on", max_batch=8)
    prompt = [1] * 100
    sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    handle.engine.generate([Request(f"salt-{salt}", prompt, sampling, salt=salt) for salt in "abc"])
    assert handle.engine.stats().relay_groups == 0


def test_what_does_not_pay_is_not_done(start: Callable[..., Handle], model_of: Callable[[str], Path]) -> None:
    asked = prompts(random.Random(5))
    for costs, expected in ((FREE, True), (DEAR, False)):
        handle = start(model_of("llama"), relay="auto", max_batch=8)
        handle.engine._parts.runner._costs = costs  # type: ignore[attr-defined]
        together(handle, asked)
        assert bool(handle.engine.stats().relay_groups) is expected


def test_costs_are_measured_and_one_job_never_gains(
    start: Callable[..., Handle], model_of: Callable[[str], Path]
) -> None:
    runner: Any = start(model_of("llama"), relay="auto").engine._parts.runner
    costs = RelayCosts.measured(runner.shape, 4)
    assert costs.call > 0
    assert costs.row >= 0
    assert costs.gain(4096, 1, 1) < 0
    assert torch.get_num_threads() >= 1
